//! Fairness within a batch: VMs take turns by what their frames lead to, so that a VM's single SYN
//! waits for one frame of each other VM at most, however many of theirs came before it, and a VM
//! whose frames are sent on in many pieces has its turns as seldom. Frames of one VM keep their order.
use crate::port::{BATCH, Batch, Frame};

/// The order in which a batch is handled.
#[derive(Debug, Default)]
pub(super) struct Order {
    vms: Vec<Share>,
    /// For each frame, the next one of its VM; [`NONE`]: it is the last.
    following: Vec<u8>,
    /// Place in `vms` of whose frame was given out last.
    at: usize,
}

/// A VM's frames in the batch at hand.
#[derive(Clone, Copy, Debug)]
struct Share {
    row: u16,
    next: u8,
    last: u8,
    /// What those that were handled led to, frames.
    cost: usize,
}

const NONE: u8 = u8::MAX;

const _: () = assert!(BATCH <= NONE as usize);

impl Order {
    /// Takes a batch of which nothing is handled.
    pub(super) fn arrange(&mut self, batch: &Batch) {
        self.vms.clear();
        self.following.clear();
        for index in 0..batch.len() {
            // What can't be parsed is dropped: its place does not matter.
            let row = Frame::parse(batch.frame(index)).map_or(0, |f| f.header.vm_row);
            let index = index as u8;
            self.following.push(NONE);
            match self.vms.iter_mut().find(|vm| vm.row == row) {
                Some(vm) => {
                    self.following[usize::from(vm.last)] = index;
                    vm.last = index;
                }
                None => self.vms.push(Share {
                    row,
                    next: index,
                    last: index,
                    cost: 0,
                }),
            }
        }
    }

    /// Whether every frame was given out.
    pub(super) fn is_done(&self) -> bool {
        self.vms.iter().all(|vm| vm.next == NONE)
    }

    /// The frame to be handled next: of the VM that has cost least so far.
    pub(super) fn next(&mut self) -> Option<usize> {
        let waiting = self.vms.iter().enumerate();
        let waiting = waiting.filter(|(_, vm)| vm.next != NONE);
        let (at, _) = waiting.min_by_key(|(_, vm)| vm.cost)?;
        self.at = at;
        let vm = &mut self.vms[at];
        let index = usize::from(vm.next);
        vm.next = self.following[index];
        Some(index)
    }

    /// What the frame that was given out last led to, in frames.
    pub(super) fn charge(&mut self, cost: usize) {
        if let Some(vm) = self.vms.get_mut(self.at) {
            vm.cost += cost;
        }
    }
}
