//! Room in a guest's buffers into which a socket's bytes go straight, and where bytes of a socket go at all.
//!
//! # Theory of operation
//! A frame for the guest has its headers before its payload, and they depend on its length. So a
//! [`Space`] is found first, with room for the longest that may be; then the kernel copies what the
//! socket has behind the place of the headers; then the headers are copied, and as many chains as the frame
//! fills are the guest's. The others stay available, as all do if nothing comes of the frame.
//!
//! What is in the buffers can be read by the guest at once, before it is told. So a space is given only for a
//! flow whose next frame the programs will pass on and count.
#![expect(
    unsafe_code,
    reason = "the kernel writes memory that the guest may write, of which there is no slice of bytes"
)]
use std::{
    os::fd::{AsRawFd as _, OwnedFd},
    sync::Arc,
};

use nix::{errno::Errno, libc, sys::socket::MsgFlags};
use vm_memory::GuestMemoryMmap;

use crate::guest_buffers::{Buffer, GuestBuffers, NO_PIECE};

/// Buffers that a space may have: as many as a frame of 64 KiB fills if each has 1,500 bytes. With more of
/// them a frame is copied.
pub(crate) const MOST_BUFFERS: usize = 46;

/// Where the bytes of a socket go that are for the guest.
#[derive(Debug)]
pub(crate) enum Target<'t> {
    /// Into a buffer of ours, as many as it has room for.
    Here(&'t mut [u8]),
    /// Into the guest's.
    Guest(&'t Space),
}

impl<'t> From<&'t mut [u8]> for Target<'t> {
    fn from(here: &'t mut [u8]) -> Self {
        Self::Here(here)
    }
}

impl<'t> From<&'t Space> for Target<'t> {
    fn from(space: &'t Space) -> Self {
        Self::Guest(space)
    }
}

/// A chain of a ring: its head, and the bytes for which it has room.
pub(crate) type Head = (u16, usize);

/// Room for a frame in chains of the guest's, which are still available.
#[derive(Debug)]
pub struct Space {
    buffers: GuestBuffers,
    heads: Vec<Head>,
    /// Index of the first of the chains in the ring.
    from: u16,
    /// Where payload is to be, bytes from the first buffer's beginning, and how much at most.
    at: usize,
    most: usize,
}

/// What a [`Space`] was made of, to be used again.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) heads: Vec<Head>,
    pub(crate) from: u16,
    pub(crate) at: usize,
}

impl Space {
    /// Room for `most` bytes of payload behind those of headers, of which there are `parts.at`. Returns the
    /// parts if they are not for the kernel to fill.
    pub(crate) fn new(
        memory: &Arc<GuestMemoryMmap>,
        parts: Parts,
        most: usize,
    ) -> Result<Self, Parts> {
        let Parts {
            buffers,
            heads,
            from,
            at,
        } = parts;
        let back = |buffers, heads| {
            Err(Parts {
                buffers,
                heads,
                from,
                at,
            })
        };
        let buffers = match GuestBuffers::new(memory, buffers, MOST_BUFFERS) {
            Ok(buffers) => buffers,
            Err(buffers) => return back(buffers, heads),
        };
        if buffers.len() < at + most {
            return back(buffers.into_list(), heads);
        }
        Ok(Self {
            buffers,
            heads,
            from,
            at,
            most,
        })
    }

    pub(crate) fn into_parts(self) -> Parts {
        Parts {
            buffers: self.buffers.into_list(),
            heads: self.heads,
            from: self.from,
            at: self.at,
        }
    }

    /// Copies payload that is there to `into`. Returns whether it could.
    pub fn copy_to(&self, into: &mut [u8]) -> bool {
        into.len() <= self.most && self.buffers.copy(self.at..self.at + into.len(), into)
    }

    /// Receives bytes of a socket into `before`, and the next into the place of the payload. Returns the
    /// number of both.
    ///
    /// # Errors
    /// As recvmsg(2).
    pub(crate) fn receive(
        &self,
        socket: &OwnedFd,
        before: &mut [u8],
        flags: MsgFlags,
    ) -> nix::Result<usize> {
        let mut pieces = [NO_PIECE; 1 + MOST_BUFFERS];
        pieces[0] = libc::iovec {
            iov_base: before.as_mut_ptr().cast(),
            iov_len: before.len(),
        };
        let place = self.at..self.at + self.most;
        let count = 1 + self.buffers.pieces(place, &mut pieces[1..])?;
        // SAFETY: all zeroes is a message without address, pieces and control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen = count as _;
        // SAFETY: the pieces are `before` and slices of the memory that `self` keeps mapped. No reference
        // to that memory's bytes exists, and that the guest changes them meanwhile is no matter to the kernel.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags.bits()) };
        Ok(Errno::result(got)? as usize)
    }
}

#[cfg(test)]
#[path = "space_test.rs"]
mod tests;
