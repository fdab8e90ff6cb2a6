//! The two sides of a mapping: a guest's port, and the ports among which its translated port is.
use std::net::{IpAddr, Ipv4Addr};

use slipgate_abi::{ForwardKey, Protocol, VmId};
use slipgate_model::FlowTuple;

/// A port of a guest, and the address to which it is translated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Inside {
    /// Id of the VM.
    pub vm: VmId,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Address of the guest.
    pub guest: IpAddr,
    /// Port of the guest.
    pub port: u16,
    /// Translated address.
    pub nat: IpAddr,
}

impl Inside {
    /// Returns the guest's side of a flow with this tuple on the guest's link, translated to this
    /// address; `None` if its protocol or family has no mappings.
    pub fn of(guest: &FlowTuple, nat: IpAddr) -> Option<Self> {
        let protocol = guest.protocol()?;
        let has_ports = matches!(protocol, Protocol::Tcp | Protocol::Udp);
        (has_ports && nat.is_ipv4()).then_some(Self {
            vm: VmId::new(guest.scope),
            protocol,
            guest: guest.local,
            port: guest.local_port,
            nat,
        })
    }

    /// Returns the ports among which its translated port is.
    pub const fn pool(&self) -> Pool {
        Pool {
            protocol: self.protocol,
            nat: self.nat,
        }
    }

    /// Returns a value that is not behind any of a VM's.
    pub(super) const fn first_of(vm: VmId) -> Self {
        let none = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Self {
            vm,
            protocol: Protocol::Icmp,
            guest: none,
            port: 0,
            nat: none,
        }
    }
}

/// Translated address and protocol: each has all ports of the range.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Pool {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Translated address.
    pub nat: IpAddr,
}

impl Pool {
    /// Not behind any other.
    pub(super) const FIRST: Self = Self {
        protocol: Protocol::Icmp,
        nat: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };

    /// Returns the element of `FORWARDS` of a port.
    pub fn key(&self, port: u16) -> Option<ForwardKey> {
        let IpAddr::V4(nat) = self.nat else {
            return None;
        };
        Some(ForwardKey {
            host: nat.into(),
            port,
            protocol: self.protocol as u8,
            pad: 0,
        })
    }
}
