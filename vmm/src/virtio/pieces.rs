//! Translation of guest addresses to host addresses, and the `iovec` arrays ("pieces") that a
//! system call takes.
use std::sync::Arc;

use libc::iovec;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::ring::Broken;
use crate::GuestMemory;

/// Host addresses of the guest's memory. Keeps the memory mapped.
#[derive(Debug)]
pub(super) struct Translation {
    regions: Vec<Region>,
    _mapped: Arc<GuestMemory>,
}

#[derive(Debug)]
struct Region {
    guest: u64,
    bytes: u64,
    host: *mut u8,
}

impl Translation {
    pub(super) fn new(memory: Arc<GuestMemory>) -> Translation {
        let region = |region: &vm_memory::GuestRegionMmap<()>| {
            Some(Region {
                guest: region.start_addr().raw_value(),
                bytes: region.len(),
                host: region.get_host_address(MemoryRegionAddress(0)).ok()?,
            })
        };
        Translation {
            regions: memory.iter().filter_map(region).collect(),
            _mapped: memory,
        }
    }

    /// Returns the host address of `bytes` at a guest address; `None` unless they lie in one
    /// region.
    pub(super) fn host(&self, guest: u64, bytes: u64) -> Option<*mut u8> {
        let (host, there) = self.locate(guest)?;
        (bytes <= there).then_some(host)
    }

    /// Returns the host address of a guest address, and the number of bytes from there to the
    /// region's end.
    fn locate(&self, guest: u64) -> Option<(*mut u8, u64)> {
        self.regions.iter().find_map(|region| {
            let offset = guest.checked_sub(region.guest)?;
            let there = region
                .bytes
                .checked_sub(offset)
                .filter(|there| *there > 0)?;
            Some((region.host.wrapping_add(offset as usize), there))
        })
    }

    /// Appends the memory at a guest address: one piece, or several where regions touch. An empty
    /// range appends none.
    ///
    /// # Errors
    /// A byte lies outside the guest's memory.
    pub(super) fn append(
        &self,
        mut guest: u64,
        bytes: u32,
        pieces: &mut Vec<iovec>,
    ) -> Result<(), Broken> {
        let mut left = u64::from(bytes);
        while left > 0 {
            let (host, there) = self.locate(guest).ok_or(Broken::Address)?;
            let part = left.min(there);
            pieces.push(iovec {
                iov_base: host.cast(),
                iov_len: part as usize,
            });
            left -= part;
            guest = guest.checked_add(part).ok_or(Broken::Address)?;
        }
        Ok(())
    }
}

/// Returns the number of bytes in all pieces.
pub(super) fn total(pieces: &[iovec]) -> usize {
    pieces.iter().map(|piece| piece.iov_len).sum()
}

/// Appends to `part` those of the pieces that lie behind the first `offset` bytes, up to `bytes`.
pub(super) fn append_part(
    pieces: &[iovec],
    mut offset: usize,
    mut bytes: usize,
    part: &mut Vec<iovec>,
) {
    for piece in pieces {
        let skipped = offset.min(piece.iov_len);
        offset -= skipped;
        let taken = bytes.min(piece.iov_len - skipped);
        bytes -= taken;
        if taken > 0 {
            part.push(iovec {
                iov_base: piece.iov_base.wrapping_byte_add(skipped),
                iov_len: taken,
            });
        }
    }
}

/// Copies from the pieces, beginning `offset` bytes in. Returns how many bytes were copied.
///
/// # Safety
/// The pieces are memory that is mapped. The guest may be writing to it: each byte is read once.
pub(super) unsafe fn read(pieces: &[iovec], offset: usize, into: &mut [u8]) -> usize {
    // SAFETY: as of this function.
    unsafe { read_into(pieces, offset, into.iter_mut()) }
}

/// As [`read`], into bytes that need not be one slice.
///
/// # Safety
/// As of [`read`].
pub(super) unsafe fn read_into<'a>(
    pieces: &[iovec],
    offset: usize,
    mut into: impl ExactSizeIterator<Item = &'a mut u8>,
) -> usize {
    // SAFETY: as of this function.
    unsafe {
        each(pieces, offset, into.len(), |at| {
            if let Some(byte) = into.next() {
                *byte = at.read_volatile();
            }
        })
    }
}

/// Copies into the pieces, beginning `offset` bytes in. Returns how many bytes were copied.
///
/// # Safety
/// The pieces are memory that is mapped and that may be written to.
pub(super) unsafe fn write(pieces: &[iovec], offset: usize, from: &[u8]) -> usize {
    let mut done = 0;
    let mut skip = offset;
    for piece in pieces {
        if done == from.len() {
            break;
        }
        let here = skip.min(piece.iov_len);
        skip -= here;
        let part = (piece.iov_len - here).min(from.len() - done);
        // SAFETY: `here + part` lies within the piece and `done + part` within `from`; the VMM's
        // own memory and the guest's do not overlap.
        unsafe {
            let to = piece.iov_base.cast::<u8>().add(here);
            std::ptr::copy_nonoverlapping(from[done..].as_ptr(), to, part);
        }
        done += part;
    }
    done
}

/// Calls `call` with the address of each of `count` bytes from `offset` on, as far as the pieces
/// go. Returns the number of calls.
///
/// # Safety
/// The pieces are mapped.
unsafe fn each(
    pieces: &[iovec],
    offset: usize,
    count: usize,
    mut call: impl FnMut(*mut u8),
) -> usize {
    let (mut skip, mut done) = (offset, 0);
    for piece in pieces {
        let here = skip.min(piece.iov_len);
        skip -= here;
        for at in here..piece.iov_len {
            if done == count {
                return done;
            }
            // SAFETY: within the piece.
            call(unsafe { piece.iov_base.cast::<u8>().add(at) });
            done += 1;
        }
    }
    done
}
