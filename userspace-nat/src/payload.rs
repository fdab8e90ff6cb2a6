//! Payload of a guest's segment, whose end may still be in the guest's memory.
//!
//! # Theory of operation
//! Of a long frame in a ring only the headers are read. What is behind them stays in the guest's buffers
//! ([`Rest`]) until a socket takes it from there: one copy, by the kernel. The headers were copied and are
//! judged as copied. Nothing here looks at the payload, and the peer gets what the guest has in its buffers
//! when the kernel reads them: a guest that changes them meanwhile changes its own stream.
//!
//! That the buffers are in the guest's memory is checked before. The memory stays mapped as long as a
//! [`Rest`] lives.
#![expect(
    unsafe_code,
    reason = "the kernel reads memory that the guest may write, of which there is no slice of bytes"
)]
use std::{
    cell::Cell,
    ops::Range,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::Arc,
};

use nix::{
    errno::Errno,
    libc,
    sys::socket::{MsgFlags, send},
};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

/// Buffers in which the rest of a frame may be: what is in more is cheaper to copy.
pub(crate) const MOST_BUFFERS: usize = 32;

/// Address and length in bytes of a guest's buffer.
pub(crate) type Buffer = (GuestAddress, u32);

/// The last bytes of a frame, in the guest's memory.
#[derive(Debug)]
pub struct Rest {
    memory: Arc<GuestMemoryMmap>,
    buffers: Vec<Buffer>,
    len: usize,
    /// Bytes that sockets took out of the buffers.
    sent: Cell<usize>,
}

impl Rest {
    /// The rest of a frame, of which there is some. Returns the buffers if there are too many, or if one
    /// of them is not within one region of the memory.
    pub(crate) fn new(
        memory: &Arc<GuestMemoryMmap>,
        buffers: Vec<Buffer>,
    ) -> Result<Self, Vec<Buffer>> {
        let is_there = |(address, len): &Buffer| memory.get_slice(*address, *len as usize).is_ok();
        if buffers.len() > MOST_BUFFERS || !buffers.iter().all(is_there) {
            return Err(buffers);
        }
        Ok(Self {
            memory: memory.clone(),
            len: buffers.iter().map(|(_, len)| *len as usize).sum(),
            buffers,
            sent: Cell::new(0),
        })
    }

    /// Number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes that sockets took out of the buffers.
    pub(crate) fn sent(&self) -> usize {
        self.sent.get()
    }

    /// The list of buffers, for another frame.
    pub(crate) fn into_buffers(self) -> Vec<Buffer> {
        self.buffers
    }

    /// Copies all of it to `into`, which has its length. Returns whether it could.
    pub fn copy_to(&self, into: &mut [u8]) -> bool {
        into.len() == self.len && self.copy(0..self.len, into)
    }

    /// The parts of the buffers in which a range of the bytes is.
    fn parts(&self, range: Range<usize>) -> impl Iterator<Item = (GuestAddress, usize)> {
        let mut skipped = range.start;
        let mut wanted = range.len();
        self.buffers.iter().filter_map(move |(address, len)| {
            let before = skipped.min(*len as usize);
            skipped -= before;
            let some = wanted.min(*len as usize - before);
            wanted -= some;
            (some > 0).then(|| (GuestAddress(address.0 + before as u64), some))
        })
    }

    fn copy(&self, range: Range<usize>, mut into: &mut [u8]) -> bool {
        for (address, len) in self.parts(range) {
            let (now, later) = into.split_at_mut(len);
            if self.memory.read_slice(now, address).is_err() {
                return false;
            }
            into = later;
        }
        into.is_empty()
    }

    /// Sends bytes on a socket, and a range of these behind them. Returns how many the socket took of
    /// both.
    fn send(
        &self,
        socket: &OwnedFd,
        before: &[u8],
        range: Range<usize>,
        flags: MsgFlags,
    ) -> nix::Result<usize> {
        let none = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        let mut pieces = [none; 1 + MOST_BUFFERS];
        pieces[0] = libc::iovec {
            iov_base: before.as_ptr().cast_mut().cast(),
            iov_len: before.len(),
        };
        let mut count = 1;
        for (address, len) in self.parts(range) {
            let slice = self.memory.get_slice(address, len);
            let slice = slice.map_err(|_| Errno::EFAULT)?;
            pieces[count] = libc::iovec {
                iov_base: slice.ptr_guard().as_ptr().cast_mut().cast(),
                iov_len: len,
            };
            count += 1;
        }
        // SAFETY: all zeroes is a message without address, pieces and control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen = count as _;
        // SAFETY: the pieces are `before` and slices of the memory that `self` keeps mapped; the call
        // only reads them, and that they change meanwhile is no matter to the kernel.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags.bits()) };
        let sent = Errno::result(sent)? as usize;
        let of_these = sent.saturating_sub(before.len());
        self.sent.set(self.sent.get() + of_these);
        Ok(sent)
    }
}

/// Bytes of a segment: those that were copied, and those behind them in the guest's memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Payload<'p> {
    here: &'p [u8],
    rest: Option<(&'p Rest, Range<usize>)>,
}

impl<'p> From<&'p [u8]> for Payload<'p> {
    fn from(here: &'p [u8]) -> Self {
        Self { here, rest: None }
    }
}

impl<'p> Payload<'p> {
    /// Bytes that were copied, and the rest of the frame.
    pub(crate) fn new(here: &'p [u8], rest: Option<&'p Rest>) -> Self {
        Self {
            here,
            rest: rest.map(|rest| (rest, 0..rest.len)),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.here.len() + self.rest.as_ref().map_or(0, |(_, range)| range.len())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A part of the bytes; `None` if it is not within them.
    pub(crate) fn get(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.len() {
            return None;
        }
        let here = self.here.len();
        let rest = self.rest.as_ref().filter(|_| range.end > here);
        Some(Self {
            here: &self.here[range.start.min(here)..range.end.min(here)],
            rest: rest.map(|(rest, of)| {
                let at = |end: usize| of.start + end.saturating_sub(here);
                (*rest, at(range.start)..at(range.end))
            }),
        })
    }

    /// A copy of the bytes; `None` if the guest's memory can't be read.
    pub(crate) fn to_box(&self) -> Option<Box<[u8]>> {
        let Some((rest, range)) = &self.rest else {
            return Some(self.here.into());
        };
        let mut bytes = vec![0; self.len()];
        let (here, behind) = bytes.split_at_mut(self.here.len());
        here.copy_from_slice(self.here);
        rest.copy(range.clone(), behind)
            .then(|| bytes.into_boxed_slice())
    }

    /// Sends the bytes on a socket, which does not wait. Returns how many it took.
    ///
    /// # Errors
    /// As send(2).
    pub(crate) fn send(&self, socket: &OwnedFd) -> nix::Result<usize> {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        match &self.rest {
            None => send(socket.as_raw_fd(), self.here, flags),
            Some((rest, range)) => rest.send(socket, self.here, range.clone(), flags),
        }
    }
}

#[cfg(test)]
#[path = "payload_test.rs"]
mod tests;
