//! Fairness within a batch: VMs take turns, and so do a guest and the world that sends to it. So a VM's
//! single SYN waits for two frames of each VM at most, however many of theirs came before it. Frames of
//! one sender keep their order.
use crate::port::{BATCH, Batch, Frame};

/// The order in which a batch is handled.
#[derive(Debug, Default)]
pub(super) struct Order {
    places: Vec<u8>,
    /// (sender: VM's row, whether from the world; frames so far) of the batch at hand.
    counts: Vec<((u16, bool), u8)>,
    ranks: Vec<u8>,
}

const _: () = assert!(BATCH <= u8::MAX as usize);

impl Order {
    /// Arranges a batch.
    pub(super) fn arrange(&mut self, batch: &Batch) {
        self.places.clear();
        self.counts.clear();
        self.ranks.clear();
        for index in 0..batch.len() {
            // What can't be parsed is dropped: its place does not matter.
            let sender = Frame::parse(batch.frame(index))
                .map_or((0, false), |f| (f.header.vm_row, f.is_from_world()));
            let rank = match self.counts.iter_mut().find(|(s, _)| *s == sender) {
                Some((_, count)) => {
                    *count += 1;
                    *count
                }
                None => {
                    self.counts.push((sender, 0));
                    0
                }
            };
            self.ranks.push(rank);
            self.places.push(index as u8);
        }
        if self.counts.len() > 1 {
            let ranks = &self.ranks;
            self.places.sort_by_key(|place| ranks[usize::from(*place)]);
        }
    }

    /// The frame to be handled at this place.
    pub(super) fn at(&self, place: usize) -> usize {
        self.places.get(place).map_or(place, |p| usize::from(*p))
    }
}
