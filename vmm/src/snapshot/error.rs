//! Errors of saving and restoring snapshots.
use std::io;

use super::{LAYOUT_VERSION, MAX_BASES, MAX_STATE_BYTES, SnapshotId};

/// Reason why a machine can't be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file does not begin as a state file does.
    #[error("the state file is no state of a machine: give a snapshot that slipgate made")]
    NotAState,
    /// The state has another layout.
    #[error(
        "the state file has layout version {found}, and this slipgate reads version \
         {LAYOUT_VERSION}: restore it with the slipgate that made it, or make a new one"
    )]
    Version {
        /// Version of the file's layout.
        found: u32,
    },
    /// The file is longer than any state.
    #[error("the state file says that it has {0} bytes of state; {MAX_STATE_BYTES} is the most")]
    TooLong(u64),
    /// The file ends early, or its digest is of other bytes.
    #[error("the state file is damaged ({0}): it can't be restored")]
    Damaged(&'static str),
    /// The state can't be that of such a machine.
    #[error("the snapshot does not fit this machine: {0}")]
    Mismatch(String),
    /// The snapshot has a base, which was not given.
    #[error("it holds the differences from the snapshot {wanted}, which is missing")]
    NoBase {
        /// Identity of the missing base.
        wanted: SnapshotId,
    },
    /// Another snapshot is in the place of the base.
    #[error(
        "it holds the differences from the snapshot {wanted}, and what is in the place of that is \
         the snapshot {found}"
    )]
    OtherBase {
        /// Identity of the base that it needs.
        wanted: SnapshotId,
        /// The one that was given.
        found: SnapshotId,
    },
    /// A base was given for a snapshot that has all pages.
    #[error("a base was given for a snapshot that is whole without one")]
    NotABase,
    /// There are too many bases.
    #[error("there are more than {MAX_BASES} snapshots below it: make one without a base")]
    TooManyBases,
    /// The host differs from the one on which the state was saved.
    #[error("the snapshot was saved on another kind of host: {0}")]
    Host(String),
    /// KVM refused a part of the state.
    #[error("KVM: {what}")]
    Kvm {
        /// Operation that was tried.
        what: &'static str,
        /// Error from the kernel.
        source: io::Error,
    },
    /// A file could not be read or written.
    #[error("could not {what}")]
    File {
        /// Operation that was tried.
        what: &'static str,
        /// Error from the host.
        source: io::Error,
    },
    /// The guest is a hypervisor: what the CPU knows of its VMs is not saved.
    #[error(
        "the guest uses virtualization itself, and the state of its VMs can't be saved: unload its \
         hypervisor first (on Linux: kvm_intel or kvm_amd)"
    )]
    Nested,
    /// Whoever asked for the snapshot does not want it any more.
    #[error("it was cancelled")]
    Cancelled,
    /// The machine ends, or has ended.
    #[error("the machine has ended meanwhile")]
    Ended,
    /// The guest has reset the machine, which has not begun anew yet.
    #[error("the machine is being reset by its guest: ask again")]
    Resetting,
    /// The guest has reset the machine by an instruction that goes on and on.
    #[error("the instruction by which the guest has reset the machine does not end")]
    Unfinished,
    /// The machine has no balloon.
    #[error("the machine has no balloon: start it with --balloon")]
    NoBalloon,
    /// The guest has not so much memory.
    #[error("the guest has {memory} bytes of memory, and can't give {wanted}: ask for less")]
    BalloonSize {
        /// Bytes that were asked for.
        wanted: u64,
        /// Size of the memory, bytes.
        memory: u64,
    },
    /// The machine runs, and must be paused first.
    #[error("the machine is not paused")]
    NotPaused,
}

impl SnapshotError {
    /// Returns a function for `map_err` that makes an error of operation `what` and KVM's error.
    pub(crate) fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> SnapshotError {
        move |error| SnapshotError::Kvm {
            what,
            source: error.into(),
        }
    }

    /// Returns a function for `map_err` that makes an error of operation `what` on a file.
    pub(crate) fn file(what: &'static str) -> impl Fn(io::Error) -> SnapshotError {
        move |source| SnapshotError::File { what, source }
    }
}
