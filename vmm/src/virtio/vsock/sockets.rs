//! System calls on the sockets of the host's programs.
use std::{
    io::{self, ErrorKind},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixListener,
    },
    ptr,
};

use libc::iovec;

#[cfg(test)]
#[path = "staged_test.rs"]
pub(super) mod staged;

/// Most pieces of one call (IOV_MAX).
const MAX_PIECES: usize = 1024;

/// Accepts a connection; the socket is non-blocking.
pub(super) fn accept(listener: &UnixListener) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    loop {
        // SAFETY: the peer's address is not asked for.
        let fd = unsafe {
            libc::accept4(
                listener.as_raw_fd(),
                ptr::null_mut(),
                ptr::null_mut(),
                flags,
            )
        };
        if fd >= 0 {
            // SAFETY: a new descriptor, which nothing else owns.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        match io::Error::last_os_error() {
            error if error.kind() == ErrorKind::Interrupted => {}
            error => return Err(error),
        }
    }
}

/// Writes pieces, as many bytes as the socket takes.
///
/// # Safety
/// The pieces are mapped memory.
pub(super) unsafe fn write(socket: &OwnedFd, pieces: &[iovec]) -> io::Result<usize> {
    #[cfg(test)]
    if staged::is_on() {
        // SAFETY: as of this function.
        return unsafe { staged::write(socket, pieces) };
    }
    let count = pieces.len().min(MAX_PIECES) as i32;
    // SAFETY: as of this function; `count` is the number of pieces, or less.
    again(|| unsafe { libc::writev(socket.as_raw_fd(), pieces.as_ptr(), count) })
}

/// Reads into pieces, as many bytes as the socket has. 0: no more come.
///
/// # Safety
/// The pieces are mapped memory that may be written to.
pub(super) unsafe fn read(socket: &OwnedFd, pieces: &[iovec]) -> io::Result<usize> {
    #[cfg(test)]
    if staged::is_on() {
        // SAFETY: as of this function.
        return unsafe { staged::read(socket, pieces) };
    }
    let count = pieces.len().min(MAX_PIECES) as i32;
    // SAFETY: as of this function; `count` is the number of pieces, or less.
    again(|| unsafe { libc::readv(socket.as_raw_fd(), pieces.as_ptr(), count) })
}

/// Ends one direction of a socket, `SHUT_RD` or `SHUT_WR`. One whose other end is gone has ended
/// already.
pub(super) fn shut(socket: &OwnedFd, direction: i32) {
    // SAFETY: a system call without memory.
    let _ = unsafe { libc::shutdown(socket.as_raw_fd(), direction) };
}

/// Returns bytes as a piece.
pub(super) fn piece(bytes: &[u8]) -> iovec {
    iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

fn again(call: impl Fn() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(done) = usize::try_from(call()) {
            return Ok(done);
        }
        match io::Error::last_os_error() {
            error if error.kind() == ErrorKind::Interrupted => {}
            error => return Err(error),
        }
    }
}
