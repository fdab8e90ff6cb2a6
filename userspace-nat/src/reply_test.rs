use std::net::{Ipv4Addr, Ipv6Addr};

use super::*;
use crate::{
    fake::packets,
    packet::{Ip, transport},
};

const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 2, 15));
const B: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 7));
const A6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 5));
const B6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 7));

fn tcp(flags: u8, data: &[u8]) -> transport::Tcp {
    let bytes = packets::tcp((A, 1), (B, 2), flags, 100, 200, &[], data);
    match Packet::parse(Ip::parse(&bytes).unwrap()).unwrap().transport {
        Transport::Tcp(tcp) => tcp,
        _ => panic!("TCP"),
    }
}

#[test]
fn rfc9293_3_10_7_1_resets() {
    let of = |flags, data: &[u8]| {
        reset_for(&tcp(flags, data)).map(|s| (s.sequence, s.acknowledgement, s.flags))
    };
    let rst_ack = Flags::RST | Flags::ACK;
    assert_eq!(of(Flags::SYN, b""), Some((0, 101, rst_ack)));
    assert_eq!(of(Flags::SYN, b"abc"), Some((0, 104, rst_ack)));
    assert_eq!(of(Flags::FIN, b"abc"), Some((0, 104, rst_ack)));
    assert_eq!(of(Flags::ACK, b"abc"), Some((200, 0, Flags::RST)));
    assert_eq!(of(Flags::SYN | Flags::ACK, b""), Some((200, 0, Flags::RST)));
    assert_eq!(of(Flags::RST, b""), None);
    assert_eq!(of(Flags::RST | Flags::ACK, b""), None);
}

#[test]
fn rfc1191_an_mtu_stands_in_the_low_half() {
    let header = |error: IcmpError| error.header(Version::V4);
    assert_eq!(header(IcmpError::TooBig(1_400)), (3, 4, 1_400));
    assert_eq!(header(IcmpError::TooBig(1 << 20)), (3, 4, 0xffff));
    assert_eq!(header(IcmpError::TtlExceeded), (11, 0, 0));
    let prohibited = IcmpError::Unreachable(Unreachable::Prohibited);
    assert_eq!(header(prohibited), (3, 13, 0));
}

#[test]
fn rfc4443_3_types_and_codes_of_icmpv6() {
    let header = |error: IcmpError| error.header(Version::V6);
    assert_eq!(header(IcmpError::TooBig(1_400)), (2, 0, 1_400));
    assert_eq!(header(IcmpError::TooBig(600)), (2, 0, 1_280), "RFC 8201");
    assert_eq!(header(IcmpError::TtlExceeded), (3, 0, 0));
    for (why, code) in [
        (Unreachable::Net, 0),
        (Unreachable::Prohibited, 1),
        (Unreachable::Host, 3),
        (Unreachable::Port, 4),
    ] {
        assert_eq!(header(IcmpError::Unreachable(why)), (1, code, 0));
    }
}

fn may(bytes: &[u8], error: IcmpError) -> bool {
    may_be_answered(&Packet::parse(Ip::parse(bytes).unwrap()).unwrap(), error)
}

#[test]
fn rfc1122_3_2_2_what_is_not_answered() {
    let error = IcmpError::TooBig(1_400);
    assert!(may(&packets::udp((A, 1), (B, 2), b"x"), error));
    assert!(may(&packets::echo(A, B, true, 1, b""), error));
    let about = packets::udp((B, 1), (A, 2), b"x");
    assert!(!may(&packets::icmp_error(A, B, 3, 1, &about), error));
    for group in [[224, 0, 0, 1], [255, 255, 255, 255], [0, 0, 0, 0]] {
        assert!(!may(
            &packets::udp((A, 1), (IpAddr::from(group), 2), b"x"),
            error
        ));
    }
}

#[test]
fn rfc4443_2_4_what_is_not_answered() {
    let (too_big, expired) = (IcmpError::TooBig(1_400), IcmpError::TtlExceeded);
    let group: IpAddr = "ff02::1".parse().unwrap();
    let unspecified: IpAddr = "::".parse().unwrap();
    for error in [too_big, expired] {
        assert!(may(&packets::udp((A6, 1), (B6, 2), b"x"), error));
        assert!(may(&packets::echo(A6, B6, true, 1, b""), error));
        let about = packets::udp((B6, 1), (A6, 2), b"x");
        for kind in [1, 2, 3, 4, 100, 127, 137] {
            let message = packets::icmp_error(A6, B6, kind, 0, &about);
            assert!(!may(&message, error), "e.1, e.2: type {kind}");
        }
        for source in [unspecified, group] {
            assert!(
                !may(&packets::udp((source, 1), (B6, 2), b"x"), error),
                "e.6"
            );
        }
    }
    let to_group = packets::udp((A6, 1), (group, 2), b"x");
    assert!(
        may(&to_group, too_big),
        "e.3 excepts what a path's MTU needs"
    );
    assert!(!may(&to_group, expired));
}
