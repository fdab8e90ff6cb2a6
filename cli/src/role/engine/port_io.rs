//! Frames over the engine port: a non-blocking TAP descriptor, one system call a frame.
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use userspace_nat::{
    port::{Batch, FrameIo},
    userspace_port::UserspacePort,
};

use super::userspace::Tables;

/// The engine port, of either mode.
#[derive(Debug)]
pub(super) enum Port {
    /// The kernel's programs are behind it.
    Kernel(PortIo),
    /// The guest's device and the host's sockets are behind it.
    Userspace(Box<UserspacePort<Tables>>),
}

impl FrameIo for Port {
    fn recv(&mut self, batch: &mut Batch) -> io::Result<()> {
        match self {
            Self::Kernel(port) => port.recv(batch),
            Self::Userspace(port) => port.recv(batch),
        }
    }

    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        match self {
            Self::Kernel(port) => port.send(frame),
            Self::Userspace(port) => port.send(frame),
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Kernel(port) => port.fd(),
            Self::Userspace(port) => port.fd(),
        }
    }

    fn has_more(&self) -> bool {
        match self {
            Self::Kernel(port) => port.has_more(),
            Self::Userspace(port) => port.has_more(),
        }
    }

    fn is_looked_at(&self) -> bool {
        match self {
            Self::Kernel(port) => port.is_looked_at(),
            Self::Userspace(port) => port.is_looked_at(),
        }
    }
}

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
