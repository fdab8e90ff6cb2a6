//! A stock Linux that moves between hosts of one CPU template: machines that QEMU emulates with other
//! CPUs, one after the other. On one it is saved, on the next it goes on. Its snapshot and its disk are on
//! a file system that each machine has as its disk.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A file that, if it is there, has what a machine is to do with the guest of [`super::SAVED`].
pub const MOVED_PLAN: &str = "/saved/plan";

/// A step of a guest of this template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// Value of `--cpu-template`.
    pub template: String,
    /// What is done with it.
    pub step: MoveStep,
}

/// What a host does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MoveStep {
    /// Boots the guest, and saves it.
    Save,
    /// Restores it, and has it go on to its end.
    Restore,
    /// Refuses to restore it, by the names of the features that it lacks.
    Refuse(Vec<String>),
}

/// Text of [`MOVED_PLAN`].
///
/// # Errors
/// None in practice: all of it can be written as JSON.
pub fn moved_plan(steps: &[Move]) -> Result<String> {
    serde_json::to_string(steps).map_err(Error::unexpected)
}
