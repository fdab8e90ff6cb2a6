//! Connections of guests at a listening socket.
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};

use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollEvent, EpollFlags},
        socket::{SockFlag, accept4},
    },
};

/// What became of a connection that waited, if one did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Accepted {
    /// None waited, or none is accepted at present.
    No,
    /// Its guest is connected.
    Yes,
    /// It was closed, since the kernel can't watch it. Whoever waits is accepted later.
    Refused,
}

/// The host was short of something: to be tried again later, since the event has come and comes no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Short {
    /// Whether a connection was closed for it.
    pub(super) has_refused: bool,
}

impl Short {
    pub(super) fn accepted(self) -> Accepted {
        match self.has_refused {
            true => Accepted::Refused,
            false => Accepted::No,
        }
    }
}

/// Accepts the connection that waits, and has a set tell what comes on it. `has_warned`: as for [`watch`].
pub(super) fn accept(
    listener: &OwnedFd,
    epoll: &Epoll,
    key: u64,
    has_warned: &mut bool,
) -> Result<Option<OwnedFd>, Short> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = match accept4(listener.as_raw_fd(), flags) {
        Ok(accepted) => owned(accepted),
        Err(Errno::EAGAIN) => return Ok(None),
        Err(_) => return Err(Short { has_refused: false }),
    };
    match watch(&socket, epoll, key, "was closed", has_warned) {
        true => Ok(Some(socket)),
        false => Err(Short { has_refused: true }),
    }
}

/// Has a set tell what comes on a connection, for as long as it has not been read. Returns whether it does.
/// `otherwise`: what becomes of a connection that can't be watched. Of the first one is warned, then of none
/// until one can be watched: `has_warned` says whether there was one.
pub(super) fn watch(
    socket: &OwnedFd,
    epoll: &Epoll,
    key: u64,
    otherwise: &str,
    has_warned: &mut bool,
) -> bool {
    let watched = epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, key));
    if let Err(error) = watched
        && !*has_warned
    {
        tracing::warn!(
            "a guest's connection {otherwise}: the kernel can't watch it ({error}). ENOSPC: this user watches \
             too much; raise fs.epoll.max_user_watches, or end other programs. Not said again before one can \
             be watched"
        );
    }
    *has_warned = watched.is_err();
    watched.is_ok()
}

#[expect(
    unsafe_code,
    reason = "nix returns a descriptor that accept4 has made as a number"
)]
fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just made it for the caller.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[cfg(test)]
#[path = "accepting_test.rs"]
mod tests;
