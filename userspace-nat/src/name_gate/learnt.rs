//! Addresses that names have opened, per VM.
//!
//! An opening consists of VM, address and the rules about the name. It lasts for the answer's TTL,
//! within [`slipgate_policy::FLOOR_S`] and [`slipgate_policy::CEILING_S`]. Names with the same
//! effect on the same address are one opening, by the name last asked for, so that a thousand names
//! at one address cost no more than two: where that one's own time is shorter than another's, the
//! one that lasts longest is kept beside it. Each keeps its own time, so that of a name which a
//! later policy denies nothing is left. For a VM whose connections are inspected each name is an
//! opening of its own. A VM has at most [`MAX_PER_VM`]: answers beyond that are refused, and no
//! live opening gives way. An opening by an answer that leads through long names counts as several.
//!
//! A guest that owns a domain can have all of them at one address. So the openings of an address
//! are in order of their rules, then of their names: a decision examines one for each list of
//! rules, however many names have it, and a name is found by binary search.
//!
//! Openings and their ends are noted ([`Change`]) for the map that a successor reads. It receives
//! the chain of an answer: all names from the name asked for to the last, and judges it by
//! its own rules.
use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    rc::Rc,
};

use slipgate_abi::VmId;

use crate::clock::SECOND_NS;
use slipgate_policy::PatternRef;

/// Most openings of a VM: more than new names of common length beneath wildcards
/// ([`slipgate_policy::Asker`]) amount to in half an hour, and at most 10 MiB.
pub const MAX_PER_VM: usize = 16_384;
/// An opening counts once more for each so many octets of its chain of names.
const CHAIN_OCTETS: usize = 256;

/// A name that opened an address, and the rules about it.
#[derive(PartialEq, Eq, Debug)]
pub struct LearntName {
    /// The name as people write it, without the final dot.
    pub name: Box<str>,
    /// Positions of the rules about it, ascending.
    pub(super) rules: Box<[PatternRef]>,
    /// The name and those that the answer led through, concatenated in wire form.
    pub(super) chain: Box<[u8]>,
}

impl LearntName {
    /// Order of the openings of an address: by their rules, then by their names.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        (&self.rules, &self.name).cmp(&(&other.rules, &other.name))
    }

    /// Returns how many openings one by this name counts as.
    fn weight(&self) -> usize {
        1 + self.chain.len() / CHAIN_OCTETS
    }
}

/// Which names have the same effect.
#[derive(Clone, Copy)]
pub(super) enum Alike<'a> {
    /// Those with the same text and rules: each name counts.
    Itself,
    /// Those whose rules have the same effect; equal ones must have.
    Rules(&'a dyn Fn(&[PatternRef], &[PatternRef]) -> bool),
}

/// A change that a successor is to know.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// An address is open to a VM by a chain of names, until the given time, ns.
    Opened(VmId, IpAddr, Rc<LearntName>, u64),
    /// The opening has ended.
    Ended(VmId, IpAddr, Rc<LearntName>),
}

impl LearntName {
    /// Returns the name asked for and those that the answer led through, concatenated in wire form.
    pub fn chain(&self) -> &[u8] {
        &self.chain
    }
}

/// A name that opens an address.
#[derive(Clone, Debug)]
pub(super) struct Told {
    pub(super) name: Rc<LearntName>,
    /// Time until which it opens the address by itself, ns.
    pub(super) until_ns: u64,
    /// The time that a successor would read, ns; 0: none was noted. It may be up to a second before
    /// the other.
    pub(super) noted_ns: u64,
}

impl Told {
    /// Whether the time is to be noted for a successor. Of one that is extended by less than a second
    /// it is not.
    fn is_to_be_noted(&self) -> bool {
        let within = self.noted_ns..self.noted_ns.saturating_add(SECOND_NS);
        self.noted_ns == 0 || !within.contains(&self.until_ns)
    }
}

#[derive(Clone, Debug)]
struct Opening {
    /// The name last asked for.
    last: Told,
    /// Another name with the same effect, which opens the address for longer: of these the one that
    /// lasts longest.
    longer: Option<Told>,
    id: u64,
}

impl Opening {
    /// Returns the time at which it ends, ns.
    fn expires_ns(&self) -> u64 {
        self.longer.as_ref().unwrap_or(&self.last).until_ns
    }

    /// Returns a name that opens the address at this time: the one last asked for, as long as its own
    /// time lasts.
    fn living(&self, now_ns: u64) -> Option<&Rc<LearntName>> {
        let living = self.each().find(|told| told.until_ns > now_ns);
        living.map(|told| &told.name)
    }

    /// Whether a name of this text opens the address at this time, of those that it has.
    fn is_by(&self, name: &str, now_ns: u64) -> bool {
        self.each()
            .any(|told| *told.name.name == *name && told.until_ns > now_ns)
    }

    /// Returns its names: the one last asked for, then the one that lasts longer.
    fn each(&self) -> impl Iterator<Item = &Told> {
        [&self.last].into_iter().chain(&self.longer)
    }

    /// Returns the same, the one last asked for at the end.
    fn names(self) -> impl Iterator<Item = Told> {
        self.longer.into_iter().chain([self.last])
    }

    fn rules(&self) -> &[PatternRef] {
        &self.last.name.rules
    }

    /// Compares it with an opening by a name.
    fn order(&self, name: &LearntName) -> Ordering {
        self.last.name.order(name)
    }

    /// Returns how many openings it counts as.
    fn weight(&self) -> usize {
        self.each().map(|told| told.name.weight()).sum()
    }

    /// Returns how many names it has.
    fn count(&self) -> usize {
        self.each().count()
    }

    /// Returns the opening by `last` that takes the place of this one, and the names that it leaves
    /// out.
    fn renewed(&self, mut last: Told) -> (Self, Vec<Told>) {
        let (itself, mut others): (Vec<_>, Vec<_>) = self
            .clone()
            .names()
            .partition(|told| told.name.chain == last.name.chain);
        if let Some(before) = itself.first() {
            last.until_ns = last.until_ns.max(before.until_ns);
            last.noted_ns = before.noted_ns;
        }
        others.sort_by_key(|told| told.until_ns);
        let longer = others.pop_if(|told| told.until_ns > last.until_ns);
        let renewed = Self {
            last,
            longer,
            id: self.id,
        };
        (renewed, others)
    }
}

/// The openings of all VMs.
#[derive(Debug, Default)]
pub(super) struct Learnt {
    vms: HashMap<VmId, OfVm>,
    changes: Vec<Change>,
    /// Names of all VMs' openings.
    total: usize,
}

/// Openings of one address, ascending by rules and name, without duplicates.
#[derive(Debug, Default)]
struct AtAddress(Vec<Opening>);

#[derive(Debug, Default)]
struct OfVm {
    by_address: HashMap<IpAddr, AtAddress>,
    by_expiry: BTreeSet<(u64, u64, IpAddr)>,
    /// Sum of the openings' weights, and of their names.
    weight: usize,
    names: usize,
    last_id: u64,
}

/// Error: a VM has no room for an answer's addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Full;

impl Learnt {
    /// Opens addresses to `vm` by a name: all or none. `until`: until when each, ns. `noted_ns`: the
    /// time that a successor would read already, 0 if none.
    ///
    /// # Errors
    /// When the VM would exceed [`MAX_PER_VM`].
    pub(super) fn open(
        &mut self,
        vm: VmId,
        (name, noted_ns): (&Rc<LearntName>, u64),
        until: &BTreeMap<IpAddr, u64>,
        alike: Alike<'_>,
        now_ns: u64,
    ) -> Result<(), Full> {
        let changes = &mut self.changes;
        let of_vm = self.vms.entry(vm).or_default();
        self.total -= of_vm.expire(vm, changes, now_ns);
        let told = |until_ns: u64| Told {
            name: name.clone(),
            until_ns,
            noted_ns,
        };
        let more = |(address, until_ns): (&IpAddr, &u64)| {
            let openings = of_vm.by_address.get(address);
            let known = openings.and_then(|all| Some(&all.0[all.position(name, alike)?]));
            known.map_or(name.weight(), |old| {
                let renewed = old.renewed(told(*until_ns)).0;
                renewed.weight().saturating_sub(old.weight())
            })
        };
        if of_vm.weight + until.iter().map(more).sum::<usize>() > MAX_PER_VM {
            return Err(Full);
        }
        let before = of_vm.names;
        for (&address, &until_ns) in until {
            let openings = of_vm.by_address.entry(address).or_default();
            let mut opening = Opening {
                last: told(until_ns),
                longer: None,
                id: 0,
            };
            if let Some(at) = openings.position(name, alike) {
                let old = openings.0.remove(at);
                of_vm.by_expiry.remove(&(old.expires_ns(), old.id, address));
                of_vm.weight -= old.weight();
                of_vm.names -= old.count();
                let (renewed, left_out) = old.renewed(opening.last);
                opening = renewed;
                for other in left_out {
                    changes.push(Change::Ended(vm, address, other.name));
                }
            }
            let last = &mut opening.last;
            if last.is_to_be_noted() {
                if last.noted_ns > last.until_ns {
                    // A successor may find no room for the earlier time: rather none than the later one.
                    changes.push(Change::Ended(vm, address, name.clone()));
                }
                last.noted_ns = last.until_ns;
                changes.push(Change::Opened(vm, address, name.clone(), last.until_ns));
            }
            of_vm.last_id += 1;
            opening.id = of_vm.last_id;
            of_vm
                .by_expiry
                .insert((opening.expires_ns(), opening.id, address));
            of_vm.weight += opening.weight();
            of_vm.names += opening.count();
            openings.insert(opening);
        }
        self.total = self.total + of_vm.names - before;
        Ok(())
    }

    /// Returns, of the names that have an address open to a VM, one for each list of rules.
    pub(super) fn effects(
        &self,
        vm: VmId,
        address: IpAddr,
        now_ns: u64,
    ) -> impl Iterator<Item = &Rc<LearntName>> {
        let openings = self.at(vm, address).map(AtAddress::by_rules);
        openings
            .into_iter()
            .flatten()
            .filter_map(move |alike| alike.iter().find_map(|opening| opening.living(now_ns)))
    }

    /// Returns the live opening of an address by this very name, if there is one.
    pub(super) fn by_name(
        &self,
        vm: VmId,
        address: IpAddr,
        name: &str,
        now_ns: u64,
    ) -> Option<&Rc<LearntName>> {
        let mut openings = self.at(vm, address)?.by_rules();
        openings.find_map(|alike| {
            let at = alike.binary_search_by(|opening| opening.last.name.name[..].cmp(name));
            let living = alike[at.ok()?].living(now_ns)?;
            (*living.name == *name).then_some(living)
        })
    }

    fn at(&self, vm: VmId, address: IpAddr) -> Option<&AtAddress> {
        self.vms.get(&vm)?.by_address.get(&address)
    }

    /// Returns the addresses that a name has open to a VM, ascending. Examines all of the VM's.
    pub(super) fn addresses(&self, vm: VmId, name: &str, now_ns: u64) -> Vec<IpAddr> {
        let of_vm = self.vms.get(&vm);
        let all = of_vm.into_iter().flat_map(|of_vm| &of_vm.by_address);
        let has = |opening: &Opening| opening.is_by(name, now_ns);
        let mut found: Vec<_> = all
            .filter(|(_, openings)| openings.0.iter().any(has))
            .map(|(address, _)| *address)
            .collect();
        found.sort_unstable();
        found
    }

    /// Returns the number of a VM's openings, without those found to have expired.
    pub(super) fn count(&self, vm: VmId) -> usize {
        self.vms.get(&vm).map_or(0, |of_vm| of_vm.by_expiry.len())
    }

    /// Returns the number of names by which these are open, which a successor is to know.
    pub(super) fn names(&self, vm: VmId) -> usize {
        self.vms.get(&vm).map_or(0, |of_vm| of_vm.names)
    }

    /// Returns that number for all VMs.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Ends the openings that have expired.
    pub(super) fn expire(&mut self, now_ns: u64) {
        let changes = &mut self.changes;
        let total = &mut self.total;
        self.vms.retain(|vm, of_vm| {
            *total -= of_vm.expire(*vm, changes, now_ns);
            !of_vm.by_expiry.is_empty()
        });
    }

    /// Returns the changes since the last call, in order.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Ends all openings of a VM.
    pub(super) fn forget(&mut self, vm: VmId) {
        for (address, told) in self.take(vm) {
            self.end(vm, address, told.name);
        }
    }

    /// Removes all openings of a VM, and returns their names. What is not opened again is to be
    /// [ended](Self::end).
    pub(super) fn take(&mut self, vm: VmId) -> Vec<(IpAddr, Told)> {
        let by_address = self.vms.remove(&vm).unwrap_or_default().by_address;
        let each = by_address.into_iter().flat_map(|(address, openings)| {
            let names = openings.0.into_iter().flat_map(Opening::names);
            names.map(move |told| (address, told))
        });
        let had: Vec<_> = each.collect();
        self.total -= had.len();
        had
    }

    /// Notes the end of an opening that was removed.
    pub(super) fn end(&mut self, vm: VmId, address: IpAddr, name: Rc<LearntName>) {
        self.changes.push(Change::Ended(vm, address, name));
    }
}

impl AtAddress {
    /// The opening by this name, or by another with the same effect.
    fn position(&self, name: &LearntName, alike: Alike<'_>) -> Option<usize> {
        let exactly = self.0.binary_search_by(|one| one.order(name));
        let Alike::Rules(same) = alike else {
            return exactly.ok();
        };
        exactly.ok().or_else(|| {
            let mut before = 0;
            self.by_rules().find_map(|openings| {
                let at = before;
                before += openings.len();
                same(openings[0].rules(), &name.rules).then_some(at)
            })
        })
    }

    fn insert(&mut self, opening: Opening) {
        let at = self
            .0
            .partition_point(|one| one.order(&opening.last.name).is_lt());
        if self.0.is_empty() {
            // Most addresses have one opening.
            self.0.reserve_exact(1);
        }
        self.0.insert(at, opening);
    }

    /// Returns the openings grouped by their rules.
    fn by_rules(&self) -> impl Iterator<Item = &[Opening]> {
        let mut rest = &self.0[..];
        std::iter::from_fn(move || {
            let first = rest.first()?;
            let len = match rest.get(1) {
                Some(next) if next.rules() == first.rules() => {
                    rest.partition_point(|one| one.rules() == first.rules())
                }
                _ => 1,
            };
            let (alike, others) = rest.split_at(len);
            rest = others;
            Some(alike)
        })
    }
}

impl OfVm {
    /// Ends the openings that have expired. Returns how many names they had.
    fn expire(&mut self, vm: VmId, changes: &mut Vec<Change>, now_ns: u64) -> usize {
        let before = self.names;
        let mut addresses = BTreeSet::new();
        while let Some(&(expires_ns, _, address)) = self.by_expiry.first() {
            if expires_ns > now_ns {
                break;
            }
            self.by_expiry.pop_first();
            addresses.insert(address);
        }
        // Each address once, however many openings of it end.
        for address in addresses {
            let Some(openings) = self.by_address.get_mut(&address) else {
                continue;
            };
            let over = openings.0.extract_if(.., |one| one.expires_ns() <= now_ns);
            for over in over {
                self.weight -= over.weight();
                self.names -= over.count();
                changes.extend(
                    over.names()
                        .map(|told| Change::Ended(vm, address, told.name)),
                );
            }
            if openings.0.is_empty() {
                self.by_address.remove(&address);
            }
        }
        before - self.names
    }
}

#[cfg(test)]
#[path = "learnt_test.rs"]
mod tests;
