//! The machine that is measured on: its kernel, its CPUs, and who works on which.

use std::fs;

use serde::{Deserialize, Serialize};

/// Assignment of work to CPUs.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Pinning {
    /// Client, server and frame generator; so also a NAT that works in the sender's context.
    pub(crate) ends: Option<usize>,
    /// The stand-in for a VMM, and NAT processes.
    pub(crate) middle: Option<usize>,
}

impl Pinning {
    /// The ends on the first CPU and the middle on the second; nowhere where there is only one.
    pub(crate) fn of_this_machine() -> Pinning {
        match cpus() {
            0 | 1 => Pinning::none(),
            _ => Pinning {
                ends: Some(0),
                middle: Some(1),
            },
        }
    }

    pub(crate) fn none() -> Pinning {
        Pinning {
            ends: None,
            middle: None,
        }
    }
}

/// Release of the running kernel.
pub(crate) fn kernel() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease");
    release.unwrap_or_default().trim().to_owned()
}

pub(crate) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
