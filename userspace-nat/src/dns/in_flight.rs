//! Questions in flight: the guests that wait for each, and the VM whose share it counts in.
use std::collections::{BTreeSet, HashMap};

use slipgate_abi::VmId;

use super::{
    exchange::{Exchange, Progress, Surroundings},
    proxy::Origin,
    reply::Asked,
    upstream,
};
use crate::{
    poll::{Subsystem, Token},
    stats::VmStats,
};

/// Bits of a token's key that are an index; the rest are a generation.
const INDEX_BITS: u32 = 12;
/// Most exchanges at once.
pub(super) const MAX_EXCHANGES: usize = 1 << INDEX_BITS;

/// All exchanges in flight, with their waiters and deadlines.
#[derive(Debug)]
pub(super) struct InFlight {
    slots: Vec<Slot>,
    free: Vec<u16>,
    by_question: HashMap<Box<[u8]>, u16>,
    deadlines: BTreeSet<(u64, u16)>,
    loads: HashMap<VmId, Load>,
}

/// Place for one exchange. The generation distinguishes events of earlier ones.
#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    live: Option<Live>,
}

/// An exchange, and the guests' questions that wait for it.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) exchange: Exchange,
    /// VM in whose share the exchange counts: that of the first waiter.
    pub(super) vm: VmId,
    since_ns: u64,
    pub(super) waiting: Vec<Waiter>,
}

/// A guest's question that has no reply yet.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) vm: VmId,
    /// Whether the VM has IPv6 that leads somewhere.
    pub(super) has_ipv6: bool,
    pub(super) stats: VmStats,
    pub(super) origin: Origin,
    pub(super) asked: Asked,
    /// The message, of a question by UDP: another engine may have to ask it.
    pub(super) message: Box<[u8]>,
    pub(super) since_ns: u64,
}

impl Waiter {
    /// Whether the other is the same question, sent again.
    pub(super) fn is_same_as(&self, other: &Self) -> bool {
        (self.vm, self.origin, self.asked.id) == (other.vm, other.origin, other.asked.id)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    waiting: usize,
    exchanges: usize,
}

impl InFlight {
    /// Empty, with room for this many exchanges.
    pub(super) fn new(exchanges: usize) -> Self {
        let exchanges = exchanges.min(MAX_EXCHANGES);
        Self {
            slots: (0..exchanges).map(|_| Slot::default()).collect(),
            free: (0..exchanges as u16).rev().collect(),
            by_question: HashMap::new(),
            deadlines: BTreeSet::new(),
            loads: HashMap::new(),
        }
    }

    /// Number of exchanges in flight.
    pub(super) fn len(&self) -> usize {
        self.by_question.len()
    }

    /// Number of a VM's questions without a reply.
    pub(super) fn waiting_of(&self, vm: VmId) -> usize {
        self.loads.get(&vm).map_or(0, |load| load.waiting)
    }

    /// The exchange for this question and its waiters; `None` if it is not in flight.
    pub(super) fn find(&self, key: &[u8]) -> Option<(u16, &[Waiter])> {
        let index = *self.by_question.get(key)?;
        let live = self.slots[usize::from(index)].live.as_ref()?;
        Some((index, &live.waiting))
    }

    /// Index of the exchange that a token's key names; `None` if it has ended.
    pub(super) fn by_token(&self, key: u32) -> Option<u16> {
        let index = key & (MAX_EXCHANGES as u32 - 1);
        let slot = self.slots.get(index as usize)?;
        (slot.generation == key >> INDEX_BITS).then_some(index as u16)
    }

    /// The earliest deadline, ns, and the exchange it belongs to.
    pub(super) fn first_deadline(&self) -> Option<(u64, u16)> {
        self.deadlines.first().copied()
    }

    /// Adds a waiter to an exchange.
    pub(super) fn join(&mut self, index: u16, waiter: Waiter) {
        if let Some(live) = &mut self.slots[usize::from(index)].live {
            self.loads.entry(waiter.vm).or_default().waiting += 1;
            live.waiting.push(waiter);
        }
    }

    /// Adds an exchange and returns its index.
    ///
    /// # Errors
    /// Returns the waiter if there is no room.
    pub(super) fn begin(
        &mut self,
        key: &[u8],
        (waiter, ways): (Waiter, Option<upstream::Known>),
        now_ns: u64,
    ) -> Result<u16, Box<Waiter>> {
        let Some(index) = self.free.pop() else {
            return Err(Box::new(waiter));
        };
        let slot = &mut self.slots[usize::from(index)];
        let token = Token {
            subsystem: Subsystem::Dns,
            key: slot.generation << INDEX_BITS | u32::from(index),
        };
        let exchange = Exchange::new(key, token, ways, now_ns);
        self.deadlines.insert((exchange.next_ns(), index));
        let load = self.loads.entry(waiter.vm).or_default();
        load.waiting += 1;
        load.exchanges += 1;
        let vm = waiter.vm;
        slot.live = Some(Live {
            exchange,
            vm,
            since_ns: now_ns,
            waiting: vec![waiter],
        });
        self.by_question.insert(key.into(), index);
        Ok(index)
    }

    /// Runs a step of an exchange, and updates its deadline.
    pub(super) fn step(
        &mut self,
        index: u16,
        with: &mut Surroundings<'_>,
        step: fn(&mut Exchange, &mut Surroundings<'_>) -> Progress,
    ) -> Progress {
        let Some(live) = &mut self.slots[usize::from(index)].live else {
            return Progress::Waiting;
        };
        let before_ns = live.exchange.next_ns();
        let progress = step(&mut live.exchange, with);
        let next_ns = live.exchange.next_ns();
        if next_ns != before_ns {
            self.deadlines.remove(&(before_ns, index));
            self.deadlines.insert((next_ns, index));
        }
        progress
    }

    /// Removes an exchange, with its sockets.
    pub(super) fn end(&mut self, index: u16) -> Option<Live> {
        let slot = &mut self.slots[usize::from(index)];
        let live = slot.live.take()?;
        slot.generation = (slot.generation + 1) & (u32::MAX >> INDEX_BITS);
        self.free.push(index);
        self.by_question.remove(live.exchange.key().0);
        self.deadlines.remove(&(live.exchange.next_ns(), index));
        for waiter in &live.waiting {
            self.unload(waiter.vm, |load| &mut load.waiting);
        }
        self.unload(live.vm, |load| &mut load.exchanges);
        Some(live)
    }

    fn unload(&mut self, vm: VmId, of: fn(&mut Load) -> &mut usize) {
        if let Some(load) = self.loads.get_mut(&vm) {
            let count = of(load);
            *count = count.saturating_sub(1);
            if load.waiting == 0 && load.exchanges == 0 {
                self.loads.remove(&vm);
            }
        }
    }

    /// If there is no room, ends the oldest exchange of the VM that holds most, unless `vm` would
    /// then hold more than that VM. An exchange that other VMs wait for too is kept.
    pub(super) fn make_room(&mut self, vm: VmId) -> Option<Live> {
        if !self.free.is_empty() {
            return None;
        }
        let held = self.loads.get(&vm).map_or(0, |load| load.exchanges);
        let (&most, load) = self.loads.iter().max_by_key(|(_, load)| load.exchanges)?;
        if load.exchanges <= held + 1 {
            return None;
        }
        let oldest = (0..self.slots.len() as u16)
            .filter_map(|i| Some((i, self.slots[usize::from(i)].live.as_ref()?)))
            .filter(|(_, l)| l.vm == most && l.waiting.iter().all(|w| w.vm == most))
            .min_by_key(|(_, l)| l.since_ns)
            .map(|(i, _)| i)?;
        self.end(oldest)
    }

    /// The questions without a reply.
    pub(super) fn waiters(&self) -> impl Iterator<Item = &Waiter> {
        let live = self.slots.iter().filter_map(|slot| slot.live.as_ref());
        live.flat_map(|live| &live.waiting)
    }

    /// VM in whose share a question counts, and whose policy it follows.
    pub(super) fn vm_of(&self, index: u16) -> Option<VmId> {
        let slot = self.slots.get(usize::from(index))?;
        slot.live.as_ref().map(|live| live.vm)
    }

    /// Removes a VM's waiters. An exchange that others wait for continues, in the share of one of
    /// them.
    pub(super) fn forget(&mut self, vm: VmId) {
        for index in 0..self.slots.len() as u16 {
            let Some(live) = &mut self.slots[usize::from(index)].live else {
                continue;
            };
            live.waiting.retain(|w| w.vm != vm);
            match live.waiting.first().map(|w| w.vm) {
                None => drop(self.end(index)),
                Some(heir) if live.vm == vm => {
                    live.vm = heir;
                    self.loads.entry(heir).or_default().exchanges += 1;
                }
                Some(_) => {}
            }
        }
        self.loads.remove(&vm);
    }

    /// Whether no exchange, waiter or deadline is left; for tests.
    #[cfg(test)]
    pub(super) fn is_clean(&self) -> bool {
        self.loads.is_empty() && self.deadlines.is_empty() && self.by_question.is_empty()
    }
}
