//! Giving the guest's memory back to the host.
use std::io;

use vm_memory::{Address as _, GuestMemoryBackend as _, GuestMemoryRegion as _};

use crate::{GuestMemory, memory};

/// The guest's memory, by what gives it back. It must outlive this.
#[derive(Debug)]
pub(super) struct Pages {
    regions: Vec<Region>,
}

#[derive(Debug)]
struct Region {
    guest: u64,
    bytes: u64,
    host: *mut u8,
    /// Size of the host's pages.
    page_bytes: u64,
    advice: libc::c_int,
}

/// What became of a range, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Given {
    /// Given back to the host.
    pub(super) discarded: u64,
    /// Stays, as it is no whole page of the host's.
    pub(super) kept: u64,
    /// None of the guest's memory.
    pub(super) invalid: u64,
    /// Number of parts that the host did not take.
    pub(super) failed: u64,
}

impl Pages {
    pub(super) fn of(memory: &GuestMemory) -> Self {
        let region = |region: &vm_memory::GuestRegionMmap<()>| Region {
            guest: region.start_addr().raw_value(),
            bytes: region.len(),
            host: region.as_ptr(),
            page_bytes: memory::page_bytes(region),
            advice: memory::discarding(region),
        };
        Self {
            regions: memory.iter().map(region).collect(),
        }
    }

    /// Returns the size of the guest's memory.
    pub(super) fn total_bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.bytes).sum()
    }

    /// Gives a range of the guest's addresses back, as far as it is the guest's memory.
    pub(super) fn give_back(&self, guest: u64, bytes: u64) -> Given {
        let mut given = Given::default();
        let mut inside = 0;
        for region in &self.regions {
            let end = guest.saturating_add(bytes);
            let from = guest.max(region.guest) - region.guest;
            let until = end.saturating_sub(region.guest).min(region.bytes);
            if from >= until {
                continue;
            }
            inside += until - from;
            let whole_from = from.next_multiple_of(region.page_bytes);
            let whole_until = until - until % region.page_bytes;
            let whole = whole_until.saturating_sub(whole_from);
            given.kept += until - from - whole;
            if whole == 0 {
                continue;
            }
            match region.discard(whole_from, whole) {
                Ok(()) => given.discarded += whole,
                Err(_) => given.failed += 1,
            }
        }
        given.invalid = bytes - inside;
        given
    }
}

impl Region {
    fn discard(&self, at: u64, bytes: u64) -> io::Result<()> {
        // SAFETY: the range is within the region's mapping, which stays. Only the guest has a claim on
        // what is in it; who reads it meanwhile reads what was there or what is there instead.
        let done = unsafe {
            let start = self.host.wrapping_add(at as usize);
            libc::madvise(start.cast(), bytes as usize, self.advice)
        };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
#[path = "pages_test.rs"]
mod tests;
