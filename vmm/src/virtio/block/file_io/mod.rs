//! Carries operations out on a disk's file.
use std::{io, os::fd::RawFd, sync::Arc};

use libc::iovec;

#[cfg(test)]
#[path = "../held_test.rs"]
pub(super) mod held;
#[cfg(any(test, feature = "fake"))]
mod strict;
mod uring;
mod vectored;

use super::file::Image;
use uring::Uring;
use vectored::Vectored;

/// Most pieces that one operation takes (UIO_MAXIOV).
pub(super) const MAX_PIECES: usize = 1024;
/// Most operations under way at once.
pub(super) const MAX_OPERATIONS: usize = super::QUEUE_SIZE as usize;

/// An operation of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Operation {
    /// Place in the file where it begins, bytes.
    pub(super) offset: u64,
    pub(super) action: Action,
}

// SAFETY: the pieces are addresses that every thread may use alike; who carries the operation out has
// to see that they are valid.
unsafe impl Send for Operation {}

/// What an operation does. The pieces are up to [`MAX_PIECES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Read {
        pieces: *const iovec,
        count: u32,
    },
    /// `stable`: what is written is on the medium when the operation ends.
    Write {
        pieces: *const iovec,
        count: u32,
        stable: bool,
    },
    /// Makes all writes stable that have ended.
    Flush,
    /// fallocate(2) with a mode.
    Allocate {
        mode: i32,
        bytes: u64,
    },
}

/// Method of carrying operations out. Results are numbers of bytes (0 where there are none), or
/// negative errnos.
pub(super) trait FileIo: Send {
    /// Prepares the method. Called once on the thread that uses it.
    ///
    /// # Errors
    /// The host refuses it.
    fn begin(&mut self) -> io::Result<()>;

    /// Returns whether it goes by io_uring.
    fn is_uring(&self) -> bool {
        false
    }

    /// Returns how many operations are worth to be begun by one [`FileIo::submit`].
    fn batch(&self) -> usize;

    /// Returns a descriptor that can be read when there is a result; `None` if none comes later than
    /// at [`FileIo::submit`].
    fn descriptor(&self) -> Option<RawFd>;

    /// Adds an operation to those that [`FileIo::submit`] begins. `id` is given back with its
    /// result. At most [`MAX_OPERATIONS`] are under way.
    ///
    /// # Safety
    /// The pieces, and the memory that they are of, stay where they are and mapped until the result
    /// was returned; that of a read is writable.
    unsafe fn push(&mut self, id: u16, operation: &Operation);

    /// Begins all operations that were added.
    fn submit(&mut self);

    /// Returns whether there is a result.
    fn has_result(&mut self) -> bool;

    /// Returns the next result, with the id of its operation.
    fn result(&mut self) -> Option<(u16, i32)>;

    /// Waits for a result. One must be under way.
    fn wait(&mut self);
}

/// Which method carries operations out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    /// io_uring where the host allows it, else [`Method::Vectored`].
    Auto,
    /// io_uring.
    #[cfg(test)]
    IoUring,
    /// Operations are carried out when the test lets them.
    #[cfg(test)]
    Held(&'static held::Gate),
    /// As [`Method::Vectored`], but what is not aligned fails, as it does with O_DIRECT.
    #[cfg(any(test, feature = "fake"))]
    Strict,
    /// preadv and pwritev: one operation after the other.
    Vectored,
}

/// Creates the method for one queue.
///
/// # Errors
/// `method` demands io_uring, and the host refuses it.
pub(super) fn new(method: Method, image: &Arc<Image>) -> io::Result<Box<dyn FileIo>> {
    Ok(match method {
        Method::Auto => match Uring::new(image.clone()) {
            Ok(uring) => Box::new(uring),
            Err(_) => Box::new(Vectored::new(image.clone())),
        },
        #[cfg(test)]
        Method::IoUring => Box::new(Uring::new(image.clone())?),
        #[cfg(test)]
        Method::Held(gate) => Box::new(held::Held::new(image.clone(), gate)?),
        #[cfg(any(test, feature = "fake"))]
        Method::Strict => Box::new(strict::Strict::new(image.clone())),
        Method::Vectored => Box::new(Vectored::new(image.clone())),
    })
}

#[cfg(test)]
#[path = "../file_io_test.rs"]
mod tests;
