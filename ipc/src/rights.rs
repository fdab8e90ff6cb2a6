//! At most one descriptor with the bytes of a socket, as clients pass them.
use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use nix::sys::socket::MsgFlags;
use slipgate_model::rights::receive;

/// Descriptors that came with the bytes that were received.
#[derive(Debug, Default)]
pub enum Passed {
    /// The bytes came alone.
    #[default]
    Nothing,
    /// Exactly one descriptor, which the receiver owns from now on.
    One(OwnedFd),
    /// Several, which are closed; or one for which this process has no room.
    Refused,
}

/// Receives bytes, and at most one descriptor. The kernel gives this process no
/// further one, so however many a peer sends, none is left open.
///
/// # Errors
/// Those of recvmsg(2).
pub fn receive_with_one(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    flags: MsgFlags,
) -> io::Result<(usize, Passed)> {
    let mut received = receive(socket, bytes, 1, flags)?;
    let passed = match received.fds.pop() {
        _ if received.was_cut => Passed::Refused,
        Some(fd) => Passed::One(fd),
        None => Passed::Nothing,
    };
    Ok((received.len, passed))
}
