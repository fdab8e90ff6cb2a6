//! Fairness among senders: whose frame is handled next.
//!
//! The port's queue is one for all VMs, and a VM's flood fills it as far as its credits go. So
//! frames are read from it faster than they are handled, and wait here, each sender's in their
//! order. The sender whose frames have cost least is served next; the cost of a frame is the number
//! of frames that it led to. A sender that had no frame waiting begins with the cost of the one that
//! is served, so it neither makes up for its silence nor waits for those who were busy (start-time
//! fair queueing, Goyal et al., SIGCOMM 1996). A VM's single SYN thus waits for two frames of each
//! VM at most, however many precede it. A guest and the world that sends to it are two senders.
use std::{cmp::Reverse, collections::BinaryHeap};

use hashbrown::HashMap;
use slipgate_abi::VmRow;

use crate::port::{BATCH, Batch, Frame};

/// Most frames that wait. Beyond it they wait in the port's queue, where they are in one order.
const MOST_WAITING: usize = 1_024;

/// Row of the VM, and whether the world is the sender.
type Sender = (VmRow, bool);

/// Frames that were read and are not handled yet.
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

/// A place for a frame.
#[derive(Debug)]
struct Waits {
    /// A buffer that is exchanged with the batch's.
    bytes: Box<[u8]>,
    len: usize,
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
    index: u16,
    sender: Sender,
    cost: u64,
}

impl Waiting {
    /// Whether no frame waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Whether all frames of another batch may wait.
    pub(crate) fn has_room(&self) -> bool {
        self.frames.len() - self.free.len() + BATCH <= MOST_WAITING
    }

    /// Takes all frames of a batch.
    pub(crate) fn take(&mut self, batch: &mut Batch) {
        for at in 0..batch.len() {
            // A frame that can't be parsed is dropped: its position does not matter.
            let frame = Frame::parse(batch.frame(at));
            let sender = frame.map_or((VmRow::NOBODY, false), |f| {
                (f.header.row(), f.is_from_world())
            });
            let index = self.place();
            let place = &mut self.frames[usize::from(index)];
            place.len = batch.exchange(at, &mut place.bytes);
            place.next = None;
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

    /// Returns a place for a frame.
    fn place(&mut self) -> u16 {
        if let Some(index) = self.free.pop() {
            return index;
        }
        self.frames.push(Waits {
            bytes: Batch::buffer(),
            len: 0,
            next: None,
        });
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
        Some(Turn {
            index,
            sender,
            cost,
        })
    }

    /// Returns the frame with all its headers, to be changed in place.
    pub(crate) fn frame_mut(&mut self, turn: Turn) -> &mut [u8] {
        let place = &mut self.frames[usize::from(turn.index)];
        &mut place.bytes[..place.len]
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
