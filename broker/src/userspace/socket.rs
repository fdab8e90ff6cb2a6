//! The socket of `slipgate attach --socket`, to which a VMM connects.
//!
//! The engine accepts from a copy of the listening socket. If it serves one guest only, it shuts the
//! socket down when that has gone, and both see it hang up.
use std::{
    fs,
    io::{self, Write as _},
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::{
            fs::{FileTypeExt as _, MetadataExt as _},
            net::UnixDatagram,
        },
    },
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::Signal,
        socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket},
        stat::{Mode, fchmod},
    },
};

use super::Guest;

/// A listening socket; its file is removed with it.
#[derive(Debug)]
pub(super) struct Socket {
    listener: OwnedFd,
    path: PathBuf,
    /// Device and inode of its file.
    file: (u64, u64),
    /// Name of the VM.
    vm: String,
    is_stopped: bool,
    /// How the engine ended, if it did.
    lost_engine: Option<String>,
}

impl Socket {
    /// Makes the socket, for this user only. What a killed process has left at the path is replaced.
    pub(super) fn listen(path: PathBuf, vm: String) -> anyhow::Result<Self> {
        remove_left(&path)?;
        let making = || format!("--socket {}: making the socket", path.display());
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let listener = socket(AddressFamily::Unix, SockType::Stream, flags, None);
        let listener = listener.with_context(making)?;
        // Its file is made with this mode, less the umask.
        fchmod(&listener, Mode::S_IRUSR | Mode::S_IWUSR).with_context(making)?;
        let address = UnixAddr::new(&path).with_context(making)?;
        bind(listener.as_raw_fd(), &address).with_context(making)?;
        let made = listen(&listener, Backlog::MAXCONN)
            .map_err(io::Error::from)
            .and_then(|()| fs::metadata(&path));
        let file = made.with_context(making)?;
        Ok(Self {
            listener,
            file: (file.dev(), file.ino()),
            path,
            vm,
            is_stopped: false,
            lost_engine: None,
        })
    }

    /// Returns a copy of the listening socket, for the engine.
    pub(super) fn link(&self) -> anyhow::Result<OwnedFd> {
        let copy = self.listener.try_clone();
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

    fn begin(&mut self) -> anyhow::Result<()> {
        let (vm, path) = (&self.vm, self.path.display());
        let mut out = io::stdout().lock();
        writeln!(out, "slipgate: ready: {vm} at {path}")
            .and_then(|()| out.flush())
            .unwrap_or_else(|e| tracing::warn!("saying on stdout that it serves: {e}"));
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

impl Drop for Socket {
    fn drop(&mut self) {
        // Another one may have been made in its place.
        let file = fs::metadata(&self.path).map(|file| (file.dev(), file.ino()));
        if file.is_ok_and(|file| file == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the socket of a process that was killed.
fn remove_left(path: &Path) -> anyhow::Result<()> {
    let flag = || format!("--socket {}", path.display());
    let file = match fs::symlink_metadata(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).with_context(flag),
    };
    if !file.file_type().is_socket() {
        bail!("{}: it is there, and no socket: give another path", flag());
    }
    // Whoever listens does not notice a socket of another kind.
    let tried = UnixDatagram::unbound().and_then(|socket| socket.connect(path));
    match tried {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).with_context(|| format!("{}: replacing it", flag()))
        }
        Err(e) if e.raw_os_error() != Some(libc::EPROTOTYPE) => Err(e).with_context(flag),
        _ => bail!(
            "{}: another process listens there: give another path",
            flag()
        ),
    }
}

#[cfg(test)]
#[path = "socket_test.rs"]
mod tests;
