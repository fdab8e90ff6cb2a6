//! Openings: their expiry, and their transfer to other rules and to a successor.
use std::{cmp::Reverse, net::IpAddr};

use slipgate_abi::VmId;

use super::Judge;
use crate::{
    clock::SECOND_NS,
    dns::{chain::Chain, name::end_of_plain},
    name_gate::{Change, learnt::Lasting},
};
use slipgate_policy::Name;

impl Judge {
    /// Returns the number of names by which addresses are open to a VM, and to all VMs.
    pub fn open_by_name(&self, vm: VmId) -> (usize, usize) {
        (self.learnt.names(vm), self.learnt.total())
    }

    /// Ends the openings that have expired.
    pub fn expire(&mut self, now_ns: u64) {
        self.learnt.expire(now_ns);
    }

    /// Returns the openings and ends of openings since the last call, for a successor.
    pub fn take_changes(&mut self) -> Vec<Change> {
        self.learnt.take_changes()
    }

    /// Restores an opening that a predecessor, or this judge under other rules, had until
    /// `expires_ns` by a chain of names ([`LearntName::chain`]), unless the present rules deny it.
    /// Returns whether the address is open.
    pub fn reopen(
        &mut self,
        vm: VmId,
        addr: IpAddr,
        chain: &[u8],
        expires_ns: u64,
        now_ns: u64,
    ) -> bool {
        let left_ns = expires_ns.saturating_sub(now_ns);
        // The floor was applied when it opened.
        let lasting = Lasting {
            floor_s: 0,
            ceiling_s: self.policy(vm).settings().dns.ttl_ceiling_s,
        };
        let left_s = u32::try_from(left_ns / SECOND_NS).unwrap_or(u32::MAX);
        let Some((name, steps)) = split(chain) else {
            return false;
        };
        if left_s == 0 || !self.policy(vm).judges_names() {
            return false;
        }
        let about = self.policy(vm).about(name);
        let chain = Chain {
            steps,
            addresses: vec![(addr, left_s)],
        };
        self.asks(vm, name, &about).is_allowed()
            && self.open(vm, name, &chain, lasting, now_ns).is_ok()
            && (!about.is_empty() || self.policy(vm).inspections().1)
    }

    /// Judges the openings of these VMs by the present rules, after their policies changed.
    pub(super) fn rejudge(&mut self, vms: impl Iterator<Item = VmId>, now_ns: u64) {
        for vm in vms {
            let mut had = self.learnt.forget(vm);
            // The longest first, as they were told: a later one that lasts longer displaces it.
            had.sort_by_key(|(.., expires_ns)| Reverse(*expires_ns));
            for (addr, name, expires_ns) in had {
                self.reopen(vm, addr, &name.chain, expires_ns, now_ns);
            }
        }
    }
}

/// Splits a chain of names into the first name and the others.
pub(super) fn split(chain: &[u8]) -> Option<(Name<'_>, Vec<Box<[u8]>>)> {
    let end = end_of_plain(chain, 0)?;
    let (first, mut rest) = chain.split_at(end);
    let mut steps = Vec::new();
    while !rest.is_empty() {
        let (step, after) = rest.split_at(end_of_plain(rest, 0)?);
        steps.push(step.into());
        rest = after;
    }
    Some((Name(first), steps))
}
