//! The pool of slots: allocated by chunk, reused after a rest.
//!
//! A chunk is claimed before the last quarter of the process's slots is used, so that a lack of
//! chunks is known early, and when all free slots still rest. Once no chunk can be claimed, that
//! quarter is a [`Reserve`] among the process's VMs. Between processes the table is first come,
//! first served, except for a quarter that is kept for those that have little
//! ([`may_claim_chunk`]).
//!
//! Slots are allocated from the first chunk that has one, so that others become empty. A chunk all
//! of whose slots are ready is released when half of the remaining slots would still be free. A
//! chunk belongs to its process until a single atomic exchange, and each slot's generation stays in
//! the slot: a process that dies before leaves an empty chunk, which the next start of any process
//! releases.
//!
//! [`may_claim_chunk`]: slipgate_abi::maps::may_claim_chunk
use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::atomic::Ordering::Relaxed,
};

use slipgate_abi::{SlotIndex, Verdict, maps::SLOTS_PER_CHUNK, timeout::SLOT_REST_NS};

use crate::{datapath::Tables, quota::Reserve};

/// Slots in this process's chunks that hold no flow.
#[derive(Debug, Default)]
pub(super) struct SlotPool {
    ready: Ready,
    /// Resting slots, with the time at which each is ready, ns.
    resting: VecDeque<(u64, SlotIndex)>,
    /// Number of slots in this process's chunks.
    owned: usize,
    /// Time of the last attempt to claim a chunk if it failed, ns.
    none_left_at_ns: Option<u64>,
}

/// Slots that may be used, by chunk. The last slot of a chunk is taken first: its cache lines are
/// the warmest.
#[derive(Debug, Default)]
struct Ready {
    by_chunk: BTreeMap<u32, Vec<SlotIndex>>,
    len: usize,
}

impl Ready {
    fn push(&mut self, slot: SlotIndex) {
        let chunk = self.by_chunk.entry(slot.chunk()).or_default();
        chunk.push(slot);
        self.len += 1;
    }

    /// Adds slots, all of one chunk.
    fn add(&mut self, slots: Vec<SlotIndex>) {
        let Some(chunk) = slots.first().map(|slot| slot.chunk()) else {
            return;
        };
        debug_assert!(slots.iter().all(|slot| slot.chunk() == chunk));
        self.len += slots.len();
        self.by_chunk.entry(chunk).or_default().extend(slots);
    }

    fn pop(&mut self) -> Option<SlotIndex> {
        let mut first = self.by_chunk.first_entry()?;
        let slot = first.get_mut().pop();
        if first.get().is_empty() {
            first.remove();
        }
        self.len -= usize::from(slot.is_some());
        slot
    }

    /// Removes the last chunk all of whose slots are ready. Returns its number.
    fn take_whole(&mut self) -> Option<u32> {
        let mut chunks = self.by_chunk.iter().rev();
        let (chunk, _) = chunks.find(|(_, slots)| slots.len() == SLOTS_PER_CHUNK as usize)?;
        let chunk = *chunk;
        self.by_chunk.remove(&chunk);
        self.len -= SLOTS_PER_CHUNK as usize;
        Some(chunk)
    }
}

/// Time for which no further chunk is claimed after a failure, ns: other processes release theirs.
const CLAIM_AGAIN_NS: u64 = 1_000_000_000;

impl SlotPool {
    /// Adds a chunk of this process. Its slots that hold no flow are ready if they have rested or
    /// were never used. Otherwise they rest first: a program may still read them.
    pub(super) fn add_chunk(
        &mut self,
        tables: &impl Tables,
        chunk: Range<u32>,
        has_rested: bool,
        now_ns: u64,
    ) {
        self.owned += chunk.len();
        let mut ready = Vec::with_capacity(chunk.len());
        for slot in chunk.rev().map(SlotIndex::new) {
            let live = tables.slot(slot);
            if live.verdict().load(Relaxed) != Verdict::Free as u32 {
                continue;
            }
            if has_rested || live.generation().load(Relaxed) == 0 {
                ready.push(slot);
            } else {
                self.release(slot, now_ns);
            }
        }
        self.ready.add(ready);
    }

    /// Takes a slot for a VM that has `held` slots, one of `vms` VMs. Returns `None` when none is
    /// ready, or the VM has used up its share.
    pub(super) fn take(
        &mut self,
        tables: &mut impl Tables,
        (held, vms): (usize, usize),
        now_ns: u64,
    ) -> Option<SlotIndex> {
        if self.ready.len == 0 {
            self.wake(now_ns);
        }
        // Resting slots are no help now, however many there are.
        let wanted = self.ready.len == 0 || self.free() <= self.owned / 4;
        if wanted && self.may_claim(now_ns) {
            match tables.claim_chunk(now_ns) {
                Some((chunk, has_rested)) => {
                    self.none_left_at_ns = None;
                    self.add_chunk(tables, chunk, has_rested, now_ns);
                }
                None => self.none_left_at_ns = Some(now_ns),
            }
        }
        let shared = self.none_left_at_ns.is_some();
        if shared && !Reserve::new(self.owned, vms).allows(self.free(), || held) {
            return None;
        }
        self.ready.pop()
    }

    /// Releases a chunk that is not needed, if there is one. Returns its number.
    pub(super) fn give_back(&mut self, tables: &mut impl Tables, now_ns: u64) -> Option<u32> {
        self.wake(now_ns);
        let chunk = SLOTS_PER_CHUNK as usize;
        let (free, owned) = (
            self.free().checked_sub(chunk)?,
            self.owned.checked_sub(chunk)?,
        );
        // Half is twice the level at which a chunk is claimed: no chunk is released and claimed in
        // turns.
        if !self.has_spare() || free <= owned / 2 {
            return None;
        }
        let chunk = self.ready.take_whole()?;
        self.owned = owned;
        tables.release_chunk(SlotIndex::of_chunk(chunk), now_ns);
        Some(chunk)
    }

    /// Whether there is more than the one chunk that stays.
    pub(super) fn has_spare(&self) -> bool {
        self.owned > SLOTS_PER_CHUNK as usize
    }

    fn free(&self) -> usize {
        self.ready.len + self.resting.len()
    }

    fn may_claim(&self, now_ns: u64) -> bool {
        self.none_left_at_ns
            .is_none_or(|at| now_ns >= at + CLAIM_AGAIN_NS)
    }

    /// Returns a slot that was taken and not filled.
    pub(super) fn put_back(&mut self, slot: SlotIndex) {
        self.ready.push(slot);
    }

    /// Lets a slot rest whose flow is gone.
    pub(super) fn release(&mut self, slot: SlotIndex, now_ns: u64) {
        self.resting.push_back((now_ns + SLOT_REST_NS, slot));
    }

    /// Makes slots ready that have rested.
    fn wake(&mut self, now_ns: u64) {
        while let Some((_, slot)) = self
            .resting
            .pop_front_if(|(ready_ns, _)| *ready_ns <= now_ns)
        {
            self.ready.push(slot);
        }
    }

    /// Returns how many more slots should be on their way back: the reserve and an eighth of the
    /// slots when no chunk is left to claim, otherwise 0.
    pub(super) fn shortage(&self, vms: usize) -> usize {
        if self.none_left_at_ns.is_none() {
            return 0;
        }
        let wanted = self.owned / 8 + Reserve::new(self.owned, vms).size();
        wanted.saturating_sub(self.free())
    }
}

#[cfg(test)]
#[path = "slots_test.rs"]
mod tests;
