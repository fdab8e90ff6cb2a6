//! Local ports: a range for each CPU, and no port twice while a connection of it is in TIME-WAIT.

use alloc::{boxed::Box, vec};
use core::ops::Range;

/// The first local port; those below are left to what is not a workload's.
const FIRST: u16 = 16_384;

/// How long a port rests after a connection that this side was the first to close: as long as
/// smoltcp stays in TIME-WAIT.
pub const TIME_WAIT_NS: u64 = 10_000_000_000;

/// The CPU whose connections have this local port.
pub fn owner(port: u16, cpus: usize) -> usize {
    match port.checked_sub(FIRST) {
        None => 0,
        Some(offset) => (usize::from(offset) / ports_each(cpus)).min(cpus - 1),
    }
}

/// A CPU's ports.
pub fn range(cpu: usize, cpus: usize) -> Range<u16> {
    let (first, each) = (
        usize::from(FIRST) + cpu * ports_each(cpus),
        ports_each(cpus),
    );
    // The last CPU's last port at most is u16::MAX, and that one is left out.
    first as u16..(first + each).min(usize::from(u16::MAX)) as u16
}

fn ports_each(cpus: usize) -> usize {
    usize::from(u16::MAX - FIRST) / cpus
}

/// One CPU's ports, handed out round robin, so that each rests as long as can be.
#[derive(Debug)]
pub struct Ports {
    first: u16,
    cursor: usize,
    /// When each is free again; [`IN_USE`] while it is somebody's.
    free_at_ns: Box<[u64]>,
}

const IN_USE: u64 = u64::MAX;

impl Ports {
    /// CPU `cpu`'s, from a random one on.
    pub fn new(cpu: usize, cpus: usize, random: u16) -> Self {
        let range = range(cpu, cpus);
        Ports {
            first: range.start,
            cursor: usize::from(random) % range.len(),
            free_at_ns: vec![0; range.len()].into_boxed_slice(),
        }
    }

    /// A port that is nobody's and at rest no more; none if there is none.
    pub fn take(&mut self, now_ns: u64) -> Option<u16> {
        let count = self.free_at_ns.len();
        for step in 0..count {
            let index = (self.cursor + step) % count;
            if self.free_at_ns[index] <= now_ns {
                self.free_at_ns[index] = IN_USE;
                self.cursor = (index + 1) % count;
                return Some(self.first + index as u16);
            }
        }
        None
    }

    /// Gives a port back, to be used again from `free_at_ns` on.
    pub fn give_back(&mut self, port: u16, free_at_ns: u64) {
        let index = port.checked_sub(self.first).map(usize::from);
        if let Some(slot) = index.and_then(|index| self.free_at_ns.get_mut(index)) {
            *slot = free_at_ns;
        }
    }
}

#[cfg(test)]
#[path = "ports_test.rs"]
mod tests;
