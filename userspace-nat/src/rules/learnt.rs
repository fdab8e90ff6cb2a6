//! Addresses that names have opened, per VM.
//!
//! An opening is (VM, address) and the rules of the name; it lasts for the answer's TTL, within
//! [`FLOOR_S`] and [`CEILING_S`]. What has the same effect on the same address is one opening, by
//! the name last asked for, so that a thousand names at one address cost no more than one; but for
//! a VM whose connections are inspected each name is one of its own. A VM
//! has [`MAX_PER_VM`] at most: what is beyond is refused, and nothing that lives gives way.
//!
//! What opens and what ends is noted ([`Change`]) for the map that a successor reads. It gets the
//! *way* of an answer, from the name asked for to the last, and judges it by the rules of its time.
use std::{
    collections::{BTreeSet, HashMap},
    net::Ipv4Addr,
    rc::Rc,
};

use super::policy::Place;
use crate::clock::SECOND_NS;

/// An answer opens at least so long, seconds: a client connects after it has heard, and may keep
/// an answer with TTL 0 for the connection at hand.
pub const FLOOR_S: u32 = 30;
/// And at most so long, seconds: as long as the resolver keeps an answer itself.
pub const CEILING_S: u32 = 86_400;
/// Openings of a VM at once.
pub const MAX_PER_VM: usize = 4_096;

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
}

#[derive(Debug, Default)]
struct OfVm {
    by_address: HashMap<Ipv4Addr, Vec<Opening>>,
    by_expiry: BTreeSet<(u64, u64, Ipv4Addr)>,
    last_id: u64,
}

/// A VM has no room for an answer's addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Full;

impl Learnt {
    /// Opens `addresses` (with TTLs, seconds) to `vm` by `name`: all or none. `same` tells whether
    /// two names have the same effect.
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
        of_vm.expire(vm, changes, now_ns);
        let alike = |opening: &Opening| same(&opening.name, name);
        let known = |address| {
            let openings = of_vm.by_address.get(address);
            openings.is_some_and(|openings| openings.iter().any(alike))
        };
        let fresh: BTreeSet<_> = addresses
            .iter()
            .map(|(a, _)| a)
            .filter(|a| !known(a))
            .collect();
        if of_vm.by_expiry.len() + fresh.len() > MAX_PER_VM {
            return Err(Full);
        }
        for &(address, ttl_s) in addresses {
            let lasts_s = ttl_s.min(lasting.ceiling_s).max(lasting.floor_s);
            let lasts_ns = u64::from(lasts_s) * SECOND_NS;
            let mut expires_ns = now_ns + lasts_ns;
            let openings = of_vm.by_address.entry(address).or_default();
            let mut known = false;
            if let Some(at) = openings.iter().position(alike) {
                let old = openings.swap_remove(at);
                of_vm.by_expiry.remove(&(old.expires_ns, old.id, address));
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
            openings.push(Opening {
                name: name.clone(),
                expires_ns,
                id,
            });
        }
        Ok(())
    }

    /// The names that opened an address to a VM and still do.
    pub(super) fn names(
        &self,
        vm: u32,
        address: Ipv4Addr,
        now_ns: u64,
    ) -> impl Iterator<Item = &Rc<LearntName>> {
        let openings = self.vms.get(&vm).and_then(|v| v.by_address.get(&address));
        openings
            .into_iter()
            .flatten()
            .filter(move |opening| opening.expires_ns > now_ns)
            .map(|opening| &opening.name)
    }

    /// The addresses that a name opened to a VM, ascending. Looks through all of the VM's.
    pub(super) fn addresses(&self, vm: u32, name: &str, now_ns: u64) -> Vec<Ipv4Addr> {
        let of_vm = self.vms.get(&vm);
        let mut found: Vec<_> = of_vm
            .into_iter()
            .flat_map(|of_vm| &of_vm.by_address)
            .filter(|(_, openings)| {
                let lives = |o: &Opening| o.expires_ns > now_ns && *o.name.name == *name;
                openings.iter().any(lives)
            })
            .map(|(address, _)| *address)
            .collect();
        found.sort_unstable();
        found
    }

    /// Openings of a VM that have not been found to be over.
    pub(super) fn count(&self, vm: u32) -> usize {
        self.vms.get(&vm).map_or(0, |of_vm| of_vm.by_expiry.len())
    }

    /// Ends what is over.
    pub(super) fn expire(&mut self, now_ns: u64) {
        let changes = &mut self.changes;
        self.vms.retain(|vm, of_vm| {
            of_vm.expire(*vm, changes, now_ns);
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
            for opening in openings {
                let name = opening.name.clone();
                self.changes.push(Change::Ended(vm, address, name));
                had.push((address, opening.name, opening.expires_ns));
            }
        }
        had
    }
}

impl OfVm {
    fn expire(&mut self, vm: u32, changes: &mut Vec<Change>, now_ns: u64) {
        while let Some(&(expires_ns, id, address)) = self.by_expiry.first() {
            if expires_ns > now_ns {
                return;
            }
            self.by_expiry.pop_first();
            if let Some(openings) = self.by_address.get_mut(&address) {
                if let Some(at) = openings.iter().position(|opening| opening.id == id) {
                    let over = openings.swap_remove(at);
                    changes.push(Change::Ended(vm, address, over.name));
                }
                if openings.is_empty() {
                    self.by_address.remove(&address);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "learnt_test.rs"]
mod tests;
