use super::*;
use crate::{
    fake::packets,
    packet::{Ipv4, transport},
};

const A: Ip4 = Ip4 {
    octets: [10, 0, 2, 15],
};
const B: Ip4 = Ip4 {
    octets: [198, 51, 100, 7],
};

fn tcp(flags: u8, data: &[u8]) -> transport::Tcp {
    let bytes = packets::tcp((A, 1), (B, 2), flags, 100, 200, &[], data);
    match Packet::parse(Ipv4::parse(&bytes).unwrap())
        .unwrap()
        .transport
    {
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
    assert_eq!(IcmpError::TooBig(1_400).header(), (3, 4, 1_400));
    assert_eq!(IcmpError::TooBig(1 << 20).header(), (3, 4, 0xffff));
    assert_eq!(IcmpError::TtlExceeded.header(), (11, 0, 0));
    assert_eq!(
        IcmpError::Unreachable(Unreachable::Prohibited).header(),
        (3, 13, 0)
    );
}

#[test]
fn rfc1122_3_2_2_what_is_not_answered() {
    let may = |bytes: &[u8]| may_be_answered(&Packet::parse(Ipv4::parse(bytes).unwrap()).unwrap());
    assert!(may(&packets::udp((A, 1), (B, 2), b"x")));
    assert!(may(&packets::echo(A, B, true, 1, b"")));
    let about = packets::udp((B, 1), (A, 2), b"x");
    assert!(!may(&packets::icmp_error(A, B, 3, 1, &about)));
    for group in [[224, 0, 0, 1], [255, 255, 255, 255], [0, 0, 0, 0]] {
        assert!(!may(&packets::udp(
            (A, 1),
            (Ip4 { octets: group }, 2),
            b"x"
        )));
    }
}
