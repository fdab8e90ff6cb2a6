use proptest::prelude::*;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use slipgate_abi::tcp::Flags;

use super::*;
use crate::{fake::packets, packet::ip::End};

const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 2, 15));
const B: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 7));
const A6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 5));
const B6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 7));
/// Both families: this side and the other.
const FAMILIES: [(IpAddr, IpAddr); 2] = [(A, B), (A6, B6)];

fn parse(bytes: &[u8]) -> Result<Packet<'_>, Malformed> {
    Packet::parse(Ip::parse(bytes)?)
}

#[test]
fn a_segment_is_read() {
    for (a, b) in FAMILIES {
        check_segment(a, b);
    }
}

fn check_segment(a: IpAddr, b: IpAddr) {
    let bytes = packets::tcp((a, 1), (b, 2), Flags::SYN, 3, 4, &[2, 4, 5, 0xb4], b"hello");
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
    assert_eq!((tuple.scope, tuple.local, tuple.remote), (7, a, b));
    assert_eq!(
        (tuple.local_port, tuple.remote_port, tuple.protocol),
        (1, 2, 6)
    );
    let mirrored = packet.tuple(0, Direction::Rx).unwrap();
    assert_eq!((mirrored.local, mirrored.local_port), (b, 2));
}

#[test]
fn an_echo_is_known_by_its_id_on_both_ways() {
    for (a, b) in FAMILIES {
        let request = packets::echo(a, b, true, 9, b"");
        let reply = packets::echo(b, a, false, 9, b"");
        assert!(packets::is_right(&request) && packets::is_right(&reply));
        let there = parse(&request).unwrap().tuple(1, Direction::Tx).unwrap();
        let back = parse(&reply).unwrap().tuple(1, Direction::Rx).unwrap();
        assert_eq!(there, back);
        assert_eq!((there.local_port, there.remote_port), (9, 0));
    }
}

#[test]
fn padding_after_the_packet_is_left_out() {
    for (a, b) in FAMILIES {
        let mut bytes = packets::udp((a, 1), (b, 2), b"x");
        let len = bytes.len();
        bytes.resize(len + 20, 0);
        let packet = parse(&bytes).unwrap();
        assert_eq!(packet.ip.bytes.len(), len);
        assert_eq!(packet.segments(VirtioNetHdr::default()).bytes, len as u64);
    }
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
    let mut six = packets::udp((A6, 1), (B6, 2), b"x");
    six[5] += 1;
    assert!(parse(&six).is_err(), "longer than the frame");
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
        } else if bytes.len() >= ipv6::HEADER_LEN {
            bytes[0] = 0x60;
            let len = (bytes.len() - ipv6::HEADER_LEN) as u16;
            bytes[4..6].copy_from_slice(&len.to_be_bytes());
            bytes[6] = [58, 6, 17][usize::from(bytes[6]) % 3];
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
        ip::set_address(&mut bytes, End::Source, address.into());
        ip::decrement_ttl(&mut bytes);
        let ip = Ipv4::parse(&bytes).unwrap();
        prop_assert!(ip.checksum_is_right());
        prop_assert_eq!((ip.source.octets, ip.ttl), (address, ttl - 1));
    }

    /// A translated packet has right checksums, whether it came with a full one, a partial one or
    /// none, and only the addresses and ports that were to change did.
    #[test]
    fn a_translation_leaves_right_checksums(
        six: bool,
        protocol in 0usize..3,
        source: bool,
        partial: bool,
        none: bool,
        data in prop::collection::vec(any::<u8>(), 0..40),
        address: [u8; 16],
        port: u16,
        ttl in 1u8..,
    ) {
        let (a, b) = FAMILIES[usize::from(six)];
        let packet = match protocol {
            0 => packets::tcp((a, 1), (b, 2), Flags::ACK, 3, 4, &[], &data),
            1 => packets::udp((a, 1), (b, 2), &data),
            _ => packets::echo(a, b, true, 1, &data),
        };
        let mut bytes = packets::with_ttl(packet, ttl);
        let header_len = Version::of(a).header_len();
        let mut vnet = VirtioNetHdr::default();
        if partial && protocol < 2 {
            vnet.flags = VirtioNetHdr::NEEDS_CSUM;
            let l4_len = bytes.len() - header_len;
            let sum = checksum::Sum::default().pseudo(a, b, bytes_protocol(&bytes), l4_len);
            let at = header_len + [16, 6][protocol];
            bytes[at..at + 2].copy_from_slice(&sum.folded().to_be_bytes());
        } else if none && protocol == 1 && !six {
            bytes[header_len + 6..header_len + 8].fill(0);
        }
        let end = if source { End::Source } else { End::Destination };
        let new: IpAddr = match six {
            true => address.into(),
            false => <[u8; 4]>::try_from(&address[..4]).unwrap().into(),
        };
        let before = bytes.clone();
        let packet = parse(&before).unwrap();
        translation::translate(&mut bytes, &packet, vnet, end, (new, port));
        prop_assert!(packets::is_right(&bytes));
        let after = parse(&bytes).unwrap();
        let ends = |packet: &Packet<'_>| [packet.ip.source, packet.ip.destination];
        let other = usize::from(source);
        prop_assert_eq!(ends(&after)[1 - other], new);
        prop_assert_eq!(ends(&after)[other], ends(&packet)[other]);
        prop_assert_eq!(after.ip.ttl, ttl - 1);
        let (from, to) = after.transport.ports().unwrap();
        let told = match protocol {
            2 => (from, to) == (port, port),
            _ if source => (from, to) == (port, 2),
            _ => (from, to) == (1, port),
        };
        prop_assert!(told, "{from} {to}");
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

fn bytes_protocol(packet: &[u8]) -> u8 {
    Ip::parse(packet).unwrap().protocol
}

#[test]
fn the_icmp_of_the_other_family_is_another_protocol() {
    for (a, b) in FAMILIES {
        let mut echo = packets::echo(a, b, true, 9, b"");
        assert!(parse(&echo).unwrap().tuple(1, Direction::Tx).is_some());
        match Version::of(a) {
            Version::V4 => echo[9] = 58,
            Version::V6 => echo[6] = 1,
        }
        let packet = parse(&echo).unwrap();
        assert_eq!(packet.transport, Transport::Other, "{a}");
        assert_eq!(packet.tuple(1, Direction::Tx), None);
    }
}

#[test]
fn extension_headers_are_told_from_payload() {
    let packet = packets::udp((A6, 1), (B6, 2), b"x");
    let with = |next: u8| {
        let mut packet = packet.clone();
        packet[6] = next;
        let ip = Ipv6::parse(&packet).unwrap();
        (ip.is_fragment(), ip.has_extension())
    };
    assert_eq!(with(17), (false, false));
    assert_eq!(with(ipv6::FRAGMENT), (true, false));
    for next in [0, 43, 60, 50, 51] {
        assert_eq!(with(next), (false, true), "{next}");
    }
}
