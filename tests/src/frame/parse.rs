use std::net::{Ipv4Addr, SocketAddrV4};

use super::{fold, pseudo_sum, sum_of};
use crate::tap::VnetHdr;

/// One direction of a flow. For ICMP echo the port is the identifier, on the side that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowKey {
    /// IP protocol number of the flow.
    pub protocol: u8,
    /// Sender's address and port.
    pub source: SocketAddrV4,
    /// Receiver's address and port.
    pub destination: SocketAddrV4,
}

impl FlowKey {
    /// One direction of a TCP connection.
    pub fn tcp(source: SocketAddrV4, destination: SocketAddrV4) -> Self {
        FlowKey {
            protocol: 6,
            source,
            destination,
        }
    }

    /// One direction of a UDP flow.
    pub fn udp(source: SocketAddrV4, destination: SocketAddrV4) -> Self {
        FlowKey {
            protocol: 17,
            source,
            destination,
        }
    }

    /// Returns the opposite direction.
    pub fn reversed(self) -> Self {
        FlowKey {
            source: self.destination,
            destination: self.source,
            ..self
        }
    }
}

/// An IPv4 packet taken apart. Ports are 0 where there are none (a later fragment, other
/// protocols); for an ICMP echo the asking side's port is the identifier.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Sender and its port.
    pub source: SocketAddrV4,
    /// Receiver and its port.
    pub destination: SocketAddrV4,
    /// IP protocol number of the packet.
    pub protocol: u8,
    /// Time to live of the packet.
    pub ttl: u8,
    /// The IP total length: bytes from the IP header on.
    pub total_len: usize,
    /// IP header length in bytes.
    pub header_len: usize,
    /// TCP, UDP or ICMP header length in bytes; 0 for others and later fragments.
    pub transport_header_len: usize,
    /// The bytes from the IP header on, as many as were captured.
    pub ip: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Parses a frame with an Ethernet header; one 802.1Q tag is looked through.
    pub fn parse_ethernet(frame: &'a [u8]) -> Option<Self> {
        match frame.get(12..14)? {
            [8, 0] => Self::parse_ip(&frame[14..]),
            [0x81, 0] if frame.get(16..18)? == [8, 0] => Self::parse_ip(&frame[18..]),
            _ => None,
        }
    }

    /// Parses a packet from its IP header on. The payload may be cut short, the headers not.
    pub fn parse_ip(ip: &'a [u8]) -> Option<Self> {
        let fixed: &[u8; 20] = ip.first_chunk()?;
        let header_len = usize::from(fixed[0] & 0xf) * 4;
        if fixed[0] >> 4 != 4 || header_len < 20 {
            return None;
        }
        let half = |at: usize| u16::from_be_bytes([fixed[at], fixed[at + 1]]);
        let address =
            |at: usize| Ipv4Addr::new(fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]);
        let first = half(6) & 0x1fff == 0;
        let l4 = if first { ip.get(header_len..)? } else { &[] };
        let port = |at: usize| Some(u16::from_be_bytes([*l4.get(at)?, *l4.get(at + 1)?]));
        let protocol = fixed[9];
        let (ports, transport_header_len) = match protocol {
            // A first fragment may be too short to say.
            6 if first && half(6) & 0x2000 != 0 && l4.len() < 13 => ((port(0)?, port(2)?), 0),
            6 if first => ((port(0)?, port(2)?), usize::from(l4.get(12)? >> 4) * 4),
            17 if first => ((port(0)?, port(2)?), 8),
            1 if first => match l4.first()? {
                8 => ((port(4)?, 0), 8),
                0 => ((0, port(4)?), 8),
                _ => ((0, 0), 8),
            },
            _ => ((0, 0), 0),
        };
        Some(Packet {
            source: SocketAddrV4::new(address(12), ports.0),
            destination: SocketAddrV4::new(address(16), ports.1),
            protocol,
            ttl: fixed[8],
            total_len: usize::from(half(2)),
            header_len,
            transport_header_len,
            ip,
        })
    }

    /// The direction it belongs to.
    pub fn flow_key(&self) -> FlowKey {
        FlowKey {
            protocol: self.protocol,
            source: self.source,
            destination: self.destination,
        }
    }

    /// The bytes from the transport header on, without padding.
    pub fn transport(&self) -> &'a [u8] {
        let end = self.total_len.min(self.ip.len());
        self.ip.get(self.header_len..end).unwrap_or(&[])
    }

    /// The bytes after the transport header, without padding.
    pub fn payload(&self) -> &'a [u8] {
        self.transport()
            .get(self.transport_header_len..)
            .unwrap_or(&[])
    }

    /// TCP flags; `None` when it is not TCP.
    pub fn tcp_flags(&self) -> Option<u8> {
        (self.protocol == 6).then(|| self.transport().get(13).copied())?
    }

    /// TCP sequence and acknowledgment numbers.
    pub fn tcp_numbers(&self) -> Option<(u32, u32)> {
        let l4 = self.transport();
        let word = |at: usize| Some(u32::from_be_bytes(*l4.get(at..)?.first_chunk()?));
        (self.protocol == 6).then(|| Some((word(4)?, word(8)?)))?
    }

    /// ICMP type and code; `None` when it is not ICMP.
    pub fn icmp(&self) -> Option<(u8, u8)> {
        let l4 = self.transport();
        (self.protocol == 1).then(|| Some((*l4.first()?, *l4.get(1)?)))?
    }

    /// Whether the IP header's checksum, and the transport's where it is complete, are right. With
    /// NEEDS_CSUM in `vnet` the transport's field must hold the pseudo-header's sum.
    pub fn checksums_are_right(&self, vnet: &VnetHdr) -> bool {
        let Some(header) = self.ip.get(..self.header_len) else {
            return false;
        };
        if fold(sum_of(header)) != 0xffff {
            return false;
        }
        let l4 = self.transport();
        let pseudo = pseudo_sum(
            *self.source.ip(),
            *self.destination.ip(),
            self.protocol,
            l4.len(),
        );
        let field = |at: usize| Some(u16::from_be_bytes(*l4.get(at..)?.first_chunk()?));
        match self.protocol {
            _ if self.transport_header_len == 0 => true,
            6 if vnet.flags & VnetHdr::NEEDS_CSUM != 0 => field(16) == Some(fold(pseudo)),
            17 if vnet.flags & VnetHdr::NEEDS_CSUM != 0 => field(6) == Some(fold(pseudo)),
            17 if field(6) == Some(0) => true,
            6 | 17 => fold(pseudo + sum_of(l4)) == 0xffff,
            1 => fold(sum_of(l4)) == 0xffff,
            _ => true,
        }
    }
}
