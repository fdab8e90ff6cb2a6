//! System calls on the host's sockets.
#![expect(
    unsafe_code,
    reason = "the room of a send queue, and the place to peek at, have no call in nix"
)]
use std::{
    io::{self, IoSliceMut},
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{
    errno::Errno,
    libc,
    sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect,
        getsockopt, recv, recvmsg, setsockopt, socket, sockopt,
    },
};
use slipgate_abi::Protocol;
use slipgate_model::FlowTuple;

/// Bytes that one call takes out of a queue at most.
const DISCARDED_AT_ONCE: usize = 1 << 16;

/// Makes the socket of a flow: bound to its translated address and port, and connected, or about to
/// be, to its peer.
///
/// # Errors
/// The host refuses, or the peer's address means this host or many: of these no rule lets a guest reach
/// the host's own loopback by a socket of ours.
pub(super) fn open(tuple: &FlowTuple) -> io::Result<OwnedFd> {
    if !is_one_other_host(tuple.remote) {
        return Err(Errno::EACCES.into());
    }
    let (family, ping) = match tuple.remote {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
    };
    let (kind, protocol) = match tuple.protocol() {
        Some(Protocol::Tcp) => (SockType::Stream, None),
        Some(Protocol::Icmp | Protocol::Icmpv6) => (SockType::Datagram, Some(ping)),
        _ => (SockType::Datagram, None),
    };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = socket(family, kind, flags, protocol)?;
    if tuple.remote.is_ipv6() {
        // The kernel refuses IPv4 addresses in IPv6 form then, too.
        setsockopt(&socket, sockopt::Ipv6V6Only, &true)?;
    }
    // A port is used for many destinations at once, each with a socket of its own.
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
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

/// Returns the error of a socket, which is cleared.
pub(super) fn error_of(socket: &OwnedFd) -> io::Result<()> {
    match getsockopt(socket, sockopt::SocketError)? {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Returns how many bytes more a connection's send queue takes, and how many it has in all.
pub(super) fn room(socket: &OwnedFd) -> (u32, u32) {
    let size = getsockopt(socket, sockopt::SndBuf).unwrap_or(0) as u32;
    let mut queued: libc::c_int = 0;
    // SAFETY: the call writes an int.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut queued) };
    if rc < 0 {
        return (0, size);
    }
    // The size includes what the kernel needs for itself.
    let usable = size - size / 8;
    (usable.saturating_sub(queued.max(0) as u32), size)
}

/// Sets the place in a connection's receive queue from which the next bytes are peeked. Returns
/// whether the kernel can (6.9).
pub(super) fn peek_at(socket: &OwnedFd, offset: u32) -> bool {
    let offset = offset as libc::c_int;
    // SAFETY: the option is an int, of the size given.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            (&raw const offset).cast(),
            size_of_val(&offset) as libc::socklen_t,
        )
    };
    rc == 0
}

/// Peeks the bytes `skipped` behind where the kernel begins. Returns how many there are; 0 at the
/// end of the data, or if `skipped` leaves none.
pub(super) fn peek(
    socket: &OwnedFd,
    skipped: usize,
    scratch: &mut [u8],
    into: &mut [u8],
) -> io::Result<usize> {
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let skips = scratch.len() >= skipped;
    if !skips {
        return Err(Errno::EAGAIN.into());
    }
    let mut parts = [
        IoSliceMut::new(&mut scratch[..skipped]),
        IoSliceMut::new(into),
    ];
    let parts = if skipped == 0 {
        &mut parts[1..]
    } else {
        &mut parts[..]
    };
    let got = recvmsg::<()>(socket.as_raw_fd(), parts, None, flags)?.bytes;
    match (got.saturating_sub(skipped), skipped) {
        // Nothing behind what the guest has not acknowledged; whether it is the end, a hang-up says.
        (0, 1..) => Err(Errno::EAGAIN.into()),
        (more, _) => Ok(more),
    }
}

/// Takes bytes out of a connection's receive queue.
pub(super) fn discard(socket: &OwnedFd, mut bytes: usize, scratch: &mut [u8]) -> io::Result<()> {
    while bytes > 0 {
        let most = bytes.min(DISCARDED_AT_ONCE).min(scratch.len());
        // Not even copied: MSG_TRUNC, tcp(7).
        let flags = MsgFlags::MSG_TRUNC | MsgFlags::MSG_DONTWAIT;
        match recv(socket.as_raw_fd(), &mut scratch[..most], flags)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            some => bytes -= some.min(bytes),
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "system_test.rs"]
mod tests;
