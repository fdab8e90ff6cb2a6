//! Builders of the engine's own packets, into a buffer that is reused from packet to packet.
use slipgate_abi::Ip4;

use super::{checksum, checksum::Sum, icmp, ipv4};

/// TTL of the engine's packets.
const TTL: u8 = 64;
/// Largest part of the offending packet that an ICMP error quotes, bytes: the whole error has at
/// most 576 (RFC 1812 section 4.3.2.3).
const QUOTE_MAX: usize = 576 - ipv4::HEADER_LEN - icmp::HEADER_LEN;

/// Builds an IPv4 packet, with its header's checksum, into `out`, which is cleared first.
pub fn ipv4(
    out: &mut Vec<u8>,
    source: Ip4,
    destination: Ip4,
    protocol: u8,
    payload: impl FnOnce(&mut Vec<u8>),
) {
    out.clear();
    // RFC 6864: an atomic datagram (DF) needs no unique identification.
    out.extend_from_slice(&[0x45, 0, 0, 0, 0, 0, 0x40, 0, TTL, protocol, 0, 0]);
    out.extend_from_slice(&source.octets);
    out.extend_from_slice(&destination.octets);
    payload(out);
    let total = u16::try_from(out.len()).unwrap_or(u16::MAX);
    out[2..4].copy_from_slice(&total.to_be_bytes());
    ipv4::fill_checksum(out, ipv4::HEADER_LEN);
}

/// A TCP segment without options or payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Source port, host byte order.
    pub source: u16,
    /// Destination port, host byte order.
    pub destination: u16,
    /// Sequence number, host byte order.
    pub sequence: u32,
    /// Acknowledgement number, host byte order.
    pub acknowledgement: u32,
    /// Flags of the segment.
    pub flags: u8,
}

/// Builds a TCP segment in IPv4.
pub fn tcp(out: &mut Vec<u8>, source: Ip4, destination: Ip4, segment: Segment) {
    ipv4(out, source, destination, 6, |out| {
        let begin = out.len();
        out.extend_from_slice(&segment.source.to_be_bytes());
        out.extend_from_slice(&segment.destination.to_be_bytes());
        out.extend_from_slice(&segment.sequence.to_be_bytes());
        out.extend_from_slice(&segment.acknowledgement.to_be_bytes());
        out.extend_from_slice(&[5 << 4, segment.flags, 0, 0, 0, 0, 0, 0]);
        let len = out.len() - begin;
        let sum = Sum::default()
            .pseudo(source, destination, 6, len)
            .bytes(&out[begin..])
            .finish();
        out[begin + 16..begin + 18].copy_from_slice(&sum.to_be_bytes());
    });
}

/// Builds an ICMP error in IPv4 that quotes the beginning of `offender`. The header has type, code
/// and second word (the next-hop MTU of "fragmentation needed").
pub fn icmp_error(
    out: &mut Vec<u8>,
    (source, destination): (Ip4, Ip4),
    (kind, code, rest): (u8, u8, u32),
    offender: &[u8],
) {
    ipv4(out, source, destination, 1, |out| {
        let begin = out.len();
        out.extend_from_slice(&[kind, code, 0, 0]);
        out.extend_from_slice(&rest.to_be_bytes());
        out.extend_from_slice(&offender[..offender.len().min(QUOTE_MAX)]);
        fill_icmp_checksum(&mut out[begin..]);
    });
}

/// Recomputes an ICMP message's checksum.
pub fn fill_icmp_checksum(message: &mut [u8]) {
    message[2..4].fill(0);
    let sum = checksum::of(message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
}
