//! Description of a VM and its network, and its counters.
use std::{
    net::IpAddr,
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
    pub fn is_on_link(&self, addr: impl Into<IpAddr>) -> bool {
        match addr.into() {
            IpAddr::V4(addr) => {
                let mask = u32::MAX
                    .checked_shl(32 - u32::from(self.prefix_len.min(32)))
                    .unwrap_or(0);
                (addr.to_bits() ^ self.guest.to_bits()) & mask == 0
            }
            IpAddr::V6(addr) => {
                let is_guests = |ipv6: slipgate_model::GuestIpv6| {
                    ipv6.gateway_net().contains(&addr) || ipv6.prefix.contains(&addr)
                };
                addr.is_unicast_link_local() || self.ipv6.is_some_and(is_guests)
            }
        }
    }

    /// Whether an address is the gateway's or the resolver's.
    pub fn is_ours(&self, addr: impl Into<IpAddr>) -> bool {
        match addr.into() {
            IpAddr::V4(addr) => addr == self.gateway || addr == self.dns,
            IpAddr::V6(addr) => self.ipv6.is_some_and(|ipv6| {
                addr == ipv6.gateway() || addr == ipv6.gateway_link_local(self.gateway_mac)
            }),
        }
    }

    /// Whether the VM may have flows of a guest's address: of IPv6, if the address is of its prefix,
    /// and the prefix is routed to the host if the flow is not translated.
    pub fn may_have_flows_of(&self, guest: IpAddr, is_untranslated: bool) -> bool {
        match guest {
            IpAddr::V4(_) => true,
            IpAddr::V6(guest) => self.ipv6.is_some_and(|ipv6| {
                ipv6.prefix.contains(&guest) && (ipv6.is_routed || !is_untranslated)
            }),
        }
    }

    /// Whether the guest's packets to this address leave with their own source address.
    pub fn is_routed_to(&self, addr: IpAddr) -> bool {
        addr.is_ipv6() && self.ipv6.is_some_and(|ipv6| ipv6.is_routed)
    }

    /// Returns the gateway's address of the family of a guest's address; `None` if the VM does not
    /// have that family.
    pub fn gateway_of(&self, guest: IpAddr) -> Option<IpAddr> {
        match guest {
            IpAddr::V4(_) => Some(self.gateway.into()),
            IpAddr::V6(_) => self.ipv6.map(|ipv6| ipv6.gateway().into()),
        }
    }
}
