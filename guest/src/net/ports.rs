//! Local ports: a range for each CPU. A port is not reused while a connection of it is in
//! TIME-WAIT.

use alloc::{boxed::Box, vec};
use core::ops::Range;

/// First local port of workloads. Lower ports have other uses.
const FIRST: u16 = 16_384;

/// Time for which a port rests after a connection that this side closed first: smoltcp's time in
/// TIME-WAIT.
pub const TIME_WAIT_NS: u64 = 10_000_000_000;

/// Returns the CPU whose connections have this local port.
pub fn owner(port: u16, cpus: usize) -> usize {
    match port.checked_sub(FIRST) {
        None => 0,
        Some(offset) => (usize::from(offset) / ports_each(cpus)).min(cpus - 1),
    }
}

/// Returns the range of a CPU's ports.
pub fn range(cpu: usize, cpus: usize) -> Range<u16> {
    let (first, each) = (
        usize::from(FIRST) + cpu * ports_each(cpus),
        ports_each(cpus),
    );
    // The last CPU's range may end at u16::MAX, which is left out.
    first as u16..(first + each).min(usize::from(u16::MAX)) as u16
}

fn ports_each(cpus: usize) -> usize {
    usize::from(u16::MAX - FIRST) / cpus
}

/// One CPU's ports, allocated round robin, so that each rests as long as possible.
#[derive(Debug)]
pub struct Ports {
    first: u16,
    cursor: usize,
    /// Time at which each port is free again; [`IN_USE`] while it is allocated.
    free_at_ns: Box<[u64]>,
}

const IN_USE: u64 = u64::MAX;

impl Ports {
    /// Returns the ports of CPU `cpu`. Allocation starts at a random one.
    pub fn new(cpu: usize, cpus: usize, random: u16) -> Self {
        let range = range(cpu, cpus);
        Ports {
            first: range.start,
            cursor: usize::from(random) % range.len(),
            free_at_ns: vec![0; range.len()].into_boxed_slice(),
        }
    }

    /// Allocates a port that is free and has rested; `None` if there is none.
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

    /// Frees a port. It may be allocated again from `free_at_ns` on.
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
