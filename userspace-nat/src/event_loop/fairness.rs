//! Fairness within a batch: VMs take turns by what their frames lead to, and so do a guest and the world
//! that sends to it. So a VM's single SYN waits for two frames of each VM at most, however many of
//! theirs came before it, and who sends what is sent on in many pieces has its turns as seldom. Frames
//! of one sender keep their order.
use crate::port::{BATCH, Batch, Frame};

/// The order in which a batch is handled.
#[derive(Debug, Default)]
pub(crate) struct Order {
    senders: Vec<Share>,
    /// For each frame, the next one of its sender; [`NONE`]: it is the last.
    following: Vec<u8>,
    /// Place in `senders` of whose frame was given out last.
    at: usize,
}

/// A sender's frames in the batch at hand.
#[derive(Clone, Copy, Debug)]
struct Share {
    /// The VM's row, and whether it is the world that sends.
    sender: (u16, bool),
    next: u8,
    last: u8,
    /// What those that were handled led to, frames.
    cost: usize,
}

const NONE: u8 = u8::MAX;

const _: () = assert!(BATCH <= NONE as usize);

impl Order {
    /// Takes a batch of which nothing is handled.
    pub(crate) fn arrange(&mut self, batch: &Batch) {
        self.senders.clear();
        self.following.clear();
        for index in 0..batch.len() {
            // What can't be parsed is dropped: its place does not matter.
            let frame = Frame::parse(batch.frame(index));
            let sender = frame.map_or((0, false), |f| (f.header.vm_row, f.is_from_world()));
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

    /// Whether every frame was given out.
    pub(crate) fn is_done(&self) -> bool {
        self.senders.iter().all(|share| share.next == NONE)
    }

    /// The frame to be handled next: of the sender that has cost least so far.
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

    /// What the frame that was given out last led to, in frames.
    pub(crate) fn charge(&mut self, cost: usize) {
        if let Some(share) = self.senders.get_mut(self.at) {
            share.cost += cost;
        }
    }
}
