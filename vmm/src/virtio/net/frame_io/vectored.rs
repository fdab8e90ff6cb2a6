//! readv and writev: one system call for each frame.
use std::{io, os::fd::RawFd};

use super::{Direction, FrameIo, Transfer};

/// readv and writev on one queue.
pub(super) struct Vectored {
    descriptor: RawFd,
}

impl Vectored {
    pub(super) fn new(descriptor: RawFd) -> Vectored {
        Vectored { descriptor }
    }
}

impl FrameIo for Vectored {
    fn begin(&mut self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn transfer(&mut self, transfers: &mut [Transfer]) -> io::Result<u64> {
        let mut calls = 0;
        // After the first EAGAIN of a direction, further calls would return the same.
        let (mut drained, mut full) = (false, false);
        for transfer in transfers {
            let blocked = match transfer.direction {
                Direction::Read => &mut drained,
                Direction::Write => &mut full,
            };
            if *blocked {
                transfer.result = -libc::EAGAIN;
                continue;
            }
            let count = transfer.count as libc::c_int;
            loop {
                calls += 1;
                let done = match transfer.direction {
                    // SAFETY: the caller's promise; the descriptor is the TAP's, which outlives
                    // `self`.
                    Direction::Read => unsafe {
                        libc::readv(self.descriptor, transfer.pieces, count)
                    },
                    // SAFETY: as above.
                    Direction::Write => unsafe {
                        libc::writev(self.descriptor, transfer.pieces, count)
                    },
                };
                transfer.result = match i32::try_from(done) {
                    Ok(done) if done >= 0 => done,
                    _ => -io::Error::last_os_error()
                        .raw_os_error()
                        .unwrap_or(libc::EIO),
                };
                if transfer.result != -libc::EINTR {
                    break;
                }
            }
            *blocked = transfer.result == -libc::EAGAIN;
        }
        Ok(calls)
    }
}
