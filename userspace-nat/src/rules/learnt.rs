//! Addresses that names have opened, per VM.
//!
//! An opening is (VM, address) and the rules of the name; it lasts for the answer's TTL, within
//! [`FLOOR_S`] and [`CEILING_S`]. What has the same effect on the same address is one opening, by
//! the name last asked for, so that a thousand names at one address cost no more than one. A VM
//! has [`MAX_PER_VM`] at most: what is beyond is refused, and nothing that lives gives way.
use std::{
    collections::{BTreeSet, HashMap},
    net::Ipv4Addr,
    rc::Rc,
};

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
    pub(super) rules: Box<[u32]>,
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
    /// two lists of rules have the same effect.
    pub(super) fn open(
        &mut self,
        vm: u32,
        name: &Rc<LearntName>,
        addresses: &[(Ipv4Addr, u32)],
        same: impl Fn(&[u32], &[u32]) -> bool,
        now_ns: u64,
    ) -> Result<(), Full> {
        let of_vm = self.vms.entry(vm).or_default();
        of_vm.expire(now_ns);
        let alike = |opening: &Opening| same(&opening.name.rules, &name.rules);
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
            let lasts_ns = u64::from(ttl_s.clamp(FLOOR_S, CEILING_S)) * SECOND_NS;
            let mut expires_ns = now_ns + lasts_ns;
            let openings = of_vm.by_address.entry(address).or_default();
            if let Some(at) = openings.iter().position(alike) {
                let old = openings.swap_remove(at);
                of_vm.by_expiry.remove(&(old.expires_ns, old.id, address));
                expires_ns = expires_ns.max(old.expires_ns);
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

    pub(super) fn forget(&mut self, vm: u32) {
        self.vms.remove(&vm);
    }
}

impl OfVm {
    fn expire(&mut self, now_ns: u64) {
        while let Some(&(expires_ns, id, address)) = self.by_expiry.first() {
            if expires_ns > now_ns {
                return;
            }
            self.by_expiry.pop_first();
            if let Some(openings) = self.by_address.get_mut(&address) {
                openings.retain(|opening| opening.id != id);
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
