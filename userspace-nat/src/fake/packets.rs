//! Builders of packets for tests, with correct checksums.
use std::net::IpAddr;

use slipgate_abi::{Ip4, tcp::Flags};

use crate::packet::{Ip, Ipv4, Version, build, checksum::Sum, icmp};

/// Transport address of IPv4: address and port. The builders take those of either family.
pub type At = (Ip4, u16);

/// The address and port of either family.
fn at(at: (impl Into<IpAddr>, u16)) -> (IpAddr, u16) {
    (at.0.into(), at.1)
}

/// A TCP segment with options and payload.
pub fn tcp(
    from: (impl Into<IpAddr>, u16),
    to: (impl Into<IpAddr>, u16),
    flags: u8,
    seq: u32,
    ack: u32,
    options: &[u8],
    data: &[u8],
) -> Vec<u8> {
    let (from, to) = (at(from), at(to));
    let mut out = Vec::new();
    build::ip(&mut out, from.0, to.0, 6, |out| {
        let begin = out.len();
        out.extend_from_slice(&from.1.to_be_bytes());
        out.extend_from_slice(&to.1.to_be_bytes());
        out.extend_from_slice(&seq.to_be_bytes());
        out.extend_from_slice(&ack.to_be_bytes());
        let header_len = 20 + options.len().next_multiple_of(4);
        out.extend_from_slice(&[(header_len as u8 / 4) << 4, flags, 0x72, 0x10, 0, 0, 0, 0]);
        out.extend_from_slice(options);
        out.resize(begin + header_len, 0);
        out.extend_from_slice(data);
        let len = out.len() - begin;
        let sum = Sum::default()
            .pseudo(from.0, to.0, 6, len)
            .bytes(&out[begin..])
            .finish();
        out[begin + 16..begin + 18].copy_from_slice(&sum.to_be_bytes());
    });
    out
}

/// A SYN with an MSS option of 8,960 bytes.
pub fn syn(from: (impl Into<IpAddr>, u16), to: (impl Into<IpAddr>, u16), isn: u32) -> Vec<u8> {
    tcp(from, to, Flags::SYN, isn, 0, &[2, 4, 0x23, 0], &[])
}

/// A SYN-ACK that acknowledges `ack`.
pub fn syn_ack(
    from: (impl Into<IpAddr>, u16),
    to: (impl Into<IpAddr>, u16),
    isn: u32,
    ack: u32,
) -> Vec<u8> {
    tcp(
        from,
        to,
        Flags::SYN | Flags::ACK,
        isn,
        ack,
        &[2, 4, 5, 0xb4],
        &[],
    )
}

/// A bare ACK, or with FIN or RST added.
pub fn ack(
    from: (impl Into<IpAddr>, u16),
    to: (impl Into<IpAddr>, u16),
    more: u8,
    seq: u32,
    ack: u32,
) -> Vec<u8> {
    tcp(from, to, Flags::ACK | more, seq, ack, &[], &[])
}

/// A UDP datagram with this payload.
pub fn udp(from: (impl Into<IpAddr>, u16), to: (impl Into<IpAddr>, u16), data: &[u8]) -> Vec<u8> {
    let (from, to) = (at(from), at(to));
    let mut out = Vec::new();
    build::ip(&mut out, from.0, to.0, 17, |out| {
        let begin = out.len();
        let len = 8 + data.len();
        out.extend_from_slice(&from.1.to_be_bytes());
        out.extend_from_slice(&to.1.to_be_bytes());
        out.extend_from_slice(&(len as u16).to_be_bytes());
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(data);
        let sum = Sum::default()
            .pseudo(from.0, to.0, 17, len)
            .bytes(&out[begin..])
            .finish();
        out[begin + 6..begin + 8].copy_from_slice(&sum.to_be_bytes());
    });
    out
}

/// An ICMP or ICMPv6 echo request or reply.
pub fn echo(
    from: impl Into<IpAddr>,
    to: impl Into<IpAddr>,
    request: bool,
    id: u16,
    data: &[u8],
) -> Vec<u8> {
    let (from, to) = (from.into(), to.into());
    let version = Version::of(from);
    let kind = match request {
        true => icmp::echo_request(version),
        false => icmp::echo_reply(version),
    };
    let mut out = Vec::new();
    build::ip(&mut out, from, to, version.icmp(), |out| {
        let begin = out.len();
        out.extend_from_slice(&[kind, 0, 0, 0]);
        out.extend_from_slice(&id.to_be_bytes());
        out.extend_from_slice(&[0, 1]);
        out.extend_from_slice(data);
        build::fill_icmp_checksum(from, to, &mut out[begin..]);
    });
    out
}

/// An ICMP or ICMPv6 error that quotes the beginning of a packet.
pub fn icmp_error(
    from: impl Into<IpAddr>,
    to: impl Into<IpAddr>,
    kind: u8,
    code: u8,
    about: &[u8],
) -> Vec<u8> {
    let mut out = Vec::new();
    build::icmp_error(&mut out, (from, to), (kind, code, 0), about);
    out
}

/// The packet with another TTL or hop limit.
pub fn with_ttl(mut packet: Vec<u8>, ttl: u8) -> Vec<u8> {
    match packet[0] >> 4 {
        6 => packet[7] = ttl,
        _ => {
            packet[8] = ttl;
            crate::packet::ipv4::fill_checksum(&mut packet, 20);
        }
    }
    packet
}

/// The IPv4 packet with DF cleared.
pub fn may_fragment(mut packet: Vec<u8>) -> Vec<u8> {
    packet[6] = 0;
    crate::packet::ipv4::fill_checksum(&mut packet, 20);
    packet
}

/// Whether every checksum of a packet is correct.
pub fn is_right(packet: &[u8]) -> bool {
    let Ok(ip) = Ip::parse(packet) else {
        return false;
    };
    let version = ip.version();
    let is_header_right = match version {
        Version::V4 => Ipv4::parse(packet).is_ok_and(|ip| ip.checksum_is_right()),
        Version::V6 => true,
    };
    let l4 = ip.payload();
    let sum = match ip.protocol {
        icmp if icmp == version.icmp() => build::icmp_checksum(ip.source, ip.destination, l4),
        17 if version == Version::V4 && l4[6..8] == [0, 0] => 0,
        protocol => Sum::default()
            .pseudo(ip.source, ip.destination, protocol, l4.len())
            .bytes(l4)
            .finish(),
    };
    is_header_right && sum == 0
}
