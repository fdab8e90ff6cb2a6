//! System calls on the queues of a connection's socket.
#![expect(
    unsafe_code,
    reason = "how much is in a queue, and the place to peek at, have no call in nix"
)]
use std::{
    io::{self, IoSliceMut},
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{
    errno::Errno,
    libc,
    sys::socket::{MsgFlags, getsockopt, recv, recvmsg, setsockopt, sockopt},
};

use crate::{payload::Payload, space::Target};

/// Bytes that one call takes out of a queue at most.
const DISCARDED_AT_ONCE: usize = 1 << 16;
/// Size of a send queue from which on no larger one is asked for, bytes: what most kernels' default of
/// `net.core.wmem_max` permits. Where less is permitted, asking would make a larger one smaller.
const LARGEST_QUEUE: usize = 2 * 212_992;

/// Returns the error of a socket, which is cleared.
pub(super) fn error_of(socket: &OwnedFd) -> io::Result<()> {
    match getsockopt(socket, sockopt::SocketError)? {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// As [`room`], of a connection on which nothing was sent.
pub(super) fn whole_room(socket: &OwnedFd) -> (u32, u32) {
    let size = getsockopt(socket, sockopt::SndBuf).unwrap_or(0) as u32;
    (usable(size), size)
}

/// Part of a send queue's size that is for data: the size includes what the kernel needs for itself.
const fn usable(size: u32) -> u32 {
    size - size / 8
}

/// Returns how many bytes more a connection's send queue takes, and how many it has in all.
pub(super) fn room(socket: &OwnedFd) -> (u32, u32) {
    let size = getsockopt(socket, sockopt::SndBuf).unwrap_or(0) as u32;
    let mut queued: libc::c_int = 0;
    // SAFETY: the call writes an int.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut queued) };
    if rc < 0 {
        return (0, size);
    }
    (usable(size).saturating_sub(queued.max(0) as u32), size)
}

/// Has a connection's send queue take so many bytes if it takes less, as far as [`LARGEST_QUEUE`] and
/// `net.core.wmem_max` permit. The kernel still enlarges it further by itself.
pub(super) fn enlarge(socket: &OwnedFd, bytes: u32) {
    /// Of `asm-generic/socket.h`, Linux 5.14: which sizes the kernel leaves as they are.
    const SO_BUF_LOCK: libc::c_int = 72;
    let size = getsockopt(socket, sockopt::SndBuf).unwrap_or(usize::MAX);
    let wanted = bytes as usize + bytes.div_ceil(7) as usize;
    if size >= wanted.min(LARGEST_QUEUE) {
        return;
    }
    // The kernel doubles it, and takes it for the last word.
    if setsockopt(socket, sockopt::SndBuf, &wanted.div_ceil(2)).is_ok() {
        set_int(socket, SO_BUF_LOCK, 0);
    }
}

/// Returns how many bytes a connection's receive queue has.
pub(super) fn received(socket: &OwnedFd) -> usize {
    let mut received: libc::c_int = 0;
    // SAFETY: the call writes an int.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCINQ, &raw mut received) };
    if rc < 0 { 0 } else { received.max(0) as usize }
}

/// Sets the place in a connection's receive queue from which the next bytes are peeked. Returns
/// whether the kernel can (6.9).
pub(super) fn peek_at(socket: &OwnedFd, offset: u32) -> bool {
    set_int(socket, libc::SO_PEEK_OFF, offset as libc::c_int)
}

/// Sets an option of the level SOL_SOCKET. Returns whether the kernel has it.
fn set_int(socket: &OwnedFd, option: libc::c_int, value: libc::c_int) -> bool {
    // SAFETY: the option is an int, of the size given.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    rc == 0
}

/// Peeks the bytes `skipped` behind where the kernel begins. Returns how many there are; 0 at the
/// end of the data.
///
/// # Errors
/// `EAGAIN` if there are none at present. `EFAULT` if the guest's memory can't be written, or, with
/// `skipped`, if it may be so: whether there are any, a peek into a buffer of ours says.
pub(super) fn peek(
    socket: &OwnedFd,
    skipped: usize,
    scratch: &mut [u8],
    into: &mut Target<'_>,
) -> io::Result<usize> {
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let skips = scratch.len() >= skipped;
    if !skips {
        return Err(Errno::EAGAIN.into());
    }
    let before = &mut scratch[..skipped];
    let got = match into {
        Target::Guest(space) => space.receive(socket, before, flags)?,
        Target::Here(into) => {
            let mut parts = [IoSliceMut::new(before), IoSliceMut::new(into)];
            let parts = if skipped == 0 {
                &mut parts[1..]
            } else {
                &mut parts[..]
            };
            recvmsg::<()>(socket.as_raw_fd(), parts, None, flags)?.bytes
        }
    };
    match (got.saturating_sub(skipped), skipped) {
        // The kernel counts what it has copied before it found the memory gone, and says no more.
        (0, 1..) if matches!(into, Target::Guest(_)) => Err(Errno::EFAULT.into()),
        // Nothing behind what the guest has not acknowledged; whether it is the end, a hang-up says.
        (0, 1..) => Err(Errno::EAGAIN.into()),
        (more, _) => Ok(more),
    }
}

/// Takes bytes out of a connection's receive queue.
pub(super) fn discard(socket: &OwnedFd, mut bytes: usize, scratch: &mut [u8]) -> io::Result<()> {
    while bytes > 0 {
        let most = bytes.min(DISCARDED_AT_ONCE).min(scratch.len());
        // Not even copied: MSG_TRUNC, tcp(7).
        let flags = MsgFlags::MSG_TRUNC | MsgFlags::MSG_DONTWAIT;
        match recv(socket.as_raw_fd(), &mut scratch[..most], flags)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            some => bytes -= some.min(bytes),
        }
    }
    Ok(())
}

/// Puts bytes into a connection's send queue. Returns how many it took.
pub(super) fn send_to(socket: &OwnedFd, bytes: &Payload<'_>) -> io::Result<u32> {
    loop {
        match bytes.send(socket) {
            Ok(taken) => return Ok(taken as u32),
            Err(Errno::EAGAIN | Errno::ENOBUFS) => return Ok(0),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
#[path = "queue_test.rs"]
mod tests;
