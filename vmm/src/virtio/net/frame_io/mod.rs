//! Moving a batch of frames between pieces of the guest's memory and the TAP.
use std::{io, os::fd::RawFd};

use libc::iovec;

mod uring;
mod vectored;

use super::IoMethod;
use uring::Uring;
use vectored::Vectored;

/// The most transfers in one batch.
pub(super) const MAX_TRANSFERS: usize = 128;

/// Which way a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// From the TAP to the guest.
    Read,
    /// From the guest to the TAP.
    Write,
}

/// One frame, with its header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) pieces: *const iovec,
    pub(super) count: u32,
    pub(super) way: Way,
    /// Bytes, or a negative errno.
    pub(super) result: i32,
}

/// How frames are read and written.
pub(super) trait FrameIo: Send {
    /// Called once on the thread that makes all transfers.
    fn begin(&mut self) -> io::Result<()>;

    /// Makes all transfers, in order for each way, none of which waits: what can't be done now
    /// results in EAGAIN. Returns the number of system calls.
    ///
    /// # Errors
    /// The method itself failed, not a frame; it can't be used further.
    ///
    /// # Safety
    /// All pieces are mapped until it returns, writable for [`Way::Read`]. At most
    /// [`MAX_TRANSFERS`].
    unsafe fn transfer(&mut self, transfers: &mut [Transfer]) -> io::Result<u64>;
}

/// Makes the method for one queue; `Auto` takes what the host allows.
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
