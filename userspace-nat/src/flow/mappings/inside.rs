//! The two sides of a mapping: a guest's port, and the ports among which its translated port is.
use std::net::{IpAddr, Ipv4Addr};

use slipgate_abi::{Protocol, VmId};
use slipgate_model::FlowTuple;

use crate::datapath::PortKey;

/// A port of a guest, and the address to which it is translated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Inside {
    /// Id of the VM.
    pub vm: VmId,
    /// Protocol: TCP or UDP.
    pub protocol: Protocol,
    /// Address of the guest.
    pub guest: IpAddr,
    /// Port of the guest.
    pub port: u16,
    /// Address that packets have as their source once translated.
    pub nat: IpAddr,
}

impl Inside {
    /// Returns the guest's side of a flow with this tuple on the guest's link, translated to this
    /// address; `None` if its protocol has no mappings, or it is not translated, as flows of a routed
    /// prefix are not.
    pub fn of(guest: &FlowTuple, nat: IpAddr) -> Option<Self> {
        let protocol = guest.protocol()?;
        let has_ports = matches!(protocol, Protocol::Tcp | Protocol::Udp);
        let is_translated = nat.is_ipv4() || nat != guest.local;
        (has_ports && is_translated).then_some(Self {
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
    /// Protocol: TCP or UDP.
    pub protocol: Protocol,
    /// Address that packets have as their source once translated.
    pub nat: IpAddr,
}

impl Pool {
    /// Not behind any other.
    pub(super) const FIRST: Self = Self {
        protocol: Protocol::Icmp,
        nat: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };

    /// Returns the key of a port in `FORWARDS` or `FORWARDS6`.
    pub fn key(&self, port: u16) -> PortKey {
        PortKey::new(self.protocol, self.nat, port)
    }
}
