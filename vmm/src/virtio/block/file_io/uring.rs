//! io_uring: one system call begins a batch, and operations that wait for the medium do so beside
//! each other and beside the next batch.
//!
//! What is in the page cache is transferred while it is submitted. The ring is created on the thread
//! that creates the disk, is restricted there to the operations of the one registered file, and only
//! then enabled, by the disk's thread. An attacker in control of that thread can do no more with it
//! than with preadv, pwritev, fdatasync and fallocate.
use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, RawFd},
    thread,
    time::Duration,
};

use io_uring::{IoUring, opcode, register::Restriction, squeue, types};

use super::{Action, FileIo, MAX_OPERATIONS, Operation};

/// Pause before a call is tried again for which the kernel has no memory.
const PAUSE: Duration = Duration::from_micros(100);

pub(super) struct Uring {
    ring: IoUring,
    /// Number of operations that were added and not submitted.
    added: usize,
}

impl Uring {
    pub(super) fn new(file: &File) -> io::Result<Uring> {
        let ring = IoUring::builder()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_submit_all()
            .build(MAX_OPERATIONS as u32)?;
        let submitter = ring.submitter();
        submitter.register_files(&[file.as_raw_fd()])?;
        let fixed = squeue::Flags::FIXED_FILE.bits();
        submitter.register_restrictions(&mut [
            Restriction::sqe_op(opcode::Readv::CODE),
            Restriction::sqe_op(opcode::Writev::CODE),
            Restriction::sqe_op(opcode::Fsync::CODE),
            Restriction::sqe_op(opcode::Fallocate::CODE),
            Restriction::sqe_flags_allowed(fixed),
            Restriction::sqe_flags_required(fixed),
        ])?;
        Ok(Uring { ring, added: 0 })
    }

    /// Enters the kernel until all that was added is submitted and `results` are there.
    fn enter(&mut self, results: usize) {
        loop {
            match self.ring.submit_and_wait(results) {
                Ok(submitted) => self.added = self.added.saturating_sub(submitted),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel has no memory, or has to be rid of results first, for which there is
                // room in the ring: it is asked again. No other error can come up, since the ring is
                // this thread's and stays open; the operations would be lost if it gave up.
                Err(_) => thread::sleep(PAUSE),
            }
            if self.added == 0 && (results == 0 || self.has_result()) {
                return;
            }
        }
    }
}

impl FileIo for Uring {
    fn begin(&mut self) -> io::Result<()> {
        self.ring.submitter().register_enable_rings()
    }

    fn batch(&self) -> usize {
        BATCH
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.ring.as_raw_fd())
    }

    unsafe fn push(&mut self, id: u16, operation: &Operation) {
        let (file, offset) = (types::Fixed(0), operation.offset);
        let entry = match operation.action {
            Action::Read { pieces, count } => opcode::Readv::new(file, pieces, count)
                .offset(offset)
                .build(),
            Action::Write {
                pieces,
                count,
                stable,
            } => opcode::Writev::new(file, pieces, count)
                .offset(offset)
                .rw_flags(if stable { libc::RWF_DSYNC } else { 0 })
                .build(),
            Action::Flush => opcode::Fsync::new(file)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            Action::Allocate { mode, bytes } => opcode::Fallocate::new(file, bytes)
                .offset(offset)
                .mode(mode)
                .build(),
        };
        let entry = entry.user_data(id.into());
        // SAFETY: the caller keeps the pieces until the result.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.enter(0);
        }
        self.added += 1;
    }

    fn submit(&mut self) {
        if self.added > 0 {
            self.enter(0);
        }
    }

    fn has_result(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    fn result(&mut self) -> Option<(u16, i32)> {
        let entry = self.ring.completion().next()?;
        Some((entry.user_data() as u16, entry.result()))
    }

    fn wait(&mut self) {
        self.enter(1);
    }
}

/// Operations that are begun at once. A longer batch spares system calls, and lets the first answer
/// wait for the last transfer.
const BATCH: usize = 8;
