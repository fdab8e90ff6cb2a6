//! io_uring: one system call for a batch of frames.
//!
//! No request may wait (RWF_NOWAIT: with a non-blocking descriptor alone, io_uring would poll it).
//! So each is done while it is submitted, in order, and a batch is complete when the one call
//! returns. Nothing stays in flight between batches.
//!
//! The ring is created on the thread that creates the card. It is restricted there to reads and
//! writes of the one registered TAP descriptor, and only then enabled, by the worker. An attacker
//! in control of the worker can do no more with it than with readv and writev.
use std::{io, os::fd::RawFd, ptr, thread};

use io_uring::{IoUring, opcode, types::Fixed};

use super::{Direction, FrameIo, MAX_TRANSFERS, Transfer};
use crate::virtio::restricted_ring::restrict;

/// Number of retries of a call for which the kernel has no memory.
const ATTEMPTS: u32 = 1_000;

/// io_uring of one queue.
pub(super) struct Uring {
    ring: IoUring,
    /// True after a call failed for good. Its requests are still in the queue, and point to memory
    /// that may have been reused: nothing is submitted any more.
    failed: bool,
}

impl Uring {
    pub(super) fn new(descriptor: RawFd) -> io::Result<Uring> {
        if !takes_nowait(descriptor) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let ring = IoUring::builder()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_submit_all()
            .build(MAX_TRANSFERS as u32)?;
        let operations = [opcode::Readv::CODE, opcode::Writev::CODE];
        restrict(&ring, descriptor, &operations)?;
        Ok(Uring {
            ring,
            failed: false,
        })
    }
}

impl FrameIo for Uring {
    fn begin(&mut self) -> io::Result<()> {
        self.ring.submitter().register_enable_rings()
    }

    fn is_uring(&self) -> bool {
        true
    }

    unsafe fn transfer(&mut self, transfers: &mut [Transfer]) -> io::Result<u64> {
        if self.failed {
            return Err(io::Error::other("this io_uring has failed before"));
        }
        // SAFETY: as the caller promises.
        let calls = unsafe { self.submit(transfers) };
        self.failed = calls.is_err();
        calls
    }
}

impl Uring {
    /// Submits all transfers and waits for their completions. Returns the number of system calls.
    ///
    /// # Safety
    /// As of [`FrameIo::transfer`].
    unsafe fn submit(&mut self, transfers: &mut [Transfer]) -> io::Result<u64> {
        let mut queue = self.ring.submission();
        for (index, transfer) in transfers.iter().enumerate() {
            let (pieces, count) = (transfer.pieces, transfer.count);
            let entry = match transfer.direction {
                Direction::Read => opcode::Readv::new(Fixed(0), pieces, count)
                    .rw_flags(libc::RWF_NOWAIT)
                    .build(),
                Direction::Write => opcode::Writev::new(Fixed(0), pieces, count)
                    .rw_flags(libc::RWF_NOWAIT)
                    .build(),
            };
            // SAFETY: the caller keeps the pieces mapped until all are done.
            let pushed = unsafe { queue.push(&entry.user_data(index as u64)) };
            pushed.map_err(|_| io::Error::from(io::ErrorKind::StorageFull))?;
        }
        drop(queue);
        let (mut calls, mut done, mut attempts) = (0, 0, 0);
        while done < transfers.len() {
            calls += 1;
            let answer = self.ring.submit_and_wait(transfers.len() - done);
            for completion in self.ring.completion() {
                let transfer = transfers.get_mut(completion.user_data() as usize);
                if let Some(transfer) = transfer {
                    transfer.result = completion.result();
                    done += 1;
                }
            }
            match answer {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) if is_passing(&error) && attempts < ATTEMPTS => {
                    attempts += 1;
                    thread::yield_now();
                }
                Err(error) => return Err(error),
            }
        }
        Ok(calls)
    }
}

/// Returns whether the descriptor supports RWF_NOWAIT. TAPs do from Linux 6.4 on (438b406055cd);
/// before, they refuse each transfer. The test writes one byte from address 0, which is too short
/// for a TAP (EINVAL) and not mapped (EFAULT), so nothing is sent.
fn takes_nowait(descriptor: RawFd) -> bool {
    let nowhere = libc::iovec {
        iov_base: ptr::null_mut(),
        iov_len: 1,
    };
    // SAFETY: the kernel checks the piece itself; it is only ever read from.
    let wrote = unsafe { libc::pwritev2(descriptor, &nowhere, 1, -1, libc::RWF_NOWAIT) };
    wrote != -1 || io::Error::last_os_error().raw_os_error() != Some(libc::EOPNOTSUPP)
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY))
}

#[cfg(test)]
#[path = "uring_test.rs"]
mod tests;
