//! Translated ports that flows to several peers have, and the sockets that get what comes from others.
//!
//! # Theory of operation
//! Each flow has a socket that is connected to its peer, also where its port is that of an
//! endpoint-independent mapping: so what the peer sends, errors and path MTU are that flow's by the kernel's
//! own look-up, which prefers a connected socket. What comes from anybody else goes to a socket that is
//! bound to the same address and port and connected to nobody. It becomes packets of the world like any, and
//! the programs' functions and the engine decide whether the mapping lets them in.
//!
//! That socket is bound first, and alone: so no other process has the port. Afterwards it and the flows'
//! sockets share the port by `SO_REUSEPORT`, which the kernel lets no other user join, and never by
//! `SO_REUSEADDR`, which anybody may set. It is closed when no flow has the port any more and no stranger
//! is let in by it.
use std::{
    cell::{Cell, RefCell},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    os::fd::{AsRawFd, OwnedFd},
};

use hashbrown::HashSet;
use nix::{
    errno::Errno,
    sys::socket::{SockaddrStorage, bind, setsockopt, sockopt},
};
use slipgate_abi::Protocol;
use slipgate_model::FlowTuple;

use super::opening::{Busy, NotOpened};

/// The ports.
#[derive(Debug, Default)]
pub(crate) struct SharedPorts {
    /// First and last port that may be shared.
    range: Cell<Option<(u16, u16)>>,
    held: RefCell<HashSet<SocketAddr>>,
    /// Sockets that were made and that nobody waits at yet.
    made: RefCell<Vec<(FlowTuple, OwnedFd)>>,
}

/// Whether a tuple is that of a shared port's own socket: its peer is nobody.
pub(crate) fn is_of_strangers(tuple: &FlowTuple) -> bool {
    tuple.remote.is_unspecified()
}

impl SharedPorts {
    /// Sets the ports that may be shared.
    pub(crate) fn set_range(&self, range: Option<&RangeInclusive<u16>>) {
        self.range
            .set(range.map(|range| (*range.start(), *range.end())));
    }

    /// Whether the port of a flow is one of them.
    pub(crate) fn has(&self, tuple: &FlowTuple) -> bool {
        let is_udp = tuple.protocol == Protocol::Udp as u8;
        let range = self.range.get().filter(|_| is_udp);
        range.is_some_and(|(first, last)| (first..=last).contains(&tuple.local_port))
    }

    /// Whether any is held.
    pub(crate) fn are_some_held(&self) -> bool {
        !self.held.borrow().is_empty()
    }

    pub(super) fn is_held(&self, tuple: &FlowTuple) -> bool {
        self.held.borrow().contains(&tuple.local_addr())
    }

    /// Binds the socket of a port.
    pub(super) fn hold(&self, tuple: &FlowTuple, socket: OwnedFd) -> Result<(), NotOpened> {
        let local = tuple.local_addr();
        let refused = |error: Errno| NotOpened::Refused(error.into());
        setsockopt(&socket, sockopt::ReuseAddr, &false).map_err(refused)?;
        match bind(socket.as_raw_fd(), &SockaddrStorage::from(local)) {
            Ok(()) => {}
            Err(error @ Errno::EADDRINUSE) => return Err(NotOpened::Busy(Busy::Bound, error)),
            Err(error) => return Err(refused(error)),
        }
        setsockopt(&socket, sockopt::ReusePort, &true).map_err(refused)?;
        let nobody = FlowTuple {
            remote: match local {
                SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            },
            remote_port: 0,
            ..*tuple
        };
        self.held.borrow_mut().insert(local);
        self.made.borrow_mut().push((nobody, socket));
        Ok(())
    }

    /// Lets the socket of a flow, which is not bound yet, share a port that is held.
    pub(super) fn share(socket: &OwnedFd) -> Result<(), Errno> {
        setsockopt(socket, sockopt::ReuseAddr, &false)?;
        setsockopt(socket, sockopt::ReusePort, &true)
    }

    /// Whether there are ports that may be shared.
    pub(super) fn has_any(&self) -> bool {
        self.range.get().is_some()
    }

    /// Puts a socket back that could not be waited at: it is tried again in the next turn.
    pub(crate) fn put_back(&self, tuple: FlowTuple, socket: OwnedFd) {
        self.held.borrow_mut().insert(tuple.local_addr());
        self.made.borrow_mut().push((tuple, socket));
    }

    /// Takes a socket that was made, with its tuple.
    pub(crate) fn take_made(&self) -> Option<(FlowTuple, OwnedFd)> {
        self.made.borrow_mut().pop()
    }

    /// Notes that the socket of a port is closed.
    pub(crate) fn release(&self, tuple: &FlowTuple) {
        if is_of_strangers(tuple) {
            self.held.borrow_mut().remove(&tuple.local_addr());
        }
    }
}

#[cfg(test)]
#[path = "shared_test.rs"]
mod tests;
