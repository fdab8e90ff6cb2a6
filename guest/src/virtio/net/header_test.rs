use smoltcp::{
    phy::ChecksumCapabilities,
    wire::{
        EthernetFrame, IpAddress, Ipv4Address, Ipv4Packet, Ipv6Address, Ipv6Packet, TcpPacket,
        UdpPacket,
    },
};

use super::*;

const SOURCE: Ipv4Address = Ipv4Address::new(10, 1, 0, 2);
const DESTINATION: Ipv4Address = Ipv4Address::new(192, 0, 2, 77);
const SOURCE6: Ipv6Address = Ipv6Address::new(0xfd73, 1, 2, 3, 4, 5, 6, 7);
const DESTINATION6: Ipv6Address = Ipv6Address::new(0x2001, 0xdb8, 0xffff, 1, 2, 0, 0, 9);

/// Families, with the lengths of their headers.
const FAMILIES: [([u8; 2], usize); 2] = [(IPV4, 20), (IPV6, IPV6_HEADER)];

/// Returns an Ethernet frame with `payload` in TCP or UDP, with correct checksums.
fn frame(family: [u8; 2], protocol: u8, payload: &[u8]) -> Vec<u8> {
    let header = if protocol == TCP { 20 } else { 8 };
    let is_ipv4 = family == IPV4;
    let ip_header = if is_ipv4 { 20 } else { IPV6_HEADER };
    let mut bytes = vec![0; ETHERNET + ip_header + header + payload.len()];
    bytes[12..14].copy_from_slice(&family);
    let (source, destination) = match is_ipv4 {
        true => (SOURCE.into(), DESTINATION.into()),
        false => (SOURCE6.into(), DESTINATION6.into()),
    };
    let ip = &mut bytes[ETHERNET..];
    transport(
        &mut ip[ip_header..],
        protocol,
        (source, destination),
        payload,
    );
    if is_ipv4 {
        let total = ip.len() as u16;
        let mut ip = Ipv4Packet::new_unchecked(ip);
        ip.set_version(4);
        ip.set_header_len(20);
        ip.set_total_len(total);
        ip.set_hop_limit(64);
        ip.set_next_header(protocol.into());
        ip.set_src_addr(SOURCE);
        ip.set_dst_addr(DESTINATION);
        ip.fill_checksum();
    } else {
        let length = (ip.len() - IPV6_HEADER) as u16;
        let mut ip = Ipv6Packet::new_unchecked(ip);
        ip.set_version(6);
        ip.set_payload_len(length);
        ip.set_hop_limit(64);
        ip.set_next_header(protocol.into());
        ip.set_src_addr(SOURCE6);
        ip.set_dst_addr(DESTINATION6);
    }
    bytes
}

fn transport(bytes: &mut [u8], protocol: u8, addresses: (IpAddress, IpAddress), payload: &[u8]) {
    let header = bytes.len() - payload.len();
    bytes[header..].copy_from_slice(payload);
    if protocol == TCP {
        let mut tcp = TcpPacket::new_unchecked(bytes);
        tcp.set_src_port(4000);
        tcp.set_dst_port(80);
        tcp.set_header_len(20);
        tcp.fill_checksum(&addresses.0, &addresses.1);
    } else {
        let length = bytes.len() as u16;
        let mut udp = UdpPacket::new_unchecked(bytes);
        udp.set_src_port(4000);
        udp.set_dst_port(53);
        udp.set_len(length);
        udp.fill_checksum(&addresses.0, &addresses.1);
    }
}

/// Completes a checksum as a device does for NEEDS_CSUM.
fn complete(header: &[u8; BYTES], frame: &mut [u8]) {
    let start = usize::from(u16::from_le_bytes([header[6], header[7]]));
    let offset = usize::from(u16::from_le_bytes([header[8], header[9]]));
    let value = !fold(sum(&frame[start..]));
    frame[start + offset..start + offset + 2].copy_from_slice(&value.to_be_bytes());
}

#[test]
fn the_device_can_complete_what_was_prepared() {
    for (family, protocol) in all() {
        for length in [0, 1, 2, 3, 1000, 1001, 60_000] {
            let payload: Vec<u8> = (0..length).map(|at| (at * 7) as u8).collect();
            let right = frame(family, protocol, &payload);
            let mut mine = right.clone();
            let header = prepare(&mut mine, None);
            assert_eq!((header[0], header[1]), (NEEDS_CSUM, 0));
            complete(&header, &mut mine);
            assert_eq!(mine, right, "{length} bytes of {protocol} in {family:x?}");
        }
    }
}

/// Every protocol in every family.
fn all() -> impl Iterator<Item = ([u8; 2], u8)> {
    let of = |(family, _)| [(family, TCP), (family, UDP)];
    FAMILIES.into_iter().flat_map(of)
}

#[test]
fn a_frame_to_be_cut_says_how() {
    for ((family, ip_header), gso_tcp) in FAMILIES.into_iter().zip([GSO_TCPV4, GSO_TCPV6]) {
        let start = (ETHERNET + ip_header) as u8;
        let mut tcp = frame(family, TCP, &[1; 5000]);
        let header = prepare(&mut tcp, Some(1448));
        assert_eq!(
            header[..6],
            [NEEDS_CSUM, gso_tcp, start + 20, 0, 0xA8, 0x05]
        );
        assert_eq!(header[6..10], [start, 0, 16, 0]);
        let mut udp = frame(family, UDP, &[1; 5000]);
        let header = prepare(&mut udp, Some(1472));
        assert_eq!(
            header[..6],
            [NEEDS_CSUM, GSO_UDP_L4, start + 8, 0, 0xC0, 0x05]
        );
        assert_eq!(header[6..10], [start, 0, 6, 0]);
    }
}

#[test]
fn other_frames_are_left_alone() {
    let good = frame(IPV4, TCP, b"data");
    let good6 = frame(IPV6, TCP, b"data");
    let with = |good: &[u8], at: usize, bytes: &[u8]| {
        let mut frame = good.to_vec();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let fragment = 44;
    for frame in [
        with(&good, 12, &[8, 6]),
        with(&good, ETHERNET + 6, &[0x20]),
        with(&good, ETHERNET + 9, &[1]),
        with(&good, ETHERNET + 2, &[0xFF]),
        with(&good, ETHERNET + 2, &[0, 39]),
        good[..33].to_vec(),
        with(&good, 12, &IPV6),
        with(&good6, 12, &IPV4),
        with(&good6, ETHERNET + 4, &[0xFF]),
        with(&good6, ETHERNET + 4, &[0, 19]),
        // Hop-by-hop options, a fragment, ICMPv6.
        with(&good6, ETHERNET + 6, &[0]),
        with(&good6, ETHERNET + 6, &[fragment]),
        with(&good6, ETHERNET + 6, &[58]),
        good6[..53].to_vec(),
        vec![],
        vec![0; 14],
    ] {
        let mut mine = frame.clone();
        assert_eq!(prepare(&mut mine, Some(1448)), [0; BYTES]);
        assert_eq!(mine, frame);
        assert!(
            is_intact(&frame),
            "what has no checksum that we know is not ours to refuse"
        );
    }
}

#[test]
fn every_wrong_byte_is_noticed() {
    for (family, protocol) in all() {
        let good = frame(family, protocol, b"some odd payload!");
        assert!(is_intact(&good));
        let padded = [&good[..], &[0xAA; 9]].concat();
        assert!(is_intact(&padded), "Ethernet padding is not part of it");
        let start = ETHERNET + if family == IPV4 { 20 } else { IPV6_HEADER };
        for at in start..good.len() {
            // The byte does not change the kind of the frame either.
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            assert!(!is_intact(&bad), "byte {at} of {protocol} in {family:x?}");
        }
    }
    for (family, header) in FAMILIES {
        let mut without = frame(family, UDP, b"x");
        let at = ETHERNET + header + 6;
        without[at..at + 2].copy_from_slice(&[0, 0]);
        let why = "a UDP checksum of 0 is none by IPv4, and wrong by IPv6";
        assert_eq!(is_intact(&without), family == IPV4, "{why}");
    }
}

#[test]
fn smoltcp_agrees_on_what_is_intact() {
    let bytes = frame(IPV4, TCP, b"payload");
    let ethernet = EthernetFrame::new_checked(&bytes[..]).unwrap();
    let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
    agrees(ip.payload(), SOURCE.into(), DESTINATION.into());
    assert!(is_intact(&bytes));
    let bytes = frame(IPV6, TCP, b"payload");
    let ethernet = EthernetFrame::new_checked(&bytes[..]).unwrap();
    let ip = Ipv6Packet::new_checked(ethernet.payload()).unwrap();
    agrees(ip.payload(), SOURCE6.into(), DESTINATION6.into());
    assert!(is_intact(&bytes));
}

fn agrees(segment: &[u8], source: IpAddress, destination: IpAddress) {
    let tcp = TcpPacket::new_checked(segment).unwrap();
    let sums = ChecksumCapabilities::default();
    assert!(smoltcp::wire::TcpRepr::parse(&tcp, &source, &destination, &sums).is_ok());
}
