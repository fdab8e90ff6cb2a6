//! Sockets of the API.
use std::{
    fs,
    io::{self, ErrorKind},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{
            fs::{FileTypeExt as _, PermissionsExt as _},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use nix::{
    sys::{
        socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket},
        stat::{Mode, fchmod},
    },
    unistd::{Gid, Group, chown},
};
use slipgate_policy::document::ConfigError;

use crate::handover::HandedOver;

/// Connections that wait to be accepted at most; further clients wait in connect(2).
const BACKLOG: i32 = 128;

/// A Unix socket of the API. Root and the members of the group may connect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApiSocket {
    /// Path of the socket.
    pub path: PathBuf,
    /// Name of the group; `None`: root alone.
    pub group: Option<String>,
    /// Whether clients may change anything.
    pub may_change: bool,
}

impl ApiSocket {
    /// Returns the flag that defines the socket.
    pub(crate) fn flag(&self) -> &'static str {
        match self.may_change {
            true => "--api",
            false => "--api-read",
        }
    }

    /// Listens at the path: by the socket that a predecessor or a service manager has there, which
    /// gave it its group, or by a new one in place of a socket that no process serves any more.
    ///
    /// # Errors
    /// The group is not known, the path is in use, or the socket can't be created there.
    pub(crate) fn listen(&self, handed_over: &mut HandedOver) -> Result<UnixListener, ConfigError> {
        let path = &self.path;
        let failed = |problem: String, remedy: &str| {
            ConfigError::new(self.flag(), path.display(), problem, remedy)
        };
        let group = self.group.as_deref().map(|name| {
            let found = Group::from_name(name).ok().flatten();
            found.map(|group| group.gid).ok_or_else(|| {
                failed(
                    format!("there is no group {name}"),
                    "make it with `groupadd`, or leave group= out",
                )
            })
        });
        let group = group.transpose()?;
        if let Some(listener) = handed_over.unix_socket(path) {
            return Ok(listener);
        }
        self.remove_stale(&failed)?;
        let cannot = |e: io::Error| {
            let remedy = "give a path in a directory that exists, like /run/slipgate-api.sock";
            failed(format!("it can't be listened at ({e})"), remedy)
        };
        let socket = bind_for_nobody(path).map_err(cannot)?;
        if let Err(e) = self.set_access(group) {
            // Nobody serves it.
            let _ = fs::remove_file(path);
            return Err(match &self.group {
                Some(name) if e.kind() == ErrorKind::PermissionDenied => failed(
                    format!("this user is not in the group {name}"),
                    "have root add the user with `usermod -aG` and log in again, or leave group= out",
                ),
                _ => cannot(e),
            });
        }
        // Nobody can connect before.
        let backlog = Backlog::new(BACKLOG).map_err(|e| cannot(e.into()))?;
        listen(&socket, backlog).map_err(|e| cannot(e.into()))?;
        Ok(UnixListener::from(socket))
    }

    fn remove_stale(
        &self,
        failed: &impl Fn(String, &str) -> ConfigError,
    ) -> Result<(), ConfigError> {
        let path = &self.path;
        let Ok(found) = fs::symlink_metadata(path) else {
            return Ok(());
        };
        if !found.file_type().is_socket() {
            let problem = "there is something else at that path".to_owned();
            return Err(failed(problem, "give another path, or remove it"));
        }
        match UnixStream::connect(path) {
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
                // Its process is gone.
                let _ = fs::remove_file(path);
                Ok(())
            }
            _ => Err(failed(
                "another process serves it".to_owned(),
                "give another path, or stop that one",
            )),
        }
    }

    /// Gives the group access.
    fn set_access(&self, group: Option<Gid>) -> io::Result<()> {
        let mode = if group.is_some() { 0o660 } else { 0o600 };
        chown(&self.path, None, group)?;
        fs::set_permissions(&self.path, fs::Permissions::from_mode(mode))
    }
}

impl super::Config {
    /// Paths of the API's sockets, those for reading first.
    pub(crate) fn api_paths(&self) -> Vec<PathBuf> {
        let mut sockets: Vec<_> = self.api.iter().collect();
        sockets.sort_by_key(|socket| socket.may_change);
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let paths = sockets.into_iter().map(|socket| absolute(&socket.path));
        paths.collect()
    }
}

/// Makes a socket at a path, which is for root alone from the first moment on, whatever the umask
/// says: the file gets the permissions that the socket has when it is bound.
fn bind_for_nobody(path: &Path) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

#[cfg(test)]
#[path = "api_test.rs"]
mod tests;
