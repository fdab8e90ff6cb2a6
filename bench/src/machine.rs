//! The measured machine: kernel, CPUs, and the assignment of work to CPUs.

use std::fs;

use serde::{Deserialize, Serialize};

/// Assignment of work to CPUs.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Pinning {
    /// CPU of the client, the server and the frame generator, and of a NAT that works in the
    /// sender's context.
    pub(crate) ends: Option<usize>,
    /// CPU of the stand-in for a VMM and of NAT processes.
    pub(crate) middle: Option<usize>,
}

impl Pinning {
    /// Returns the ends on the first CPU and the middle on the second; no pinning on a machine with
    /// one CPU.
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
