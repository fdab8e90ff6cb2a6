use super::*;
use smoltcp::{
    phy::ChecksumCapabilities,
    wire::{EthernetFrame, IpAddress, Ipv4Packet, Ipv4Repr, TcpPacket, TcpRepr},
};

const GUEST: &str = "10.0.2.15:4000";
const SERVER: &str = "203.0.113.10:80";

#[test]
fn smoltcp_accepts_a_full_checksum() {
    let (vnet, frame) = FrameBuilder::tcp(GUEST, SERVER)
        .flags(tcp_flags::SYN)
        .numbers(7, 0)
        .tcp_options(&[2, 4, 5, 0xb4])
        .payload(b"odd")
        .build();
    assert_eq!(vnet, VnetHdr::default());
    let frame = EthernetFrame::new_checked(&frame).unwrap();
    let ip = Ipv4Packet::new_checked(frame.payload()).unwrap();
    Ipv4Repr::parse(&ip, &ChecksumCapabilities::default()).unwrap();
    let tcp = TcpPacket::new_checked(ip.payload()).unwrap();
    let (from, to): (IpAddress, IpAddress) = (ip.src_addr().into(), ip.dst_addr().into());
    let repr = TcpRepr::parse(&tcp, &from, &to, &ChecksumCapabilities::default()).unwrap();
    assert_eq!(repr.max_seg_size, Some(1460));
    assert_eq!(repr.payload, b"odd");
}

#[test]
fn checksums_are_told_right_from_wrong() {
    for builder in [
        FrameBuilder::tcp(GUEST, SERVER),
        FrameBuilder::udp(GUEST, SERVER),
    ] {
        let builder = builder.payload(&[1, 2, 3]);
        for (how, right) in [
            (Checksum::Full, true),
            (Checksum::Partial, true),
            (Checksum::Wrong, false),
        ] {
            let (vnet, frame) = builder.clone().checksum(how).build();
            let packet = Packet::parse_ethernet(&frame).unwrap();
            assert_eq!(packet.checksums_are_right(&vnet), right, "{how:?}");
        }
        let (_, frame) = builder.checksum(Checksum::Partial).build();
        let packet = Packet::parse_ethernet(&frame).unwrap();
        assert!(
            !packet.checksums_are_right(&VnetHdr::default()),
            "partial, but said to be full"
        );
    }
}

#[test]
fn what_was_built_is_what_is_parsed() {
    let (_, frame) = FrameBuilder::tcp(GUEST, SERVER)
        .vlan(5)
        .ttl(9)
        .ip_options(&[1, 1, 1])
        .flags(tcp_flags::SYN | tcp_flags::ACK)
        .numbers(0xdead_beef, 1)
        .payload(b"data")
        .build();
    let packet = Packet::parse_ethernet(&frame).unwrap();
    assert_eq!(
        (packet.source.to_string(), packet.destination.to_string()),
        (GUEST.into(), SERVER.into())
    );
    assert_eq!(
        (packet.ttl, packet.header_len, packet.payload()),
        (9, 24, &b"data"[..])
    );
    assert_eq!(packet.tcp_flags(), Some(tcp_flags::SYN | tcp_flags::ACK));
    assert_eq!(packet.tcp_numbers(), Some((0xdead_beef, 1)));
}

#[test]
fn no_prefix_of_a_frame_panics() {
    let (_, frame) = FrameBuilder::tcp(GUEST, SERVER).payload(b"data").build();
    for end in 0..frame.len() {
        if let Some(packet) = Packet::parse_ethernet(&frame[..end]) {
            packet.checksums_are_right(&VnetHdr::default());
            packet.payload();
        }
    }
}
