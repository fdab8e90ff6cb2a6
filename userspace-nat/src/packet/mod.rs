//! Reading and building IPv4, TCP, UDP and ICMP.
//!
//! Views are plain values read once, with every length checked against the frame; whatever a guest
//! writes into a header, reading it ends in a view or in [`Malformed`].
pub mod build;
pub mod checksum;
pub mod icmp;
pub mod ipv4;
pub mod transport;

pub use ipv4::Ipv4;
pub use transport::Transport;

use slipgate_abi::{Direction, Protocol, Tuple, segment, segment::Segments, tcp::Flags};
use thiserror::Error;

use crate::port::VirtioNetHdr;

/// Headers that contradict themselves or the frame's length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("malformed packet")]
pub struct Malformed;

/// An IPv4 packet of a protocol that has flows, with the headers a flow is known by.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// The IPv4 header.
    pub ip: Ipv4<'a>,
    /// The transport header.
    pub transport: Transport,
}

impl<'a> Packet<'a> {
    /// Reads both headers. The packet is no fragment (the caller asked [`Ipv4::is_fragment`]).
    pub fn parse(ip: Ipv4<'a>) -> Result<Self, Malformed> {
        Ok(Self {
            transport: Transport::parse(ip.protocol, ip.payload())?,
            ip,
        })
    }

    /// The flow's tuple on the link with this scope: `Tx` for a packet that the local side sent.
    /// `None` for a protocol without flows and for ICMP that is no echo.
    pub fn tuple(&self, scope: u32, direction: Direction) -> Option<Tuple> {
        let (source, destination) = self.transport.ports()?;
        let ip = &self.ip;
        let (local, remote, local_port, remote_port) = match direction {
            Direction::Tx => (ip.source, ip.destination, source, destination),
            Direction::Rx => (ip.destination, ip.source, destination, source),
        };
        // An echo's id names the local end, whichever way it goes.
        let (local_port, remote_port) = match self.transport {
            Transport::Icmp(_) => (source, 0),
            _ => (local_port, remote_port),
        };
        Some(Tuple {
            scope,
            local,
            remote,
            local_port,
            remote_port,
            protocol: Protocol::from_ip(ip.protocol)? as u8,
            pad: [0; 3],
        })
    }

    /// Whether its TCP flags contradict each other. The programs drop these before they come here.
    pub fn contradicts_itself(&self) -> bool {
        matches!(self.transport, Transport::Tcp(tcp) if Flags::are_contradictory(tcp.flags))
    }

    /// L3 and L4 headers together, bytes.
    pub fn headers_len(&self) -> usize {
        self.ip.header_len + self.transport.header_len()
    }

    /// What it counts as on the wire.
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
