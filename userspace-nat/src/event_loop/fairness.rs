//! Fairness within a batch: VMs take turns by the number of frames that theirs lead to, and so do a
//! guest and the world that sends to it. So a VM's single SYN waits for two frames of each VM at
//! most, however many precede it. A sender whose frames are sent on in many pieces has
//! correspondingly fewer turns. Frames of one sender keep their order.
use crate::port::{BATCH, Batch, Frame};
use slipgate_abi::VmRow;

/// The order in which a batch is handled.
#[derive(Debug, Default)]
pub(crate) struct Order {
    senders: Vec<Share>,
    /// For each frame, the next one of its sender; [`NONE`] for the last.
    following: Vec<u8>,
    /// Index in `senders` of the sender whose frame was returned last.
    at: usize,
}

/// A sender's frames in the present batch.
#[derive(Clone, Copy, Debug)]
struct Share {
    /// Row of the VM, and whether the world is the sender.
    sender: (VmRow, bool),
    next: u8,
    last: u8,
    /// Number of frames that the handled ones led to.
    cost: usize,
}

const NONE: u8 = u8::MAX;

const _: () = assert!(BATCH <= NONE as usize);

impl Order {
    /// Takes a batch of which no frame is handled yet.
    pub(crate) fn arrange(&mut self, batch: &Batch) {
        self.senders.clear();
        self.following.clear();
        for index in 0..batch.len() {
            // A frame that can't be parsed is dropped: its position does not matter.
            let frame = Frame::parse(batch.frame(index));
            let sender = frame.map_or((VmRow::NOBODY, false), |f| {
                (f.header.row(), f.is_from_world())
            });
            let index = index as u8;
            self.following.push(NONE);
            match self.senders.iter_mut().find(|share| share.sender == sender) {
                Some(share) => {
                    self.following[usize::from(share.last)] = index;
                    share.last = index;
                }
                None => self.senders.push(Share {
                    sender,
                    next: index,
                    last: index,
                    cost: 0,
                }),
            }
        }
    }

    /// Whether every frame was returned.
    pub(crate) fn is_done(&self) -> bool {
        self.senders.iter().all(|share| share.next == NONE)
    }

    /// Returns the index of the next frame: of the sender with the least cost so far.
    pub(crate) fn next(&mut self) -> Option<usize> {
        let waiting = self.senders.iter().enumerate();
        let waiting = waiting.filter(|(_, share)| share.next != NONE);
        let (at, _) = waiting.min_by_key(|(_, share)| share.cost)?;
        self.at = at;
        let share = &mut self.senders[at];
        let index = usize::from(share.next);
        share.next = self.following[index];
        Some(index)
    }

    /// Charges the sender of the last returned frame with the number of frames that it led to.
    pub(crate) fn charge(&mut self, cost: usize) {
        if let Some(share) = self.senders.get_mut(self.at) {
            share.cost += cost;
        }
    }
}
