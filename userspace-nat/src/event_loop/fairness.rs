//! Fairness among senders: whose frame is handled next.
//!
//! The port's queue is one for all VMs, and a VM's flood fills it as far as its credits go. So
//! frames are read from it faster than they are handled, and wait here, each sender's in their
//! order. The sender whose frames have cost least is served next; the cost of a frame is the number
//! of frames that it led to, or more if it opened a flow, had early fragments looked for, or the kernel
//! asked about its route. A sender that had no frame waiting begins with the cost of the one that
//! is served, so it neither makes up for its silence nor waits for those who were busy (start-time
//! fair queueing, Goyal et al., SIGCOMM 1996). A VM's single SYN thus waits for two frames of each
//! VM at most, however many precede it. A guest and the world that sends to it are two senders.
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, binary_heap::PeekMut},
};

use hashbrown::HashMap;
use slipgate_abi::{Handover, VmRow, first_packet::RING_LEN, portframe::PortFlags};

use crate::{
    port::{BATCH, Batch, Frame, KeptFrame},
    state::credits::credits_of,
};

/// Most frames that wait: 1,024 and, where there is one, a whole ring of first packets. Beyond it they
/// wait in the port's queue, where they are in one order, and in the ring.
pub(super) const MOST_WAITING: u16 = 1_024 + RING_LEN as u16;

/// Most frames of one sender whose credits are given back together: the programs of other CPUs read the
/// counts with each frame, and each change of them is waited for.
const CREDITED_AT_ONCE: usize = 16;

/// Row of the VM, and whether the world is the sender.
type Sender = (VmRow, bool);

/// Frames that were read and are not handled yet. Their bytes are in the [`Batch`].
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    frames: Vec<Waits>,
    /// Indices in `frames` that are not in use.
    free: Vec<u16>,
    /// Index of the last frame of each sender that has any.
    senders: HashMap<Sender, u16, foldhash::fast::RandomState>,
    /// The first frame of each sender. The next one stays here until it is handled.
    turns: BinaryHeap<Reverse<Place>>,
    number: u64,
    /// Cost of the sender that was served last, before that frame.
    cost: u64,
}

/// A frame that waits.
#[derive(Clone, Copy, Debug)]
struct Waits {
    frame: KeptFrame,
    /// Credits that it took and that are not given back yet.
    credits: u64,
    /// The next one of its sender.
    next: Option<u16>,
}

/// A sender's place among the others, in their order: the cost of its frames so far, and a number that
/// counts up, by which those of equal cost take turns. Then the sender, and the index of its first
/// frame.
type Place = (u64, u64, Sender, u16);

/// A frame whose turn it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// The frame to handle.
    pub(super) frame: KeptFrame,
    pub(super) sender: Sender,
    /// Credits to give back to its sender before it is handled: its own and those of the next frames,
    /// or none, if that was done with a frame before it.
    pub(super) credits: u64,
    index: u16,
    cost: u64,
}

impl Waiting {
    /// Whether no frame waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Whether all frames of another batch may wait, and of the ring of first packets.
    pub(crate) fn has_room(&self) -> bool {
        let waiting = self.frames.len() - self.free.len();
        waiting + BATCH + RING_LEN as usize <= usize::from(MOST_WAITING)
    }

    /// Takes all frames of a batch, which keeps them. The first `by_port` of them were read from the
    /// port, and take their place behind the others. Returns how many of these are first packets of
    /// guests.
    pub(crate) fn take(&mut self, batch: &mut Batch, by_port: usize) -> u64 {
        let mut first_packets = 0;
        for at in (by_port..batch.len()).chain(0..by_port) {
            let kept = batch.kept(at);
            // A frame that can't be parsed is dropped: its position does not matter.
            let (sender, credits) = match Frame::parse(batch.frame(at)) {
                Some(frame) if frame.header.flags & PortFlags::WAKE != 0 => {
                    batch.release(kept);
                    continue;
                }
                Some(frame) => {
                    let from_world = frame.is_from_world();
                    let is_first = frame.header.code == Handover::Miss as u8 && !from_world;
                    first_packets += u64::from(at < by_port && is_first);
                    ((frame.header.row(), from_world), credits_of(&frame))
                }
                None => ((VmRow::NOBODY, false), 0),
            };
            self.line_up_frame(kept, sender, credits);
        }
        batch.keep();
        first_packets
    }

    fn line_up_frame(&mut self, frame: KeptFrame, sender: Sender, credits: u64) {
        let index = self.wait(frame, credits);
        if let Some(last) = self.senders.get_mut(&sender) {
            let last = std::mem::replace(last, index);
            self.frames[usize::from(last)].next = Some(index);
            return;
        }
        self.senders.insert(sender, index);
        self.number += 1;
        let place = (self.cost, self.number, sender, index);
        self.turns.push(Reverse(place));
    }

    fn wait(&mut self, frame: KeptFrame, credits: u64) -> u16 {
        let waits = Waits {
            frame,
            credits,
            next: None,
        };
        if let Some(index) = self.free.pop() {
            self.frames[usize::from(index)] = waits;
            return index;
        }
        self.frames.push(waits);
        (self.frames.len() - 1) as u16
    }

    /// Returns the next frame. [`Waiting::done`] is to be called with it before the next call.
    pub(crate) fn next(&mut self) -> Option<Turn> {
        let Reverse((cost, _, sender, index)) = *self.turns.peek()?;
        self.cost = cost;
        Some(Turn {
            frame: self.frames[usize::from(index)].frame,
            sender,
            credits: self.take_credits(index),
            index,
            cost,
        })
    }

    /// Takes the credits of a frame and of some that follow it, if its own were not taken before.
    fn take_credits(&mut self, first: u16) -> u64 {
        let mut sum = 0;
        let mut next = Some(first);
        for _ in 0..CREDITED_AT_ONCE {
            let Some(frame) = next.map(|index| &mut self.frames[usize::from(index)]) else {
                break;
            };
            if frame.credits == 0 {
                break;
            }
            sum += std::mem::take(&mut frame.credits);
            next = frame.next;
        }
        sum
    }

    /// Removes the frame, which led to `cost` frames.
    pub(crate) fn done(&mut self, turn: Turn, cost: usize) {
        let Turn { index, sender, .. } = turn;
        // Who came meanwhile has its cost at least, and a higher number: it is still the first.
        let Some(mut first) = self.turns.peek_mut() else {
            return;
        };
        debug_assert!((first.0.2, first.0.3) == (sender, index));
        self.free.push(index);
        match self.frames[usize::from(index)].next {
            Some(next) => {
                self.number += 1;
                first.0 = (turn.cost + cost as u64, self.number, sender, next);
            }
            None => {
                PeekMut::pop(first);
                self.senders.remove(&sender);
            }
        }
    }
}

#[cfg(test)]
#[path = "fairness_test.rs"]
mod tests;
