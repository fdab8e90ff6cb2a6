//! The identity of a flow on one of its two links, of either family.
use std::net::{IpAddr, SocketAddr};

use slipgate_abi::{Protocol, Tuple};

/// Protocol number of ICMPv6 (RFC 4443).
const ICMPV6: u8 = 58;

/// A flow as one link sees it: addresses, ports and protocol. Each flow has two. On the guest's
/// link, `scope` is the VM's id and `local` the guest's own address. On the world's link, `scope`
/// is [`FlowTuple::WORLD`] and `local` the translated address. Both addresses are of one family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FlowTuple {
    /// Id of the VM, or [`FlowTuple::WORLD`].
    pub scope: u32,
    /// Address of the guest, or its translation.
    pub local: IpAddr,
    /// Address of the peer.
    pub remote: IpAddr,
    /// Port of the guest or its translation, or the ICMP query id.
    pub local_port: u16,
    /// Port of the peer; 0 for ICMP.
    pub remote_port: u16,
    /// IP protocol number: 58 for ICMPv6.
    pub protocol: u8,
}

impl FlowTuple {
    /// Scope of tuples on the world's link.
    pub const WORLD: u32 = Tuple::WORLD;

    /// Returns the protocol; `None` if the family has no flows of it. ICMPv6 is ICMP here, as in
    /// rules: the addresses tell the family.
    pub fn protocol(&self) -> Option<Protocol> {
        match (self.local, self.protocol) {
            (IpAddr::V4(_), number) => Protocol::from_ip(number),
            (IpAddr::V6(_), ICMPV6) => Some(Protocol::Icmp),
            (IpAddr::V6(_), number) => {
                Protocol::from_ip(number).filter(|protocol| *protocol != Protocol::Icmp)
            }
        }
    }

    /// Returns the IP protocol number of a protocol in the family of an address.
    pub const fn number(addr: IpAddr, protocol: Protocol) -> u8 {
        match (addr, protocol) {
            (IpAddr::V6(_), Protocol::Icmp) => ICMPV6,
            (_, protocol) => protocol as u8,
        }
    }

    /// Returns address and port of the local side.
    pub const fn local_addr(&self) -> SocketAddr {
        SocketAddr::new(self.local, self.local_port)
    }

    /// Returns address and port of the peer.
    pub const fn remote_addr(&self) -> SocketAddr {
        SocketAddr::new(self.remote, self.remote_port)
    }
}

/// The three addresses of a flow, which are of one family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FlowAddresses {
    /// Address of the guest.
    pub guest: IpAddr,
    /// Address of the peer.
    pub remote: IpAddr,
    /// Translated address: the guest's as the world sees it.
    pub nat: IpAddr,
}
