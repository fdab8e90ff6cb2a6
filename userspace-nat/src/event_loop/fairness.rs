//! Fairness among senders: whose frame is handled next.
//!
//! The port's queue is one for all VMs, and a VM's flood fills it as far as its credits go. So
//! frames are read from it faster than they are handled, and wait here, each sender's in their
//! order. The sender whose frames have cost least is served next; the cost of a frame is the number
//! of frames that it led to, or more if it opened a flow. A sender that had no frame waiting begins with the cost of the one that
//! is served, so it neither makes up for its silence nor waits for those who were busy (start-time
//! fair queueing, Goyal et al., SIGCOMM 1996). A VM's single SYN thus waits for two frames of each
//! VM at most, however many precede it. A guest and the world that sends to it are two senders.
use std::{cmp::Reverse, collections::BinaryHeap};

use hashbrown::HashMap;
use slipgate_abi::VmRow;

use crate::port::{BATCH, Batch, Frame, KeptFrame};

/// Most frames that wait. Beyond it they wait in the port's queue, where they are in one order.
pub(super) const MOST_WAITING: u16 = 1_024;

/// Row of the VM, and whether the world is the sender.
type Sender = (VmRow, bool);

/// Frames that were read and are not handled yet. Their bytes are in the [`Batch`].
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    frames: Vec<Waits>,
    /// Indices in `frames` that are not in use.
    free: Vec<u16>,
    senders: HashMap<Sender, Share, foldhash::fast::RandomState>,
    /// Senders with the cost of their frames so far and a number that counts up, by which those of
    /// equal cost take turns.
    turns: BinaryHeap<Reverse<(u64, u64, Sender)>>,
    number: u64,
    /// Cost of the sender that was served last, before that frame.
    cost: u64,
}

/// A frame that waits.
#[derive(Clone, Copy, Debug)]
struct Waits {
    frame: KeptFrame,
    /// The next one of its sender.
    next: Option<u16>,
}

/// A sender's frames; there is at least one.
#[derive(Clone, Copy, Debug)]
struct Share {
    first: u16,
    last: u16,
}

/// A frame whose turn it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// The frame.
    pub(super) frame: KeptFrame,
    index: u16,
    sender: Sender,
    cost: u64,
    /// Whether no other frame of its sender waits.
    pub(super) is_last: bool,
}

impl Waiting {
    /// Whether no frame waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Whether all frames of another batch may wait.
    pub(crate) fn has_room(&self) -> bool {
        self.frames.len() - self.free.len() + BATCH <= usize::from(MOST_WAITING)
    }

    /// Takes all frames of a batch, which keeps them.
    pub(crate) fn take(&mut self, batch: &mut Batch) {
        let mut senders = [(VmRow::NOBODY, false); BATCH];
        for (at, sender) in senders.iter_mut().enumerate().take(batch.len()) {
            // A frame that can't be parsed is dropped: its position does not matter.
            if let Some(frame) = Frame::parse(batch.frame(at)) {
                *sender = (frame.header.row(), frame.is_from_world());
            }
        }
        for (frame, sender) in batch.keep().zip(senders) {
            let index = self.wait(frame);
            if let Some(share) = self.senders.get_mut(&sender) {
                let last = std::mem::replace(&mut share.last, index);
                self.frames[usize::from(last)].next = Some(index);
                continue;
            }
            let (first, last) = (index, index);
            self.senders.insert(sender, Share { first, last });
            self.line_up(self.cost, sender);
        }
    }

    fn wait(&mut self, frame: KeptFrame) -> u16 {
        let waits = Waits { frame, next: None };
        if let Some(index) = self.free.pop() {
            self.frames[usize::from(index)] = waits;
            return index;
        }
        self.frames.push(waits);
        (self.frames.len() - 1) as u16
    }

    fn line_up(&mut self, cost: u64, sender: Sender) {
        self.number += 1;
        self.turns.push(Reverse((cost, self.number, sender)));
    }

    /// Returns the next frame. [`Waiting::done`] is to be called with it.
    pub(crate) fn next(&mut self) -> Option<Turn> {
        let Reverse((cost, _, sender)) = self.turns.pop()?;
        self.cost = cost;
        let index = self.senders.get(&sender)?.first;
        let Waits { frame, next } = self.frames[usize::from(index)];
        Some(Turn {
            frame,
            is_last: next.is_none(),
            index,
            sender,
            cost,
        })
    }

    /// Removes the frame, which led to `cost` frames.
    pub(crate) fn done(&mut self, turn: Turn, cost: usize) {
        let Turn { index, sender, .. } = turn;
        self.free.push(index);
        let next = self.frames[usize::from(index)].next;
        let share = self.senders.get_mut(&sender);
        match share.zip(next) {
            Some((share, next)) => {
                share.first = next;
                self.line_up(turn.cost + cost as u64, sender);
            }
            None => {
                self.senders.remove(&sender);
            }
        }
    }
}

#[cfg(test)]
#[path = "fairness_test.rs"]
mod tests;
