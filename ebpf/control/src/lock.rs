//! File locks. The kernel frees a lock when its holder dies. A holder that hangs or is stopped
//! keeps its lock, so every wait is bounded, and the error of a wait names the holder.

use std::{
    fs::{File, OpenOptions, TryLockError},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
    time::{Duration, Instant},
};

use crate::{Error, Result, paths::ROUTED_LOCK};

/// Time-out of the lock for a start or an orderly stop: other processes load programs while they
/// hold it, which takes seconds on a slow machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Time-out of the lock for a process that serves guests meanwhile.
pub const WHILE_SERVING: Duration = Duration::from_millis(500);
/// Interval of attempts to take a lock.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// A held lock. It is freed when it is dropped or the process dies. The descriptor is
/// close-on-exec, but a forked child that keeps it keeps the lock.
#[derive(Debug)]
pub(crate) struct FileLock {
    file: File,
}

impl FileLock {
    /// Waits for the lock, for `patience` at most.
    pub(crate) fn wait(path: &Path, patience: Duration) -> Result<Self> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(lock) = Self::take(path)? {
                return Ok(lock);
            }
            if Instant::now() >= deadline {
                return Err(Error::Locked {
                    path: path.to_owned(),
                    holder: holder(path),
                });
            }
            std::thread::sleep(RETRY_INTERVAL);
        }
    }

    /// Waits for the lock under which entries of what is routed to VMs are looked for, made and removed,
    /// where they may be another VM's by now. `run_dir`: the directory of the locks.
    pub(crate) fn of_routed(run_dir: &Path, patience: Duration) -> Result<Self> {
        Self::wait(&run_dir.join(ROUTED_LOCK), patience)
    }

    /// Returns the descriptor that holds the lock. A process with a copy holds the lock too.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Takes the lock without waiting; `None` if another process holds it.
    pub(crate) fn take(path: &Path) -> Result<Option<Self>> {
        loop {
            let file = open(path)?;
            match file.try_lock() {
                Ok(()) if is_current(&file, path) => return Ok(Some(Self { file })),
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => {
                    return Err(Error::os(format!("lock {}", path.display()))(error));
                }
            }
        }
    }
}

/// Returns the process that holds a lock on the file, by the kernel's list of locks. `None`: it is
/// in another PID namespace, or has released the lock by now.
fn holder(path: &Path) -> Option<u32> {
    let file = std::fs::metadata(path).ok()?;
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    holder_in(&locks, file.dev(), file.ino())
}

/// Returns the holder of a lock from the text of `/proc/locks`. A line is `1: FLOCK  ADVISORY
/// WRITE 4321 00:19:77 0 EOF`; lines of waiting processes have `->` after the number.
fn holder_in(locks: &str, device: u64, inode: u64) -> Option<u32> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (kind, pid, of) = (words.next()?, words.nth(2)?, words.next()?);
        (kind == "FLOCK" && of == file).then(|| pid.parse().ok())?
    })
}

fn open(path: &Path) -> Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(Error::os(format!("open the lock file {}", path.display())))
}

/// Whether the path still names the locked file: the last owner removes lock files.
fn is_current(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(ours), Ok(named)) => ours.ino() == named.ino() && ours.dev() == named.dev(),
        _ => false,
    }
}

#[cfg(test)]
#[path = "lock_test.rs"]
mod tests;
