//! Slots to give out: ours by chunk, free after a rest.
//!
//! A chunk is claimed before the last quarter of ours is used, so that it is known early when there
//! is none left, and when all that are free still rest. From when none is left, that quarter is a
//! [`Reserve`] among our VMs. What processes have of the table they have by who came first.
use std::{collections::VecDeque, ops::Range, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{Verdict, timeout::SLOT_REST_NS};

use crate::{datapath::Tables, quota::Reserve};

/// The slots of our chunks that hold no flow.
#[derive(Debug)]
pub(super) struct SlotPool {
    /// Ready. The last is taken first: its cache lines are the warmest.
    ready: Vec<u32>,
    /// Resting, with the time at which they are ready.
    resting: VecDeque<(u64, u32)>,
    /// Slots of our chunks.
    owned: usize,
    /// The last attempt to claim a chunk found none, at this time.
    none_left_at_ns: Option<u64>,
}

/// How long to believe that there is no free chunk, ns: other processes give theirs back.
const CLAIM_AGAIN_NS: u64 = 1_000_000_000;

impl SlotPool {
    pub(super) fn new() -> Self {
        Self {
            ready: Vec::new(),
            resting: VecDeque::new(),
            owned: 0,
            none_left_at_ns: None,
        }
    }

    /// Adds a chunk that is ours. Its slots that hold no flow are ready if they were never used,
    /// and rest first otherwise: a program may still look at them.
    pub(super) fn add_chunk(&mut self, tables: &impl Tables, chunk: Range<u32>, now_ns: u64) {
        self.owned += chunk.len();
        for slot in chunk.rev() {
            let live = tables.slot(slot);
            if live.verdict().load(Relaxed) != Verdict::Free as u32 {
                continue;
            }
            if live.generation().load(Relaxed) == 0 {
                self.ready.push(slot);
            } else {
                self.release(slot, now_ns);
            }
        }
    }

    /// Takes a slot for a VM that has `held`, one of so many; `None` when there is none, or the VM
    /// has had its share.
    pub(super) fn take(
        &mut self,
        tables: &mut impl Tables,
        (held, vms): (usize, usize),
        now_ns: u64,
    ) -> Option<u32> {
        if self.ready.is_empty() {
            self.wake(now_ns);
        }
        // Resting ones are no help now, however many there are.
        let wanted = self.ready.is_empty() || self.free() <= self.owned / 4;
        if wanted && self.may_claim(now_ns) {
            match tables.claim_chunk() {
                Some(chunk) => {
                    self.none_left_at_ns = None;
                    self.add_chunk(tables, chunk, now_ns);
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

    fn free(&self) -> usize {
        self.ready.len() + self.resting.len()
    }

    fn may_claim(&self, now_ns: u64) -> bool {
        self.none_left_at_ns
            .is_none_or(|at| now_ns >= at + CLAIM_AGAIN_NS)
    }

    /// Gives back a slot that was taken and not filled.
    pub(super) fn put_back(&mut self, slot: u32) {
        self.ready.push(slot);
    }

    /// Lets a slot rest whose flow is gone.
    pub(super) fn release(&mut self, slot: u32, now_ns: u64) {
        self.resting.push_back((now_ns + SLOT_REST_NS, slot));
    }

    /// Makes ready what has rested.
    fn wake(&mut self, now_ns: u64) {
        while let Some((_, slot)) = self
            .resting
            .pop_front_if(|(ready_ns, _)| *ready_ns <= now_ns)
        {
            self.ready.push(slot);
        }
    }

    /// How many more slots should be on their way back: the reserve and an eighth of ours when no
    /// chunk is left to claim, else none.
    pub(super) fn shortage(&self, vms: usize) -> usize {
        if self.none_left_at_ns.is_none() {
            return 0;
        }
        let wanted = self.owned / 8 + Reserve::new(self.owned, vms).size();
        wanted.saturating_sub(self.free())
    }
}
