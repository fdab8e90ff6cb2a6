//! Bodies of requests about machines of `slipgate run`, and of the answers.
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use slipgate_ipc::client::{MachineState, MachineStatus, SavedSnapshot};

/// A machine of `slipgate run` whose VM the daemon serves.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct Machine {
    /// Name of its VM.
    pub name: String,
    /// Process id of its `slipgate run`; 0: it is in another PID namespace than the daemon.
    pub pid: u32,
    /// Present state of the machine.
    pub state: State,
    /// Number of virtual CPUs.
    pub cpus: u8,
    /// Memory of the guest, MiB.
    pub memory_mib: u64,
    /// Name of its TAP.
    pub tap: Option<String>,
    /// Time since the guest's start, s.
    pub runs_s: u64,
}

/// State of a machine, from its making to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It is being made.
    Starting,
    /// The guest executes.
    Running,
    /// Its guest is paused.
    Paused,
    /// A snapshot is being written.
    Saving,
}

impl From<MachineStatus> for Machine {
    fn from(status: MachineStatus) -> Self {
        let MachineStatus {
            name,
            pid,
            state,
            cpus,
            memory_mib,
            mac: _,
            tap,
            netns: _,
            runs_s,
        } = status;
        Self {
            name,
            pid,
            state: match state {
                MachineState::Starting => State::Starting,
                MachineState::Running => State::Running,
                MachineState::Paused => State::Paused,
                MachineState::Saving => State::Saving,
            },
            cpus,
            memory_mib,
            tap,
            runs_s,
        }
    }
}

/// What a guest is asked for.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BalloonBody {
    /// Memory that it is to give back in all, MiB; 0: it takes back what it has given.
    pub mib: u64,
}

/// Where a snapshot is to be made.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotBody {
    /// Name of the snapshot, which is that of a new directory in the daemon's `--snapshot-dir`: 1 to 63
    /// letters, digits, `-`, `_` or `.`, and no `.` in front.
    pub name: String,
    /// Name of the snapshot whose differences are written. Absent: all memory is.
    #[serde(default)]
    pub base: Option<String>,
    /// Whether the VM sleeps from then on: what comes for it is held, the daemon keeps the VM, and the
    /// machine ends once the snapshot is whole. `slipgate run --restore DIRECTORY --as NAME` wakes it.
    #[serde(default)]
    pub sleep: bool,
}

/// A snapshot that was made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct Snapshot {
    /// Name of the snapshot, which a restore gives.
    pub name: String,
    /// Its directory on the daemon's host, for `slipgate run --restore`.
    pub directory: String,
}

impl From<SavedSnapshot> for Snapshot {
    fn from(snapshot: SavedSnapshot) -> Self {
        let SavedSnapshot { name, directory } = snapshot;
        Self {
            name,
            directory: directory.display().to_string(),
        }
    }
}
