//! Description of a VM and its network, and its counters.
use std::{
    net::Ipv4Addr,
    ops::{Deref, DerefMut},
};

use slipgate_abi::{VmId, VmRow};

use crate::stats::VmStats;

/// A VM and its network, as the broker describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VmSpec {
    /// Id of the VM, never reused.
    pub id: VmId,
    /// Row of the VM in `VMS`, `COUNTERS` and `DROPS`.
    pub row: VmRow,
    /// Name of the VM, given by the user.
    pub name: String,
    /// Address of the guest.
    pub guest: Ipv4Addr,
    /// Address of the gateway, which the engine answers for.
    pub gateway: Ipv4Addr,
    /// Address of the resolver, which the engine answers for.
    pub dns: Ipv4Addr,
    /// Prefix length of the guest's network.
    pub prefix_len: u8,
    /// MAC of the guest as configured; `None`: the guest may have any.
    pub guest_mac: Option<[u8; 6]>,
    /// MAC of the gateway.
    pub gateway_mac: [u8; 6],
    /// MTU of the guest's link, L3 bytes.
    pub mtu: u16,
    /// Most live flows at once.
    pub max_flows: u32,
    /// Most flows admitted per second.
    pub new_flows_per_second: u32,
    /// Index of the VM's policy in the process's policies.
    pub policy: u32,
    /// Most DNS questions per second; 0: no limit.
    pub dns_per_second: u32,
}

/// A VM's description together with its counters.
#[derive(Clone, Debug)]
pub struct VmNet {
    spec: VmSpec,
    /// Counters of the VM.
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
    /// Combines the broker's description and the rows that count the VM.
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

    /// Whether an address is the gateway's or the resolver's.
    pub fn is_ours(&self, addr: Ipv4Addr) -> bool {
        addr == self.gateway || addr == self.dns
    }
}
