//! Orders to the machine of one `slipgate run`, at a control socket of its own.
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::descriptors::maps_descriptors;

/// An order to a machine, or a question.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "order")]
pub enum MachineOrder<F = OwnedFd> {
    /// What it is and does; answered by [`ClientAnswer::Machine`](super::ClientAnswer::Machine).
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
    /// End the machine, as SIGTERM does; answered by [`ClientAnswer::Done`](super::ClientAnswer::Done)
    /// before it has ended.
    Kill,
}

impl<F> MachineOrder<F> {
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
    /// Process id of its `slipgate run`.
    pub pid: u32,
    /// What it does.
    pub state: MachineState,
    /// Number of virtual CPUs.
    pub cpus: u8,
    /// Memory of the guest, MiB.
    pub memory_mib: u64,
    /// Name of its TAP; `None` in user mode.
    pub tap: Option<String>,
    /// Inode number of its network namespace.
    pub netns: u64,
    /// Time since the guest's start, s.
    pub runs_s: u64,
}

/// What a machine does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineState {
    /// It is being made.
    Starting,
    /// The guest runs.
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
    enum MachineOrder {
        Status,
        Pause,
        Resume,
        Snapshot { state: fd, memory: fd },
        Kill,
    }
);
