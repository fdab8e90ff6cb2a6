//! Frames over the engine port: a non-blocking TAP descriptor, one system call a frame.
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use userspace_nat::port::{Batch, FrameIo};

/// Packet I/O on the engine port, by its descriptor.
#[derive(Debug)]
pub(super) struct PortIo {
    tap: OwnedFd,
}

impl PortIo {
    pub(super) fn new(tap: OwnedFd) -> Self {
        Self { tap }
    }
}

impl FrameIo for PortIo {
    fn recv(&mut self, batch: &mut Batch) -> io::Result<()> {
        loop {
            let tap = &self.tap;
            match batch.push_with(|buffer| Ok(nix::unistd::read(tap, buffer)?)) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        loop {
            match nix::unistd::write(&self.tap, frame) {
                Ok(_) => return Ok(()),
                Err(nix::Error::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.tap.as_fd())
    }
}
