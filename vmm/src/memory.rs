//! The guest's memory: anonymous, private, not touched before the guest touches it.
use thiserror::Error;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::{
    GuestMemory,
    layout::{self, PAGE_SIZE},
};

/// The least memory of a machine.
pub const MIN_BYTES: u64 = 4 << 20;

/// Why there is no memory.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// Not whole pages, or too little.
    #[error(
        "{0} bytes of memory asked for: give a multiple of {PAGE_SIZE}, {MIN_BYTES} at the least"
    )]
    Size(u64),
    /// The kernel gave no address space.
    #[error("mapping {bytes} bytes of guest memory: {why}; give less memory to the machine")]
    Map {
        /// Asked for.
        bytes: u64,
        /// What the kernel or vm-memory said.
        why: String,
    },
}

/// `bytes` of zeroes at the addresses that [`layout::ram`] says.
pub fn create(bytes: u64) -> Result<GuestMemory, MemoryError> {
    if bytes < MIN_BYTES || !bytes.is_multiple_of(PAGE_SIZE) {
        return Err(MemoryError::Size(bytes));
    }
    let refused = |why: String| MemoryError::Map { bytes, why };
    // Addresses that wrap are refused here, not later in sums.
    bytes
        .checked_add(layout::HIGH_RAM_START)
        .ok_or_else(|| refused("beyond 64 bits".into()))?;
    let pieces: Vec<_> = layout::ram(bytes)
        .into_iter()
        .map(|piece| (GuestAddress(piece.start), piece.size as usize))
        .collect();
    GuestMemory::from_ranges(&pieces).map_err(|e| refused(e.to_string()))
}

/// How much RAM there is.
pub fn total_bytes(memory: &GuestMemory) -> u64 {
    memory.iter().map(GuestMemoryRegion::len).sum()
}

/// Where RAM below the hole ends.
pub fn low_end(memory: &GuestMemory) -> u64 {
    memory
        .iter()
        .filter(|region| region.start_addr().0 < layout::LOW_RAM_LIMIT)
        .map(|region| region.start_addr().0 + region.len())
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
#[path = "memory_test.rs"]
mod tests;
