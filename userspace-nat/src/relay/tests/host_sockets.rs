//! What the kernel has still to carry between sockets of the host, which takes real time, and what waits
//! for one of their ends, which does not.
use std::{
    collections::HashMap,
    net::SocketAddr,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use nix::{
    libc,
    sys::socket::{SockaddrStorage, getpeername, getsockname},
};

/// States of the kernel's connections (include/net/tcp_states.h).
mod state {
    pub(super) const ESTABLISHED: u8 = 1;
    pub(super) const FIN_WAIT_1: u8 = 4;
    pub(super) const FIN_WAIT_2: u8 = 5;
    pub(super) const LAST_ACK: u8 = 9;
    pub(super) const CLOSING: u8 = 11;
}

/// Whether something that one of `sockets` has sent is on its way to another of them: bytes, or the end
/// behind them. What has arrived, and what waits because the receiver reads nothing, is not.
pub(super) fn is_anything_under_way<'s>(
    sockets: impl Iterator<Item = BorrowedFd<'s>> + Clone,
) -> bool {
    let mut senders = sockets.clone().filter_map(|socket| {
        let info = info(socket)?;
        let awaits = info.tcpi_unacked > 0 || info.tcpi_notsent_bytes > 0 || has_sent_end(&info);
        awaits.then_some((socket, info))
    });
    let Some(first) = senders.next() else {
        return false;
    };
    let by_ends: HashMap<_, _> = sockets
        .filter_map(|socket| Some((ends(socket)?, socket)))
        .collect();
    let receiver_of = |socket| {
        let (local, peer) = ends(socket)?;
        let receiver = *by_ends.get(&(peer, local))?;
        Some((receiver, info(receiver)?))
    };
    std::iter::once(first).chain(senders).any(|(socket, sent)| {
        receiver_of(socket).is_some_and(|(receiver, received)| {
            is_under_way(&sent, &received, || unread(receiver) == 0)
        })
    })
}

fn is_under_way(
    sent: &libc::tcp_info,
    received: &libc::tcp_info,
    has_read_all: impl Fn() -> bool,
) -> bool {
    use state::{ESTABLISHED, FIN_WAIT_1, FIN_WAIT_2};
    let is_open = [ESTABLISHED, FIN_WAIT_1, FIN_WAIT_2].contains(&received.tcpi_state);
    let carried = sent.tcpi_bytes_sent - sent.tcpi_bytes_retrans;
    is_open
        && match sent.tcpi_notsent_bytes {
            0 => carried > received.tcpi_bytes_received || has_sent_end(sent),
            // Nothing but the news of a window, or a timer of the kernel's, can be what it waits for.
            _ => carried > received.tcpi_bytes_received || has_read_all(),
        }
}

/// Whether an end was sent that is not acknowledged.
fn has_sent_end(info: &libc::tcp_info) -> bool {
    [state::FIN_WAIT_1, state::CLOSING, state::LAST_ACK].contains(&info.tcpi_state)
}

fn info(socket: BorrowedFd<'_>) -> Option<libc::tcp_info> {
    // SAFETY: zeros are a valid value of a C struct of integers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes of `info`.
    let done = unsafe {
        let into = (&raw mut info).cast();
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            into,
            &raw mut len,
        )
    };
    (done == 0).then_some(info)
}

/// Bytes in a socket's receive queue.
fn unread(socket: BorrowedFd<'_>) -> libc::c_int {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes an int.
    unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    bytes
}

/// A socket's own address and its peer's.
fn ends(socket: BorrowedFd<'_>) -> Option<(SocketAddr, SocketAddr)> {
    let own: SockaddrStorage = getsockname(socket.as_raw_fd()).ok()?;
    let peer: SockaddrStorage = getpeername(socket.as_raw_fd()).ok()?;
    Some((address(&own)?, address(&peer)?))
}

fn address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|it| SocketAddr::from(*it));
    v4.or_else(|| address.as_sockaddr_in6().map(|it| SocketAddr::from(*it)))
}
