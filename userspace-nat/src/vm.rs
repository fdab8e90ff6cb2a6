//! What the engine's parts need to know of a VM.
use std::{
    net::Ipv4Addr,
    ops::{Deref, DerefMut},
};

use serde::{Deserialize, Serialize};

use crate::stats::VmStats;

/// A VM and its network, as the broker describes it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmSpec {
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
    /// Index of its policy among the process's.
    pub policy: u32,
    /// Most questions asked of DNS in a second; 0: no limit.
    pub dns_per_second: u32,
}

/// A VM, its network, and where it is counted.
#[derive(Clone, Debug)]
pub struct VmNet {
    spec: VmSpec,
    /// Where this VM is counted.
    pub stats: VmStats,
}

impl Deref for VmNet {
    type Target = VmSpec;

    fn deref(&self) -> &VmSpec {
        &self.spec
    }
}

impl DerefMut for VmNet {
    fn deref_mut(&mut self) -> &mut VmSpec {
        &mut self.spec
    }
}

impl VmNet {
    /// From the broker's description and the rows where it is counted.
    pub fn new(spec: VmSpec, stats: VmStats) -> Self {
        Self { spec, stats }
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
