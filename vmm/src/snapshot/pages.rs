//! The memory's file: the RAM below the hole, then that above it, without pages of zeroes; or, of a
//! snapshot with a base, only what differs from that.
//!
//! What is written is passed on to the disk meanwhile ([`Writeback`]): otherwise the last sync would
//! have to write all of it, which takes long and hears no order to stop.
use std::{
    fs::File,
    io,
    os::{fd::AsRawFd as _, unix::fs::FileExt as _},
};

use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _, MemoryRegionAddress};

use super::{Layers, Runs, SnapshotError};
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
    let end = each_piece(memory, &mut |piece, at| {
        goes_on()?;
        write_piece(file, piece, at)
            .and_then(|()| writeback.reached(at + piece.len() as u64))
            .map_err(&failed)
    })?;
    // The last pages may be zeroes.
    file.set_len(end).map_err(&failed)
}

/// As [`write_memory`], but writes what differs from the base's. Returns the pages that were written.
///
/// # Errors
/// As of [`write_memory`]; or the base can't be read.
pub(crate) fn write_differences(
    memory: &GuestMemory,
    base: &Layers,
    file: &File,
    goes_on: &dyn Fn() -> Result<(), SnapshotError>,
) -> Result<Runs, SnapshotError> {
    let failed = SnapshotError::file("write the file `memory`");
    let mut there = vec![0; PAUSE_BYTES as usize];
    let mut differing = Runs::default();
    let end = each_piece(memory, &mut |piece, at| {
        goes_on()?;
        let there = &mut there[..piece.len()];
        base.read(there, at)?;
        let pages = piece.chunks(PAGE).zip(there.chunks(PAGE)).enumerate();
        let differ = pages.filter(|(_, (here, there))| here != there);
        differ.for_each(|(page, _)| differing.add(at / PAGE_SIZE + page as u64));
        Ok(())
    })?;
    differing.join();
    let runs = differing;
    let mut writeback = Writeback::of(file);
    each_piece(memory, &mut |piece, at| {
        goes_on()?;
        let until = at + piece.len() as u64;
        for (from, to) in runs.within(at, until) {
            let part = &piece[(from - at) as usize..(to - at) as usize];
            file.write_all_at(part, from).map_err(&failed)?;
        }
        writeback.reached(until).map_err(&failed)
    })?;
    file.set_len(end).map_err(&failed)?;
    Ok(runs)
}

/// Takes a piece of memory, and its offset in the file.
type Take<'a> = dyn FnMut(&[u8], u64) -> Result<(), SnapshotError> + 'a;

/// Calls `take` with each [`PAUSE_BYTES`] of the memory of a paused machine and their offset in the
/// file. Returns the size of the file.
fn each_piece(memory: &GuestMemory, take: &mut Take<'_>) -> Result<u64, SnapshotError> {
    let failed = SnapshotError::file("read the memory");
    let mut start = 0;
    let mut read = vec![0; PAUSE_BYTES as usize];
    for region in memory.iter() {
        let bytes = usize::try_from(region.len()).unwrap_or(usize::MAX);
        let host = region
            .get_host_address(MemoryRegionAddress(0))
            .map_err(|e| failed(std::io::Error::other(e)))?;
        // Another process has it, too.
        let is_shared = region.flags() & libc::MAP_SHARED != 0;
        let shared = region.file_offset().filter(|_| is_shared);
        for from in (0..bytes).step_by(PAUSE_BYTES as usize) {
            let length = (bytes - from).min(PAUSE_BYTES as usize);
            let piece = match shared {
                // A page that was never touched would be allocated by a look at it in the mapping.
                Some(file) => {
                    let at = file.start() + from as u64;
                    let piece = &mut read[..length];
                    file.file().read_exact_at(piece, at).map_err(&failed)?;
                    &*piece
                }
                // SAFETY: within the region, which `memory` keeps mapped, and private. Neither a vCPU
                // nor a device writes to it: the machine is paused.
                None => unsafe { std::slice::from_raw_parts(host.add(from), length) },
            };
            take(piece, start + from as u64)?;
        }
        start += region.len();
    }
    Ok(start)
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
