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
//! in `FORWARDS`, so that the programs hand over first packets to it as they do with a forward's,
//! with the same credits. [`crate::admission::inbound`] decides about them.
//!
//! When its last flow has ended the port rests, as others do (RFC 6888 REQ-8). Meanwhile only the
//! same port of the same guest gets it. Where the range is exhausted a VM's own resting ports make
//! room for its new ones, the oldest first.
//!
//! Mappings are in no map: a successor makes them of the flows that it adopts.
use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    hash::Hash,
    net::{IpAddr, Ipv4Addr},
    ops::{RangeInclusive, SubAssign},
};

use hashbrown::HashMap;
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use slipgate_abi::{
    ForwardKey, Protocol, SlotIndex, VmId, VmRow, maps::MAX_FORWARDS, timeout::PORT_REST_NS,
};
use slipgate_model::FlowTuple;

use super::Entry;
use crate::quota::Reserve;

/// Random tries for a port before the range is searched in order.
const RANDOM_TRIES: usize = 16;
/// Most mappings of this process that are open at once.
pub const MOST_OPEN: usize = MAX_FORWARDS as usize / 2;

/// A port of a guest, and the address to which it is translated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Inside {
    /// Id of the VM.
    pub vm: VmId,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Address of the guest.
    pub guest: IpAddr,
    /// Port of the guest.
    pub port: u16,
    /// Translated address.
    pub nat: IpAddr,
}

impl Inside {
    /// Returns the guest's side of a flow with this tuple on the guest's link, translated to this
    /// address; `None` if its protocol or family has no mappings.
    pub fn of(guest: &FlowTuple, nat: IpAddr) -> Option<Self> {
        let protocol = guest.protocol()?;
        let has_ports = matches!(protocol, Protocol::Tcp | Protocol::Udp);
        (has_ports && nat.is_ipv4()).then_some(Self {
            vm: VmId::new(guest.scope),
            protocol,
            guest: guest.local,
            port: guest.local_port,
            nat,
        })
    }

    /// Returns the ports among which its translated port is.
    pub const fn pool(&self) -> Pool {
        Pool {
            protocol: self.protocol,
            nat: self.nat,
        }
    }
}

/// Translated address and protocol: each has all ports of the range.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Pool {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Translated address.
    pub nat: IpAddr,
}

impl Pool {
    /// Returns the element of `FORWARDS` of a port.
    pub fn key(&self, port: u16) -> Option<ForwardKey> {
        let IpAddr::V4(nat) = self.nat else {
            return None;
        };
        Some(ForwardKey {
            host: nat.into(),
            port,
            protocol: self.protocol as u8,
            pad: 0,
        })
    }
}

/// The translated port of a guest's port, and the flows that have it.
#[derive(Debug)]
pub struct Mapping {
    /// Translated port.
    pub port: u16,
    /// Row of the VM.
    pub row: VmRow,
    /// Number of the guest's own flows to each address.
    peers: HashMap<IpAddr, u32, foldhash::fast::RandomState>,
    /// Slots of the flows that the world opened.
    from_world: HashSet<SlotIndex>,
    /// Whether the port has an entry in `FORWARDS`.
    is_open: bool,
    /// End of its rest, ns, while it has no flow.
    rests_until_ns: u64,
}

impl Mapping {
    /// Whether a flow has the mapping.
    fn has_flows(&self) -> bool {
        !self.peers.is_empty() || !self.from_world.is_empty()
    }

    /// Whether the guest has a flow of its own to this address.
    pub fn has_peer(&self, remote: IpAddr) -> bool {
        self.peers.contains_key(&remote)
    }

    /// Whether it is in use. `is_answered`: whether the guest has answered a flow of the world's.
    pub fn is_in_use(&self, is_answered: impl Fn(SlotIndex) -> bool) -> bool {
        !self.peers.is_empty() || self.from_world.iter().any(|slot| is_answered(*slot))
    }

    /// Whether the programs hand over first packets to the port.
    pub const fn is_open(&self) -> bool {
        self.is_open
    }
}

/// A port whose entry in `FORWARDS` is to be removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Closed {
    /// Id of the VM.
    pub vm: VmId,
    /// Protocol and address.
    pub pool: Pool,
    /// Translated port.
    pub port: u16,
}

impl Closed {
    /// Returns the element of `FORWARDS`.
    pub fn key(&self) -> Option<ForwardKey> {
        self.pool.key(self.port)
    }
}

/// The mappings of this process.
#[derive(Debug)]
pub struct Mappings {
    /// Ports for mappings; `None`: no VM has endpoint-independent mapping.
    range: Option<RangeInclusive<u16>>,
    reserve: Reserve,
    vms: usize,
    /// Ports that are bound by sockets of the host, by protocol.
    reserved: HashSet<(Protocol, u16)>,
    by_inside: BTreeMap<Inside, Mapping>,
    by_outside: BTreeMap<(Pool, u16), Inside>,
    /// Number of ports that each VM has.
    held: HashMap<(VmId, Pool), usize, foldhash::fast::RandomState>,
    /// Number of ports that are taken.
    taken: HashMap<Pool, usize, foldhash::fast::RandomState>,
    /// Mappings without flows in the order in which their rests end.
    resting: VecDeque<(u64, Inside)>,
    /// Mappings that may have to be opened or closed.
    changed: HashSet<Inside>,
    /// Ports of mappings that are gone and were open.
    closed: Vec<Closed>,
    /// Number of mappings that are open.
    open: usize,
    rng: SmallRng,
}

impl Mappings {
    /// Creates an empty set without a range.
    pub(super) fn new() -> Self {
        Self {
            range: None,
            reserve: Reserve::new(0, 1),
            vms: 1,
            reserved: HashSet::new(),
            by_inside: BTreeMap::new(),
            by_outside: BTreeMap::new(),
            held: HashMap::default(),
            taken: HashMap::default(),
            resting: VecDeque::new(),
            changed: HashSet::new(),
            closed: Vec::new(),
            open: 0,
            rng: SmallRng::from_rng(&mut rand::rng()),
        }
    }

    /// Sets the range of ports, before the first flow.
    pub fn set_range(&mut self, range: Option<RangeInclusive<u16>>) {
        self.range = range;
        self.share_among(self.vms);
    }

    /// Returns the range of ports; `None`: no VM has endpoint-independent mapping.
    pub fn range(&self) -> Option<&RangeInclusive<u16>> {
        self.range.as_ref()
    }

    /// Sets the number of VMs among which the ports are shared.
    pub(super) fn share_among(&mut self, vms: usize) {
        self.vms = vms;
        self.reserve = Reserve::new(self.size(), vms);
    }

    /// Sets the ports that are bound by sockets of the host; they are not picked any more.
    pub fn set_reserved(&mut self, ports: impl IntoIterator<Item = (Protocol, u16)>) {
        self.reserved = ports.into_iter().collect();
    }

    fn size(&self) -> usize {
        self.range.as_ref().map_or(0, |range| range.len())
    }

    /// Returns the number of mappings, resting ones included.
    pub fn len(&self) -> usize {
        self.by_inside.len()
    }

    /// Whether there is no mapping.
    pub fn is_empty(&self) -> bool {
        self.by_inside.is_empty()
    }

    /// Returns the mapping of a guest's port.
    pub fn get(&self, inside: &Inside) -> Option<&Mapping> {
        self.by_inside.get(inside)
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
        let port = match self.pick(&inside) {
            Some(port) => port,
            None => {
                self.end_own_rest(&inside)?;
                self.pick(&inside)?
            }
        };
        self.add(inside, row, port);
        Some(port)
    }

    /// Picks a free port at random (RFC 6056), of the same parity as the guest's if there is one
    /// (RFC 4787 REQ-4).
    fn pick(&mut self, inside: &Inside) -> Option<u16> {
        let range = self.range.clone()?;
        let pool = inside.pool();
        let free = range.len() - self.taken(pool);
        let held = || self.held.get(&(inside.vm, pool)).copied().unwrap_or(0);
        if free == 0 || !self.reserve.allows(free, held) {
            return None;
        }
        let is_free = |of: &Self, port: u16| {
            !of.by_outside.contains_key(&(pool, port))
                && !of.reserved.contains(&(inside.protocol, port))
        };
        let is_even = |port: u16| port % 2 == inside.port % 2;
        for _ in 0..RANDOM_TRIES {
            let port = self.rng.random_range(range.clone());
            if is_even(port) && is_free(self, port) {
                return Some(port);
            }
        }
        let start = self.rng.random_range(range.clone());
        let in_order = || (start..=*range.end()).chain(*range.start()..start);
        let of_parity = in_order().find(|port| is_even(*port) && is_free(self, *port));
        of_parity.or_else(|| in_order().find(|port| is_free(self, *port)))
    }

    fn add(&mut self, inside: Inside, row: VmRow, port: u16) {
        let pool = inside.pool();
        self.by_outside.insert((pool, port), inside);
        *self.held.entry((inside.vm, pool)).or_default() += 1;
        *self.taken.entry(pool).or_default() += 1;
        let mapping = Mapping {
            port,
            row,
            peers: HashMap::default(),
            from_world: HashSet::new(),
            is_open: false,
            rests_until_ns: 0,
        };
        self.by_inside.insert(inside, mapping);
    }

    /// Frees the oldest resting port of the same VM. `None`: it has none.
    fn end_own_rest(&mut self, wanted: &Inside) -> Option<()> {
        let (vm, pool) = (wanted.vm, wanted.pool());
        let is_own = |(ends_ns, inside): &&(u64, Inside)| {
            let mapping = self.by_inside.get(inside);
            let rests = mapping.is_some_and(|of| !of.has_flows() && of.rests_until_ns == *ends_ns);
            inside.vm == vm && inside.pool() == pool && rests
        };
        let (_, inside) = *self.resting.iter().find(is_own)?;
        self.remove(&inside);
        Some(())
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
        let pool = inside.pool();
        self.by_outside.remove(&(pool, mapping.port));
        decrement(&mut self.held, (inside.vm, pool));
        decrement(&mut self.taken, pool);
        if mapping.is_open {
            self.open -= 1;
            self.closed.push(Closed {
                vm: inside.vm,
                pool,
                port: mapping.port,
            });
        }
    }

    /// Notes that the programs hand over first packets to a mapping's port now, or do not any more.
    pub fn set_open(&mut self, inside: &Inside, is_open: bool) {
        if let Some(mapping) = self.by_inside.get_mut(inside)
            && mapping.is_open != is_open
        {
            mapping.is_open = is_open;
            match is_open {
                true => self.open += 1,
                false => self.open -= 1,
            }
        }
    }

    /// Whether another mapping may be open: half of `FORWARDS` is left to forwards.
    pub fn may_open(&self) -> bool {
        self.open < MOST_OPEN
    }

    /// Returns the number of ports that are taken of a pool.
    pub fn taken(&self, pool: Pool) -> usize {
        self.taken.get(&pool).copied().unwrap_or(0)
    }

    /// Notes a flow that has got its tuples. One with a port of the range has a mapping.
    pub(super) fn joined(&mut self, slot: SlotIndex, entry: &Entry) {
        let Some(inside) = self.inside_of(entry) else {
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
        if !mapping.is_open {
            self.changed.insert(inside);
        }
    }

    /// Notes a flow that has lost its tuples.
    pub(super) fn left(&mut self, slot: SlotIndex, entry: &Entry, now_ns: u64) {
        let Some(inside) = self.inside_of(entry) else {
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
        if !mapping.has_flows() {
            mapping.rests_until_ns = now_ns + PORT_REST_NS;
            self.resting.push_back((mapping.rests_until_ns, inside));
        }
        if mapping.is_open && mapping.peers.is_empty() {
            self.changed.insert(inside);
        }
    }

    /// Whether an element of `FORWARDS` is that of a mapping.
    pub fn has_open(&self, key: &ForwardKey) -> bool {
        let Some(protocol) = Protocol::from_number(key.protocol) else {
            return false;
        };
        let nat = IpAddr::from(key.host);
        let inside = self.by_outside.get(&(Pool { protocol, nat }, key.port));
        let mapping = inside.and_then(|inside| self.by_inside.get(inside));
        mapping.is_some_and(Mapping::is_open)
    }

    fn inside_of(&self, entry: &Entry) -> Option<Inside> {
        let range = self.range.as_ref()?;
        let is_mapped = range.contains(&entry.nat_port);
        is_mapped.then(|| Inside::of(&entry.guest, entry.nat))?
    }

    /// Ends the rests that are over.
    pub fn wake(&mut self, now_ns: u64) {
        while let Some((ends_ns, inside)) = self.resting.pop_front_if(|of| of.0 <= now_ns) {
            let mapping = self.by_inside.get(&inside);
            if mapping.is_some_and(|of| !of.has_flows() && of.rests_until_ns == ends_ns) {
                self.remove(&inside);
            }
        }
    }

    /// Has a VM's mappings looked at again: it may have another policy.
    pub fn look_again(&mut self, vm: VmId) {
        let none = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let first = Inside {
            vm,
            protocol: Protocol::Icmp,
            guest: none,
            port: 0,
            nat: none,
        };
        let behind = self.by_inside.range(first..);
        let own = behind.map_while(|(inside, _)| (inside.vm == vm).then_some(*inside));
        self.changed.extend(own);
    }

    /// Whether mappings may have to be opened or closed.
    pub fn has_changed(&self) -> bool {
        !self.changed.is_empty() || !self.closed.is_empty()
    }

    /// Takes the mappings that may have to be opened or closed.
    pub fn take_changed(&mut self) -> Vec<Inside> {
        self.changed.drain().collect()
    }

    /// Takes the ports of mappings that are gone and were open.
    pub fn take_closed(&mut self) -> Vec<Closed> {
        std::mem::take(&mut self.closed)
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
