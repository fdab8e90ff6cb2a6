//! Descriptors that a broker leaves to its successor, so that nothing is lost in between: the engine
//! port's, in whose queue the first packets of new flows and guests' questions wait, and listening
//! sockets, in which connections wait.
//!
//! They go from one to the other by a service manager that keeps them (FDSTORE of sd_notify(3)), or
//! by the control socket where the successor starts while the predecessor serves. Each is recognised
//! by what it is, not by a name or a position. So a successor of another version or with other flags
//! takes what it has a use for, and closes the rest.
use std::{
    net::SocketAddr,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::net::UnixListener,
    },
    path::Path,
};

use nix::sys::socket::{SockType, SockaddrStorage, UnixAddr, getsockname, getsockopt, sockopt};
use slipgate_ipc::{
    channel::{Channel, MAX_FDS},
    client::{self, ClientAnswer, ClientRequest, ask},
};

/// Name of the descriptors at a service manager.
pub(crate) const STORE: &str = "slipgate";

/// Descriptors of a predecessor that nobody has taken yet, and sockets of a service manager.
#[derive(Debug, Default)]
pub(crate) struct HandedOver {
    sockets: Vec<OwnedFd>,
    others: Vec<OwnedFd>,
}

impl HandedOver {
    /// Adds what the daemon behind a control socket has. It serves on until [`end_predecessor`].
    ///
    /// # Errors
    /// The daemon gives no valid answer. None being there is no error.
    pub(crate) fn ask(&mut self, socket: &Path) -> anyhow::Result<()> {
        let (theirs, ours) = Channel::pair()?;
        let to = theirs.as_fd();
        match ask(socket, ClientRequest::HandOver { to }) {
            Ok(ClientAnswer::Done) => {}
            Ok(answer) => {
                tracing::warn!("the running daemon hands nothing over: {answer:?}");
                return Ok(());
            }
            Err(e) if e.is_nobodys() => return Ok(()),
            Err(e) => return Err(e.into()),
        }
        drop(theirs);
        while let Some(message) = ours.receive::<client::HandedOver>()? {
            let more = Self::from_iter(message.descriptors);
            self.sockets.extend(more.sockets);
            self.others.extend(more.others);
        }
        Ok(())
    }

    /// Takes the descriptors that a service manager passed to this process (sd_listen_fds(3)). To
    /// be called once.
    pub(crate) fn by_service_manager() -> Self {
        let passed = sd_notify::listen_fds().into_iter().flatten();
        // SAFETY: the service manager opened them for this process, and only this takes them.
        Self::from_iter(passed.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Takes out the socket that is bound to an address.
    pub(crate) fn socket(&mut self, kind: SockType, address: SocketAddr) -> Option<OwnedFd> {
        self.take(|fd| {
            getsockopt(&fd, sockopt::SockType) == Ok(kind)
                && getsockname::<SockaddrStorage>(fd.as_raw_fd())
                    .is_ok_and(|bound| bound == SockaddrStorage::from(address))
        })
    }

    /// Takes out the Unix socket that is bound to a path. Where that is a service manager's, it
    /// stays the manager's too: clients can connect while no slipgate runs.
    pub(crate) fn unix_socket(&mut self, path: &Path) -> Option<UnixListener> {
        let socket = self.take(|fd| {
            getsockname::<UnixAddr>(fd.as_raw_fd()).is_ok_and(|bound| bound.path() == Some(path))
        });
        socket.map(UnixListener::from)
    }

    /// Takes out all that are no sockets.
    pub(crate) fn others(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.others)
    }

    fn take(&mut self, is_it: impl Fn(BorrowedFd<'_>) -> bool) -> Option<OwnedFd> {
        let at = self.sockets.iter().position(|fd| is_it(fd.as_fd()))?;
        Some(self.sockets.swap_remove(at))
    }
}

/// Sends copies of descriptors to the process that asked by [`HandedOver::ask`].
pub(crate) fn hand_over<'a>(
    fds: impl Iterator<Item = BorrowedFd<'a>>,
    to: OwnedFd,
) -> anyhow::Result<()> {
    let channel = Channel::from_fd(to);
    let mut fds = fds.peekable();
    while fds.peek().is_some() {
        let descriptors = fds.by_ref().take(MAX_FDS).collect();
        if !channel.try_send(client::HandedOver { descriptors })? {
            anyhow::bail!("the successor takes no more descriptors");
        }
    }
    Ok(())
}

/// Has the daemon behind a control socket stop and leave its flows to this process. It may not have
/// ended yet when this returns.
///
/// # Errors
/// It does not agree to that. None being there is no error.
pub(crate) fn end_predecessor(socket: &Path) -> anyhow::Result<()> {
    match ask(socket, ClientRequest::Stop { keep: true }) {
        Ok(ClientAnswer::Done) => Ok(()),
        Ok(answer) => Err(anyhow::anyhow!("stopping the running daemon: {answer:?}")),
        Err(e) if e.is_nobodys() => Ok(()),
        Err(e) => Err(e.into()),
    }
}

impl FromIterator<OwnedFd> for HandedOver {
    fn from_iter<I: IntoIterator<Item = OwnedFd>>(all: I) -> Self {
        let is_socket = |fd: &OwnedFd| getsockopt(fd, sockopt::SockType).is_ok();
        let (sockets, others) = all.into_iter().partition(is_socket);
        Self { sockets, others }
    }
}
