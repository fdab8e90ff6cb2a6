//! Builders of the engine's own packets, into a buffer that is reused from packet to packet.
use std::net::IpAddr;

use super::{Version, checksum, checksum::Sum, icmp, ipv4};

/// TTL or hop limit of the engine's packets.
const TTL: u8 = 64;

/// Returns the largest part of the offending packet that an ICMP error quotes, bytes: the whole
/// error has at most 576 (RFC 1812 section 4.3.2.3), and in IPv6 1,280 (RFC 4443 section 2.4).
pub const fn quote_max(version: Version) -> usize {
    version.least_mtu() as usize - version.header_len() - icmp::HEADER_LEN
}

/// Builds a packet of the addresses' family into `out`, which is cleared first. Both addresses are
/// of one family; a packet of two is left empty, which no link takes.
pub fn ip(
    out: &mut Vec<u8>,
    source: impl Into<IpAddr>,
    destination: impl Into<IpAddr>,
    protocol: u8,
    payload: impl FnOnce(&mut Vec<u8>),
) {
    let ends = (source.into(), destination.into());
    let header_len = Version::of(ends.0).header_len();
    out.clear();
    out.resize(header_len, 0);
    payload(out);
    let (header, payload) = out.split_at_mut(header_len);
    let is_written = write_header(header, ends, protocol, None, payload.len());
    debug_assert!(is_written, "the addresses are of two families");
    if !is_written {
        out.clear();
    }
}

/// Writes the header of a packet with `payload_len` bytes behind it, from the first of `ends` to the
/// second. `header` has room for it ([`Version::header_len`]). IPv4: `None` as identification makes an
/// atomic datagram (DF), which needs no unique one (RFC 6864). Returns `false`, and writes nothing, if
/// the addresses are of two families.
pub fn write_header(
    header: &mut [u8],
    ends: (IpAddr, IpAddr),
    protocol: u8,
    identification: Option<u16>,
    payload_len: usize,
) -> bool {
    let length = |bytes: usize| u16::try_from(bytes).unwrap_or(u16::MAX).to_be_bytes();
    match ends {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            header[..2].copy_from_slice(&[0x45, 0]);
            header[2..4].copy_from_slice(&length(ipv4::HEADER_LEN + payload_len));
            let dont_fragment = if identification.is_none() { 0x40 } else { 0 };
            header[4..6].copy_from_slice(&identification.unwrap_or(0).to_be_bytes());
            header[6..10].copy_from_slice(&[dont_fragment, 0, TTL, protocol]);
            header[12..16].copy_from_slice(&source.octets());
            header[16..20].copy_from_slice(&destination.octets());
            ipv4::fill_checksum(header, ipv4::HEADER_LEN);
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            header[..4].copy_from_slice(&[0x60, 0, 0, 0]);
            header[4..6].copy_from_slice(&length(payload_len));
            header[6..8].copy_from_slice(&[protocol, TTL]);
            header[8..24].copy_from_slice(&source.octets());
            header[24..40].copy_from_slice(&destination.octets());
        }
        _ => return false,
    }
    true
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

/// Builds the packet of a TCP segment.
pub fn tcp(
    out: &mut Vec<u8>,
    source: impl Into<IpAddr>,
    destination: impl Into<IpAddr>,
    segment: Segment,
) {
    let (source, destination) = (source.into(), destination.into());
    ip(out, source, destination, 6, |out| {
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

/// Builds an ICMP or ICMPv6 error that quotes the beginning of `offender`. The header has type,
/// code and second word (such as the MTU of "packet too big").
pub fn icmp_error(
    out: &mut Vec<u8>,
    (source, destination): (impl Into<IpAddr>, impl Into<IpAddr>),
    (kind, code, rest): (u8, u8, u32),
    offender: &[u8],
) {
    let (source, destination) = (source.into(), destination.into());
    let version = Version::of(source);
    ip(out, source, destination, version.icmp(), |out| {
        let begin = out.len();
        out.extend_from_slice(&[kind, code, 0, 0]);
        out.extend_from_slice(&rest.to_be_bytes());
        out.extend_from_slice(&offender[..offender.len().min(quote_max(version))]);
        fill_icmp_checksum(source, destination, &mut out[begin..]);
    });
}

/// Recomputes the checksum of an ICMP message, or of an ICMPv6 message between these addresses.
pub fn fill_icmp_checksum(
    source: impl Into<IpAddr>,
    destination: impl Into<IpAddr>,
    message: &mut [u8],
) {
    message[2..4].fill(0);
    let sum = icmp_checksum(source.into(), destination.into(), message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
}

/// Returns the checksum of an ICMP or ICMPv6 message between two addresses whose checksum field is
/// zero. If the field is in place, returns 0 when it is correct.
pub fn icmp_checksum(source: IpAddr, destination: IpAddr, message: &[u8]) -> u16 {
    match Version::of(source) {
        Version::V4 => checksum::of(message),
        Version::V6 => Sum::default()
            .pseudo(source, destination, Version::V6.icmp(), message.len())
            .bytes(message)
            .finish(),
    }
}
