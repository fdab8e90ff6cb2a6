//! Directories of the pins and locks of one network namespace.
//!
//! Ifindexes are valid within their network namespace only, and so are the maps: each namespace has
//! a directory of its own, named by the namespace's inode number.

use std::{
    ffi::OsString,
    fs, io,
    net::{Ipv4Addr, UdpSocket},
    os::fd::AsRawFd,
    os::unix::ffi::{OsStrExt, OsStringExt},
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

pub use crate::bpf::BPFFS;
use crate::{Error, Result, fingerprint::fingerprint};

/// Directory of the pins of all network namespaces, unless another is given.
pub const PINS: &str = "/sys/fs/bpf/slipgate";
/// File beside the locks with the cookie of the pins' network namespace.
pub(crate) const COOKIE_FILE: &str = "netns-cookie";
/// Directory of root's locks, sockets and files of memory.
pub const RUN: &str = "/run/slipgate";
/// File beside the locks with the path of the pins that they guard.
pub(crate) const PINS_FILE: &str = "pin-dir";
/// File beside the locks with the build of the pinned programs.
pub(crate) const BUILD_FILE: &str = "programs-build";
/// Directory beside the locks in which a daemon keeps its VMs' definitions.
pub const VMS_DIR: &str = "vms";
/// Directory beside the locks in which a daemon keeps the policies that clients gave it.
pub const POLICIES_DIR: &str = "policies";
/// File beside the locks that a daemon holds: a network namespace has one.
pub(crate) const DAEMON_LOCK: &str = "daemon.lock";
/// File beside the locks that is locked while entries of what is routed to VMs are looked for and made.
pub(crate) const ROUTED_LOCK: &str = "routed.lock";
/// Suffix of the files beside the locks that list the TAPs of a process.
pub(crate) const TAPS_SUFFIX: &str = ".taps";
/// Suffix of the files beside the locks that list the next hops of a process.
pub(crate) const HOPS_SUFFIX: &str = ".hops";

/// Directories of one set of pins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Paths {
    /// Directory on bpffs: a pin per map, program and attachment. Root only.
    pub pin_dir: PathBuf,
    /// Directory of the lock files and the control socket. Root only.
    pub run_dir: PathBuf,
}

impl Paths {
    /// Returns `/sys/fs/bpf/slipgate/<inode>` and `/run/slipgate/<inode>` of the calling thread's
    /// network namespace.
    ///
    /// # Errors
    /// The namespace's inode number cannot be read.
    pub fn of_this_netns() -> Result<Self> {
        let inode = netns_inode()?;
        Ok(Self {
            pin_dir: format!("{PINS}/{inode}").into(),
            run_dir: format!("{RUN}/{inode}").into(),
        })
    }

    /// Returns the directories for another pin directory. The lock directory depends on the
    /// resolved path, however it is written.
    ///
    /// # Errors
    /// The path cannot be resolved, or the namespace's inode number cannot be read.
    pub fn with_pin_dir(pin_dir: PathBuf) -> Result<Self> {
        let usual = Self::of_this_netns()?;
        let pin_dir = resolve(&pin_dir).map_err(Error::os(format!(
            "resolve --pin-dir {}",
            pin_dir.display()
        )))?;
        if pin_dir == usual.pin_dir {
            return Ok(usual);
        }
        let run_dir = format!("{RUN}/{}-{}", netns_inode()?, hash_of(&pin_dir)).into();
        Ok(Self { pin_dir, run_dir })
    }

    /// Returns the directory of this network namespace's maps and locks in files of memory, in `base`.
    ///
    /// # Errors
    /// The namespace's inode number cannot be read.
    pub fn in_memory(base: &Path) -> Result<Self> {
        let dir = base.join(netns_inode()?.to_string());
        Ok(Self {
            pin_dir: dir.clone(),
            run_dir: dir,
        })
    }

    /// Makes both directories, and their parents, for root only.
    pub(crate) fn create(&self) -> Result<()> {
        for dir in [&self.pin_dir, &self.run_dir] {
            make_private(dir)?;
        }
        Ok(())
    }

    /// Removes both directories, and the locks in the second. The caller holds `lock`. A process
    /// that waits for it finds that the path no longer names its file, and starts over.
    pub(crate) fn remove(&self) -> Result<()> {
        remove_if_there(&self.pin_dir, |d| fs::remove_dir(d))?;
        self.remove_run_dir()
    }

    pub(crate) fn remove_run_dir(&self) -> Result<()> {
        let Ok(entries) = fs::read_dir(&self.run_dir) else {
            return Ok(());
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let ours = [
                COOKIE_FILE,
                BUILD_FILE,
                PINS_FILE,
                DAEMON_LOCK,
                ROUTED_LOCK,
            ]
            .iter()
            .any(|own| name == *own)
                || name.as_encoded_bytes().starts_with(b"owner-")
                // Of a killed process: no process lives.
                || name.as_encoded_bytes().ends_with(b".sock")
                // The policy it had in force: no flow is left to continue under it.
                || name.as_encoded_bytes().ends_with(b".policy")
                || name.as_encoded_bytes().ends_with(b".policy-new")
                // Of guests that nobody answers any more.
                || name.as_encoded_bytes().ends_with(b".questions")
                || name.as_encoded_bytes().ends_with(b".questions-new")
                || name.as_encoded_bytes().ends_with(b".rules")
                || name.as_encoded_bytes().ends_with(TAPS_SUFFIX.as_bytes())
                || name.as_encoded_bytes().ends_with(b".taps-new")
                || name.as_encoded_bytes().ends_with(HOPS_SUFFIX.as_bytes())
                || name.as_encoded_bytes().ends_with(b".hops-new");
            if ours {
                remove_if_there(&entry.path(), |f| fs::remove_file(f))?;
            } else if name == VMS_DIR || name == POLICIES_DIR {
                // Of a daemon of which no row is left.
                remove_if_there(&entry.path(), |d| fs::remove_dir_all(d))?;
            }
        }
        // Last: afterwards another process may hold the lock.
        remove_if_there(&self.run_dir.join("lock"), |f| fs::remove_file(f))?;
        // Other files in it are not slipgate's.
        let _ = fs::remove_dir(&self.run_dir);
        Ok(())
    }

    /// Whether the pins belong to a namespace that is gone: inode numbers are reused.
    ///
    /// The namespace's cookie, which is never reused, is kept beside the locks.
    pub(crate) fn are_stale(&self) -> Result<bool> {
        match self.kept_cookie()? {
            Some(kept) => Ok(kept != netns_cookie()?.to_string()),
            None => Ok(false),
        }
    }

    /// Returns the cookie of the namespace that the pins belong to, if it was recorded.
    pub(crate) fn kept_cookie(&self) -> Result<Option<String>> {
        let path = self.cookie_path();
        match fs::read_to_string(&path) {
            Ok(kept) => Ok(Some(kept.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::os(format!("read {}", path.display()))(error)),
        }
    }

    /// Records the namespace that the pins belong to, and their path.
    pub(crate) fn keep_cookie(&self) -> Result<()> {
        let path = self.cookie_path();
        fs::write(&path, netns_cookie()?.to_string())
            .map_err(Error::os(format!("write {}", path.display())))?;
        let path = self.run_dir.join(PINS_FILE);
        fs::write(&path, self.pin_dir.as_os_str().as_bytes())
            .map_err(Error::os(format!("write {}", path.display())))
    }

    fn cookie_path(&self) -> PathBuf {
        self.run_dir.join(COOKIE_FILE)
    }

    pub(crate) fn pin(&self, name: &str) -> PathBuf {
        self.pin_dir.join(name)
    }
}

/// Returns the path of the pins that the locks in a run directory guard, if it was recorded.
pub(crate) fn pin_dir_of(run_dir: &Path) -> Option<PathBuf> {
    let written = fs::read(run_dir.join(PINS_FILE)).unwrap_or_default();
    (!written.is_empty()).then(|| OsString::from_vec(written).into())
}

/// Decodes a path of /proc/self/mountinfo: spaces, tabs, newlines and backslashes are octal escapes
/// (proc_pid_mountinfo(5)).
pub(crate) fn mount_path(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| first == b'\\');
        let octal =
            octal.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        path.push(octal.unwrap_or(first));
        rest = if octal.is_some() { &after[3..] } else { after };
    }
    OsString::from_vec(path).into()
}

/// Returns a hash that distinguishes the lock directories of different pin directories.
pub(crate) fn hash_of(pin_dir: &Path) -> String {
    fingerprint(pin_dir.as_os_str().as_bytes())
}

/// Resolves symbolic links, dots and relative parts of a path, as far as it exists.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let path = std::path::absolute(path)?;
            match (path.parent(), path.file_name()) {
                (Some(parent), Some(name)) => Ok(resolve(parent)?.join(name)),
                _ => Err(error),
            }
        }
        other => other,
    }
}

/// Returns the inode number of the calling thread's network namespace.
///
/// # Errors
/// `/proc` cannot be read.
pub fn netns_inode() -> Result<u64> {
    // Not /proc/self: that is the process's first thread.
    let path = "/proc/thread-self/ns/net";
    Ok(fs::metadata(path)
        .map_err(Error::os(format!("look at {path}")))?
        .ino())
}

/// Returns the cookie of the calling thread's network namespace, which is never reused (Linux
/// 5.14).
pub(crate) fn netns_cookie() -> Result<u64> {
    let failed = || Error::os("ask for the network namespace's cookie");
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed())?;
    let mut cookie = 0u64;
    let mut length = size_of_val(&cookie) as libc::socklen_t;
    // SAFETY: room for the cookie, of the length given.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if answer != 0 {
        return Err(failed()(io::Error::last_os_error()));
    }
    Ok(cookie)
}

/// Makes a directory, and its parents, for root only.
pub(crate) fn make_private(dir: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(Error::os(format!("make the directory {}", dir.display())))?;
    // An existing directory may have any mode.
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
        .map_err(Error::os(format!("make {} private", dir.display())))
}

/// Removes a file or directory. Returns false if it does not exist.
pub(crate) fn remove_if_there(
    path: &Path,
    remove: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<bool> {
    match remove(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::os(format!("remove {}", path.display()))(error)),
    }
}

#[cfg(test)]
#[path = "paths_test.rs"]
mod tests;
