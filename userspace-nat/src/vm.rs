//! Description of a VM and its network, and its counters.
use std::{
    net::Ipv4Addr,
    ops::{Deref, DerefMut},
};

pub use slipgate_model::VmSpec;

use crate::stats::VmStats;
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
