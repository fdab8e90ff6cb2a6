//! Translated ports (and ICMP ids): which are free, for which destination.
//!
//! # Theory of operation
//! Mapping is address and port dependent: a port is busy only toward the destination it is used
//! for, so that the default range of 4,536 ports serves as many flows to *each* destination.
//! A destination's busy ports are a short list, then a bitmap. A port is picked at random (RFC
//! 6056 section 3.3.1: unguessable), which for a bitmap means: the first free one from a random
//! start, at worst a look at each of the range's words.
//!
//! A freed port rests ([`PORT_REST_NS`], RFC 6888 REQ-8) before it is used toward the same
//! destination again, unless its flow shows that it is safe ([`Freed::Safe`]): then it is free at
//! once. When nothing else is left, the VM that had it may have it early: for a SYN with timestamps
//! (RFC 6191), or after [`EARLY_NS`] where no end of a connection can be held by the peer
//! ([`Freed::RestsForOthers`]).
//!
//! None of that for a port of an inspected flow ([`Freed::Inspected`]): for as long as a cookie of
//! its server's is good (RFC 4987 section 3.6), an acknowledgement of old is enough to open a
//! connection that nobody looks at. It rests to the end.
//!
//! How many ports may rest is bounded ([`MAX_RESTING`]). Past it the oldest are freed early; of
//! those that rest to the end no more come to be, because no flow is inspected that might leave one
//! ([`PortPool::may_inspect`]).
//!
//! # Shares
//! No VM can use up the ports toward a destination that others want too (RFC 6888 REQ-4). With
//! several VMs a quarter of the range is a [`Reserve`]: of it a VM may only take what brings its
//! ports toward that destination, resting ones included, up to an equal part. So whatever the
//! others do, each VM can have 1/4 of the range divided by the number of VMs.
//!
//! Between processes: each has a part of its own ([`PortPool::share_with`]).
//!
//! Endpoint-independent mapping (RFC 4787 REQ-1, on request, UDP) would take its ports from a
//! range of its own, with one [`Destination`] of remote 0.0.0.0:0 for all.
use std::{
    collections::VecDeque,
    hash::{Hash, Hasher},
    ops::RangeInclusive,
};

use hashbrown::{HashMap, hash_map::Entry};
use rand::{Rng, RngExt, SeedableRng, rngs::SmallRng};
use slipgate_abi::{Ip4, Protocol, Tuple, maps::MAX_OWNERS, timeout::PORT_REST_NS};

use crate::{clock::SECOND_NS, quota::Reserve};

mod occupancy;
mod parts;

use occupancy::Occupancy;
use parts::Parts;

/// Disjoint from Linux's default `ip_local_port_range`, 32768 to 60999.
pub const DEFAULT_RANGE: RangeInclusive<u16> = 61_000..=65_535;
/// Most resting ports, of all destinations together, and as many of inspected flows: 12 MiB each.
pub const MAX_RESTING: usize = 262_144;
/// How long a port rests at least that its own VM may have early, ns: late answers are the same
/// guest's, and most are there by then.
pub const EARLY_NS: u64 = 10 * SECOND_NS;

/// What a port is busy toward.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Destination {
    /// The translated address.
    pub nat: Ip4,
    /// The peer's address.
    pub remote: Ip4,
    /// The peer's port; 0 for ICMP.
    pub remote_port: u16,
    /// The protocol.
    pub protocol: Protocol,
}

impl Destination {
    /// The flow there that has this port, as the world's links see it.
    pub fn world(&self, nat_port: u16) -> Tuple {
        Tuple {
            scope: Tuple::WORLD,
            local: self.nat,
            remote: self.remote,
            local_port: nat_port,
            remote_port: self.remote_port,
            protocol: self.protocol as u8,
            pad: [0; 3],
        }
    }
}

impl Hash for Destination {
    /// Two words instead of a call per field: this is on the path of every admission.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let word = |a: Ip4| u64::from(a.to_wire());
        state.write_u64(word(self.nat) << 32 | word(self.remote));
        state.write_u32(u32::from(self.remote_port) << 8 | self.protocol as u32);
    }
}

/// How safely a freed port can be used again toward the same destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Freed {
    /// At once.
    Safe,
    /// After a rest, or before by the same VM with timestamps.
    Rests,
    /// After a rest, or a shorter one by the same VM: there was no connection, or it was reset.
    RestsForOthers,
    /// After a rest, and by nobody before.
    Inspected,
    /// It was another process's all along: after a rest, and it is nobody's meanwhile.
    Taken,
}

/// How often a port is tried by chance before the rest is tried in turn.
const RANDOM_TRIES: usize = 8;
/// Resting ports that are looked at for one that its VM may have early.
const RESTING_LOOKS: usize = 64;
/// Whose a port is that another process has.
const NOBODY: u32 = Tuple::WORLD;

#[derive(Debug, Default)]
struct Toward {
    busy: Occupancy,
    /// Ports among the busy that rest, oldest first.
    resting: VecDeque<Rest>,
    /// The same of inspected flows.
    inspected: VecDeque<Rest>,
    /// The offset at which a search among the busy goes on.
    looked_at: u16,
}

#[derive(Clone, Copy, Debug)]
struct Rest {
    port: u16,
    /// Whose it was.
    vm: u32,
    /// When it is over, ns. It tells a port's rests apart.
    ready_ns: u64,
    /// When it is over for whose it was, ns.
    early_ns: u64,
}

impl Rest {
    /// Whether it is this port's, and may end early for this VM.
    fn is_for(&self, port: u16, vm: u32) -> bool {
        self.port == port && self.vm == vm && self.early_ns != u64::MAX
    }
}

/// Rests in the order in which they end: when, and whose.
type RestOrder = VecDeque<(u64, Destination, u16)>;

/// A port that a flow gives back which is about to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GivenBack {
    /// The port.
    pub port: u16,
    /// Whose it was.
    pub vm: u32,
    /// How safely it can be used again.
    pub how: Freed,
    /// Whether the flow ends for want of ports: what is its own then a VM has again at once.
    pub is_reclaimed: bool,
}

/// All ports.
#[derive(Debug)]
pub struct PortPool {
    range: RangeInclusive<u16>,
    vms: usize,
    reserve: Reserve,
    /// Among processes.
    parts: Parts,
    /// By protocol: ports that sockets of the host hold.
    reserved: HashMap<(Protocol, u16), (), foldhash::fast::RandomState>,
    toward: HashMap<Destination, Toward, foldhash::fast::RandomState>,
    /// Every rest, also of ports that were picked early.
    rests: RestOrder,
    /// Every rest of an inspected flow's port.
    inspected: RestOrder,
    /// Of these, how many are of which VM.
    inspected_of: HashMap<u32, usize, foldhash::fast::RandomState>,
    /// Among the VMs, of [`MAX_RESTING`].
    inspected_reserve: Reserve,
    /// The rest that the last port was taken from early, until the next one is.
    early: Option<(Destination, Rest)>,
    rng: SmallRng,
}

impl PortPool {
    /// A pool over `range`, seeded from the system's entropy.
    pub fn new(range: RangeInclusive<u16>) -> Self {
        Self::with_rng(range, SmallRng::from_rng(&mut rand::rng()))
    }

    /// A pool with a generator of the caller's, for tests.
    pub fn with_rng(range: RangeInclusive<u16>, rng: SmallRng) -> Self {
        Self {
            vms: 1,
            reserve: Reserve::new(range.len(), 1),
            parts: Parts::new(range.len(), 0, 0),
            range,
            reserved: HashMap::default(),
            toward: HashMap::default(),
            rests: VecDeque::new(),
            inspected: VecDeque::new(),
            inspected_of: HashMap::default(),
            inspected_reserve: Reserve::new(MAX_RESTING, 1),
            early: None,
            rng,
        }
    }

    /// How many ports the range has.
    pub fn size(&self) -> usize {
        self.range.len()
    }

    /// Sets among how many VMs the ports are shared.
    pub fn share_among(&mut self, vms: usize) {
        self.vms = vms;
        self.reserve = Reserve::new(self.usable(), vms);
        self.inspected_reserve = Reserve::new(MAX_RESTING, vms);
    }

    /// Sets which rows of `OWNERS` other processes have, a bit each, and which is ours. With others
    /// there some ports are kept for each process: theirs are left alone, ours are for VMs that have
    /// little.
    pub fn share_with(&mut self, own_row: u32, others: u64) {
        let parts = Parts::new(self.range.len(), own_row, others);
        if parts != self.parts {
            self.parts = parts;
            self.reserve = Reserve::new(self.usable(), self.vms);
        }
    }

    /// Ports of the range that are not kept for a process.
    fn usable(&self) -> usize {
        self.range.len() - self.parts.kept()
    }

    /// Whether another flow of a VM may be inspected, after which its port has to rest to the end.
    pub fn may_inspect(&self, vm: u32) -> bool {
        let free = MAX_RESTING.saturating_sub(self.inspected.len());
        let held = || self.inspected_of.get(&vm).copied().unwrap_or_default();
        free > 0 && self.inspected_reserve.allows(free, held)
    }

    /// Sets the ports that sockets of the host hold; they are not picked any more.
    pub fn set_reserved(&mut self, ports: impl IntoIterator<Item = (Protocol, u16)>) {
        self.reserved = ports.into_iter().map(|p| (p, ())).collect();
    }

    /// Picks a free port toward a destination for a VM and marks it busy; `None` when there is
    /// none, or the VM has had its share. `timestamps`: whether it is for a SYN that carries them.
    pub fn pick(&mut self, to: Destination, vm: u32, timestamps: bool, now_ns: u64) -> Option<u16> {
        let size = self.range.len();
        if size == 0 {
            return None;
        }
        let first = *self.range.start();
        let usable = self.usable();
        let toward = self.toward.entry(to).or_default();
        let mut start = random_below(&mut self.rng, size);
        self.early = None;
        let free = usable.saturating_sub(toward.busy.len());
        let may = self.reserve.allows(free, || toward.busy.held_by(vm));
        // Reserved ports are few; each costs one more try, as does what is kept for a process.
        let parts = if self.parts.kept() > 0 {
            RANDOM_TRIES + MAX_OWNERS as usize
        } else {
            0
        };
        let tries = if may {
            1 + self.reserved.len().min(64) + parts
        } else {
            0
        };
        for tried in 0..tries {
            let Some(offset) = toward.busy.first_free_from(start, size) else {
                break;
            };
            if let Some(behind) = self.parts.behind_kept(offset) {
                // By chance again, or what lies behind would be likelier than others.
                start = match tried {
                    ..RANDOM_TRIES => random_below(&mut self.rng, size),
                    _ => behind % size,
                };
                continue;
            }
            let port = first + offset as u16;
            if !is_reserved(&self.reserved, to, port) {
                toward.busy.set(offset, vm, size);
                return Some(port);
            }
            start = (offset + 1) % size;
        }
        if toward.busy.len() == 0 {
            self.toward.remove(&to);
            return None;
        }
        // One of its own that rests; the look is bounded, the oldest are the likeliest.
        let mut oldest = self.toward.get(&to)?.resting.iter().take(RESTING_LOOKS);
        let may = |rest: &Rest| self.may_have_early(to, rest, vm, timestamps, now_ns);
        let at = oldest.position(may)?;
        let rest = self.toward.get_mut(&to)?.resting.remove(at)?;
        self.early = Some((to, rest));
        Some(rest.port)
    }

    /// Whether a VM would find a port toward a destination, had these been given back: by
    /// [`PortPool::pick`], [`PortPool::pick_kept`], or [`PortPool::take`].
    pub fn has_port(
        &self,
        to: Destination,
        vm: u32,
        timestamps: bool,
        now_ns: u64,
        given_back: &[GivenBack],
    ) -> bool {
        let is_reserved = |port: u16| is_reserved(&self.reserved, to, port);
        let is_own = |given: &&GivenBack| {
            given.vm == vm && !is_reserved(given.port) && self.offset(given.port).is_some()
        };
        let own = || given_back.iter().filter(is_own);
        let is_its_again = |how| matches!(how, Freed::Safe | Freed::RestsForOthers);
        if own().any(|given| given.is_reclaimed && is_its_again(given.how)) {
            return true;
        }
        let none = Toward::default();
        let toward = self.toward.get(&to).unwrap_or(&none);
        let safe = given_back.iter().filter(|given| given.how == Freed::Safe);
        let freed: Vec<(usize, u32)> = safe
            .filter_map(|given| Some((self.offset(given.port)?, given.vm)))
            .collect();
        let busy = toward.busy.len().saturating_sub(freed.len());
        let freed_own = freed.iter().filter(|(_, of)| *of == vm).count();
        let held = || toward.busy.held_by(vm).saturating_sub(freed_own);
        let (first, size) = (*self.range.start(), self.range.len());
        let is_free = |offset: &usize| {
            let is_busy = toward.busy.contains(*offset);
            (!is_busy || freed.iter().any(|(freed, _)| freed == offset))
                && !is_reserved(first + *offset as u16)
        };
        if self
            .reserve
            .allows(self.usable().saturating_sub(busy), held)
            && busy < size
        {
            let is_common = |offset: &usize| self.parts.behind_kept(*offset).is_none();
            // Reserved ports are few: mostly there is nothing to search.
            if size - busy > self.reserved.len() + self.parts.kept()
                || (0..size).filter(is_common).any(|offset| is_free(&offset))
            {
                return true;
            }
        }
        let mut oldest = toward.resting.iter().take(RESTING_LOOKS);
        let rests = |how| matches!(how, Freed::Rests | Freed::RestsForOthers);
        if oldest.any(|rest| self.may_have_early(to, rest, vm, timestamps, now_ns))
            || timestamps
                && toward.resting.len() < RESTING_LOOKS
                && own().any(|given| rests(given.how))
        {
            return true;
        }
        held() < self.kept_for_each()
            && self.parts.own().any(|offset| {
                let port = first + offset as u16;
                let is_for = |rest: &Rest| rest.is_for(port, vm);
                is_free(&offset)
                    || !is_reserved(port) && toward.resting.iter().any(is_for)
                    || own().any(|given| given.port == port && is_its_again(given.how))
            })
    }

    /// How many of the ports that are kept for our process a VM may have toward a destination.
    fn kept_for_each(&self) -> usize {
        (self.parts.own().len() / self.vms.max(1)).max(1)
    }

    /// Whether a resting port may be picked early.
    fn may_have_early(
        &self,
        to: Destination,
        rest: &Rest,
        vm: u32,
        timestamps: bool,
        now_ns: u64,
    ) -> bool {
        let is_early = timestamps || rest.early_ns <= now_ns;
        rest.vm == vm && is_early && !is_reserved(&self.reserved, to, rest.port)
    }

    /// Gives back a port that was picked just now, and not used: as it was.
    pub fn put_back(&mut self, to: Destination, port: u16, vm: u32) {
        let (Some(offset), Entry::Occupied(mut entry)) = (self.offset(port), self.toward.entry(to))
        else {
            return;
        };
        match self.early.take() {
            Some((of, rest)) if of == to && rest.port == port => {
                entry.get_mut().resting.push_front(rest);
            }
            _ => {
                entry.get_mut().busy.clear(offset, vm);
                remove_if_empty(entry);
            }
        }
    }

    /// Picks a free port of what is kept for our process, for a VM that has less than an equal part of
    /// that toward the destination.
    pub fn pick_kept(&mut self, to: Destination, vm: u32) -> Option<u16> {
        let own = self.parts.own();
        let held = self.toward.get(&to).map_or(0, |t| t.busy.held_by(vm));
        if held >= self.kept_for_each() {
            return None;
        }
        let first = *self.range.start();
        let mut ports = own.map(|offset| first + offset as u16);
        ports.find(|port| self.take(to, *port, vm))
    }

    /// Takes this port for a VM that has just given it back for that, whatever its share. Whether it
    /// may: it is free, or rests for others only.
    pub fn take(&mut self, to: Destination, port: u16, vm: u32) -> bool {
        let Some(offset) = self.offset(port) else {
            return false;
        };
        if is_reserved(&self.reserved, to, port) {
            return false;
        }
        let size = self.range.len();
        let toward = self.toward.entry(to).or_default();
        if !toward.busy.contains(offset) {
            self.early = None;
            toward.busy.set(offset, vm, size);
            return true;
        }
        // The newest.
        let at = toward
            .resting
            .iter()
            .rposition(|rest| rest.is_for(port, vm));
        let rest = at.and_then(|at| toward.resting.remove(at));
        self.early = rest.map(|rest| (to, rest)).or(self.early);
        rest.is_some()
    }

    /// Marks a port busy that a VM's flow has already (adoption).
    pub fn mark(&mut self, to: Destination, port: u16, vm: u32) {
        if let Some(offset) = self.offset(port) {
            let size = self.range.len();
            let toward = self.toward.entry(to).or_default();
            toward.busy.set(offset, vm, size);
        }
    }

    /// Frees a port of a VM. One outside the range (a forward's) is nobody's to give out, so nothing is to
    /// be done.
    pub fn free(&mut self, to: Destination, port: u16, vm: u32, how: Freed, now_ns: u64) {
        let Some(offset) = self.offset(port) else {
            return;
        };
        let Entry::Occupied(mut entry) = self.toward.entry(to) else {
            return;
        };
        match how {
            Freed::Safe => {
                entry.get_mut().busy.clear(offset, vm);
                remove_if_empty(entry);
            }
            Freed::Rests | Freed::RestsForOthers | Freed::Taken => {
                let toward = entry.get_mut();
                let holder = if how == Freed::Taken { NOBODY } else { vm };
                if holder != vm {
                    toward.busy.hand_over(offset, vm, holder);
                }
                let ready_ns = now_ns + PORT_REST_NS;
                toward.resting.push_back(Rest {
                    port,
                    vm: holder,
                    ready_ns,
                    early_ns: match how {
                        Freed::RestsForOthers => now_ns + EARLY_NS,
                        _ => u64::MAX,
                    },
                });
                self.rests.push_back((ready_ns, to, port));
                if self.rests.len() > MAX_RESTING
                    && let Some(first) = self.rests.pop_front()
                {
                    self.end_rest(first, |toward| &mut toward.resting);
                }
            }
            Freed::Inspected => {
                let ready_ns = now_ns + PORT_REST_NS;
                let rest = Rest {
                    port,
                    vm,
                    ready_ns,
                    early_ns: u64::MAX,
                };
                entry.get_mut().inspected.push_back(rest);
                self.inspected.push_back((ready_ns, to, port));
                *self.inspected_of.entry(vm).or_default() += 1;
            }
        }
    }

    /// Frees the ports whose rest is over.
    pub fn wake(&mut self, now_ns: u64) {
        let is_over = |rest: &mut (u64, Destination, u16)| rest.0 <= now_ns;
        while let Some(rest) = self.rests.pop_front_if(is_over) {
            self.end_rest(rest, |toward| &mut toward.resting);
        }
        while let Some(rest) = self.inspected.pop_front_if(is_over) {
            let ended = self.end_rest(rest, |toward| &mut toward.inspected);
            if let Some(Rest { vm, .. }) = ended
                && let Entry::Occupied(mut count) = self.inspected_of.entry(vm)
            {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }

    /// Ends a rest among `of` and frees its port, unless that was picked early: its next rest is
    /// another.
    fn end_rest(
        &mut self,
        (ready_ns, to, port): (u64, Destination, u16),
        of: impl FnOnce(&mut Toward) -> &mut VecDeque<Rest>,
    ) -> Option<Rest> {
        let offset = self.offset(port)?;
        let Entry::Occupied(mut entry) = self.toward.entry(to) else {
            return None;
        };
        let rests = of(entry.get_mut());
        let is_it = |rest: &Rest| rest.port == port && rest.ready_ns == ready_ns;
        let rest = rests
            .iter()
            .position(is_it)
            .and_then(|at| rests.remove(at))?;
        entry.get_mut().busy.clear(offset, rest.vm);
        remove_if_empty(entry);
        Some(rest)
    }

    /// Busy ports toward a destination, resting ones included.
    pub fn busy(&self, to: &Destination) -> usize {
        self.toward.get(to).map_or(0, |t| t.busy.len())
    }

    /// Whether ports toward a destination run short, so that closed flows should be ended early.
    pub fn is_pressed(&self, to: &Destination) -> bool {
        self.busy(to) * 2 > self.range.len()
    }

    /// The next `most` ports of the range, for a search among a destination's flows that goes on
    /// where the last one stopped ([`PortPool::looked_at`]).
    pub fn next_ports(&self, to: &Destination, most: usize) -> impl Iterator<Item = u16> + use<> {
        let (first, size) = (*self.range.start(), self.range.len());
        let start = self.toward.get(to).map_or(0, |t| usize::from(t.looked_at));
        (0..most.min(size)).map(move |i| first + ((start + i) % size) as u16)
    }

    /// Notes that so many ports toward a destination were looked at.
    pub fn looked_at(&mut self, to: &Destination, ports: usize) {
        let size = self.range.len();
        if let Some(toward) = self.toward.get_mut(to) {
            let next = (usize::from(toward.looked_at) + ports.min(size)) % size.max(1);
            toward.looked_at = next as u16;
        }
    }

    /// Destinations with a busy port, and resting ports.
    pub fn sizes(&self) -> (usize, usize) {
        (self.toward.len(), self.rests.len() + self.inspected.len())
    }

    fn offset(&self, port: u16) -> Option<usize> {
        self.range
            .contains(&port)
            .then(|| usize::from(port - self.range.start()))
    }
}

fn is_reserved(
    reserved: &HashMap<(Protocol, u16), (), foldhash::fast::RandomState>,
    to: Destination,
    port: u16,
) -> bool {
    !reserved.is_empty() && reserved.contains_key(&(to.protocol, port))
}

fn remove_if_empty(
    entry: hashbrown::hash_map::OccupiedEntry<'_, Destination, Toward, foldhash::fast::RandomState>,
) {
    if entry.get().busy.len() == 0 {
        entry.remove();
    }
}

fn random_below(rng: &mut impl Rng, size: usize) -> usize {
    rng.random_range(0..size)
}

#[cfg(test)]
#[path = "nat_ports_test.rs"]
mod tests;
