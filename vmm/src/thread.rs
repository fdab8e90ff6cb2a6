//! What a thread of the VMM is for, so that each kind can be confined in its own way.
use std::{io, sync::Arc};

/// The threads that a machine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Runs one virtual CPU; handles its exits.
    Vcpu,
    /// Moves frames for one queue pair.
    NetWorker,
    /// Everything else: the console's input, the control queue, virtio-rng.
    Device,
}

/// Called first on each thread that the VMM starts, for example to install a seccomp filter.
pub type ThreadSetup = Arc<dyn Fn(ThreadKind) -> io::Result<()> + Send + Sync>;
