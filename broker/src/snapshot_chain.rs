//! The files of a snapshot, and of the snapshots below it that it differs from.
//!
//! Each description (`machine.json`) names the base's directory and id; which snapshot it really is the
//! VMM finds out, from the states.
use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use serde_json::Value;
use slipgate_ipc::{
    client::{MAX_BASES, SnapshotBase},
    vmm::VmmSnapshot,
};

use crate::config::{
    MachineSpec, OWN_SNAPSHOT, SNAPSHOT_FILES, SavedBase, SavedMachine, other_writers,
};

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
    /// Machine that the snapshot was made of.
    machine: MachineSpec,
}

/// Reason why the files of a snapshot can't be used.
#[derive(thiserror::Error, Debug)]
pub enum ChainError {
    /// A part of it can't be read.
    #[error("{} can't be read ({source})", .path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Others can have written it.
    #[error("{} {why}", .path.display())]
    Writable {
        /// The file or directory.
        path: PathBuf,
        /// Owner or mode that lets others write.
        why: String,
    },
    /// The base of a snapshot can't be used.
    #[error("it holds the differences from the snapshot {}, which is to be in {}: {source}", .base.id, .base.path.display())]
    Base {
        /// The base, as the snapshot names it.
        base: SavedBase,
        /// The fault of the base.
        source: Box<ChainError>,
    },
    /// There are too many below it.
    #[error("there are more than {MAX_BASES} snapshots below it")]
    TooMany,
    /// One is below itself.
    #[error("the snapshot in {} is below itself", .0.display())]
    Circle(PathBuf),
    /// Its path can't be written into another one's description.
    #[error("its path {} is no UTF-8", .0.display())]
    NotText(PathBuf),
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
            (_, Self::TooMany) => {
                "make one that is whole, without a base, and others that differ from that"
            }
            (_, Self::Circle(_)) => "correct `base` in its machine.json",
            (_, Self::NotText(_)) => "rename the part that is not UTF-8",
            (Self::Base { .. }, _) => {
                "put the base there again, or correct `base` in machine.json if it is elsewhere"
            }
            _ => "give a directory that `slipgate snapshot` wrote to its end",
        };
        (self.to_string(), remedy)
    }

    /// The problem, and what to do, in one sentence.
    pub fn explained(&self) -> String {
        let (problem, remedy) = self.parts();
        format!("{problem}: {remedy}")
    }
}

impl SnapshotChain {
    /// Opens the files of the snapshot in a directory, and those of the snapshots below it.
    ///
    /// # Errors
    /// One of them can't be read, others than root and this user can have written it, or there are too
    /// many.
    pub fn open(dir: &Path) -> Result<Self, ChainError> {
        let Opened { files, own, saved } = open_one(dir)?;
        let SavedMachine { machine, base, .. } = saved;
        let mut met = vec![identity(dir, &files)?];
        let mut all = vec![files];
        let mut below = base;
        while let Some(base) = below {
            let path = base.path.clone();
            let opened = open_one(&path).map_err(|e| ChainError::Base {
                base,
                source: Box::new(e),
            })?;
            let found = identity(&path, &opened.files)?;
            if met.contains(&found) {
                return Err(ChainError::Circle(path));
            }
            if all.len() > MAX_BASES {
                return Err(ChainError::TooMany);
            }
            met.push(found);
            all.push(opened.files);
            below = opened.saved.base;
        }
        Ok(Self {
            files: all,
            own,
            machine,
        })
    }

    /// The machine that it is of.
    pub(crate) fn machine(&self) -> &MachineSpec {
        &self.machine
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
    /// There are too many below that one, or its path can't be written into the new one's description.
    pub fn bases(&self) -> Result<Vec<SnapshotBase<BorrowedFd<'_>>>, ChainError> {
        if self.files.len() > MAX_BASES {
            return Err(ChainError::TooMany);
        }
        if self.own.path.to_str().is_none() {
            return Err(ChainError::NotText(self.own.path.clone()));
        }
        let files = self.files.iter().map(|[state, memory]| SnapshotBase {
            state: state.as_fd(),
            memory: memory.as_fd(),
        });
        Ok(files.collect())
    }

    /// Adds to the description of a machine that it differs from this snapshot.
    ///
    /// # Errors
    /// What the machine has answered is no description.
    pub fn describe(&self, machine: &mut Value) -> anyhow::Result<()> {
        let fields = machine
            .as_object_mut()
            .context("the machine's description of itself is no object")?;
        let own = serde_json::to_value(&self.own).context("naming the base")?;
        fields.insert("base".into(), own);
        Ok(())
    }
}

/// One snapshot of the chain, opened.
struct Opened {
    files: [File; 2],
    /// Identity of the snapshot, as others name it for their base.
    own: SavedBase,
    saved: SavedMachine,
}

/// Returns the device and inode of a snapshot's state file, which no other file has.
fn identity(dir: &Path, [state, _]: &[File; 2]) -> Result<(u64, u64), ChainError> {
    let data = state.metadata().map_err(|source| ChainError::Unreadable {
        path: dir.to_owned(),
        source,
    })?;
    Ok((data.dev(), data.ino()))
}

/// Opens the files of one snapshot.
fn open_one(dir: &Path) -> Result<Opened, ChainError> {
    let unreadable = |path: PathBuf| move |source| ChainError::Unreadable { path, source };
    let metadata = dir.metadata().map_err(unreadable(dir.to_owned()))?;
    if let Some(why) = other_writers(&metadata) {
        let path = dir.to_owned();
        return Err(ChainError::Writable { path, why });
    }
    let [state, memory, description] = SNAPSHOT_FILES;
    let saved = SavedMachine::read(dir).map_err(unreadable(dir.join(description)))?;
    let files = [open_file(dir, state)?, open_file(dir, memory)?];
    let id = id_of(&files[0]).map_err(unreadable(dir.join(state)))?;
    // Not by links, which may lead elsewhere by the time that it is restored.
    let path = dir.canonicalize().map_err(unreadable(dir.to_owned()))?;
    Ok(Opened {
        files,
        own: SavedBase { id, path },
        saved,
    })
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
