//! The IP header of either family, as far as both have the same.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Ipv4, Ipv6, Malformed, ipv4, ipv6};
use crate::port::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};

/// Version of the Internet Protocol: the family of an address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Version {
    /// Version 4 (RFC 791).
    V4,
    /// Version 6 (RFC 8200).
    V6,
}

impl Version {
    /// Returns the family of an address.
    pub const fn of(addr: IpAddr) -> Self {
        match addr {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// Returns the unspecified address of the family.
    pub const fn unspecified(self) -> IpAddr {
        match self {
            Self::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Self::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        }
    }

    /// Returns the length of a header without options or extension headers, bytes.
    pub const fn header_len(self) -> usize {
        match self {
            Self::V4 => ipv4::HEADER_LEN,
            Self::V6 => ipv6::HEADER_LEN,
        }
    }

    /// Returns the EtherType of the family's frames.
    pub const fn ethertype(self) -> u16 {
        match self {
            Self::V4 => ETHERTYPE_IPV4,
            Self::V6 => ETHERTYPE_IPV6,
        }
    }

    /// Returns the protocol number of the family's ICMP.
    pub const fn icmp(self) -> u8 {
        match self {
            Self::V4 => 1,
            Self::V6 => 58,
        }
    }

    /// Returns the largest packet that every link of the family carries or every host takes, bytes
    /// (RFC 791 section 3.1, RFC 8200 section 5).
    pub const fn least_mtu(self) -> u32 {
        match self {
            Self::V4 => 576,
            Self::V6 => 1_280,
        }
    }
}

/// An IP header and the packet that it begins.
#[derive(Clone, Copy, Debug)]
pub struct Ip<'a> {
    /// The packet, truncated to the length that its header says.
    pub bytes: &'a [u8],
    /// Header length, with options and without extension headers, bytes.
    pub header_len: usize,
    /// Source address of the packet.
    pub source: IpAddr,
    /// Destination address of the packet.
    pub destination: IpAddr,
    /// IP protocol number of the payload.
    pub protocol: u8,
    /// Time to live or hop limit, hops.
    pub ttl: u8,
    /// Whether no router may fragment the packet: DF is set, or it is an IPv6 packet.
    pub dont_fragment: bool,
}

impl<'a> Ip<'a> {
    /// Parses a header of the version that its first octet says. The packet may be a fragment,
    /// which the result does not show.
    ///
    /// # Errors
    /// When the header or its lengths are invalid.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        match version_of(bytes) {
            Some(Version::V4) => Ok(Ipv4::parse(bytes)?.into()),
            Some(Version::V6) => Ok(Ipv6::parse(bytes)?.into()),
            None => Err(Malformed),
        }
    }

    /// Parses a header of the version that its first octet says, whose packet may be truncated.
    ///
    /// # Errors
    /// When the header is invalid or truncated.
    pub fn parse_truncated(bytes: &'a [u8]) -> Result<Self, Malformed> {
        match version_of(bytes) {
            Some(Version::V4) => Ok(Ipv4::parse_truncated(bytes)?.into()),
            Some(Version::V6) => Ok(Ipv6::parse_truncated(bytes)?.into()),
            None => Err(Malformed),
        }
    }

    /// Returns the version of the header.
    pub fn version(&self) -> Version {
        Version::of(self.source)
    }

    /// Returns the length of the packet as its header says, bytes; `None` for a jumbogram.
    pub fn told_len(&self) -> Option<usize> {
        let at = match self.version() {
            Version::V4 => 2,
            Version::V6 => 4,
        };
        let told = self.bytes.get(at..at + 2)?;
        let told = usize::from(u16::from_be_bytes([told[0], told[1]]));
        match self.version() {
            Version::V4 => Some(told),
            Version::V6 => (told != 0).then_some(ipv6::HEADER_LEN + told),
        }
    }

    /// Returns the bytes after the header.
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[self.header_len..]
    }
}

impl<'a> From<Ipv4<'a>> for Ip<'a> {
    fn from(ip: Ipv4<'a>) -> Self {
        Self {
            bytes: ip.bytes,
            header_len: ip.header_len,
            source: ip.source.into(),
            destination: ip.destination.into(),
            protocol: ip.protocol,
            ttl: ip.ttl,
            dont_fragment: ip.dont_fragment,
        }
    }
}

impl<'a> From<Ipv6<'a>> for Ip<'a> {
    fn from(ip: Ipv6<'a>) -> Self {
        Self {
            bytes: ip.bytes,
            header_len: ipv6::HEADER_LEN,
            source: ip.source.into(),
            destination: ip.destination.into(),
            protocol: ip.next_header,
            ttl: ip.hop_limit,
            dont_fragment: true,
        }
    }
}

/// One of the two addresses of a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The source address of the header.
    Source,
    /// The destination address of the header.
    Destination,
}

impl End {
    /// Returns the other one.
    pub const fn other(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }
}

/// Returns the version that the first octet of a header says.
pub fn version_of(header: &[u8]) -> Option<Version> {
    match header.first()? >> 4 {
        4 => Some(Version::V4),
        6 => Some(Version::V6),
        _ => None,
    }
}

/// Rewrites an address in a header, and updates the header's checksum if it has one. `header` must
/// have been parsed; an address of the other family changes nothing.
pub fn set_address(header: &mut [u8], end: End, new: IpAddr) {
    match (version_of(header), new) {
        (Some(Version::V4), IpAddr::V4(new)) => ipv4::set_address(header, end, new.into()),
        (Some(Version::V6), IpAddr::V6(new)) => ipv6::set_address(header, end, new),
        _ => {}
    }
}

/// Decrements the TTL or hop limit, and updates the checksum. The caller makes sure that it is not
/// 0.
pub fn decrement_ttl(header: &mut [u8]) {
    match version_of(header) {
        Some(Version::V4) => ipv4::decrement_ttl(header),
        Some(Version::V6) => ipv6::decrement_hop_limit(header),
        None => {}
    }
}

/// Truncates a packet to `len` bytes, and corrects its header. The packet must have been parsed,
/// and `len` reach behind its header of `header_len` bytes.
pub fn truncate(packet: &mut Vec<u8>, header_len: usize, len: usize) {
    if packet.len() <= len {
        return;
    }
    packet.truncate(len);
    match version_of(packet) {
        Some(Version::V4) => {
            packet[2..4].copy_from_slice(&(len as u16).to_be_bytes());
            ipv4::fill_checksum(packet, header_len);
        }
        Some(Version::V6) => {
            let payload = len.saturating_sub(header_len) as u16;
            packet[4..6].copy_from_slice(&payload.to_be_bytes());
        }
        None => {}
    }
}
