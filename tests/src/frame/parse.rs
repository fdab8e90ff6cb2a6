use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};

use super::{
    FRAGMENT, FRAGMENT_HEADER_BYTES, ICMP, ICMPV6, IPV6_HEADER_BYTES, fold, pseudo_sum, sum_of,
};
use crate::tap::VnetHdr;

/// One direction of a flow. For ICMP echo the port is the identifier, on the side that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowKey {
    /// IP protocol number of the flow.
    pub protocol: u8,
    /// Sender's address and port.
    pub source: SocketAddr,
    /// Receiver's address and port.
    pub destination: SocketAddr,
}

impl FlowKey {
    /// One direction of a TCP connection.
    pub fn tcp(source: impl Into<SocketAddr>, destination: impl Into<SocketAddr>) -> Self {
        FlowKey {
            protocol: 6,
            source: source.into(),
            destination: destination.into(),
        }
    }

    /// One direction of a UDP flow.
    pub fn udp(source: impl Into<SocketAddr>, destination: impl Into<SocketAddr>) -> Self {
        FlowKey {
            protocol: 17,
            source: source.into(),
            destination: destination.into(),
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

/// A packet taken apart: of IPv4, or of either family where its addresses are [`SocketAddr`]. Ports
/// are 0 where there are none (a later fragment, other protocols); for an ICMP echo the asking
/// side's port is the identifier.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a, A = SocketAddrV4> {
    /// Sender and its port.
    pub source: A,
    /// Receiver and its port.
    pub destination: A,
    /// IP protocol number of the packet.
    pub protocol: u8,
    /// Time to live of the packet, or its hop limit.
    pub ttl: u8,
    /// The IP total length: bytes from the IP header on.
    pub total_len: usize,
    /// Length of the headers before the transport's, in bytes.
    pub header_len: usize,
    /// Whether it is a part of a datagram.
    pub is_fragment: bool,
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
        let protocol = fixed[9];
        let more = half(6) & 0x2000 != 0;
        let (ports, transport_header_len) = match first {
            true => transport_of(protocol, l4, more)?,
            false => ((0, 0), 0),
        };
        Some(Packet {
            source: SocketAddrV4::new(address(12), ports.0),
            destination: SocketAddrV4::new(address(16), ports.1),
            protocol,
            ttl: fixed[8],
            total_len: usize::from(half(2)),
            header_len,
            is_fragment: more || !first,
            transport_header_len,
            ip,
        })
    }
}

impl<'a> Packet<'a, SocketAddr> {
    /// Parses a frame of either family with an Ethernet header.
    pub fn of_ethernet(frame: &'a [u8]) -> Option<Self> {
        match frame.get(12..14)? {
            [0x86, 0xdd] => Self::parse_ipv6(&frame[14..]),
            _ => Packet::parse_ethernet(frame).map(Self::from),
        }
    }

    /// Parses a packet of either family from its IP header on.
    pub fn of_ip(ip: &'a [u8]) -> Option<Self> {
        match ip.first()? >> 4 {
            6 => Self::parse_ipv6(ip),
            _ => Packet::parse_ip(ip).map(Self::from),
        }
    }

    /// The direction it belongs to.
    pub fn flow_key(&self) -> FlowKey {
        FlowKey {
            protocol: self.protocol,
            source: self.source,
            destination: self.destination,
        }
    }

    /// Parses an IPv6 packet. Of extension headers it knows the fragment header.
    fn parse_ipv6(ip: &'a [u8]) -> Option<Self> {
        let fixed: &[u8; IPV6_HEADER_BYTES] = ip.first_chunk()?;
        if fixed[0] >> 4 != 6 {
            return None;
        }
        let address = |at: usize| Some(Ipv6Addr::from(*fixed[at..].first_chunk::<16>()?));
        let (mut header_len, mut protocol) = (IPV6_HEADER_BYTES, fixed[6]);
        let (mut first, mut more) = (true, false);
        if protocol == FRAGMENT {
            let header: &[u8; FRAGMENT_HEADER_BYTES] = ip.get(header_len..)?.first_chunk()?;
            let place = u16::from_be_bytes([header[2], header[3]]);
            (first, more) = (place & !7 == 0, place & 1 != 0);
            protocol = header[0];
            header_len += FRAGMENT_HEADER_BYTES;
        }
        let (ports, transport_header_len) = match first {
            true => transport_of(protocol, ip.get(header_len..)?, more)?,
            false => ((0, 0), 0),
        };
        let length = usize::from(u16::from_be_bytes([fixed[4], fixed[5]]));
        Some(Packet {
            source: SocketAddr::new(address(8)?.into(), ports.0),
            destination: SocketAddr::new(address(24)?.into(), ports.1),
            protocol,
            ttl: fixed[7],
            total_len: IPV6_HEADER_BYTES + length,
            header_len,
            is_fragment: more || !first,
            transport_header_len,
            ip,
        })
    }

    /// Whether it asks for an echo.
    pub fn is_echo_request(&self) -> bool {
        let first = self.transport().first();
        matches!(
            (self.protocol, first),
            (ICMP, Some(8)) | (ICMPV6, Some(128))
        )
    }
}

impl<'a> From<Packet<'a>> for Packet<'a, SocketAddr> {
    fn from(packet: Packet<'a>) -> Self {
        Packet {
            source: packet.source.into(),
            destination: packet.destination.into(),
            protocol: packet.protocol,
            ttl: packet.ttl,
            total_len: packet.total_len,
            header_len: packet.header_len,
            is_fragment: packet.is_fragment,
            transport_header_len: packet.transport_header_len,
            ip: packet.ip,
        }
    }
}

/// Ports and the length of the header in what is behind the IP header, of a packet or of a first
/// fragment with `more` behind it. `None`: it is cut short.
fn transport_of(protocol: u8, l4: &[u8], more: bool) -> Option<((u16, u16), usize)> {
    let port = |at: usize| Some(u16::from_be_bytes([*l4.get(at)?, *l4.get(at + 1)?]));
    Some(match protocol {
        // A first fragment may be too short to say.
        6 if more && l4.len() < 13 => ((port(0)?, port(2)?), 0),
        6 => ((port(0)?, port(2)?), usize::from(l4.get(12)? >> 4) * 4),
        17 => ((port(0)?, port(2)?), 8),
        ICMP | ICMPV6 => match (protocol, l4.first()?) {
            (ICMP, 8) | (ICMPV6, 128) => ((port(4)?, 0), 8),
            (ICMP, 0) | (ICMPV6, 129) => ((0, port(4)?), 8),
            _ => ((0, 0), 8),
        },
        _ => ((0, 0), 0),
    })
}

impl<'a, A: Copy + Into<SocketAddr>> Packet<'a, A> {
    fn ips(&self) -> (IpAddr, IpAddr) {
        (self.source.into().ip(), self.destination.into().ip())
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

    /// Type and code of ICMP, or of ICMPv6; `None` when it is neither.
    pub fn icmp(&self) -> Option<(u8, u8)> {
        let l4 = self.transport();
        matches!(self.protocol, ICMP | ICMPV6).then(|| Some((*l4.first()?, *l4.get(1)?)))?
    }

    /// Whether the IPv4 header's checksum, and the transport's where it is complete, are right. With
    /// NEEDS_CSUM in `vnet` the transport's field must hold the pseudo-header's sum.
    pub fn checksums_are_right(&self, vnet: &VnetHdr) -> bool {
        let Some(header) = self.ip.get(..self.header_len) else {
            return false;
        };
        let (source, destination) = self.ips();
        if source.is_ipv4() && fold(sum_of(header)) != 0xffff {
            return false;
        }
        let l4 = self.transport();
        let pseudo = pseudo_sum(source, destination, self.protocol, l4.len());
        let field = |at: usize| Some(u16::from_be_bytes(*l4.get(at..)?.first_chunk()?));
        match self.protocol {
            _ if self.transport_header_len == 0 => true,
            6 if vnet.flags & VnetHdr::NEEDS_CSUM != 0 => field(16) == Some(fold(pseudo)),
            17 if vnet.flags & VnetHdr::NEEDS_CSUM != 0 => field(6) == Some(fold(pseudo)),
            17 if field(6) == Some(0) => true,
            6 | 17 => fold(pseudo + sum_of(l4)) == 0xffff,
            ICMP => fold(sum_of(l4)) == 0xffff,
            ICMPV6 => fold(pseudo + sum_of(l4)) == 0xffff,
            _ => true,
        }
    }
}
