//! io_uring: one system call begins a batch, and operations that wait for the medium do so beside
//! each other and beside the next batch.
//!
//! What is in the page cache is transferred while it is submitted. The ring is created on the thread
//! that creates the disk, is restricted there to the operations of the one registered file, and only
//! then enabled, by the disk's thread. An attacker in control of that thread can do no more with it
//! than with preadv, pwritev, fdatasync and fallocate.
use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
    thread,
    time::Duration,
};

use io_uring::{IoUring, opcode, types};

use super::{super::file::Image, Action, FileIo, MAX_OPERATIONS, Operation, vectored::carry_out};
use crate::virtio::restricted_ring::restrict;

/// Operations that are begun at once. A longer batch spares system calls, and lets the first answer
/// wait for the last transfer.
const BATCH: usize = 8;
/// Most threads of the kernel that work for a ring: bounded ones, those of files and block devices,
/// and others, which it has none of (0 would mean the kernel's default).
const WORKERS: [u32; 2] = [4, 1];

/// Pause before a call is tried again for which the kernel has no memory.
const PAUSE: Duration = Duration::from_micros(100);
const NO_THREAD: i32 = -libc::ECANCELED;
const NOT_NOW: i32 = -libc::EAGAIN;

pub(super) struct Uring {
    ring: IoUring,
    image: Arc<Image>,
    /// Operations by their ids, while they are under way.
    operations: Vec<Option<Operation>>,
    /// Number of operations that were added and not submitted.
    added: usize,
}

impl Uring {
    pub(super) fn new(image: Arc<Image>) -> io::Result<Uring> {
        let ring = IoUring::builder()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_submit_all()
            .build(MAX_OPERATIONS as u32)?;
        // From Linux 5.15 on; before, the host's own bound holds.
        let _ = ring
            .submitter()
            .register_iowq_max_workers(&mut WORKERS.clone());
        let operations = [
            opcode::Readv::CODE,
            opcode::Writev::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
        ];
        restrict(&ring, image.file.as_raw_fd(), &operations)?;
        Ok(Uring {
            ring,
            image,
            operations: vec![None; MAX_OPERATIONS],
            added: 0,
        })
    }

    /// Enters the kernel until all that was added is submitted and `results` are there.
    fn enter(&mut self, results: usize) {
        loop {
            match self.ring.submit_and_wait(results) {
                Ok(submitted) => self.added = self.added.saturating_sub(submitted),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // ENOMEM, EAGAIN: the kernel has no memory. EBUSY: it has to be rid of results first,
                // for which there is room. It is asked again. Others can't come up, since the ring is
                // this thread's and stays open; to give up would leave operations under way.
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

    fn is_uring(&self) -> bool {
        true
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
        if let Some(place) = self.operations.get_mut(usize::from(id)) {
            *place = Some(*operation);
        }
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
        let (id, result) = (entry.user_data() as u16, entry.result());
        let place = self.operations.get_mut(usize::from(id));
        let operation = place.and_then(Option::take);
        Some(match (result, operation) {
            // The kernel had no thread for it, or was to wait where it may not.
            (NO_THREAD | NOT_NOW, Some(operation)) => {
                // SAFETY: the caller of `push` keeps the pieces until this result.
                (id, unsafe {
                    carry_out(self.image.file.as_raw_fd(), &operation)
                })
            }
            _ => (id, result),
        })
    }

    fn wait(&mut self) {
        self.enter(1);
    }
}

#[cfg(test)]
#[path = "../uring_test.rs"]
mod tests;
