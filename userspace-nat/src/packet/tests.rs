use proptest::prelude::*;
use slipgate_abi::{Ip4, tcp::Flags};

use super::*;
use crate::fake::packets;

const A: Ip4 = Ip4 {
    octets: [10, 0, 2, 15],
};
const B: Ip4 = Ip4 {
    octets: [198, 51, 100, 7],
};

fn parse(bytes: &[u8]) -> Result<Packet<'_>, Malformed> {
    Packet::parse(Ipv4::parse(bytes)?)
}

#[test]
fn a_segment_is_read() {
    let bytes = packets::tcp((A, 1), (B, 2), Flags::SYN, 3, 4, &[2, 4, 5, 0xb4], b"hello");
    let packet = parse(&bytes).unwrap();
    let Transport::Tcp(tcp) = packet.transport else {
        panic!("TCP")
    };
    assert_eq!((tcp.sequence, tcp.acknowledgement), (3, 4));
    assert_eq!(
        (tcp.header_len, tcp.payload_len, tcp.sequence_len()),
        (24, 5, 6)
    );
    assert!(tcp.is_opening_syn());
    let tuple = packet.tuple(7, Direction::Tx).unwrap();
    assert_eq!((tuple.scope, tuple.local, tuple.remote), (7, A, B));
    assert_eq!(
        (tuple.local_port, tuple.remote_port, tuple.protocol),
        (1, 2, 6)
    );
    let mirrored = packet.tuple(0, Direction::Rx).unwrap();
    assert_eq!((mirrored.local, mirrored.local_port), (B, 2));
}

#[test]
fn an_echo_is_known_by_its_id_on_both_ways() {
    let request = packets::echo(A, B, true, 9, b"");
    let reply = packets::echo(B, A, false, 9, b"");
    let there = parse(&request).unwrap().tuple(1, Direction::Tx).unwrap();
    let back = parse(&reply).unwrap().tuple(1, Direction::Rx).unwrap();
    assert_eq!(there, back);
    assert_eq!((there.local_port, there.remote_port), (9, 0));
}

#[test]
fn padding_after_the_packet_is_left_out() {
    let mut bytes = packets::udp((A, 1), (B, 2), b"x");
    let len = bytes.len();
    bytes.resize(60, 0);
    let packet = parse(&bytes).unwrap();
    assert_eq!(packet.ip.bytes.len(), len);
    assert_eq!(packet.segments(VirtioNetHdr::default()).bytes, len as u64);
}

#[test]
fn headers_that_contradict_themselves_are_malformed() {
    let good = packets::tcp((A, 1), (B, 2), Flags::ACK, 3, 4, &[], b"");
    for (at, value) in [
        (0, 0x55),  // version
        (0, 0x44),  // header shorter than a header
        (0, 0x4f),  // header longer than the packet
        (3, 0xff),  // total length beyond the frame
        (3, 19),    // total length within the header
        (32, 0x40), // TCP header shorter than one
        (32, 0xf0), // TCP header beyond the packet
    ] {
        let mut bad = good.clone();
        bad[at] = value;
        assert!(parse(&bad).is_err(), "byte {at} = {value:#x}");
    }
    let mut udp = packets::udp((A, 1), (B, 2), b"x");
    udp[25] = 200;
    assert!(parse(&udp).is_err());
}

proptest! {
    /// Parsing never panics, whatever the frame, and all that is parsed lies within it.
    #[test]
    fn nothing_panics(mut bytes in prop::collection::vec(any::<u8>(), 0..120), plausible: bool) {
        if plausible && bytes.len() > 10 {
            bytes[0] = 0x45;
            let len = bytes.len() as u16;
            bytes[2..4].copy_from_slice(&len.to_be_bytes());
            bytes[9] = [1, 6, 17][usize::from(bytes[9]) % 3];
        }
        if let Ok(packet) = parse(&bytes) {
            prop_assert!(packet.headers_len() <= packet.ip.bytes.len());
            packet.segments(VirtioNetHdr { gso_type: 1, gso_size: 1, ..VirtioNetHdr::default() });
            if let Transport::Tcp(tcp) = packet.transport {
                let header = &packet.ip.payload()[..tcp.header_len];
                for (_, at, len) in transport::tcp_options(header) {
                    prop_assert!(len >= 2 && at + len <= header.len());
                }
            }
        }
    }

    /// An address changed in place leaves a right checksum.
    #[test]
    fn an_address_is_replaced(address: [u8; 4], ttl in 1u8..) {
        let mut bytes = packets::with_ttl(packets::udp((A, 1), (B, 2), b"x"), ttl);
        ipv4::set_address(&mut bytes, ipv4::End::Source, Ip4 { octets: address });
        ipv4::decrement_ttl(&mut bytes);
        let ip = Ipv4::parse(&bytes).unwrap();
        prop_assert!(ip.checksum_is_right());
        prop_assert_eq!((ip.source.octets, ip.ttl), (address, ttl - 1));
    }

    /// The sum does not depend on how the bytes are cut at even places.
    #[test]
    fn sums_add_up(bytes in prop::collection::vec(any::<u8>(), 0..64), cut in 0usize..32) {
        let cut = (cut * 2).min(bytes.len() / 2 * 2);
        let whole = checksum::Sum::default().bytes(&bytes).finish();
        let parts = checksum::Sum::default().bytes(&bytes[..cut]).bytes(&bytes[cut..]).finish();
        prop_assert_eq!(whole, parts);
    }
}
