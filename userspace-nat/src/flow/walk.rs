//! A walk over all slots, some in each turn of the loop.
//!
//! # Theory of operation
//! What may concern every flow is done by steps, so that a first packet that arrives meanwhile waits
//! for one turn's steps at most, however many flows there are. Passing a slot, or a chunk that is
//! not in use, costs one step; what is done with a flow has its price with the user of the walk, who
//! subtracts it from the turn's steps.
//!
//! A walk that is started again while it is under way continues at its position, until it has passed
//! every slot since.
use slipgate_abi::{SlotIndex, maps::SLOTS_PER_CHUNK};

use super::Flows;

/// Most steps in a turn: 0.2 to 0.5 ms, by what is done with the flows.
pub(crate) const STEPS_PER_TURN: u32 = 16_384;

/// A position among the slots, and how many are left.
#[derive(Debug, Default)]
pub(crate) struct SlotWalk {
    /// Index of the next slot.
    cursor: u32,
    /// Number of slots still to be passed.
    left: u32,
}

impl SlotWalk {
    /// Starts the walk, or has the one under way pass all slots again.
    pub(crate) fn start(&mut self, flows: &Flows) {
        self.left = flows.chunks() as u32 * SLOTS_PER_CHUNK;
    }

    /// Whether slots are left.
    pub(crate) fn is_under_way(&self) -> bool {
        self.left > 0
    }

    /// Returns the next slot in use; `None` when no step of this turn, or no slot, is left.
    pub(crate) fn next(&mut self, flows: &Flows, steps: &mut u32) -> Option<SlotIndex> {
        let slots = flows.chunks() as u32 * SLOTS_PER_CHUNK;
        while self.left > 0 && *steps > 0 {
            let slot = SlotIndex::new(self.cursor);
            let passed = match flows.table.chunk(slot.chunk() as usize) {
                Some(_) => 1,
                None => SLOTS_PER_CHUNK - slot.position() as u32,
            };
            *steps -= 1;
            self.left = self.left.saturating_sub(passed);
            self.cursor = (self.cursor + passed) % slots;
            if flows.entry(slot).is_some() {
                return Some(slot);
            }
        }
        None
    }
}

#[cfg(test)]
#[path = "walk_test.rs"]
mod tests;
