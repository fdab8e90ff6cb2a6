//! The time of two dependent reads of memory, by a walk over lines in random order.

use std::{io, time::Duration};

use anyhow::{Context as _, Result};
use nix::time::ClockId;

use crate::{program_cost::Random, statistics::percentile};

/// Bytes of an entry and of a slot: where a read of one of them is.
const ENTRY: usize = 64;
const SLOT: usize = 128;
/// Pairs of reads in a walk. It goes on where the one before ended, so that it meets other flows.
const PAIRS: usize = 250_000;
const WALKS: usize = 7;

/// Returns the time of a read of an entry and of the slot that it names, of so many in random order,
/// ns. With `huge`, of memory in huge pages where the kernel gives them; else of small ones, as the
/// kernel's maps are.
///
/// # Errors
/// There is not so much memory.
pub(super) fn ns_of_two_misses(flows: usize, huge: bool) -> Result<f64> {
    let (entries, slots) = (
        Memory::new(flows * ENTRY, huge)?,
        Memory::new(flows * SLOT, huge)?,
    );
    let mut random = Random::new(7);
    let mut entry: Vec<u32> = (0..flows as u32).collect();
    let mut slot = entry.clone();
    random.shuffle(&mut entry);
    random.shuffle(&mut slot);
    // One ring through all: an entry names its slot, a slot the next entry.
    for at in 0..flows {
        let next = entry[(at + 1) % flows];
        entries.write(entry[at] as usize * ENTRY, slot[at]);
        slots.write(slot[at] as usize * SLOT, next);
    }
    let mut at = entry[0];
    let mut walk = || -> Result<f64> {
        let began = cpu_time()?;
        for _ in 0..PAIRS {
            at = slots.read(entries.read(at as usize * ENTRY) as usize * SLOT);
        }
        std::hint::black_box(at);
        Ok((cpu_time()? - began).as_secs_f64() * 1e9 / PAIRS as f64)
    };
    let walks = (0..WALKS).map(|_| walk());
    let walks: Vec<f64> = walks.collect::<Result<_>>()?;
    Ok(percentile(&walks, 50.0))
}

/// CPU time of this thread, which others on a busy machine do not increase.
fn cpu_time() -> Result<Duration> {
    Ok(ClockId::CLOCK_THREAD_CPUTIME_ID.now()?.into())
}

/// Anonymous memory of its own mapping.
struct Memory {
    start: *mut u8,
    len: usize,
}

impl Memory {
    fn new(len: usize, huge: bool) -> Result<Self> {
        // Whole huge pages.
        let len = len.next_multiple_of(2 << 20);
        let (access, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping, wherever the kernel puts it.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("map memory to walk over");
        }
        let advice = match huge {
            true => libc::MADV_HUGEPAGE,
            false => libc::MADV_NOHUGEPAGE,
        };
        // SAFETY: our own mapping. A kernel without huge pages refuses, and has small ones.
        let _ = unsafe { libc::madvise(start, len, advice) };
        Ok(Self {
            start: start.cast(),
            len,
        })
    }

    fn word(&self, offset: usize) -> *mut u32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.len);
        // SAFETY: within the mapping, and aligned as it is.
        unsafe { self.start.add(offset).cast() }
    }

    fn write(&self, offset: usize, value: u32) {
        // SAFETY: `word` checked the bounds; nobody else has the mapping.
        unsafe { self.word(offset).write_volatile(value) };
    }

    fn read(&self, offset: usize) -> u32 {
        // SAFETY: as above.
        unsafe { self.word(offset).read_volatile() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody uses any more.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

#[cfg(test)]
#[path = "floor_test.rs"]
mod tests;
