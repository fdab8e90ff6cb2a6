//! Parsing and building of IPv4 and IPv6, TCP, UDP, ICMP and ICMPv6.
//!
//! Headers are parsed once into plain values, with every length checked against the frame. Whatever
//! a guest writes into a header, parsing ends in a value or in [`Malformed`].
pub mod build;
pub mod checksum;
pub mod fragment;
pub mod icmp;
pub mod ip;
pub mod ipv4;
pub mod ipv6;
pub mod translation;
pub mod transport;

pub use fragment::Fragment;
pub use ip::{Ip, Version};
pub use ipv4::Ipv4;
pub use ipv6::Ipv6;
pub use transport::Transport;

use slipgate_abi::{Direction, segment, segment::Segments, tcp::Flags};
use slipgate_model::FlowTuple;
use thiserror::Error;

use crate::port::VirtioNetHdr;

/// Error: headers contradict themselves or the frame's length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("malformed packet")]
pub struct Malformed;

/// A packet of either family with the headers that identify its flow.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// The parsed IP header.
    pub ip: Ip<'a>,
    /// The parsed transport header.
    pub transport: Transport,
}

impl<'a> Packet<'a> {
    /// Parses the transport header. The packet must not be a fragment ([`Ipv4::is_fragment`]).
    ///
    /// # Errors
    /// When the transport header is invalid.
    pub fn parse(ip: impl Into<Ip<'a>>) -> Result<Self, Malformed> {
        let ip = ip.into();
        Ok(Self {
            transport: Transport::parse(ip.version(), ip.protocol, ip.payload())?,
            ip,
        })
    }

    /// Parses the beginning of a packet of TCP, whose last `missing` bytes, some of its payload, are not in
    /// `bytes`. The result's lengths are those of the whole packet, but that of `ip.bytes`, which are
    /// those that are here.
    ///
    /// # Errors
    /// When it is none, a header is invalid or truncated, or the packet has another length.
    pub fn parse_beginning(bytes: &'a [u8], missing: usize) -> Result<Self, Malformed> {
        let ip = Ip::parse_truncated(bytes)?;
        let mut packet = Self::parse(ip)?;
        match &mut packet.transport {
            Transport::Tcp(tcp) if ip.told_len() == Some(bytes.len() + missing) => {
                tcp.payload_len += missing;
                Ok(packet)
            }
            _ => Err(Malformed),
        }
    }

    /// Returns the flow's tuple on the link with this scope: `Tx` for a packet that the local side
    /// sent. Returns `None` for a protocol without flows and for ICMP other than echo.
    pub fn tuple(&self, scope: u32, direction: Direction) -> Option<FlowTuple> {
        let (source, destination) = self.transport.ports()?;
        let ip = &self.ip;
        let (local, remote, local_port, remote_port) = match direction {
            Direction::Tx => (ip.source, ip.destination, source, destination),
            Direction::Rx => (ip.destination, ip.source, destination, source),
        };
        // An echo's id identifies the local end in both directions.
        let (local_port, remote_port) = match self.transport {
            Transport::Icmp(_) => (source, 0),
            _ => (local_port, remote_port),
        };
        Some(FlowTuple {
            scope,
            local,
            remote,
            local_port,
            remote_port,
            protocol: ip.protocol,
        })
    }

    /// Whether the TCP flags contradict each other. The programs drop such packets before they
    /// reach the engine.
    pub fn contradicts_itself(&self) -> bool {
        matches!(self.transport, Transport::Tcp(tcp) if Flags::are_contradictory(tcp.flags))
    }

    /// Returns the length of the L3 and L4 headers together, bytes.
    pub fn headers_len(&self) -> usize {
        self.ip.header_len + self.transport.header_len()
    }

    /// Returns the packets and bytes that the packet counts as on the wire.
    pub fn segments(&self, vnet: VirtioNetHdr) -> Segments {
        let gso_size = if vnet.gso_type == VirtioNetHdr::GSO_NONE {
            0
        } else {
            vnet.gso_size
        };
        segment::count(
            self.ip.bytes.len() as u32,
            self.headers_len() as u32,
            u32::from(gso_size),
        )
    }
}

#[cfg(test)]
mod tests;
