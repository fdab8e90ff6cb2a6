//! The socket of `slipgate attach --socket` and `--vhost-user`, to which a VMM connects.
//!
//! The engine accepts from a copy of the listening socket. If it serves one guest only, it shuts the
//! socket down when that has gone, and both see it hang up.
use std::{
    io::{self, Write as _},
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::Signal,
};

use super::Guest;
use crate::host::ListeningSocket;

/// The socket, and what became of its engine.
#[derive(Debug)]
pub(super) struct Socket {
    listener: ListeningSocket,
    /// Name of the VM.
    vm: String,
    is_stopped: bool,
    /// How the engine ended, if it did.
    lost_engine: Option<String>,
}

impl Socket {
    /// Makes the socket, for this user only. What a killed process has left at the path is replaced.
    /// `flag`: the one that gave the path.
    pub(super) fn listen(flag: &'static str, path: PathBuf, vm: String) -> anyhow::Result<Self> {
        Ok(Self {
            listener: ListeningSocket::listen(flag, path)?,
            vm,
            is_stopped: false,
            lost_engine: None,
        })
    }

    /// Returns a copy of the listening socket, for the engine.
    pub(super) fn link(&self) -> anyhow::Result<OwnedFd> {
        let copy = self.listener.copy();
        copy.context("copying the listening socket")
    }

    /// Returns how it ended.
    pub(super) fn ended(&mut self) -> anyhow::Result<()> {
        match self.lost_engine.take() {
            Some(how) => bail!("the engine {how}: the guest has no network any more"),
            None => Ok(()),
        }
    }
}

impl Guest for Socket {
    fn poll_fds(&self) -> Vec<PollFd<'_>> {
        // Its input is the engine's; this is for it to hang up.
        vec![PollFd::new(self.listener.as_fd(), PollFlags::empty())]
    }

    fn has_ended(&mut self) -> bool {
        let mut fds = self.poll_fds();
        let hung_up = matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..));
        hung_up || self.is_stopped || self.lost_engine.is_some()
    }

    fn begin(&mut self, _socket: &Path) -> anyhow::Result<()> {
        let (vm, path) = (&self.vm, self.listener.path().display());
        let mut out = io::stdout().lock();
        writeln!(out, "slipgate: ready: {vm} at {path}")
            .and_then(|()| out.flush())
            .unwrap_or_else(|e| tracing::warn!("writing `ready` to stdout: {e}"));
        Ok(())
    }

    fn signal(&mut self, signal: Signal) -> bool {
        self.is_stopped |= matches!(signal, Signal::SIGTERM | Signal::SIGINT);
        signal == Signal::SIGHUP
    }

    fn lost_engine(&mut self, how: String) {
        self.lost_engine = Some(how);
    }
}

#[cfg(test)]
#[path = "socket_test.rs"]
mod tests;
