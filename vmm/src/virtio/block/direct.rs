//! Direct transfers (O_DIRECT): between the medium and the guest's memory, past the host's page cache.
//!
//! The kernel makes them only between aligned places and aligned memory. The driver is told of the
//! blocks, and keeps to them. Its buffers may lie anywhere: a request whose buffers are not aligned is
//! carried out through one of the queue's [`Buffers`], a part as long as that at a time.
use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd as _, RawFd},
        unix::fs::FileExt as _,
    },
    slice,
};

use libc::iovec;
use vm_memory::mmap::MmapRegion;

use super::{DiskError, SECTOR_BYTES, tried};

/// Largest alignment that is supported: guests know no longer blocks, and buffers begin at pages.
const MAX_ALIGNMENT: u32 = 4096;
/// Number of buffers of a queue.
const BUFFERS: usize = 8;
/// Length of a buffer, bytes.
pub(super) const BUFFER_BYTES: usize = 64 << 10;

/// What direct transfers of a file have to be aligned to. Both are powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Addresses of memory, bytes.
    memory: u32,
    /// Places in the file, and lengths, bytes: at least a sector.
    block: u32,
}

impl Alignment {
    /// Determines the alignment of a file that is open for direct transfers.
    ///
    /// # Errors
    /// It is not, the kernel makes none of this file, or they need a larger alignment than is
    /// supported.
    pub(super) fn of(file: &File) -> Result<Alignment, DiskError> {
        // SAFETY: no memory is passed.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 || flags & libc::O_DIRECT == 0 {
            return Err(DiskError::Cached);
        }
        let [memory, block] = match said(file.as_raw_fd()).map_err(tried("look at the file"))? {
            Some([0, _] | [_, 0]) => return Err(DiskError::NoDirect),
            Some(said) => said,
            None => [MAX_ALIGNMENT, found_block(file)?],
        };
        Alignment::new(memory, block)
    }

    /// `memory`, `block`: what the kernel asks for, bytes.
    ///
    /// # Errors
    /// They are larger than what is supported, or no powers of two.
    pub(super) fn new(memory: u32, block: u32) -> Result<Alignment, DiskError> {
        let block = block.max(SECTOR_BYTES as u32);
        let is_known = |it: u32| it.is_power_of_two() && it <= MAX_ALIGNMENT;
        match is_known(memory) && is_known(block) {
            true => Ok(Alignment { memory, block }),
            false => Err(DiskError::Alignment { memory, block }),
        }
    }

    /// Returns the length of a block, bytes.
    pub(super) fn block(&self) -> u64 {
        self.block.into()
    }

    /// Returns the alignment of memory, and of places and lengths, bytes.
    #[cfg(any(test, feature = "fake"))]
    pub(super) fn both(&self) -> [u32; 2] {
        [self.memory, self.block]
    }

    /// Returns whether the kernel transfers these pieces directly, and what is left of them behind
    /// any number of [units](Alignment::unit).
    pub(super) fn holds(&self, pieces: &[iovec]) -> bool {
        pieces.iter().all(|piece| {
            let is_placed = (piece.iov_base as usize).is_multiple_of(self.memory as usize);
            is_placed && piece.iov_len.is_multiple_of(self.unit())
        })
    }

    /// Returns the bytes behind which pieces that are aligned are aligned again.
    pub(super) fn unit(&self) -> usize {
        self.memory.max(self.block) as usize
    }
}

/// Returns the alignment of memory and of places that the kernel says a file has (0: it is not
/// transferred directly); `None` if it does not say.
fn said(file: RawFd) -> io::Result<Option<[u32; 2]>> {
    // SAFETY: the structure has integers only, for which zeroes are values.
    let mut about: libc::statx = unsafe { std::mem::zeroed() };
    let (path, flags) = (c"".as_ptr(), libc::AT_EMPTY_PATH);
    // SAFETY: the path ends with a zero, and the structure outlives the call.
    match unsafe { libc::statx(file, path, flags, libc::STATX_DIOALIGN, &raw mut about) } {
        -1 => Err(io::Error::last_os_error()),
        _ if about.stx_mask & libc::STATX_DIOALIGN == 0 => Ok(None),
        _ => Ok(Some([about.stx_dio_mem_align, about.stx_dio_offset_align])),
    }
}

/// Finds the length of a file's blocks by reading parts of it, for a file system that does not say it.
fn found_block(file: &File) -> Result<u32, DiskError> {
    let buffers = Buffers::new().map_err(tried("make a buffer"))?;
    let mut block = SECTOR_BYTES as u32;
    while block <= MAX_ALIGNMENT {
        // SAFETY: within the first buffer, which is nobody's.
        let into = unsafe { slice::from_raw_parts_mut(buffers.memory.as_ptr(), block as usize) };
        // The second block, at whose start no longer one begins. If the file ends there, the first.
        let read = match file.read_at(into, block.into()) {
            Ok(0) => file.read_at(into, 0),
            read => read,
        };
        match read {
            Ok(_) => return Ok(block),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => block *= 2,
            Err(error) => return Err(tried("read a block past the page cache")(error)),
        }
    }
    Err(DiskError::NoDirect)
}

/// Buffers of a queue for requests whose own are not aligned. The memory is the host's only from when
/// they are used.
#[derive(Debug)]
pub(super) struct Buffers {
    memory: MmapRegion,
    free: Vec<usize>,
}

/// One of the buffers, of [`BUFFER_BYTES`], at the begin of a page.
#[derive(Debug)]
pub(super) struct Buffer {
    number: usize,
    start: *mut u8,
}

impl Buffers {
    /// Returns buffers, all of them free.
    ///
    /// # Errors
    /// The host has no memory.
    pub(super) fn new() -> io::Result<Buffers> {
        let memory = MmapRegion::new(BUFFERS * BUFFER_BYTES).map_err(io::Error::other)?;
        Ok(Buffers {
            memory,
            free: (0..BUFFERS).rev().collect(),
        })
    }

    /// Returns whether one is free.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Takes a buffer; `None` if none is free. To be [given back](Buffers::give_back).
    pub(super) fn take(&mut self) -> Option<Buffer> {
        let number = self.free.pop()?;
        let start = self.memory.as_ptr().wrapping_add(number * BUFFER_BYTES);
        Some(Buffer { number, start })
    }

    pub(super) fn give_back(&mut self, buffer: Buffer) {
        self.free.push(buffer.number);
    }
}

impl Buffer {
    /// Returns its first bytes, up to all of them, as a piece.
    pub(super) fn piece(&self, bytes: usize) -> iovec {
        iovec {
            iov_base: self.start.cast(),
            iov_len: bytes.min(BUFFER_BYTES),
        }
    }

    /// Returns its first bytes, up to all of them.
    ///
    /// # Safety
    /// The [`Buffers`] of which it is are there, and no operation uses it.
    pub(super) unsafe fn bytes(&mut self, bytes: usize) -> &mut [u8] {
        // SAFETY: memory that is mapped, of this buffer alone, which the caller keeps.
        unsafe { slice::from_raw_parts_mut(self.start, bytes.min(BUFFER_BYTES)) }
    }
}

#[cfg(test)]
#[path = "direct_test.rs"]
mod tests;
