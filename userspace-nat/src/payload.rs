//! Payload of a guest's segment, whose end may still be in the guest's memory.
//!
//! # Theory of operation
//! Of a long frame in a ring only the headers are read. What is behind them stays in the guest's buffers
//! ([`Rest`]) until a socket takes it from there: one copy, by the kernel. The headers were copied and are
//! judged as copied. Nothing here looks at the payload, and the peer gets what the guest has in its buffers
//! when the kernel reads them: a guest that changes them meanwhile changes its own stream.
//!
//! That the buffers are in the guest's memory is checked before, and it stays mapped
//! ([`crate::guest_buffers`]).
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
use vm_memory::GuestMemoryMmap;

use crate::guest_buffers::{Buffer, GuestBuffers, NO_PIECE};

/// Buffers in which the rest of a frame may be: what is in more is cheaper to copy.
pub(crate) const MOST_BUFFERS: usize = 32;

/// The last bytes of a frame, in the guest's memory.
#[derive(Debug)]
pub struct Rest {
    buffers: GuestBuffers,
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
        Ok(Self {
            buffers: GuestBuffers::new(memory, buffers, MOST_BUFFERS)?,
            sent: Cell::new(0),
        })
    }

    /// Number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Bytes that sockets took out of the buffers.
    pub(crate) fn sent(&self) -> usize {
        self.sent.get()
    }

    /// The list of buffers, for another frame.
    pub(crate) fn into_buffers(self) -> Vec<Buffer> {
        self.buffers.into_list()
    }

    /// Copies all of it to `into`, which has its length. Returns whether it could.
    pub fn copy_to(&self, into: &mut [u8]) -> bool {
        self.buffers.copy(0..self.len(), into)
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
        let mut pieces = [NO_PIECE; 1 + MOST_BUFFERS];
        pieces[0] = libc::iovec {
            iov_base: before.as_ptr().cast_mut().cast(),
            iov_len: before.len(),
        };
        let count = 1 + self.buffers.pieces(range, &mut pieces[1..])?;
        // SAFETY: all zeroes is a message without address, pieces and control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen = count as _;
        // SAFETY: the pieces are `before` and slices of the memory that `self` keeps mapped. The call
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
            rest: rest.map(|rest| (rest, 0..rest.len())),
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
        rest.buffers
            .copy(range.clone(), behind)
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
