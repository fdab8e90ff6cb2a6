//! System calls that give a flow its socket.
use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{SockaddrStorage, bind, connect},
};
use slipgate_abi::Protocol;
use slipgate_model::FlowTuple;

use super::{HostSockets, SharedPorts};

/// Reason why a flow has no socket.
#[derive(Debug)]
pub(super) enum NotOpened {
    /// The host does not let it have its translated port toward this peer; another might do.
    Busy(Busy, Errno),
    /// Any other, which does not depend on the port.
    Refused(io::Error),
}

/// What keeps a translated port from being used toward a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Busy {
    /// Another socket of the host has the port.
    Bound,
    /// A connection before has the tuple: it is in TIME-WAIT, or its socket is not closed yet.
    Waits,
}

impl From<NotOpened> for io::Error {
    fn from(not: NotOpened) -> Self {
        match not {
            NotOpened::Busy(_, error) => error.into(),
            NotOpened::Refused(error) => error,
        }
    }
}

/// Makes the socket of a flow: bound to its translated address and port, and connected, or about to
/// be, to its peer.
///
/// # Errors
/// The host refuses, or the peer's address means this host or many: of these no rule lets a guest reach
/// the host's own loopback by a socket of ours.
pub(super) fn open(tuple: &FlowTuple, host: &HostSockets) -> Result<OwnedFd, NotOpened> {
    let refused = |error: Errno| NotOpened::Refused(error.into());
    if !is_one_other_host(tuple.remote) {
        return Err(refused(Errno::EACCES));
    }
    let is_shared = host.shared.has(tuple);
    if is_shared {
        host.hold_shared(tuple)?;
    }
    let protocol = tuple.protocol().unwrap_or(Protocol::Udp);
    let socket = host
        .take(tuple.remote, protocol)
        .map_err(NotOpened::Refused)?;
    if is_shared {
        SharedPorts::share(&socket).map_err(refused)?;
    }
    let (local, remote): (SocketAddr, SocketAddr) = (tuple.local_addr(), tuple.remote_addr());
    match bind(socket.as_raw_fd(), &SockaddrStorage::from(local)) {
        Ok(()) => {}
        Err(error @ Errno::EADDRINUSE) => return Err(NotOpened::Busy(Busy::Bound, error)),
        // EADDRNOTAVAIL among them: the host does not have the address.
        Err(error) => return Err(refused(error)),
    }
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(remote)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(socket),
        Err(error @ Errno::EADDRNOTAVAIL) if protocol == Protocol::Tcp => {
            Err(NotOpened::Busy(Busy::Waits, error))
        }
        Err(error) => Err(refused(error)),
    }
}

/// Whether an address is that of one host, which may be another one.
fn is_one_other_host(peer: IpAddr) -> bool {
    match peer {
        IpAddr::V4(peer) => {
            let is_this = peer.octets()[0] == 0 || peer.is_loopback();
            !is_this && !peer.is_multicast() && !peer.is_broadcast()
        }
        IpAddr::V6(peer) => {
            // Unspecified, loopback, and IPv4 addresses in the old form and the new: ::/96, ::ffff:0:0/96.
            let holds_ipv4 = peer.to_ipv4().is_some();
            !holds_ipv4 && !peer.is_multicast() && !peer.is_unicast_link_local()
        }
    }
}

#[cfg(test)]
#[path = "opening_test.rs"]
mod tests;
