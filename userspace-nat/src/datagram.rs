//! UDP datagrams of either family, as the services read and write them.
use std::net::{IpAddr, SocketAddr};

use crate::packet::{
    Ip, Ipv4, Version, build, checksum::Sum, ip::version_of, transport::UDP_HEADER_LEN,
};

/// Length of the IPv4 and UDP headers before the payload, bytes.
pub const HEADERS_LEN: usize = headers_len(Version::V4);
/// Largest payload in IPv4, bytes. In IPv6 20 bytes more would fit.
pub const MAX_PAYLOAD_LEN: usize = 65_535 - HEADERS_LEN;
/// Protocol number of UDP.
const UDP: u8 = 17;

/// Returns the length of the headers before the payload, bytes.
pub const fn headers_len(version: Version) -> usize {
    version.header_len() + UDP_HEADER_LEN
}

/// A whole UDP datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram<'p> {
    /// Source address and port.
    pub from: SocketAddr,
    /// Destination address and port, of the same family.
    pub to: SocketAddr,
    /// Payload of the datagram.
    pub payload: &'p [u8],
}

impl<'p> Datagram<'p> {
    /// Parses a packet. Returns `None` for a fragment, another protocol, contradictory lengths, or
    /// a wrong header checksum. The UDP checksum is not verified: nothing can corrupt the datagram
    /// between the guest's memory and here, and with offloads the checksum is not filled in.
    pub fn parse(packet: &'p [u8]) -> Option<Self> {
        let ip = match version_of(packet)? {
            Version::V4 => {
                let ip = Ipv4::parse(packet).ok()?;
                let is_plain = !ip.is_fragment() && ip.checksum_is_right();
                is_plain.then(|| Ip::from(ip))?
            }
            Version::V6 => Ip::parse(packet).ok()?,
        };
        if ip.protocol != UDP {
            return None;
        }
        let l4 = ip.payload();
        let header: &[u8; UDP_HEADER_LEN] = l4.first_chunk()?;
        let word = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
        Some(Self {
            from: SocketAddr::new(ip.source, word(0)),
            to: SocketAddr::new(ip.destination, word(2)),
            payload: l4.get(UDP_HEADER_LEN..usize::from(word(4)))?,
        })
    }

    /// Builds the packet with its checksums. The payload is truncated to [`MAX_PAYLOAD_LEN`].
    pub fn emit(&self) -> Vec<u8> {
        let payload = &self.payload[..self.payload.len().min(MAX_PAYLOAD_LEN)];
        let (from, to) = (self.from.ip(), self.to.ip());
        let len = UDP_HEADER_LEN + payload.len();
        let mut packet = Vec::with_capacity(headers_len(Version::of(from)) + payload.len());
        build::ip(&mut packet, from, to, UDP, |out| {
            let begin = out.len();
            for word in [self.from.port(), self.to.port(), len as u16, 0] {
                out.extend_from_slice(&word.to_be_bytes());
            }
            out.extend_from_slice(payload);
            let sum = Sum::default().pseudo(from, to, UDP, len);
            let sum = match sum.bytes(&out[begin..]).finish() {
                // RFC 768: zero would mean that there is none.
                0 => 0xffff,
                sum => sum,
            };
            out[begin + 6..begin + 8].copy_from_slice(&sum.to_be_bytes());
        });
        packet
    }
}

/// Whether an address may be a unicast destination of a guest's question, and so the source of a
/// reply.
pub fn is_unicast(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            !(address.is_broadcast() || address.is_multicast() || address.octets()[0] == 0)
        }
        IpAddr::V6(address) => !(address.is_multicast() || address.is_unspecified()),
    }
}

#[cfg(test)]
#[path = "datagram_test.rs"]
mod tests;
