//! Unix sockets at a path that the user gave, for programs of the same user.
use std::{
    fs,
    io::{self, ErrorKind},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::{
            fs::{FileTypeExt as _, MetadataExt as _},
            net::UnixDatagram,
        },
    },
    path::{Path, PathBuf},
};

use nix::sys::{
    socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket},
    stat::{Mode, fchmod},
};
use slipgate_policy::document::ConfigError;

/// A listening socket; its file is removed with it.
#[derive(Debug)]
pub(crate) struct ListeningSocket {
    listener: OwnedFd,
    path: PathBuf,
    /// Device and inode of its file.
    file: (u64, u64),
}

impl ListeningSocket {
    /// Makes the socket, non-blocking, for this user only. What a killed process has left at the
    /// path is replaced. `flag`: the one that gave the path.
    ///
    /// # Errors
    /// Something else is at the path, a process listens there, or the socket can't be made.
    pub(crate) fn listen(flag: &'static str, path: PathBuf) -> Result<Self, ConfigError> {
        let refused = |problem: String, remedy: &str| {
            ConfigError::new(flag, path.display(), problem, remedy.to_owned())
        };
        remove_left(&path, &refused)?;
        let made = make(&path).map_err(|e| {
            refused(
                format!("the socket can't be made ({e})"),
                "give a path of up to 107 bytes, in a directory that is there and yours",
            )
        });
        let (listener, file) = made?;
        Ok(Self {
            listener,
            path,
            file,
        })
    }

    /// Returns the path of its file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns device and inode of its file.
    pub(crate) fn file(&self) -> (u64, u64) {
        self.file
    }

    /// Returns a copy of the listening socket.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn copy(&self) -> io::Result<OwnedFd> {
        self.listener.try_clone()
    }
}

impl AsFd for ListeningSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        // Another one may have been made in its place.
        let file = fs::metadata(&self.path).map(|file| (file.dev(), file.ino()));
        if file.is_ok_and(|file| file == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn make(path: &Path) -> io::Result<(OwnedFd, (u64, u64))> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    // Its file is made with this mode, less the umask.
    fchmod(&listener, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&listener, Backlog::MAXCONN)?;
    let file = fs::metadata(path)?;
    Ok((listener, (file.dev(), file.ino())))
}

/// Removes the socket of a process that was killed.
fn remove_left(
    path: &Path,
    refused: &impl Fn(String, &str) -> ConfigError,
) -> Result<(), ConfigError> {
    let unknown = |e: io::Error| {
        refused(
            format!("it can't be looked at ({e})"),
            "give another path, or remove it",
        )
    };
    let file = match fs::symlink_metadata(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(unknown(e)),
    };
    if !file.file_type().is_socket() {
        let problem = "it is there, and no socket".to_owned();
        return Err(refused(problem, "give another path"));
    }
    // Whoever listens does not notice a socket of another kind.
    let tried = UnixDatagram::unbound().and_then(|socket| socket.connect(path));
    match tried {
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(unknown)
        }
        Err(e) if e.raw_os_error() != Some(libc::EPROTOTYPE) => Err(unknown(e)),
        _ => Err(refused(
            "another process listens there".to_owned(),
            "give another path, or end that one",
        )),
    }
}

#[cfg(test)]
#[path = "listening_socket_test.rs"]
mod tests;
