//! The guest's memory: anonymous, private, and not touched before the guest touches it.
use thiserror::Error;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::{
    GuestMemory,
    layout::{self, PAGE_SIZE},
};

/// Least memory of a machine, bytes.
pub const MIN_BYTES: u64 = 4 << 20;

/// Reason why [`create`] fails.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The size is not whole pages, or is below [`MIN_BYTES`].
    #[error(
        "{0} bytes of memory asked for: give a multiple of {PAGE_SIZE}, {MIN_BYTES} at the least"
    )]
    Size(u64),
    /// The host could not map the memory.
    #[error("mapping {bytes} bytes of guest memory: {why}; give less memory to the machine")]
    Map {
        /// Requested size of the memory, bytes.
        bytes: u64,
        /// Error from the kernel or vm-memory, as text.
        why: String,
    },
}

/// Maps `bytes` of zeroes at the addresses of [`layout::ram`].
///
/// # Errors
/// The size is invalid, or the host has no address space for it.
pub fn create(bytes: u64) -> Result<GuestMemory, MemoryError> {
    if bytes < MIN_BYTES || !bytes.is_multiple_of(PAGE_SIZE) {
        return Err(MemoryError::Size(bytes));
    }
    let refused = |why: String| MemoryError::Map { bytes, why };
    // Addresses that overflow are refused here, so later sums can't overflow.
    bytes
        .checked_add(layout::HIGH_RAM_START)
        .ok_or_else(|| refused("beyond 64 bits".into()))?;
    let pieces: Vec<_> = layout::ram(bytes)
        .into_iter()
        .map(|piece| (GuestAddress(piece.start), piece.size as usize))
        .collect();
    GuestMemory::from_ranges(&pieces).map_err(|e| refused(e.to_string()))
}

/// Returns the size of RAM, bytes.
pub fn total_bytes(memory: &GuestMemory) -> u64 {
    memory.iter().map(GuestMemoryRegion::len).sum()
}

/// Returns the end address of the RAM below the hole.
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
