//! Addresses that names have opened, per VM.
//!
//! An opening is (VM, address) and the rules of the name; it lasts for the answer's TTL, within
//! [`slipgate_policy::FLOOR_S`] and [`slipgate_policy::CEILING_S`]. What has the same effect on the same address is one opening, by
//! the name last asked for, so that a thousand names at one address cost no more than one; but for
//! a VM whose connections are inspected each name is one of its own. A VM
//! has [`MAX_PER_VM`] at most: what is beyond is refused, and nothing that lives gives way. One by an
//! answer that leads through long names counts as several.
//!
//! A guest that owns a domain can have all of them at one address. So those of an address are in
//! order of their rules, then of their names: what decides looks at one for each list of rules,
//! however many names have it, and a name is found by halving.
//!
//! What opens and what ends is noted ([`Change`]) for the map that a successor reads. It gets the
//! *way* of an answer, from the name asked for to the last, and judges it by the rules of its time.
use std::{
    cmp::Ordering,
    collections::{BTreeSet, HashMap},
    net::Ipv4Addr,
    rc::Rc,
};

use crate::clock::SECOND_NS;
use slipgate_policy::Place;

/// Openings of a VM at once: more than new names of common length beneath wildcards
/// ([`slipgate_policy::Asker`]) come to in half an hour, and 10 MiB if the guest makes the most of them.
pub const MAX_PER_VM: usize = 16_384;
/// An opening counts once more for each so many octets of its way.
const WAY_OCTETS: usize = 256;

/// A name that opened an address, and the rules about it.
#[derive(PartialEq, Eq, Debug)]
pub struct LearntName {
    /// As people write it, without the dot at the end.
    pub name: Box<str>,
    /// Places of the rules, ascending.
    pub(super) rules: Box<[Place]>,
    /// The name, and those that the answer led through, one behind the other in wire form.
    pub(super) way: Box<[u8]>,
}

impl LearntName {
    /// How many an opening by it counts as.
    fn weight(&self) -> usize {
        1 + self.way.len() / WAY_OCTETS
    }
}

/// How long what names open stays open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Lasting {
    /// At least, seconds.
    pub(super) floor_s: u32,
    /// At most, seconds; below the floor the floor counts.
    pub(super) ceiling_s: u32,
}

/// What a successor is to know.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// An address is open to a VM by the names of a way, until then (ns).
    Opened(u32, Ipv4Addr, Rc<LearntName>, u64),
    /// It is not any more.
    Ended(u32, Ipv4Addr, Rc<LearntName>),
}

impl LearntName {
    /// The name asked for and those that the answer led through, in wire form, one behind the
    /// other.
    pub fn way(&self) -> &[u8] {
        &self.way
    }
}

#[derive(Clone, Debug)]
struct Opening {
    name: Rc<LearntName>,
    expires_ns: u64,
    id: u64,
}

/// All openings.
#[derive(Debug, Default)]
pub(super) struct Learnt {
    vms: HashMap<u32, OfVm>,
    changes: Vec<Change>,
    /// Openings of all VMs.
    total: usize,
}

/// Ascending by rules and name, no two alike.
#[derive(Debug, Default)]
struct AtAddress(Vec<Opening>);

#[derive(Debug, Default)]
struct OfVm {
    by_address: HashMap<Ipv4Addr, AtAddress>,
    by_expiry: BTreeSet<(u64, u64, Ipv4Addr)>,
    /// What all count as.
    weight: usize,
    last_id: u64,
}

/// A VM has no room for an answer's addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Full;

impl Learnt {
    /// Opens `addresses` (with TTLs, seconds) to `vm` by `name`: all or none. `same` tells whether
    /// two names have the same effect; those with the same rules and name have.
    pub(super) fn open(
        &mut self,
        vm: u32,
        name: &Rc<LearntName>,
        addresses: &[(Ipv4Addr, u32)],
        same: impl Fn(&LearntName, &LearntName) -> bool,
        lasting: Lasting,
        now_ns: u64,
    ) -> Result<(), Full> {
        let changes = &mut self.changes;
        let of_vm = self.vms.entry(vm).or_default();
        self.total -= of_vm.expire(vm, changes, now_ns);
        let known = |address| {
            let openings = of_vm.by_address.get(address)?;
            Some(openings.0[openings.position(name, &same)?].name.weight())
        };
        let distinct: BTreeSet<_> = addresses.iter().map(|(address, _)| address).collect();
        let more = |address| name.weight().saturating_sub(known(address).unwrap_or(0));
        if of_vm.weight + distinct.into_iter().map(more).sum::<usize>() > MAX_PER_VM {
            return Err(Full);
        }
        let before = of_vm.by_expiry.len();
        for &(address, ttl_s) in addresses {
            let lasts_s = ttl_s.min(lasting.ceiling_s).max(lasting.floor_s);
            let lasts_ns = u64::from(lasts_s) * SECOND_NS;
            let mut expires_ns = now_ns + lasts_ns;
            let openings = of_vm.by_address.entry(address).or_default();
            let mut known = false;
            if let Some(at) = openings.position(name, &same) {
                let old = openings.0.remove(at);
                of_vm.by_expiry.remove(&(old.expires_ns, old.id, address));
                of_vm.weight -= old.name.weight();
                // A second more is not worth a note.
                known = old.name.way == name.way && expires_ns < old.expires_ns + SECOND_NS;
                expires_ns = expires_ns.max(old.expires_ns);
                if old.name.way != name.way {
                    changes.push(Change::Ended(vm, address, old.name));
                }
            }
            if !known {
                changes.push(Change::Opened(vm, address, name.clone(), expires_ns));
            }
            of_vm.last_id += 1;
            let id = of_vm.last_id;
            of_vm.by_expiry.insert((expires_ns, id, address));
            of_vm.weight += name.weight();
            openings.insert(Opening {
                name: name.clone(),
                expires_ns,
                id,
            });
        }
        self.total += of_vm.by_expiry.len() - before;
        Ok(())
    }

    /// Of the names that opened an address to a VM and still do, one for each list of rules.
    pub(super) fn effects(
        &self,
        vm: u32,
        address: Ipv4Addr,
        now_ns: u64,
    ) -> impl Iterator<Item = &Rc<LearntName>> {
        let openings = self.at(vm, address).map(AtAddress::by_rules);
        let living = move |alike: &'_ [Opening]| -> Option<usize> {
            alike.iter().position(|opening| opening.expires_ns > now_ns)
        };
        openings
            .into_iter()
            .flatten()
            .filter_map(move |alike| Some(&alike[living(alike)?].name))
    }

    /// What a VM was told of an address by that very name, and may still use.
    pub(super) fn told(
        &self,
        vm: u32,
        address: Ipv4Addr,
        name: &str,
        now_ns: u64,
    ) -> Option<&Rc<LearntName>> {
        let mut openings = self.at(vm, address)?.by_rules();
        openings.find_map(|alike| {
            let at = alike.binary_search_by(|opening| (*opening.name.name).cmp(name));
            let found = &alike[at.ok()?];
            (found.expires_ns > now_ns).then_some(&found.name)
        })
    }

    fn at(&self, vm: u32, address: Ipv4Addr) -> Option<&AtAddress> {
        self.vms.get(&vm)?.by_address.get(&address)
    }

    /// The addresses that a name opened to a VM, ascending. Looks through all of the VM's.
    pub(super) fn addresses(&self, vm: u32, name: &str, now_ns: u64) -> Vec<Ipv4Addr> {
        let of_vm = self.vms.get(&vm);
        let all = of_vm.into_iter().flat_map(|of_vm| of_vm.by_address.keys());
        let mut found: Vec<_> = all
            .filter(|address| self.told(vm, **address, name, now_ns).is_some())
            .copied()
            .collect();
        found.sort_unstable();
        found
    }

    /// Openings of a VM that have not been found to be over.
    pub(super) fn count(&self, vm: u32) -> usize {
        self.vms.get(&vm).map_or(0, |of_vm| of_vm.by_expiry.len())
    }

    /// Openings of all VMs that have not been found to be over.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Ends what is over.
    pub(super) fn expire(&mut self, now_ns: u64) {
        let changes = &mut self.changes;
        let total = &mut self.total;
        self.vms.retain(|vm, of_vm| {
            *total -= of_vm.expire(*vm, changes, now_ns);
            !of_vm.by_expiry.is_empty()
        });
    }

    /// What happened since the last call, in its order.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// The VMs that have something open.
    pub(super) fn vms(&self) -> Vec<u32> {
        self.vms.keys().copied().collect()
    }

    /// Ends all that a VM has; what it had, with expiry, ns.
    pub(super) fn forget(&mut self, vm: u32) -> Vec<(Ipv4Addr, Rc<LearntName>, u64)> {
        let mut had = Vec::new();
        let by_address = self.vms.remove(&vm).unwrap_or_default().by_address;
        for (address, openings) in by_address {
            for opening in openings.0 {
                let name = opening.name.clone();
                self.changes.push(Change::Ended(vm, address, name));
                had.push((address, opening.name, opening.expires_ns));
            }
        }
        self.total -= had.len();
        had
    }
}

impl AtAddress {
    /// The opening by this name, or by another with the same effect.
    fn position(
        &self,
        name: &LearntName,
        same: impl Fn(&LearntName, &LearntName) -> bool,
    ) -> Option<usize> {
        let exactly = self.0.binary_search_by(|one| order(&one.name, name));
        exactly.ok().or_else(|| {
            let mut before = 0;
            self.by_rules().find_map(|alike| {
                let at = before;
                before += alike.len();
                // Of those with the same rules all have the effect, or none but the very name.
                same(&alike[0].name, name).then_some(at)
            })
        })
    }

    fn insert(&mut self, opening: Opening) {
        let at = self
            .0
            .partition_point(|one| order(&one.name, &opening.name).is_lt());
        if self.0.is_empty() {
            // Most addresses have one.
            self.0.reserve_exact(1);
        }
        self.0.insert(at, opening);
    }

    /// Those with the same rules together.
    fn by_rules(&self) -> impl Iterator<Item = &[Opening]> {
        let mut rest = &self.0[..];
        std::iter::from_fn(move || {
            let first = rest.first()?;
            let len = match rest.get(1) {
                Some(next) if next.name.rules == first.name.rules => {
                    rest.partition_point(|one| one.name.rules == first.name.rules)
                }
                _ => 1,
            };
            let (alike, others) = rest.split_at(len);
            rest = others;
            Some(alike)
        })
    }
}

fn order(a: &LearntName, b: &LearntName) -> Ordering {
    (&a.rules, &a.name).cmp(&(&b.rules, &b.name))
}

impl OfVm {
    /// Ends what is over; how many.
    fn expire(&mut self, vm: u32, changes: &mut Vec<Change>, now_ns: u64) -> usize {
        let before = self.by_expiry.len();
        let mut addresses = BTreeSet::new();
        while let Some(&(expires_ns, _, address)) = self.by_expiry.first() {
            if expires_ns > now_ns {
                break;
            }
            self.by_expiry.pop_first();
            addresses.insert(address);
        }
        // Each once, however many end there.
        for address in addresses {
            let Some(openings) = self.by_address.get_mut(&address) else {
                continue;
            };
            let over = openings.0.extract_if(.., |one| one.expires_ns <= now_ns);
            for over in over {
                self.weight -= over.name.weight();
                changes.push(Change::Ended(vm, address, over.name));
            }
            if openings.0.is_empty() {
                self.by_address.remove(&address);
            }
        }
        before - self.by_expiry.len()
    }
}

#[cfg(test)]
#[path = "learnt_test.rs"]
mod tests;
