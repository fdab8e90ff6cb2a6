//! Locks on files, which the kernel frees when their holder dies, however it dies.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::ErrorKind,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
};

use crate::{Error, Result};

/// A held lock. Dropping it, or dying, frees it. Close-on-exec, but a forked child that keeps the
/// descriptor keeps the lock.
#[derive(Debug)]
pub(crate) struct FileLock {
    file: File,
}

impl FileLock {
    /// Waits for the lock.
    pub(crate) fn wait(path: &Path) -> Result<Self> {
        loop {
            let file = open(path)?;
            match file.lock() {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                other => other.map_err(Error::os(format!("lock {}", path.display())))?,
            }
            if is_current(&file, path) {
                return Ok(Self { file });
            }
        }
    }

    /// The descriptor that holds it. Whoever has a copy holds the lock too.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Takes the lock, or `None` when somebody holds it.
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

fn open(path: &Path) -> Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(Error::os(format!("open the lock file {}", path.display())))
}

/// Whether the locked file is still the one of that name: the last owner removes them.
fn is_current(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(ours), Ok(named)) => ours.ino() == named.ino() && ours.dev() == named.dev(),
        _ => false,
    }
}
