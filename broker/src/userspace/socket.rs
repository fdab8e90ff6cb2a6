//! The socket of `slipgate attach --socket` and `--vhost-user`, to which a VMM connects, or that of
//! `--fd`, by which it is connected.
//!
//! The engine accepts from a copy of the listening socket, or has a copy of the connected one. If it serves
//! one guest only, it shuts the socket down when that has gone, and both see it hang up.
use std::{
    io::{self, Write as _},
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::Signal,
        socket::{MsgFlags, SockType, UnixAddr, getpeername, getsockopt, recv, sockopt},
    },
};
use slipgate_policy::document::ConfigError;

use super::{Guest, PidFile};
use crate::host::ListeningSocket;

/// Time limit for the engine to read what a VMM sent before it closed the connection.
const READ_WITHIN: Duration = Duration::from_secs(1);

/// The socket, and what became of its engine.
#[derive(Debug)]
pub(super) struct Socket {
    end: End,
    /// Removed with this.
    pid_file: Option<PidFile>,
    /// Name of the VM.
    vm: String,
    is_stopped: bool,
    /// How the engine ended, if it did.
    lost_engine: Option<String>,
}

/// The socket itself.
#[derive(Debug)]
enum End {
    Listening(ListeningSocket),
    Connected(OwnedFd),
}

impl AsFd for End {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Listening(listener) => listener.as_fd(),
            Self::Connected(connection) => connection.as_fd(),
        }
    }
}

impl Socket {
    /// Makes the socket, for this user only. What a killed process has left at the path is replaced.
    /// `flag`: the one that gave the path.
    pub(super) fn listen(
        flag: &'static str,
        path: PathBuf,
        vm: String,
        pid_file: Option<PidFile>,
    ) -> anyhow::Result<Self> {
        let listener = ListeningSocket::listen(flag, path)?;
        Ok(Self::new(End::Listening(listener), vm, pid_file))
    }

    /// Has a connection that others have made.
    pub(super) fn connected(connection: OwnedFd, vm: String, pid_file: Option<PidFile>) -> Self {
        Self::new(End::Connected(connection), vm, pid_file)
    }

    fn new(end: End, vm: String, pid_file: Option<PidFile>) -> Self {
        Self {
            end,
            pid_file,
            vm,
            is_stopped: false,
            lost_engine: None,
        }
    }

    /// Returns a copy of the socket, for the engine.
    pub(super) fn link(&self) -> anyhow::Result<OwnedFd> {
        let copy = self.end.as_fd().try_clone_to_owned();
        copy.context("copying the guest's socket")
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
        vec![PollFd::new(self.end.as_fd(), PollFlags::empty())]
    }

    fn has_ended(&mut self) -> bool {
        let mut fds = self.poll_fds();
        let hung_up = matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..));
        if let (true, None, End::Connected(connection)) = (hung_up, &self.lost_engine, &self.end) {
            await_reader(connection.as_fd());
        }
        hung_up || self.is_stopped || self.lost_engine.is_some()
    }

    fn begin(&mut self, _socket: &Path) -> anyhow::Result<()> {
        if let Some(file) = &mut self.pid_file {
            file.write().context("--pid-file: writing it")?;
        }
        let vm = &self.vm;
        let at = match &self.end {
            End::Listening(listener) => format!("at {}", listener.path().display()),
            End::Connected(_) => "is connected".to_owned(),
        };
        let mut out = io::stdout().lock();
        writeln!(out, "slipgate: ready: {vm} {at}")
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

/// Waits until the engine has read a VMM's last frames, at most [`READ_WITHIN`]: the socket hangs up as soon
/// as the VMM closes it.
fn await_reader(connection: BorrowedFd<'_>) {
    let until = Instant::now() + READ_WITHIN;
    let look = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let is_unread = || matches!(recv(connection.as_raw_fd(), &mut [0], look), Ok(1..));
    while is_unread() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Takes a connected stream socket that this process has inherited. To be called before anything else is
/// opened, and once.
///
/// # Errors
/// The descriptor is not open, or is no such socket.
pub(super) fn inherit(fd: RawFd) -> Result<OwnedFd, ConfigError> {
    let refused = |problem: String| {
        let remedy = "give the number of a connected Unix stream socket that slipgate inherits";
        ConfigError::new("--fd", fd, problem, remedy)
    };
    if fd <= libc::STDERR_FILENO {
        return Err(refused("that is stdin, stdout or stderr".into()));
    }
    // SAFETY: looked at only while the caller may not have closed it, and owned once it is known to be open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    fcntl(borrowed, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
        .map_err(|_| refused("it is not open".into()))?;
    let kind = getsockopt(&borrowed, sockopt::SockType);
    if kind.map_err(|_| refused("it is no socket".into()))? != SockType::Stream {
        return Err(refused("it is no stream socket".into()));
    }
    getpeername::<UnixAddr>(borrowed.as_raw_fd())
        .map_err(|e| refused(format!("nobody is connected to it by a Unix socket ({e})")))?;
    // SAFETY: the one that started this left it open for us, and nobody else here has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
#[path = "socket_test.rs"]
mod tests;
