//! The identity of a flow on one of its two links, of either family.
use std::net::{IpAddr, SocketAddr};

use slipgate_abi::{Addresses6, Protocol, Slot, Tuple, Tuple6, slot::SlotFlags};

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
        match self.local {
            IpAddr::V4(_) => Protocol::from_ip(self.protocol),
            IpAddr::V6(_) => Protocol::from_ip6(self.protocol).map(in_rules),
        }
    }

    /// Returns the IP protocol number of a protocol in the family of an address.
    pub const fn number(addr: IpAddr, protocol: Protocol) -> u8 {
        match (addr, protocol) {
            (IpAddr::V6(_), Protocol::Icmp) => Protocol::Icmpv6 as u8,
            (_, protocol) => protocol as u8,
        }
    }

    /// Returns the key of the flow's entry in the map of its family; `None` if the addresses are of
    /// two families, which no flow has.
    pub fn key(&self) -> Option<TupleKey> {
        match (self.local, self.remote) {
            (IpAddr::V4(local), IpAddr::V4(remote)) => Some(TupleKey::V4(Tuple {
                scope: self.scope,
                local: local.into(),
                remote: remote.into(),
                local_port: self.local_port,
                remote_port: self.remote_port,
                protocol: self.protocol,
                pad: [0; 3],
            })),
            (IpAddr::V6(local), IpAddr::V6(remote)) => Some(TupleKey::V6(Tuple6 {
                scope: self.scope,
                local_port: self.local_port,
                remote_port: self.remote_port,
                local: local.into(),
                remote: remote.into(),
                protocol: self.protocol,
                pad: [0; 7],
            })),
            _ => None,
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

/// Key of a flow's entry in `FLOWS` or `FLOWS6`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TupleKey {
    /// Key in `FLOWS`, of an IPv4 flow.
    V4(Tuple),
    /// Key in `FLOWS6`, of an IPv6 flow.
    V6(Tuple6),
}

impl From<Tuple> for FlowTuple {
    fn from(tuple: Tuple) -> Self {
        Self {
            scope: tuple.scope,
            local: tuple.local.into(),
            remote: tuple.remote.into(),
            local_port: tuple.local_port,
            remote_port: tuple.remote_port,
            protocol: tuple.protocol,
        }
    }
}

impl From<Tuple6> for FlowTuple {
    fn from(tuple: Tuple6) -> Self {
        Self {
            scope: tuple.scope,
            local: tuple.local.into(),
            remote: tuple.remote.into(),
            local_port: tuple.local_port,
            remote_port: tuple.remote_port,
            protocol: tuple.protocol,
        }
    }
}

/// The protocol as rules and users have it: ICMP in both families.
fn in_rules(protocol: Protocol) -> Protocol {
    match protocol.is_icmp() {
        true => Protocol::Icmp,
        false => protocol,
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

impl FlowAddresses {
    /// Returns the addresses of the flow in a slot. `six` has those of an IPv6 flow.
    pub fn of(slot: &Slot, six: &Addresses6) -> Self {
        match slot.flags & SlotFlags::IPV6 {
            0 => Self {
                guest: slot.guest.into(),
                remote: slot.remote.into(),
                nat: slot.nat.into(),
            },
            _ => Self {
                guest: six.guest.into(),
                remote: six.remote.into(),
                nat: six.nat.into(),
            },
        }
    }
}

#[cfg(test)]
#[path = "flow_tuple_test.rs"]
mod tests;
