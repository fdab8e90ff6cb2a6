//! The files of a snapshot, and of the snapshots below it that it differs from.
//!
//! Each description (`machine.json`) names the base's directory and id; which snapshot it really is the
//! VMM finds out, from the states.
use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::{self, Path, PathBuf},
};

use serde_json::{Value, json};
use slipgate_ipc::{
    client::{MAX_BASES, SnapshotBase},
    vmm::VmmSnapshot,
};

use crate::config::{OWN_SNAPSHOT, SNAPSHOT_FILES, SavedBase, SavedMachine, other_writers};

/// Where a state file has the digest of the state, which is the snapshot's id.
const ID_AT: usize = 16;
const ID_BYTES: usize = 32;

/// A snapshot's files, open for reading, and those of its base, and so on.
#[derive(Debug)]
pub struct SnapshotChain {
    /// State and memory; the snapshot's own first.
    files: Vec<[File; 2]>,
    /// Its directory, and its id.
    own: SavedBase,
}

/// Reason why the files of a snapshot can't be used.
#[derive(thiserror::Error, Debug)]
pub enum ChainError {
    /// A part of it can't be read.
    #[error("{} can't be read ({source})", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Others can have written it.
    #[error("{} {why}", .path.display())]
    Writable {
        /// The file or directory.
        path: PathBuf,
        /// Why they can.
        why: String,
    },
    /// The base of a snapshot can't be used.
    #[error("it holds the differences from the snapshot {}, which is to be in {}: {source}", .base.id, .base.path.display())]
    Base {
        /// The base.
        base: SavedBase,
        /// Why not.
        source: Box<ChainError>,
    },
    /// There are too many below it, or one is below itself.
    #[error("there are more than {MAX_BASES} snapshots below it")]
    TooMany,
}

impl ChainError {
    /// The problem, and what to do.
    pub(crate) fn parts(&self) -> (String, &'static str) {
        let mut cause = self;
        while let Self::Base { source, .. } = cause {
            cause = source;
        }
        let remedy = match (self, cause) {
            (_, Self::Writable { .. }) => OWN_SNAPSHOT,
            (_, Self::TooMany) => "make a snapshot without --diff, and others from that",
            (Self::Base { .. }, _) => {
                "put the base there again, or correct `base` in machine.json if it is elsewhere"
            }
            _ => "give a directory that `slipgate snapshot` wrote to its end",
        };
        (self.to_string(), remedy)
    }
}

impl SnapshotChain {
    /// Opens the files of the snapshot in a directory, and those of the snapshots below it.
    ///
    /// # Errors
    /// One of them can't be read, others than root and this user can have written it, or there are too
    /// many.
    pub fn open(dir: &Path) -> Result<Self, ChainError> {
        let (files, own, base) = open_one(dir)?;
        let mut all = vec![files];
        let mut below = base;
        while let Some(base) = below {
            if all.len() > MAX_BASES {
                return Err(ChainError::TooMany);
            }
            let opened = open_one(&base.path);
            let (files, _, next) = opened.map_err(|e| ChainError::Base {
                base,
                source: Box::new(e),
            })?;
            all.push(files);
            below = next;
        }
        Ok(Self { files: all, own })
    }

    /// The files for a VMM that restores the snapshot.
    pub(crate) fn into_files(self) -> VmmSnapshot {
        let mut files = self.files.into_iter().map(|[state, memory]| SnapshotBase {
            state: state.into(),
            memory: memory.into(),
        });
        // There is one at least.
        let own = files.next().expect("the snapshot itself");
        VmmSnapshot {
            state: own.state,
            memory: own.memory,
            bases: files.collect(),
        }
    }

    /// The files for a machine of which a snapshot is made that differs from this one.
    ///
    /// # Errors
    /// There are too many below that one.
    pub fn bases(&self) -> Result<Vec<SnapshotBase<BorrowedFd<'_>>>, ChainError> {
        if self.files.len() > MAX_BASES {
            return Err(ChainError::TooMany);
        }
        let files = self.files.iter().map(|[state, memory]| SnapshotBase {
            state: state.as_fd(),
            memory: memory.as_fd(),
        });
        Ok(files.collect())
    }

    /// Adds to the description of a machine that it differs from this snapshot.
    pub fn describe(&self, machine: &mut Value) {
        machine["base"] = json!(self.own);
    }
}

type Opened = ([File; 2], SavedBase, Option<SavedBase>);

/// Opens one snapshot. Returns what names it, and its base.
fn open_one(dir: &Path) -> Result<Opened, ChainError> {
    let unreadable = |name: &str| {
        let path = dir.join(name);
        move |source| ChainError::Unreadable { path, source }
    };
    let metadata = dir.metadata().map_err(unreadable(""))?;
    if let Some(why) = other_writers(&metadata) {
        let path = dir.to_owned();
        return Err(ChainError::Writable { path, why });
    }
    let [state, memory, description] = SNAPSHOT_FILES;
    let saved = SavedMachine::read(dir).map_err(unreadable(description))?;
    let files = [open_file(dir, state)?, open_file(dir, memory)?];
    let id = id_of(&files[0]).map_err(unreadable(state))?;
    let path = path::absolute(dir).map_err(unreadable(""))?;
    Ok((files, SavedBase { id, path }, saved.base))
}

fn open_file(dir: &Path, name: &str) -> Result<File, ChainError> {
    let path = dir.join(name);
    let unreadable = |source| ChainError::Unreadable {
        path: path.clone(),
        source,
    };
    let file = OpenOptions::new()
        .read(true)
        // A FIFO without a writer is not waited for.
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(&path)
        .map_err(unreadable)?;
    // As it was opened: the path may lead elsewhere by now.
    let data = file.metadata().map_err(unreadable)?;
    if let Some(why) = other_writers(&data) {
        return Err(ChainError::Writable { path, why });
    }
    match data.is_file() && data.len() > 0 {
        true => Ok(file),
        false => Err(unreadable(io::Error::other(
            "it is empty, or no regular file",
        ))),
    }
}

/// The id of a snapshot, in its state file's header. What is no state file is refused by who reads it
/// whole.
fn id_of(state: &File) -> io::Result<String> {
    let mut header = Vec::new();
    let end = (ID_AT + ID_BYTES) as u64;
    let mut file = state;
    file.take(end).read_to_end(&mut header)?;
    // The descriptor's offset is shared with who gets it.
    io::Seek::rewind(&mut file)?;
    let id = header.get(ID_AT..).unwrap_or_default();
    Ok(id.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
#[path = "snapshot_chain_test.rs"]
mod tests;
