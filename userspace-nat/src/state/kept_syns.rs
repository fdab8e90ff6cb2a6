//! SYNs that may have to be sent again, because their server may have a former connection of the same
//! tuple in TIME-WAIT; see [`crate::packet_path`]'s `challenged`.
use std::collections::{BTreeSet, VecDeque};

use hashbrown::{HashMap, hash_map::Entry};
use slipgate_abi::{SlotIndex, VmRow};

use crate::port::L3_AT;

/// Most SYNs that are kept. Only flows have one that got a port during its rest.
const MOST: usize = 4_096;
/// Longest frame that is kept, bytes: headers of 20, 40 or 60 octets, and no payload.
const LONGEST: usize = L3_AT + 120;

/// Frames of opening SYNs by their flow, and in the order in which each VM's were kept. At the bound the
/// oldest of the VM that has most is forgotten, or the VM's own where none has more: so each VM has an
/// equal share of the store for certain, and more of it while others leave it.
#[derive(Debug, Default)]
pub(crate) struct KeptSyns {
    frames: HashMap<SlotIndex, (u32, Box<[u8]>)>,
    /// Slot and generation of each, by VM; none is empty. Those that were taken out of `frames` are
    /// still here.
    orders: HashMap<VmRow, VecDeque<(SlotIndex, u32)>>,
    /// Length of each order.
    lengths: BTreeSet<(usize, VmRow)>,
    /// Sum of the lengths.
    len: usize,
}

impl KeptSyns {
    /// Keeps the frame of the SYN that opens a flow of the VM in `row`, as it goes to the port. One with
    /// payload is not kept: its guest sends it again.
    pub(crate) fn keep(&mut self, row: VmRow, slot: SlotIndex, generation: u32, frame: &[u8]) {
        if frame.len() > LONGEST {
            return;
        }
        if self.len >= MOST
            && let Some(&(most, of)) = self.lengths.last()
        {
            let own = self.orders.get(&row).map_or(0, VecDeque::len);
            self.forget_oldest(if own == most { row } else { of });
        }
        self.frames.insert(slot, (generation, frame.into()));
        let order = self.orders.entry(row).or_default();
        self.lengths.remove(&(order.len(), row));
        order.push_back((slot, generation));
        self.lengths.insert((order.len(), row));
        self.len += 1;
    }

    /// Takes out the frame of a flow's SYN, so that it is sent again once at most.
    pub(crate) fn take(&mut self, slot: SlotIndex, generation: u32) -> Option<Box<[u8]>> {
        let (of, frame) = self.frames.remove(&slot)?;
        (of == generation).then_some(frame)
    }

    /// Forgets the SYNs of a VM that is gone.
    pub(crate) fn forget(&mut self, row: VmRow) {
        while self.orders.contains_key(&row) {
            self.forget_oldest(row);
        }
    }

    fn forget_oldest(&mut self, row: VmRow) {
        let Some(order) = self.orders.get_mut(&row) else {
            return;
        };
        self.lengths.remove(&(order.len(), row));
        if let Some((slot, generation)) = order.pop_front() {
            self.len -= 1;
            // A later flow of the slot may have its own.
            if let Entry::Occupied(kept) = self.frames.entry(slot)
                && kept.get().0 == generation
            {
                kept.remove();
            }
        }
        match order.len() {
            0 => drop(self.orders.remove(&row)),
            left => drop(self.lengths.insert((left, row))),
        }
    }
}

#[cfg(test)]
#[path = "kept_syns_test.rs"]
mod tests;
