//! An io_uring that can do nothing but some operations of one file.
use std::{io, os::fd::RawFd};

use io_uring::{IoUring, register::Restriction, squeue};

/// Restricts a ring to these operations (IORING_OP_*) of one file, which is registered as the first.
/// The ring was made disabled (IORING_SETUP_R_DISABLED). From when it is enabled on, nobody can have it
/// do anything else, and the restriction can't be removed.
///
/// # Errors
/// The kernel refuses a step.
pub(super) fn restrict(ring: &IoUring, file: RawFd, operations: &[u8]) -> io::Result<()> {
    let submitter = ring.submitter();
    submitter.register_files(&[file])?;
    let fixed = squeue::Flags::FIXED_FILE.bits();
    let flags = [
        Restriction::sqe_flags_allowed(fixed),
        Restriction::sqe_flags_required(fixed),
    ];
    let operations = operations.iter().map(|code| Restriction::sqe_op(*code));
    let mut all: Vec<_> = operations.chain(flags).collect();
    submitter.register_restrictions(&mut all)
}
