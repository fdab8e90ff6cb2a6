//! Orders to the machine of one `slipgate run`, at a control socket of its own.
use std::{os::fd::OwnedFd, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::descriptors::maps_descriptors;

/// An order to a machine, or a question.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "order")]
pub enum MachineOrder<F = OwnedFd> {
    /// Report the machine's specification and state; answered by
    /// [`ClientAnswer::Machine`](super::ClientAnswer::Machine).
    Status,
    /// Pause the guest; answered by [`ClientAnswer::Done`](super::ClientAnswer::Done) once it does not
    /// run.
    Pause,
    /// Have the guest go on; answered by [`ClientAnswer::Done`](super::ClientAnswer::Done).
    Resume,
    /// Write a snapshot to these empty files; answered by
    /// [`ClientAnswer::Saved`](super::ClientAnswer::Saved) once they are on their disk.
    Snapshot {
        /// File for the machine's state, open for writing.
        state: F,
        /// File for its memory, open for writing.
        memory: F,
    },
    /// As [`MachineOrder::Snapshot`], but write what differs from another snapshot. An order of its own:
    /// a machine that knows no differences refuses it, and does not write a whole one in its place.
    Differences {
        /// File for the machine's state, open for writing.
        state: F,
        /// File for its memory, open for writing.
        memory: F,
        /// The snapshot whose differences are to be written, then its base, and so on, at most
        /// [`MAX_BASES`].
        bases: Vec<SnapshotBase<F>>,
    },
    /// The files of a snapshot that it has written are complete and have their names; answered by
    /// [`ClientAnswer::Done`](super::ClientAnswer::Done) once who listens to its events is told.
    Finished,
    /// Ask the guest for so much of its memory in all, by its balloon; answered by
    /// [`ClientAnswer::Done`](super::ClientAnswer::Done) before it has given it.
    Balloon {
        /// How much, MiB.
        mib: u64,
    },
    /// End the machine, as SIGTERM does; answered by [`ClientAnswer::Done`](super::ClientAnswer::Done)
    /// before it has ended.
    Kill,
}

/// Most snapshots below one that is made of differences.
pub const MAX_BASES: usize = 7;

/// Files of a snapshot below another, open for reading.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SnapshotBase<F = OwnedFd> {
    /// The file with the machine's state.
    pub state: F,
    /// The file with the guest's memory.
    pub memory: F,
}

impl<F> MachineOrder<F> {
    /// The order for a snapshot: of what differs from `bases`, or whole where there are none.
    pub fn snapshot(state: F, memory: F, bases: Vec<SnapshotBase<F>>) -> Self {
        match bases.is_empty() {
            true => Self::Snapshot { state, memory },
            false => Self::Differences {
                state,
                memory,
                bases,
            },
        }
    }

    /// Whether the order changes nothing.
    pub(super) fn is_read_only(&self) -> bool {
        matches!(self, Self::Status)
    }
}

/// A machine of `slipgate run`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MachineStatus {
    /// Name of the VM.
    pub name: String,
    /// Process id of its `slipgate run`; 0: it is in another PID namespace.
    pub pid: u32,
    /// Present state of the machine.
    pub state: MachineState,
    /// Number of virtual CPUs.
    pub cpus: u8,
    /// Memory of the guest, MiB.
    pub memory_mib: u64,
    /// The guest's MAC address; `None`: the machine's version does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Name of its TAP; `None` in user mode.
    pub tap: Option<String>,
    /// Inode number of its network namespace.
    pub netns: u64,
    /// Time since the guest's start, s.
    pub runs_s: u64,
}

/// Notice of a machine to the daemon that serves its VM: one JSON object per line, on the socket
/// that ties the VM to its client ([`ClientRequest::ServeVm`](super::ClientRequest::ServeVm)).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MachineNotice {
    /// Specification and present state of the machine.
    pub machine: MachineStatus,
    /// The event behind the notice; `None` if it only reports the state.
    pub event: Option<MachineEvent>,
}

/// Longest notice, bytes, with the end of its line.
pub const MAX_NOTICE: usize = 4 << 10;

/// Event in the life of a machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineEvent {
    /// Its guest was paused.
    Paused,
    /// Its guest goes on.
    Resumed,
    /// A snapshot was written, and is complete.
    Saved,
    /// The machine has ended.
    Ended {
        /// The outcome, as in the report of `slipgate run`.
        outcome: String,
        /// Exit status of `slipgate run`.
        exit_code: u8,
    },
}

/// An order to a machine that a daemon passes on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "order")]
pub enum PassedOrder {
    /// As [`MachineOrder::Pause`].
    Pause,
    /// As [`MachineOrder::Resume`].
    Resume,
    /// [`MachineOrder::Snapshot`] or [`MachineOrder::Differences`], to files that the daemon makes.
    Snapshot {
        /// Name of the snapshot: that of its directory in the daemon's.
        to: String,
        /// Name of the one whose differences are to be written; `None`: all memory is written.
        #[serde(default)]
        base: Option<String>,
        /// Whether the VM sleeps from then on: it is kept, and the machine ends.
        #[serde(default)]
        sleep: bool,
    },
    /// [`MachineOrder::Balloon`].
    Balloon {
        /// How much, MiB.
        mib: u64,
    },
    /// As [`MachineOrder::Kill`].
    Kill,
}

/// A snapshot that a daemon has had written.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SavedSnapshot {
    /// Name of the snapshot, which a restore gives.
    pub name: String,
    /// Its directory on the daemon's host.
    pub directory: PathBuf,
}

/// State of a machine, from its making to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineState {
    /// It is being made.
    Starting,
    /// The guest executes.
    Running,
    /// The guest is paused.
    Paused,
    /// A snapshot is being written.
    Saving,
}

impl MachineState {
    /// The state in a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Saving => "saving",
        }
    }
}

maps_descriptors!(
    struct SnapshotBase {
        state: fd,
        memory: fd,
    }
);
maps_descriptors!(
    enum MachineOrder {
        Status,
        Pause,
        Resume,
        Snapshot { state: fd, memory: fd },
        Differences { state: fd, memory: fd, bases: each },
        Finished,
        Balloon { mib },
        Kill,
    }
);
