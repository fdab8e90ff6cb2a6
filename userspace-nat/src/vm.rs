//! What the engine's parts need to know of a VM.
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::stats::VmStats;

/// A VM and its network, as the broker describes it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmSpec {
    /// See [`VmNet`].
    pub id: u32,
    /// See [`VmNet`].
    pub row: u16,
    /// See [`VmNet`].
    pub name: String,
    /// See [`VmNet`].
    pub guest: Ipv4Addr,
    /// See [`VmNet`].
    pub gateway: Ipv4Addr,
    /// See [`VmNet`].
    pub dns: Ipv4Addr,
    /// See [`VmNet`].
    pub prefix_len: u8,
    /// See [`VmNet`].
    pub guest_mac: Option<[u8; 6]>,
    /// See [`VmNet`].
    pub gateway_mac: [u8; 6],
    /// See [`VmNet`].
    pub mtu: u16,
    /// See [`VmNet`].
    pub max_flows: u32,
    /// See [`VmNet`].
    pub new_flows_per_second: u32,
}

/// A VM and its network, as configured.
#[derive(Clone, Debug)]
pub struct VmNet {
    /// Its id, never reused.
    pub id: u32,
    /// Its row in `VMS`, `COUNTERS`, `DROPS`.
    pub row: u16,
    /// The name given by the user.
    pub name: String,
    /// The guest's address.
    pub guest: Ipv4Addr,
    /// The gateway's address: ours.
    pub gateway: Ipv4Addr,
    /// The resolver's address: ours.
    pub dns: Ipv4Addr,
    /// Prefix length of the guest's network.
    pub prefix_len: u8,
    /// The guest's MAC as configured; `None`: whatever it has.
    pub guest_mac: Option<[u8; 6]>,
    /// The gateway's MAC.
    pub gateway_mac: [u8; 6],
    /// The guest link's MTU, L3 bytes.
    pub mtu: u16,
    /// Most flows at once.
    pub max_flows: u32,
    /// Most flows admitted in a second.
    pub new_flows_per_second: u32,
    /// Where this VM is counted.
    pub stats: VmStats,
}

impl VmNet {
    /// From the broker's description and the rows where it is counted.
    pub fn new(spec: VmSpec, stats: VmStats) -> Self {
        Self {
            id: spec.id,
            row: spec.row,
            name: spec.name,
            guest: spec.guest,
            gateway: spec.gateway,
            dns: spec.dns,
            prefix_len: spec.prefix_len,
            guest_mac: spec.guest_mac,
            gateway_mac: spec.gateway_mac,
            mtu: spec.mtu,
            max_flows: spec.max_flows,
            new_flows_per_second: spec.new_flows_per_second,
            stats,
        }
    }

    /// Whether an address is in the guest's own network.
    pub fn is_on_link(&self, addr: Ipv4Addr) -> bool {
        let mask = u32::MAX
            .checked_shl(32 - u32::from(self.prefix_len.min(32)))
            .unwrap_or(0);
        (addr.to_bits() ^ self.guest.to_bits()) & mask == 0
    }

    /// Whether an address is one of ours on the guest's network: the gateway or the resolver.
    pub fn is_ours(&self, addr: Ipv4Addr) -> bool {
        addr == self.gateway || addr == self.dns
    }
}
