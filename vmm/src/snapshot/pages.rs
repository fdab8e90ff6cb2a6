//! The memory's file: the RAM below the hole, then that above it, without pages of zeroes.
use std::{fs::File, os::unix::fs::FileExt as _};

use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _, MemoryRegionAddress};

use super::SnapshotError;
use crate::{GuestMemory, layout::PAGE_SIZE};

/// Bytes of memory between two questions whether to go on.
pub const PAUSE_BYTES: u64 = 4 << 20;

const PAGE: usize = PAGE_SIZE as usize;

/// Writes the memory of a paused machine to an empty file, which then has the memory's size.
/// `goes_on` is asked each [`PAUSE_BYTES`].
///
/// # Errors
/// The file can't be written, or `goes_on` returned false.
pub fn write_memory(
    memory: &GuestMemory,
    file: &File,
    goes_on: &dyn Fn() -> bool,
) -> Result<(), SnapshotError> {
    let failed = SnapshotError::file("write the memory's file");
    let mut start = 0;
    for region in memory.iter() {
        let bytes = usize::try_from(region.len()).unwrap_or(usize::MAX);
        let host = region
            .get_host_address(MemoryRegionAddress(0))
            .map_err(|e| failed(std::io::Error::other(e)))?;
        for from in (0..bytes).step_by(PAUSE_BYTES as usize) {
            if !goes_on() {
                return Err(SnapshotError::Ended);
            }
            let length = (bytes - from).min(PAUSE_BYTES as usize);
            // SAFETY: within the region, which `memory` keeps mapped. Neither a vCPU nor a device
            // writes to it: the machine is paused.
            let piece = unsafe { std::slice::from_raw_parts(host.add(from), length) };
            write_piece(file, piece, start + from as u64).map_err(&failed)?;
        }
        start += region.len();
    }
    // The last pages may be zeroes.
    file.set_len(start).map_err(&failed)
}

/// Writes runs of pages that are not all zeroes, each by one call.
fn write_piece(file: &File, piece: &[u8], at: u64) -> std::io::Result<()> {
    let is_empty = |page: &[u8]| {
        // SAFETY: any bytes are a valid u128.
        let (head, words, tail) = unsafe { page.align_to::<u128>() };
        let zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        zero(head) && words.iter().all(|word| *word == 0) && zero(tail)
    };
    let mut run: Option<usize> = None;
    let ends = piece.len().div_ceil(PAGE);
    for number in 0..=ends {
        let from = number * PAGE;
        let page = piece.get(from..).unwrap_or_default();
        let page = &page[..page.len().min(PAGE)];
        match (run, page.is_empty() || is_empty(page)) {
            (None, false) => run = Some(from),
            (Some(first), true) => {
                let until = from.min(piece.len());
                file.write_all_at(&piece[first..until], at + first as u64)?;
                run = None;
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "pages_test.rs"]
mod tests;
