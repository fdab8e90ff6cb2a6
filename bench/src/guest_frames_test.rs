use std::net::Ipv6Addr;

use super::*;

fn at(last: u16, port: u16) -> SocketAddrV6 {
    let address = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last);
    SocketAddrV6::new(address, port, 0, 0)
}

/// The sum over the pseudo-header and a segment with its checksum; 0 if that is right.
fn remainder(frame: &[u8]) -> u16 {
    checksum(&at(1, 0), &at(2, 0), frame[20], &frame[54..])
}

#[test]
fn an_ipv6_frame_has_its_lengths_and_checksum() {
    let macs = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    let datagram = frame6(macs, at(1, 4000), at(2, 53_000), Kind::Udp(b"odd"));
    assert_eq!(datagram.len(), 14 + 40 + 8 + 3);
    assert_eq!(datagram[18..20], [0, 11], "length behind the header");
    assert_eq!(datagram[58..60], [0, 11], "length of the datagram");
    assert_eq!(remainder(&datagram), 0);
    let syn = frame6(macs, at(1, 4000), at(2, 53_000), Kind::Syn(7));
    assert_eq!(syn.len(), 14 + 40 + 20 + 12);
    assert_eq!(syn[66] >> 4, 8, "header with options, in words");
    assert_eq!(remainder(&syn), 0);
    let mut wrong = syn;
    wrong[59] ^= 1;
    assert_ne!(remainder(&wrong), 0);
}
