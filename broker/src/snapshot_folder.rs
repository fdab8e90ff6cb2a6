//! The directory of a snapshot that is being made, by a command or by a daemon.
//!
//! Its files have no names until the snapshot is whole, so a process that is killed leaves an empty
//! directory. The next one may take that: a lock on it tells it from one that another process still
//! writes to.
use std::{
    cell::RefCell,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::{
        fd::AsRawFd as _,
        unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, AtFlags, Flock, FlockArg},
    unistd::{geteuid, linkat},
};

use crate::{config::SNAPSHOT_FILES, say};

/// There is something at the path of a snapshot that is to be made.
#[derive(thiserror::Error, Debug)]
#[error("{0}")]
pub struct FolderTaken(String);

/// The directory of a snapshot that is being made: it is removed with what was made in it, unless it is
/// finished.
#[derive(Debug)]
pub struct SnapshotFolder {
    path: PathBuf,
    /// Keeps other commands out. `None`: the file system has no locks.
    _lock: Option<Flock<File>>,
    /// Files that get their names at the end.
    unnamed: RefCell<Vec<(String, File)>>,
    /// Files that have names.
    named: RefCell<Vec<PathBuf>>,
    /// Whether it was not there before.
    is_made: bool,
    is_finished: bool,
}

impl SnapshotFolder {
    /// Makes the directory, or takes the empty one that a killed process has left.
    ///
    /// # Errors
    /// It can't be made; or ([`FolderTaken`]) there is something at this path.
    pub fn make(path: &Path) -> anyhow::Result<Self> {
        let made = DirBuilder::new().mode(0o700).create(path);
        let is_made = match made {
            Ok(()) => true,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => false,
            Err(e) => bail!("making {}: {e}", path.display()),
        };
        let exists = || {
            FolderTaken(format!(
                "{} exists: give a directory that does not, for it is made",
                path.display()
            ))
        };
        let open = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
            .open(path)
            .map_err(|_| exists())?;
        let data = open.metadata().map_err(|_| exists())?;
        let lock = match Flock::lock(open, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Some(lock),
            Err((_, Errno::EWOULDBLOCK)) => {
                let path = path.display();
                let why = format!(
                    "{path} is being written by another command: give a directory that does not exist"
                );
                return Err(FolderTaken(why).into());
            }
            // Without locks nobody takes a directory that is there.
            Err(_) if is_made => None,
            Err(_) => return Err(exists().into()),
        };
        // Another command may have taken it, finished or removed it before it was locked here.
        if !is_empty(path, &data) || !(is_made || is_own(&data)) {
            return Err(exists().into());
        }
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
            unnamed: RefCell::default(),
            named: RefCell::default(),
            is_made,
            is_finished: false,
        })
    }

    /// Makes a file in it, for writing only. It has a name at once only where the file system can't
    /// give it one later.
    ///
    /// # Errors
    /// It can't be made.
    pub fn file(&self, name: &str) -> anyhow::Result<File> {
        let unnamed = OpenOptions::new()
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_TMPFILE)
            .open(&self.path);
        let path = self.path.join(name);
        let made = match unnamed {
            Ok(file) => {
                let copy = file.try_clone()?;
                self.unnamed.borrow_mut().push((name.to_owned(), copy));
                Ok(file)
            }
            Err(_) => {
                let made = OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(&path);
                made.inspect(|_| self.named.borrow_mut().push(path.clone()))
            }
        };
        made.with_context(|| format!("making {}", path.display()))
    }

    /// Gives the files that were made so far their names.
    fn name(&self) -> io::Result<()> {
        for (name, file) in self.unnamed.borrow_mut().drain(..) {
            let own = format!("/proc/self/fd/{}", file.as_raw_fd());
            let path = self.path.join(name);
            linkat(
                AT_FDCWD,
                own.as_str(),
                AT_FDCWD,
                &path,
                AtFlags::AT_SYMLINK_FOLLOW,
            )?;
            self.named.borrow_mut().push(path);
        }
        Ok(())
    }

    /// Writes the description, which makes the snapshot whole, and has all of it on the disk.
    ///
    /// # Errors
    /// It can't be written; then nothing is left of it.
    pub fn finish(mut self, description: &serde_json::Value) -> anyhow::Result<()> {
        let [.., name] = SNAPSHOT_FILES;
        let mut file = self.file(name)?;
        let mut text = serde_json::to_vec_pretty(description)?;
        text.push(b'\n');
        let parent = match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        // None has a name before all are whole; the description gets the last one.
        let written = file
            .write_all(&text)
            .and_then(|()| file.sync_all())
            .and_then(|()| self.name())
            .and_then(|()| File::open(&self.path)?.sync_all())
            .and_then(|()| File::open(&parent)?.sync_all());
        written.with_context(|| format!("writing {}", self.path.display()))?;
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for SnapshotFolder {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        for path in self.named.borrow().iter() {
            // One that somebody else has removed is not there.
            let _ = fs::remove_file(path);
        }
        if !self.is_made {
            return;
        }
        if let Err(e) = fs::remove_dir(&self.path) {
            say(format_args!("removing {}: {e}", self.path.display()));
        }
    }
}

/// Whether an open directory is what its path names, and empty.
fn is_empty(path: &Path, open: &fs::Metadata) -> bool {
    let named = path.symlink_metadata();
    named.is_ok_and(|named| (named.dev(), named.ino()) == (open.dev(), open.ino()))
        && fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

/// Whether a directory is this user's alone, as what a killed command has left.
fn is_own(open: &fs::Metadata) -> bool {
    open.uid() == geteuid().as_raw() && open.mode() & 0o077 == 0
}

#[cfg(test)]
#[path = "snapshot_folder_test.rs"]
mod tests;
