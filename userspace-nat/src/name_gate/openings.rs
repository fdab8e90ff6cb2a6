//! Openings: their expiry, and their transfer to other rules and to a successor.
use std::{collections::BTreeMap, net::IpAddr, rc::Rc};

use slipgate_abi::VmId;

use super::Judge;
use crate::{
    clock::SECOND_NS,
    dns::name::end_of_plain,
    name_gate::{Change, LearntName},
};
use slipgate_policy::Name;

/// An opening as it was before.
#[derive(Clone, Copy, Debug)]
pub struct Had<'a> {
    /// The address.
    pub addr: IpAddr,
    /// The names that opened it ([`LearntName::chain`]).
    pub chain: &'a [u8],
    /// Time of its end, ns.
    pub until_ns: u64,
    /// The time that a successor would read, ns; 0 if none was noted.
    pub noted_ns: u64,
}

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

    /// Restores the openings that a predecessor, or this judge under other rules, had, as far as the
    /// present rules allow them. Returns of each whether the address is open by that name.
    pub fn reopen(&mut self, vm: VmId, had: &[Had<'_>], now_ns: u64) -> Vec<bool> {
        let mut open = vec![false; had.len()];
        if !self.policy(vm).judges_names() {
            return open;
        }
        let mut again = Vec::new();
        for (at, one) in had.iter().enumerate() {
            if one.until_ns > now_ns
                && let Some(learnt) = self.learn_again(vm, one)
            {
                again.push((at, learnt));
            }
        }
        // The longest first, as they were told: of names with the same effect a later one that lasts
        // longer displaces it.
        let longest_first = |a: usize, b: usize| had[b].until_ns.cmp(&had[a].until_ns);
        match self.policy(vm).inspections().0 {
            false => again.sort_by(|(a, _), (b, _)| longest_first(*a, *b)),
            // Where each name counts, only the very same has. In the order in which an address keeps
            // its openings each is put behind the others; in any other, half of them would move.
            true => again.sort_by(|(a, one), (b, other)| {
                let by_address = had[*a].addr.cmp(&had[*b].addr);
                let by_name = by_address.then_with(|| one.order(other));
                by_name.then_with(|| longest_first(*a, *b))
            }),
        }
        // The floor was applied when it opened.
        let ceiling_s = self.policy(vm).settings().dns.ttl_ceiling_s;
        let most_ns = now_ns.saturating_add(u64::from(ceiling_s) * SECOND_NS);
        for (at, learnt) in again {
            let one = &had[at];
            let until = BTreeMap::from([(one.addr, one.until_ns.min(most_ns))]);
            let name = (&learnt, one.noted_ns);
            open[at] = self.open(vm, name, &until, now_ns).is_ok();
        }
        open
    }

    /// Judges an opening by the present rules. `None`: they deny it, or know nothing of it.
    fn learn_again(&mut self, vm: VmId, had: &Had<'_>) -> Option<Rc<LearntName>> {
        let (name, steps) = split(had.chain)?;
        let about = self.policy(vm).about(name);
        if !self.asks(vm, name, &about).is_allowed() {
            return None;
        }
        let address = [had.addr].into_iter();
        self.learn(vm, name, &steps, address).ok().flatten()
    }

    /// Judges the openings of these VMs by the present rules, after their policies changed.
    pub(super) fn rejudge(&mut self, vms: impl Iterator<Item = VmId>, now_ns: u64) {
        for vm in vms {
            let names = self.learnt.take(vm);
            let had = names.iter().map(|(addr, told)| Had {
                addr: *addr,
                chain: told.name.chain(),
                until_ns: told.until_ns,
                noted_ns: told.noted_ns,
            });
            let had: Vec<_> = had.collect();
            let open = self.reopen(vm, &had, now_ns);
            for ((addr, told), is_open) in names.into_iter().zip(open) {
                if !is_open {
                    self.learnt.end(vm, addr, told.name);
                }
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
