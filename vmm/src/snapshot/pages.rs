//! The memory's file: the RAM below the hole, then that above it, without pages of zeroes.
//!
//! What is written is passed on to the disk meanwhile ([`Writeback`]): otherwise the last sync would
//! have to write all of it, which takes long and hears no order to stop.
use std::{
    fs::File,
    io,
    os::{fd::AsRawFd as _, unix::fs::FileExt as _},
};

use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _, MemoryRegionAddress};

use super::SnapshotError;
use crate::{GuestMemory, layout::PAGE_SIZE};

/// Bytes of memory between two questions whether to go on.
pub const PAUSE_BYTES: u64 = 4 << 20;

/// Bytes of the file between two orders to pass them on to the disk. At most twice as many wait in the
/// host's memory.
const WRITEBACK_BYTES: u64 = 64 << 20;

const PAGE: usize = PAGE_SIZE as usize;

/// Writes the memory of a paused machine to an empty file, which then has the memory's size.
/// `goes_on` is asked each [`PAUSE_BYTES`]: an error of its ends the writing.
///
/// # Errors
/// The file can't be written, or that of `goes_on`.
pub fn write_memory(
    memory: &GuestMemory,
    file: &File,
    goes_on: &dyn Fn() -> Result<(), SnapshotError>,
) -> Result<(), SnapshotError> {
    let failed = SnapshotError::file("write the file `memory`");
    let mut writeback = Writeback::of(file);
    let mut start = 0;
    for region in memory.iter() {
        let bytes = usize::try_from(region.len()).unwrap_or(usize::MAX);
        let host = region
            .get_host_address(MemoryRegionAddress(0))
            .map_err(|e| failed(std::io::Error::other(e)))?;
        for from in (0..bytes).step_by(PAUSE_BYTES as usize) {
            goes_on()?;
            let length = (bytes - from).min(PAUSE_BYTES as usize);
            // SAFETY: within the region, which `memory` keeps mapped. Neither a vCPU nor a device
            // writes to it: the machine is paused.
            let piece = unsafe { std::slice::from_raw_parts(host.add(from), length) };
            let at = start + from as u64;
            write_piece(file, piece, at)
                .and_then(|()| writeback.reached(at + length as u64))
                .map_err(&failed)?;
        }
        start += region.len();
    }
    // The last pages may be zeroes.
    file.set_len(start).map_err(&failed)
}

/// Has the host write parts of a file to its disk while later ones are still being made.
struct Writeback<'a> {
    file: &'a File,
    /// Ends of the part that is under way, and of the one before it.
    begun: u64,
    done: u64,
}

impl<'a> Writeback<'a> {
    fn of(file: &'a File) -> Self {
        Self {
            file,
            begun: 0,
            done: 0,
        }
    }

    /// The file is written up to here. Starts the next part, once it is long enough, and waits for the
    /// one before.
    fn reached(&mut self, end: u64) -> io::Result<()> {
        if end - self.begun < WRITEBACK_BYTES {
            return Ok(());
        }
        self.order(self.begun, end, libc::SYNC_FILE_RANGE_WRITE)?;
        let waits = libc::SYNC_FILE_RANGE_WAIT_BEFORE
            | libc::SYNC_FILE_RANGE_WRITE
            | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        self.order(self.done, self.begun, waits)?;
        (self.done, self.begun) = (self.begun, end);
        Ok(())
    }

    fn order(&self, from: u64, until: u64, flags: libc::c_uint) -> io::Result<()> {
        if from == until {
            // A length of zero would mean all of the file.
            return Ok(());
        }
        // SAFETY: the descriptor is open, and nothing else is passed but numbers.
        let done = unsafe {
            let (from, bytes) = (from as i64, (until - from) as i64);
            libc::sync_file_range(self.file.as_raw_fd(), from, bytes, flags)
        };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
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
