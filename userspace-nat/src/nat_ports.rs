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
//! destination again, unless TCP shows that it is safe:
//! - the guest closed first, so the peer holds no TIME-WAIT: free at once;
//! - the same VM had it, and its new SYN carries timestamps (RFC 6191): picked when nothing else
//!   is left.
//!
//! How many ports may rest is bounded ([`MAX_RESTING`]); past it the oldest are freed early.
//!
//! # Shares
//! No VM can use up the ports toward a destination that others want too (RFC 6888 REQ-4). With
//! several VMs a quarter of the range is a [`Reserve`]: of it a VM may only take what brings its
//! ports toward that destination, resting ones included, up to an equal part. So whatever the
//! others do, each VM can have 1/4 of the range divided by the number of VMs.
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
use slipgate_abi::{Ip4, Protocol, timeout::PORT_REST_NS};

use crate::quota::Reserve;

mod occupancy;

use occupancy::Occupancy;

/// Disjoint from Linux's default `ip_local_port_range`, 32768 to 60999.
pub const DEFAULT_RANGE: RangeInclusive<u16> = 61_000..=65_535;
/// Most resting ports, of all destinations together: 12 MiB.
pub const MAX_RESTING: usize = 262_144;

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
    /// It was another process's all along: after a rest, and it is nobody's meanwhile.
    Taken,
}

/// Whose a port is that another process has.
const NOBODY: u32 = slipgate_abi::Tuple::WORLD;

#[derive(Debug)]
struct Toward {
    busy: Occupancy,
    /// Ports among the busy that rest, oldest first: (port, VM).
    resting: VecDeque<(u16, u32)>,
}

/// All ports.
#[derive(Debug)]
pub struct PortPool {
    range: RangeInclusive<u16>,
    reserve: Reserve,
    /// By protocol: ports that sockets of the host hold.
    reserved: HashMap<(Protocol, u16), (), foldhash::fast::RandomState>,
    toward: HashMap<Destination, Toward, foldhash::fast::RandomState>,
    /// Every rest in the order in which they end.
    rests: VecDeque<(u64, Destination, u16)>,
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
            reserve: Reserve::new(range.len(), 1),
            range,
            reserved: HashMap::default(),
            toward: HashMap::default(),
            rests: VecDeque::new(),
            rng,
        }
    }

    /// How many ports the range has.
    pub fn size(&self) -> usize {
        self.range.len()
    }

    /// Sets among how many VMs the ports are shared.
    pub fn share_among(&mut self, vms: usize) {
        self.reserve = Reserve::new(self.range.len(), vms);
    }

    /// Sets the ports that sockets of the host hold; they are not picked any more.
    pub fn set_reserved(&mut self, ports: impl IntoIterator<Item = (Protocol, u16)>) {
        self.reserved = ports.into_iter().map(|p| (p, ())).collect();
    }

    /// Picks a free port toward a destination for a VM and marks it busy; `None` when there is
    /// none, or the VM has had its share. `timestamps`: whether it is for a SYN that carries them.
    pub fn pick(&mut self, to: Destination, vm: u32, timestamps: bool) -> Option<u16> {
        let size = self.range.len();
        if size == 0 {
            return None;
        }
        let first = *self.range.start();
        let toward = self.toward.entry(to).or_insert_with(Toward::new);
        let mut start = random_below(&mut self.rng, size);
        let free = size - toward.busy.len();
        let may = self.reserve.allows(free, || toward.busy.held_by(vm));
        // Reserved ports are few; each costs one more try.
        let tries = if may {
            1 + self.reserved.len().min(64)
        } else {
            0
        };
        for _ in 0..tries {
            let Some(offset) = toward.busy.first_free_from(start, size) else {
                break;
            };
            let port = first + offset as u16;
            if self.reserved.is_empty() || !self.reserved.contains_key(&(to.protocol, port)) {
                toward.busy.set(offset, vm, size);
                return Some(port);
            }
            start = (offset + 1) % size;
        }
        if toward.busy.len() == 0 {
            self.toward.remove(&to);
            return None;
        }
        if !timestamps {
            return None;
        }
        // A resting one of the same VM; the look is bounded, the oldest are the likeliest.
        let at = toward
            .resting
            .iter()
            .take(64)
            .position(|(_, had)| *had == vm)?;
        toward.resting.remove(at).map(|(port, _)| port)
    }

    /// Marks a port busy that a VM's flow has already (adoption).
    pub fn mark(&mut self, to: Destination, port: u16, vm: u32) {
        if let Some(offset) = self.offset(port) {
            let size = self.range.len();
            self.toward
                .entry(to)
                .or_insert_with(Toward::new)
                .busy
                .set(offset, vm, size);
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
            Freed::Rests | Freed::Taken => {
                let toward = entry.get_mut();
                let holder = if how == Freed::Taken { NOBODY } else { vm };
                if holder != vm {
                    toward.busy.hand_over(offset, vm, holder);
                }
                toward.resting.push_back((port, holder));
                self.rests.push_back((now_ns + PORT_REST_NS, to, port));
                if self.rests.len() > MAX_RESTING {
                    self.wake_first();
                }
            }
        }
    }

    /// Frees the ports whose rest is over.
    pub fn wake(&mut self, now_ns: u64) {
        while self
            .rests
            .front()
            .is_some_and(|(ready_ns, ..)| *ready_ns <= now_ns)
        {
            self.wake_first();
        }
    }

    fn wake_first(&mut self) {
        let Some((_, to, port)) = self.rests.pop_front() else {
            return;
        };
        let Some(offset) = self.offset(port) else {
            return;
        };
        let Entry::Occupied(mut entry) = self.toward.entry(to) else {
            return;
        };
        let toward = entry.get_mut();
        // Not there any more when it was picked early.
        if let Some(at) = toward.resting.iter().position(|(p, _)| *p == port) {
            if let Some((_, vm)) = toward.resting.remove(at) {
                toward.busy.clear(offset, vm);
            }
            remove_if_empty(entry);
        }
    }

    /// Busy ports toward a destination, resting ones included.
    pub fn busy(&self, to: &Destination) -> usize {
        self.toward.get(to).map_or(0, |t| t.busy.len())
    }

    /// Whether ports toward a destination run short, so that closed flows should be ended early.
    pub fn is_pressed(&self, to: &Destination) -> bool {
        self.busy(to) * 2 > self.range.len()
    }

    /// Up to `most` ports of the range from a random start, for a search among a destination's
    /// flows.
    pub fn sample(&mut self, most: usize) -> impl Iterator<Item = u16> + use<> {
        let (first, size) = (*self.range.start(), self.range.len());
        let start = random_below(&mut self.rng, size.max(1));
        (0..most.min(size)).map(move |i| first + ((start + i) % size) as u16)
    }

    /// Destinations with a busy port, and resting ports.
    pub fn sizes(&self) -> (usize, usize) {
        (self.toward.len(), self.rests.len())
    }

    fn offset(&self, port: u16) -> Option<usize> {
        self.range
            .contains(&port)
            .then(|| usize::from(port - self.range.start()))
    }
}

impl Toward {
    fn new() -> Self {
        Self {
            busy: Occupancy::default(),
            resting: VecDeque::new(),
        }
    }
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
