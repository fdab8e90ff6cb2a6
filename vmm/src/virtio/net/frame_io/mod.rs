//! Moves a batch of frames between guest memory and the TAP.
use std::{io, os::fd::RawFd};

use libc::iovec;

mod uring;
mod vectored;

use super::IoMethod;
use uring::Uring;
use vectored::Vectored;

/// Largest number of transfers in one batch.
pub(super) const MAX_TRANSFERS: usize = 128;

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the TAP to the guest.
    Read,
    /// From the guest to the TAP.
    Write,
}

/// Transfer of one frame, with its virtio-net header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) pieces: *const iovec,
    pub(super) count: u32,
    pub(super) direction: Direction,
    /// Result: number of bytes, or a negative errno.
    pub(super) result: i32,
}

/// Method of reading and writing frames.
pub(super) trait FrameIo: Send {
    /// Prepares the method. Called once on the thread that makes all transfers.
    ///
    /// # Errors
    /// The host refuses it.
    fn begin(&mut self) -> io::Result<()>;

    /// Returns whether it goes by io_uring.
    fn is_uring(&self) -> bool {
        false
    }

    /// Makes all transfers, in order for each direction, without waiting: one that is not possible
    /// now results in EAGAIN. Returns the number of system calls.
    ///
    /// # Errors
    /// The method itself failed, not a frame; it can't be used further.
    ///
    /// # Safety
    /// All pieces are mapped until it returns, and writable for [`Direction::Read`]. There are at most
    /// [`MAX_TRANSFERS`].
    unsafe fn transfer(&mut self, transfers: &mut [Transfer]) -> io::Result<u64>;
}

/// Creates the method for one queue. `Auto` selects io_uring if the host allows it.
pub(super) fn new(method: IoMethod, descriptor: RawFd) -> io::Result<Box<dyn FrameIo>> {
    match method {
        IoMethod::Vectored => Ok(Box::new(Vectored::new(descriptor))),
        IoMethod::IoUring => Ok(Box::new(Uring::new(descriptor)?)),
        IoMethod::Auto => Ok(match Uring::new(descriptor) {
            Ok(uring) => Box::new(uring),
            Err(_) => Box::new(Vectored::new(descriptor)),
        }),
    }
}
