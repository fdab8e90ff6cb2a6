//! `fill`: memory is filled, and stays so until the end of the run.
use alloc::vec::Vec;

use crate::pattern::Pattern;

const MIB: usize = 1 << 20;

/// Fills so many MiB with the bytes of a pattern, no page of which is like another, and keeps them.
/// Returns whether there was so much memory.
pub(crate) fn fill(mib: u32, seed: u64) -> bool {
    let mut memory: Vec<u8> = Vec::new();
    let Some(bytes) = (mib as usize).checked_mul(MIB) else {
        return false;
    };
    if memory.try_reserve_exact(bytes).is_err() {
        return false;
    }
    memory.resize(bytes, 0);
    Pattern::new(seed).fill(&mut memory);
    // The next ones get other memory, and what saves the machine finds this as it is.
    core::mem::forget(memory);
    true
}
