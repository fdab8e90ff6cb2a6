//! Socket options the standard library does not have.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

use crate::error::checked;

/// Sets the receive buffer to `bytes`, above the system's limit too (root).
pub(crate) fn set_receive_buffer(socket: &impl AsFd, bytes: i32) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, bytes)
}

/// Sets an option whose value is an int.
pub(crate) fn set(socket: &impl AsFd, level: i32, option: i32, value: i32) -> io::Result<()> {
    set_value(socket, level, option, &value)
}

/// Sets an option to any plain value.
pub(crate) fn set_value<T: Copy>(
    socket: &impl AsFd,
    level: i32,
    option: i32,
    value: &T,
) -> io::Result<()> {
    let (fd, len) = (
        socket.as_fd().as_raw_fd(),
        size_of::<T>() as libc::socklen_t,
    );
    // SAFETY: the value is readable for the length given; the kernel checks that length.
    checked(unsafe { libc::setsockopt(fd, level, option, (&raw const *value).cast(), len) })
        .map(drop)
}

/// Waits until `fd` has one of `events`, at most `timeout_ms` (-1: for ever); what it has, 0 when
/// the time is over.
pub(crate) fn poll(fd: &impl AsFd, events: i16, timeout_ms: i32) -> io::Result<i16> {
    let mut polled = libc::pollfd {
        fd: fd.as_fd().as_raw_fd(),
        events,
        revents: 0,
    };
    // SAFETY: one pollfd, writable.
    match checked(unsafe { libc::poll(&raw mut polled, 1, timeout_ms) }) {
        Ok(_) => Ok(polled.revents),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        Err(error) => Err(error),
    }
}
