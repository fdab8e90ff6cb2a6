//! Frames over the engine port: a non-blocking TAP descriptor, one system call a frame.
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    rc::Rc,
};

use nix::sys::epoll::{Epoll, EpollFlags};
use slipgate_model::GuestTcpCounts;
use userspace_nat::{
    host_sockets::HostSockets,
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

    fn set(&self) -> Option<Rc<Epoll>> {
        match self {
            Self::Kernel(port) => port.set(),
            Self::Userspace(port) => port.set(),
        }
    }

    fn on_ready(&mut self, key: u32, flags: EpollFlags) {
        match self {
            Self::Kernel(port) => port.on_ready(key, flags),
            Self::Userspace(port) => port.on_ready(key, flags),
        }
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        match self {
            Self::Kernel(port) => port.next_deadline_ns(),
            Self::Userspace(port) => port.next_deadline_ns(),
        }
    }

    fn rest(&mut self) -> bool {
        match self {
            Self::Kernel(port) => port.rest(),
            Self::Userspace(port) => port.rest(),
        }
    }

    fn room(&mut self) -> usize {
        match self {
            Self::Kernel(port) => port.room(),
            Self::Userspace(port) => port.room(),
        }
    }

    fn has_more(&self) -> bool {
        match self {
            Self::Kernel(port) => port.has_more(),
            Self::Userspace(port) => port.has_more(),
        }
    }

    fn host_sockets(&self) -> Option<Rc<HostSockets>> {
        match self {
            Self::Kernel(port) => port.host_sockets(),
            Self::Userspace(port) => port.host_sockets(),
        }
    }

    fn tcp_counts(&self) -> GuestTcpCounts {
        match self {
            Self::Kernel(port) => port.tcp_counts(),
            Self::Userspace(port) => port.tcp_counts(),
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

    fn set(&self) -> Option<Rc<Epoll>> {
        None
    }

    fn on_ready(&mut self, _: u32, _: EpollFlags) {}

    fn next_deadline_ns(&self) -> Option<u64> {
        None
    }

    fn rest(&mut self) -> bool {
        false
    }

    fn room(&mut self) -> usize {
        // The kernel takes each frame at once.
        usize::MAX
    }
}
