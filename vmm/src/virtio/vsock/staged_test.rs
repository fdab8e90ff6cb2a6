//! Socket calls by way of a buffer: what a device would do that does not pass the guest's memory to
//! the kernel. For a measurement, which turns them on.
use std::{
    cell::RefCell,
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use libc::iovec;

use super::again;
use crate::virtio::pieces::total;

static IS_ON: AtomicBool = AtomicBool::new(false);

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

pub(in super::super) fn turn(on: bool) {
    IS_ON.store(on, Relaxed);
}

pub(super) fn is_on() -> bool {
    IS_ON.load(Relaxed)
}

/// # Safety
/// The pieces are mapped memory.
pub(super) unsafe fn write(socket: &OwnedFd, pieces: &[iovec]) -> io::Result<usize> {
    BUFFER.with_borrow_mut(|buffer| {
        buffer.clear();
        buffer.reserve(total(pieces));
        for piece in pieces {
            let end = buffer.len();
            // SAFETY: as of this function; there is room for all pieces.
            unsafe {
                let to = buffer.as_mut_ptr().add(end);
                to.copy_from_nonoverlapping(piece.iov_base.cast(), piece.iov_len);
                buffer.set_len(end + piece.iov_len);
            }
        }
        let (from, bytes) = (buffer.as_ptr().cast(), buffer.len());
        // SAFETY: the buffer outlives the call.
        again(|| unsafe { libc::write(socket.as_raw_fd(), from, bytes) })
    })
}

/// # Safety
/// The pieces are mapped memory that may be written to.
pub(super) unsafe fn read(socket: &OwnedFd, pieces: &[iovec]) -> io::Result<usize> {
    BUFFER.with_borrow_mut(|buffer| {
        let bytes = total(pieces);
        if buffer.len() < bytes {
            buffer.resize(bytes, 0);
        }
        let to = buffer.as_mut_ptr().cast();
        // SAFETY: the buffer has so many bytes and outlives the call.
        let read = again(|| unsafe { libc::read(socket.as_raw_fd(), to, bytes) })?;
        let mut done = 0;
        for piece in pieces {
            let part = (read - done).min(piece.iov_len);
            // SAFETY: as of this function; the buffer has so many bytes.
            unsafe {
                let to: *mut u8 = piece.iov_base.cast();
                to.copy_from_nonoverlapping(buffer.as_ptr().add(done), part);
            }
            done += part;
        }
        Ok(read)
    })
}
