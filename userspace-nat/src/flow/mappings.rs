//! Endpoint-independent mappings (RFC 4787 REQ-1): the translated port that all flows of one port of
//! a guest share.
//!
//! # Theory of operation
//! By default a translated port depends on the flow's destination ([`crate::nat_ports`]). Where the
//! VM's policy asks for it, a port of the guest is given one of a range of its own (`--eim-ports`)
//! with its first flow, and its flows to other destinations get the same one. Each flow still has
//! its slot and its two tuples, so the programs translate its packets as those of any other.
//!
//! A mapping counts the flows that have it. It is *in use* while the guest has opened one of them,
//! or has answered one that the world opened; no stranger keeps it in use. While it is in use, and
//! the policy's filtering lets others than the guest's peers in, the port is *open*: it has an entry
//! in `FORWARDS` or `FORWARDS6`, so that the programs hand over first packets to it as they do with a forward's,
//! with the same credits. [`crate::admission::inbound`] decides about them.
//!
//! When its last flow has ended the port rests, as others do (RFC 6888 REQ-8). Meanwhile only the
//! same port of the same guest gets it. Where the range is exhausted a VM's own resting ports make
//! room for its new ones, the oldest first.
//!
//! A port may be given if no mapping has it, no socket of the host is bound to it, it is this
//! process's ([`division`]), and no flow of a predecessor has it that is still to be adopted
//! ([`unadopted`]). Those that may be given are listed, so that nothing is searched for.
//!
//! Mappings are in no map: a successor makes them of the flows that it adopts.
use std::{
    cell::RefCell,
    collections::{BTreeMap, HashSet},
    hash::Hash,
    net::{IpAddr, Ipv4Addr},
    ops::{RangeInclusive, SubAssign},
};

use hashbrown::HashMap;
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use slipgate_abi::{Protocol, SlotIndex, VmId, VmRow, timeout::PORT_REST_NS};
use slipgate_model::{FlowTuple, MappingCounts};

use super::Entry;
use crate::{datapath::PortKey, nat_ports::PORTS_AT_ONCE, quota::Reserve};

mod changes;
mod division;
mod free_ports;
mod giving;
mod inside;
mod mapping;
mod open_ports;
mod rests;
mod unadopted;

pub use inside::{Inside, Pool};
pub use mapping::{Closed, Mapping};

use changes::Changes;
use division::Division;
use free_ports::FreePorts;
use open_ports::OpenPorts;
use rests::Rests;
use unadopted::Unadopted;

/// The mappings of this process.
#[derive(Debug)]
pub struct Mappings {
    /// Ports for mappings; `None`: no VM has endpoint-independent mapping.
    range: Option<RangeInclusive<u16>>,
    /// Number of ports of the range that are this process's.
    size: usize,
    reserve: Reserve,
    vms: usize,
    division: Division,
    /// Ports that are bound by sockets of the host, by protocol.
    reserved: HashSet<(Protocol, u16)>,
    by_inside: BTreeMap<Inside, Mapping>,
    by_outside: BTreeMap<(Pool, u16), Inside>,
    /// Number of ports that each VM has.
    held: BTreeMap<(VmId, Pool), usize>,
    /// Ports that may be given. A list is made when it is first asked for.
    free: RefCell<HashMap<Pool, FreePorts, foldhash::fast::RandomState>>,
    rests: Rests,
    changes: Changes,
    open: OpenPorts,
    unadopted: Unadopted,
    rng: SmallRng,
}

impl Mappings {
    /// Creates an empty set without a range.
    pub(super) fn new() -> Self {
        Self {
            range: None,
            size: 0,
            reserve: Reserve::new(0, 1),
            vms: 1,
            division: Division::ALONE,
            reserved: HashSet::new(),
            by_inside: BTreeMap::new(),
            by_outside: BTreeMap::new(),
            held: BTreeMap::new(),
            free: RefCell::default(),
            rests: Rests::default(),
            changes: Changes::default(),
            open: OpenPorts::new(),
            unadopted: Unadopted::default(),
            rng: SmallRng::from_rng(&mut rand::rng()),
        }
    }

    /// Sets the range of ports, before the first flow.
    pub fn set_range(&mut self, range: Option<RangeInclusive<u16>>) {
        self.range = range;
        self.divide();
    }

    /// Returns the range of ports; `None`: no VM has endpoint-independent mapping.
    pub fn range(&self) -> Option<&RangeInclusive<u16>> {
        self.range.as_ref()
    }

    /// Returns the number of ports of the range that are this process's.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the number of mappings, resting ones included.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_inside.len()
    }

    /// Whether there is no mapping.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.by_inside.is_empty()
    }

    /// Returns the mapping of a guest's port.
    pub fn get(&self, inside: &Inside) -> Option<&Mapping> {
        self.by_inside.get(inside)
    }

    /// Returns the translated address of a guest's port that has a mapping: this one, if it has one
    /// with it. That of `inside` does not matter.
    pub fn external_of(&self, inside: &Inside, preferred: IpAddr) -> Option<IpAddr> {
        let with = |nat: IpAddr| Inside { nat, ..*inside };
        if self.by_inside.contains_key(&with(preferred)) {
            return Some(preferred);
        }
        let first = with(Ipv4Addr::UNSPECIFIED.into());
        let (found, _) = self.by_inside.range(first..).next()?;
        (with(found.nat) == *found).then_some(found.nat)
    }

    /// Returns the guest's port to which a packet from the world with this tuple leads.
    pub fn by_outside(&self, world: &FlowTuple) -> Option<(&Inside, &Mapping)> {
        let pool = Pool {
            protocol: world.protocol()?,
            nat: world.local,
        };
        let inside = self.by_outside.get(&(pool, world.local_port))?;
        Some((inside, self.by_inside.get(inside)?))
    }

    /// Returns the translated port of a guest's port, which is given one if it has none; `None`
    /// when none is left, or the VM has used up its share.
    pub fn take(&mut self, inside: Inside, row: VmRow) -> Option<u16> {
        if let Some(mapping) = self.by_inside.get(&inside) {
            return Some(mapping.port);
        }
        let (vm, pool) = (inside.vm, inside.pool());
        if !self.has_room(vm, pool, 0, 0) {
            let oldest = self.rest_that_makes_room(vm, pool)?;
            self.remove(&oldest);
        }
        // At random (RFC 6056), of the same parity as the guest's if there is one (RFC 4787 REQ-4).
        let random = self.rng.random();
        let port = self.free(pool)?.select(inside.port, random)?;
        self.add(inside, row, port);
        Some(port)
    }

    fn add(&mut self, inside: Inside, row: VmRow, port: u16) {
        let pool = inside.pool();
        self.by_outside.insert((pool, port), inside);
        *self.held.entry((inside.vm, pool)).or_default() += 1;
        if let Some(free) = self.free.get_mut().get_mut(&pool) {
            free.remove(port);
        }
        let mapping = Mapping {
            port,
            row,
            peers: HashMap::default(),
            from_world: HashSet::new(),
            is_open: false,
            rests_until_ns: None,
        };
        self.by_inside.insert(inside, mapping);
    }

    /// Forgets the mapping of a guest's port if no flow has it, so that it may be given another
    /// port. Returns whether no flow has it.
    pub fn give_back(&mut self, inside: &Inside) -> bool {
        let is_unused = self.by_inside.get(inside).is_none_or(|of| !of.has_flows());
        if is_unused {
            self.remove(inside);
        }
        is_unused
    }

    fn remove(&mut self, inside: &Inside) {
        let Some(mapping) = self.by_inside.remove(inside) else {
            return;
        };
        let (vm, pool, port) = (inside.vm, inside.pool(), mapping.port);
        self.by_outside.remove(&(pool, port));
        if let Some(held) = self.held.get_mut(&(vm, pool)) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(&(vm, pool));
            }
        }
        if self.may_be_given(pool, port)
            && let Some(free) = self.free.get_mut().get_mut(&pool)
        {
            free.insert(port);
        }
        if let Some(ends_ns) = mapping.rests_until_ns {
            self.rests.remove(inside, ends_ns);
        }
        if mapping.is_open {
            self.open.gone(Closed { vm, pool, port });
        }
    }

    /// Notes that the programs hand over first packets to a mapping's port now, or do not any more.
    pub fn set_open(&mut self, inside: &Inside, is_open: bool) {
        if let Some(mapping) = self.by_inside.get_mut(inside)
            && mapping.is_open != is_open
        {
            mapping.is_open = is_open;
            match is_open {
                true => self.open.opened(inside.vm),
                false => self.open.closed(inside.vm),
            }
        }
    }

    /// Whether a VM may have another mapping open.
    pub fn may_open(&self, vm: VmId) -> bool {
        self.open.may_open(vm)
    }

    /// Returns the number of ports that are taken of a pool.
    pub fn taken(&self, pool: Pool) -> usize {
        self.by_outside.range((pool, 0)..=(pool, u16::MAX)).count()
    }

    /// Returns how many mappings a VM has, resting ones included, and how many of them are open.
    pub fn counts(&self, vm: VmId) -> MappingCounts {
        let of_vm = self.held.range((vm, Pool::FIRST)..);
        let of_vm = of_vm.take_while(|((of, _), _)| *of == vm);
        let mut counts = MappingCounts {
            open: self.open.count(vm) as u64,
            ..MappingCounts::default()
        };
        for ((_, pool), held) in of_vm {
            match pool.protocol {
                Protocol::Tcp => counts.tcp += *held as u64,
                _ => counts.udp += *held as u64,
            }
        }
        counts
    }

    /// Notes a flow that has got its tuples. One with a port of the range has a mapping.
    pub(super) fn joined(&mut self, slot: SlotIndex, entry: &Entry) {
        let Some(inside) = self.inside_of(&entry.guest, entry.nat, entry.nat_port) else {
            return;
        };
        let outside = (inside.pool(), entry.nat_port);
        if !self.by_inside.contains_key(&inside) && !self.by_outside.contains_key(&outside) {
            // A predecessor's.
            self.add(inside, entry.vm_row, entry.nat_port);
        }
        let Some(mapping) = self.by_inside.get_mut(&inside) else {
            return;
        };
        if mapping.port != entry.nat_port {
            return;
        }
        match entry.is_from_world() {
            true => drop(mapping.from_world.insert(slot)),
            false => *mapping.peers.entry(entry.guest.remote).or_default() += 1,
        }
        if let Some(ends_ns) = mapping.rests_until_ns.take() {
            self.rests.remove(&inside, ends_ns);
        }
        if !mapping.is_open {
            self.changes.insert(inside);
        }
    }

    /// Notes a flow that has lost its tuples.
    pub(super) fn left(&mut self, slot: SlotIndex, entry: &Entry, now_ns: u64) {
        let Some(inside) = self.inside_of(&entry.guest, entry.nat, entry.nat_port) else {
            return;
        };
        let Some(mapping) = self.by_inside.get_mut(&inside) else {
            return;
        };
        if mapping.port != entry.nat_port {
            return;
        }
        match entry.is_from_world() {
            true => drop(mapping.from_world.remove(&slot)),
            false => decrement(&mut mapping.peers, entry.guest.remote),
        }
        if !mapping.has_flows() && mapping.rests_until_ns.is_none() {
            let ends_ns = now_ns + PORT_REST_NS;
            mapping.rests_until_ns = Some(ends_ns);
            self.rests.insert(inside, ends_ns);
        }
        if mapping.is_open && mapping.peers.is_empty() {
            self.changes.insert(inside);
        }
    }

    /// Whether an element of `FORWARDS` or `FORWARDS6` is that of a mapping.
    pub fn has_open(&self, key: &PortKey) -> bool {
        let Some(protocol) = key.protocol() else {
            return false;
        };
        let nat = key.address();
        let inside = self.by_outside.get(&(Pool { protocol, nat }, key.port()));
        let mapping = inside.and_then(|inside| self.by_inside.get(inside));
        mapping.is_some_and(Mapping::is_open)
    }

    fn inside_of(&self, guest: &FlowTuple, nat: IpAddr, nat_port: u16) -> Option<Inside> {
        let range = self.range.as_ref()?;
        let is_mapped = range.contains(&nat_port);
        is_mapped.then(|| Inside::of(guest, nat))?
    }

    /// Ends rests that are over, so many at once. Returns whether these were all.
    pub fn wake(&mut self, now_ns: u64) -> bool {
        for _ in 0..PORTS_AT_ONCE {
            let Some(inside) = self.rests.first_over(now_ns) else {
                return true;
            };
            self.remove(&inside);
            self.forget_free(inside.pool());
        }
        self.rests.first_over(now_ns).is_none()
    }

    /// Has a VM's mappings looked at again: it may have another policy.
    pub fn look_again(&mut self, vm: VmId) {
        self.changes.insert_all_of(vm);
    }

    /// Whether mappings may have to be opened or closed.
    pub fn has_changed(&self) -> bool {
        !self.changes.is_empty() || self.open.has_gone()
    }

    /// Takes at most so many mappings that may have to be opened or closed.
    pub fn take_changed(&mut self, most: usize) -> Vec<Inside> {
        self.changes.take(most, &self.by_inside)
    }

    /// Takes a port of a mapping that is gone and was open.
    pub fn take_closed(&mut self) -> Option<Closed> {
        self.open.take_gone()
    }

    /// Takes this port, if its mapping is gone and was open.
    pub fn take_closed_at(&mut self, pool: Pool, port: u16) -> Option<Closed> {
        self.open.take_gone_at(pool, port)
    }
}

/// Counts one less, and removes a count of none.
fn decrement<K: Hash + Eq, N: Copy + PartialEq + SubAssign + From<bool>>(
    counts: &mut HashMap<K, N, foldhash::fast::RandomState>,
    key: K,
) {
    if let Some(count) = counts.get_mut(&key) {
        *count -= N::from(true);
        if *count == N::from(false) {
            counts.remove(&key);
        }
    }
}

#[cfg(test)]
#[path = "mappings_test.rs"]
mod tests;
