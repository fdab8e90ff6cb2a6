//! System calls on the host's sockets.
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

use crate::host_sockets::HostSockets;

/// Makes the socket of a flow: bound to its translated address and port, and connected, or about to
/// be, to its peer.
///
/// # Errors
/// The host refuses, or the peer's address means this host or many: of these no rule lets a guest reach
/// the host's own loopback by a socket of ours.
pub(super) fn open(tuple: &FlowTuple, host: &HostSockets) -> io::Result<OwnedFd> {
    if !is_one_other_host(tuple.remote) {
        return Err(Errno::EACCES.into());
    }
    let protocol = tuple.protocol().unwrap_or(Protocol::Udp);
    let socket = host.take(tuple.remote, protocol)?;
    let (local, remote): (SocketAddr, SocketAddr) = (tuple.local_addr(), tuple.remote_addr());
    bind(socket.as_raw_fd(), &SockaddrStorage::from(local))?;
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(remote)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
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
#[path = "system_test.rs"]
mod tests;
