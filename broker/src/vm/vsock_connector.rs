//! Connects a guest to programs of the host that listen for its ports (vsock): those at Unix sockets
//! beside that of `--vsock`, `SOCKET_52` for port 52. (Firecracker's convention.)
//!
//! # Theory of operation
//! No thread of the VMM may make a socket, and its root is empty. So the VMM asks by a socket of its
//! own ([`slipgate_ipc::vsock`]), with the number of a port and nothing else, and is passed the
//! connected descriptor. A thread of this process connects, and not its loop: so that waits for no
//! file system, and a guest with many requests does not keep it from the NAT's work. Under root the
//! thread acts as a user of its own, with no capability but the one to use files of others
//! ([`CAP_DAC_OVERRIDE`]): a program that asks who is at the other end (SO_PEERCRED) is not told that
//! it is root. It ends with the VMM.
//!
//! A compromised VMM can so reach what its guest can: the programs that listen at `SOCKET_` and a
//! port. What is there is opened by its name in the directory of the socket, which was opened before
//! the guest ran, without following a symbolic link. It has to be a socket, with this one name, of
//! root, of this user, or of whoever the socket of `--vsock` was given to. Then it is connected to by
//! the descriptor, so it is what was looked at.
//!
//! This process is outside of the VM's cgroup, so its work for the guest is bounded: [`PER_PERIOD`]
//! requests in [`PERIOD`]. Others wait in the VMM, which bounds their number and their time.
use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, ErrorKind},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::ffi::{OsStrExt as _, OsStringExt as _},
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::{
    fcntl::{AtFlags, OFlag, openat},
    sys::{
        socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
        stat::{FileStat, Mode, SFlag, fstat, fstatat},
    },
    unistd::geteuid,
};
use slipgate_control::Users;
use slipgate_ipc::vsock::{self, RequestReader};

use crate::{host::ListeningSocket, privileges, role::Role};

/// To use files of others, by number.
const CAP_DAC_OVERRIDE: u32 = 1;
/// Most requests that are carried out in a period.
const PER_PERIOD: u32 = 400;
const PERIOD: Duration = Duration::from_millis(100);

/// Starts the thread that connects a guest to the programs beside its socket. Returns the VMM's end,
/// with which it ends.
///
/// # Errors
/// The socket's directory can't be opened, or there is no thread or no descriptor left.
pub(crate) fn start(listening: &ListeningSocket, users: &Users) -> anyhow::Result<OwnedFd> {
    let programs = Programs::beside(listening)
        .with_context(|| format!("looking at {}", listening.path().display()))?;
    let (requests, writer) = vsock::pair().context("making the socket for the guest's requests")?;
    // A run has no API, whose user this may be.
    let user = users.user(Role::Api.user());
    let serve = move || {
        let limited = privileges::limit_thread(user, 1 << CAP_DAC_OVERRIDE);
        if let Err(e) = limited {
            tracing::warn!("the guest can't connect to programs of the host: {e}");
            return;
        }
        serve(&requests, &programs);
    };
    let thread = thread::Builder::new().name("vsock".into());
    thread
        .spawn(serve)
        .context("starting the thread for the guest's requests")?;
    Ok(writer)
}

/// Answers requests until the VMM is gone, or sends nonsense.
fn serve(requests: &RequestReader, programs: &Programs) {
    let mut pace = Pace::new();
    while let Ok(Some((id, port))) = requests.next() {
        if let Some(rest) = pace.next(Instant::now()) {
            thread::sleep(rest);
        }
        let socket = programs.connect(port).ok();
        let socket = socket.as_ref().map(|socket| socket.as_fd());
        if requests.answer(id, socket).is_err() {
            return;
        }
    }
}

/// Bounds how often something is done.
#[derive(Debug)]
struct Pace {
    until: Option<Instant>,
    done: u32,
}

impl Pace {
    fn new() -> Self {
        Self {
            until: None,
            done: 0,
        }
    }

    /// Returns how long to wait before the next one.
    fn next(&mut self, now: Instant) -> Option<Duration> {
        let end = self.until.filter(|end| *end > now);
        match end {
            Some(_) if self.done < PER_PERIOD => {
                self.done += 1;
                None
            }
            // The next period begins when this one has ended.
            _ => {
                self.done = 1;
                self.until = Some(end.unwrap_or(now) + PERIOD);
                end.map(|end| end - now)
            }
        }
    }
}

/// The programs beside a socket.
#[derive(Debug)]
struct Programs {
    /// Directory of the socket.
    folder: OwnedFd,
    /// The socket's name in it.
    name: OsString,
    /// Device and inode of the socket.
    file: (u64, u64),
    /// This process's user.
    user: u32,
}

impl Programs {
    fn beside(listening: &ListeningSocket) -> io::Result<Self> {
        let path = listening.path();
        let name = path.file_name().ok_or(ErrorKind::InvalidInput)?.to_owned();
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let folder = nix::fcntl::open(folder, flags, Mode::empty())?;
        let programs = Self {
            folder,
            name,
            file: listening.file(),
            user: geteuid().as_raw(),
        };
        match programs.present_owner() {
            Some(_) => Ok(programs),
            None => Err(io::Error::other("another file has taken its place")),
        }
    }

    /// Connects to the program that listens for a port.
    ///
    /// # Errors
    /// None does, what is there is not to be used, or the kernel refuses.
    fn connect(&self, port: u32) -> io::Result<OwnedFd> {
        let mut name = self.name.clone().into_vec();
        name.extend_from_slice(format!("_{port}").as_bytes());
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let name = OsStr::from_bytes(&name);
        let program = File::from(openat(&self.folder, name, flags, Mode::empty())?);
        let data = fstat(&program)?;
        if !is_socket(&data) || data.st_nlink != 1 || !self.may_own(data.st_uid) {
            return Err(ErrorKind::PermissionDenied.into());
        }
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let ours = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        // The very file that was looked at. A program with too many that wait for it is not waited for.
        let path = format!("/proc/self/fd/{}", program.as_raw_fd());
        connect(ours.as_raw_fd(), &UnixAddr::new(path.as_str())?)?;
        Ok(ours)
    }

    /// Whether a program's socket may belong to this user.
    fn may_own(&self, user: u32) -> bool {
        user == 0 || user == self.user || self.present_owner() == Some(user)
    }

    /// Returns whom the socket belongs to, which may have been given to another; `None` if it is no
    /// longer there.
    fn present_owner(&self) -> Option<u32> {
        let name = self.name.as_os_str();
        let data = fstatat(&self.folder, name, AtFlags::AT_SYMLINK_NOFOLLOW).ok()?;
        ((data.st_dev, data.st_ino) == self.file).then_some(data.st_uid)
    }
}

fn is_socket(data: &FileStat) -> bool {
    SFlag::from_bits_truncate(data.st_mode) & SFlag::S_IFMT == SFlag::S_IFSOCK
}

#[cfg(test)]
#[path = "vsock_connector_test.rs"]
mod tests;
