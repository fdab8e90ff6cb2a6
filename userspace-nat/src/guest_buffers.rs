//! Bytes in a guest's memory, in several buffers. The kernel copies them to sockets and from them; nothing
//! here looks at them.
//!
//! That the buffers are in the guest's memory is checked once. The memory stays mapped as long as these
//! live.
use std::{ops::Range, sync::Arc};

use nix::{errno::Errno, libc};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

/// Address and length in bytes of a guest's buffer.
pub(crate) type Buffer = (GuestAddress, u32);

/// A piece for a call that uses fewer.
pub(crate) const NO_PIECE: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

/// Buffers of a guest, each within one region of its memory.
#[derive(Debug)]
pub(crate) struct GuestBuffers {
    memory: Arc<GuestMemoryMmap>,
    list: Vec<Buffer>,
    len: usize,
}

impl GuestBuffers {
    /// Returns the list if it has more than `most` buffers, or if one of them is not within one region of
    /// the memory.
    pub(crate) fn new(
        memory: &Arc<GuestMemoryMmap>,
        list: Vec<Buffer>,
        most: usize,
    ) -> Result<Self, Vec<Buffer>> {
        let is_there = |(address, len): &Buffer| memory.get_slice(*address, *len as usize).is_ok();
        if list.len() > most || !list.iter().all(is_there) {
            return Err(list);
        }
        Ok(Self {
            memory: memory.clone(),
            len: list.iter().map(|(_, len)| *len as usize).sum(),
            list,
        })
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The list, to be used again.
    pub(crate) fn into_list(self) -> Vec<Buffer> {
        self.list
    }

    /// The parts of the buffers in which a range of the bytes is.
    fn parts(&self, range: Range<usize>) -> impl Iterator<Item = (GuestAddress, usize)> {
        let mut skipped = range.start;
        let mut wanted = range.len();
        self.list.iter().filter_map(move |(address, len)| {
            let before = skipped.min(*len as usize);
            skipped -= before;
            let some = wanted.min(*len as usize - before);
            wanted -= some;
            (some > 0).then(|| (GuestAddress(address.0 + before as u64), some))
        })
    }

    /// Copies a range of the bytes, which has the length of `into`. Returns whether it could.
    pub(crate) fn copy(&self, range: Range<usize>, mut into: &mut [u8]) -> bool {
        for (address, len) in self.parts(range) {
            let Some((now, later)) = into.split_at_mut_checked(len) else {
                return false;
            };
            if self.memory.read_slice(now, address).is_err() {
                return false;
            }
            into = later;
        }
        into.is_empty()
    }

    /// Fills in the pieces of a range of the bytes, of which there are not more than buffers. Returns their
    /// number. They may be used as long as `self` lives.
    ///
    /// # Errors
    /// The memory is not there, or there are more than `pieces`.
    pub(crate) fn pieces(
        &self,
        range: Range<usize>,
        pieces: &mut [libc::iovec],
    ) -> nix::Result<usize> {
        let mut count = 0;
        for (address, len) in self.parts(range) {
            let slice = self.memory.get_slice(address, len);
            let slice = slice.map_err(|_| Errno::EFAULT)?;
            *pieces.get_mut(count).ok_or(Errno::EINVAL)? = libc::iovec {
                iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                iov_len: len,
            };
            count += 1;
        }
        Ok(count)
    }
}

#[cfg(test)]
#[path = "guest_buffers_fake.rs"]
pub(crate) mod fake;
