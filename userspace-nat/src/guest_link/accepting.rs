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

/// Whether was warned of a connection that can't be watched.
#[derive(Debug, Default)]
pub(super) struct Warned(pub(super) bool);

impl Warned {
    /// Takes note of a try to watch one. `outcome`: what became of the connection if there was an error.
    pub(super) fn of(&mut self, error: Option<Errno>, outcome: &str) {
        // It warns of the first, and of no other until one can be watched.
        if let Some(error) = error
            && !self.0
        {
            tracing::warn!(
                "a guest's connection {outcome}: the kernel can't watch it ({error}). ENOSPC: this user watches \
                 too much; raise fs.epoll.max_user_watches, or end other programs. Not said again before one \
                 can be watched"
            );
        }
        self.0 = error.is_some();
    }
}

/// Accepts the connection that waits, and has a set tell what comes on it.
pub(super) fn accept(
    listener: &OwnedFd,
    epoll: &Epoll,
    key: u64,
    warned: &mut Warned,
) -> Result<Option<OwnedFd>, Short> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = match accept4(listener.as_raw_fd(), flags) {
        Ok(accepted) => owned(accepted),
        Err(Errno::EAGAIN) => return Ok(None),
        Err(_) => return Err(Short { has_refused: false }),
    };
    let watched = watch(&socket, epoll, key);
    warned.of(watched.err(), "was closed");
    match watched {
        Ok(()) => Ok(Some(socket)),
        Err(_) => Err(Short { has_refused: true }),
    }
}

/// Has a set tell what comes on a connection, for as long as it has not been read.
pub(super) fn watch(socket: &OwnedFd, epoll: &Epoll, key: u64) -> Result<(), Errno> {
    epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, key))
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
