use smoltcp::{
    phy::ChecksumCapabilities,
    wire::{EthernetFrame, IpAddress, Ipv4Address, Ipv4Packet, TcpPacket, UdpPacket},
};

use super::*;

const SOURCE: Ipv4Address = Ipv4Address::new(10, 1, 0, 2);
const DESTINATION: Ipv4Address = Ipv4Address::new(192, 0, 2, 77);

/// Returns an Ethernet frame with `payload` in TCP or UDP, with correct checksums.
fn frame(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let header = if protocol == TCP { 20 } else { 8 };
    let mut bytes = vec![0; ETHERNET + 20 + header + payload.len()];
    let total = (bytes.len() - ETHERNET) as u16;
    bytes[12..14].copy_from_slice(&IPV4);
    let mut ip = Ipv4Packet::new_unchecked(&mut bytes[ETHERNET..]);
    ip.set_version(4);
    ip.set_header_len(20);
    ip.set_total_len(total);
    ip.set_hop_limit(64);
    ip.set_next_header(protocol.into());
    ip.set_src_addr(SOURCE);
    ip.set_dst_addr(DESTINATION);
    ip.fill_checksum();
    ip.payload_mut()[header..].copy_from_slice(payload);
    if protocol == TCP {
        let mut tcp = TcpPacket::new_unchecked(ip.payload_mut());
        tcp.set_src_port(4000);
        tcp.set_dst_port(80);
        tcp.set_header_len(20);
        tcp.fill_checksum(&IpAddress::Ipv4(SOURCE), &IpAddress::Ipv4(DESTINATION));
    } else {
        let mut udp = UdpPacket::new_unchecked(ip.payload_mut());
        udp.set_src_port(4000);
        udp.set_dst_port(53);
        udp.set_len((8 + payload.len()) as u16);
        udp.fill_checksum(&IpAddress::Ipv4(SOURCE), &IpAddress::Ipv4(DESTINATION));
    }
    bytes
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
    for protocol in [TCP, UDP] {
        for length in [0, 1, 2, 3, 1000, 1001, 60_000] {
            let payload: Vec<u8> = (0..length).map(|at| (at * 7) as u8).collect();
            let right = frame(protocol, &payload);
            let mut mine = right.clone();
            let header = prepare(&mut mine, None);
            assert_eq!((header[0], header[1]), (NEEDS_CSUM, 0));
            complete(&header, &mut mine);
            assert_eq!(mine, right, "{length} bytes of protocol {protocol}");
        }
    }
}

#[test]
fn a_frame_to_be_cut_says_how() {
    let mut tcp = frame(TCP, &[1; 5000]);
    let header = prepare(&mut tcp, Some(1448));
    assert_eq!(header[..6], [NEEDS_CSUM, GSO_TCPV4, 54, 0, 0xA8, 0x05]);
    assert_eq!(header[6..10], [34, 0, 16, 0]);
    let mut udp = frame(UDP, &[1; 5000]);
    let header = prepare(&mut udp, Some(1472));
    assert_eq!(header[..6], [NEEDS_CSUM, GSO_UDP_L4, 42, 0, 0xC0, 0x05]);
    assert_eq!(header[6..10], [34, 0, 6, 0]);
}

#[test]
fn other_frames_are_left_alone() {
    let good = frame(TCP, b"data");
    let mut arp = good.clone();
    arp[12..14].copy_from_slice(&[8, 6]);
    let mut fragment = good.clone();
    fragment[ETHERNET + 6] = 0x20;
    let mut icmp = good.clone();
    icmp[ETHERNET + 9] = 1;
    let mut long = good.clone();
    long[ETHERNET + 2] = 0xFF;
    let mut short = good.clone();
    short[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&[0, 39]);
    for frame in [
        arp,
        fragment,
        icmp,
        long,
        short,
        good[..33].to_vec(),
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
    for protocol in [TCP, UDP] {
        let good = frame(protocol, b"some odd payload!");
        assert!(is_intact(&good));
        let padded = [&good[..], &[0xAA; 9]].concat();
        assert!(is_intact(&padded), "Ethernet padding is not part of it");
        for at in 34..good.len() {
            // The byte does not change the kind of the frame either.
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            assert!(!is_intact(&bad), "byte {at} of protocol {protocol}");
        }
    }
    let mut without = frame(UDP, b"x");
    without[40..42].copy_from_slice(&[0, 0]);
    assert!(is_intact(&without), "a UDP checksum of 0 is none");
}

#[test]
fn smoltcp_agrees_on_what_is_intact() {
    let bytes = frame(TCP, b"payload");
    let ethernet = EthernetFrame::new_checked(&bytes[..]).unwrap();
    let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
    let tcp = TcpPacket::new_checked(ip.payload()).unwrap();
    let (source, destination) = (IpAddress::Ipv4(SOURCE), IpAddress::Ipv4(DESTINATION));
    assert!(
        smoltcp::wire::TcpRepr::parse(
            &tcp,
            &source,
            &destination,
            &ChecksumCapabilities::default()
        )
        .is_ok()
    );
    assert!(is_intact(&bytes));
}
