//! Sockets of the host of either address family: `AF_INET` and `AF_INET6`.
use std::{
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use slipgate_abi::IfIndex;

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, connect, setsockopt, socket, sockopt,
};

/// Opens a non-blocking socket that is connected to `to`, or is about to be.
///
/// # Errors
/// If the socket cannot be made, or the connection fails at once.
pub(crate) fn open(to: SocketAddr, kind: SockType) -> nix::Result<OwnedFd> {
    open_by(to, kind, None)
}

/// As [`open`], for packets that leave by this link or not at all; `None`: by any.
///
/// # Errors
/// As [`open`], and if there is no such link.
pub(crate) fn open_by(
    to: SocketAddr,
    kind: SockType,
    link: Option<IfIndex>,
) -> nix::Result<OwnedFd> {
    let fd = unconnected(to, kind, link)?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(nix::Error::EINPROGRESS) => Ok(fd),
        Err(error) => Err(error),
    }
}

/// Makes the socket that is to be connected.
fn unconnected(to: SocketAddr, kind: SockType, link: Option<IfIndex>) -> nix::Result<OwnedFd> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let fd = socket(family, kind, flags, None)?;
    if kind == SockType::Stream {
        keep_urgent_in_place(&fd);
    }
    if let Some(link) = link {
        bind_to_link(&fd, link)?;
    }
    Ok(fd)
}

/// Has what a TCP socket's peer sends as urgent come in its place, as data. The kernel would leave it out
/// otherwise, and a peek that passes its place begins again before that, so that a byte comes twice.
///
/// To be called before the socket is connected, and on a listening one, whose connections have it then: a
/// second urgent byte that came before would have displaced the first.
pub(crate) fn keep_urgent_in_place(socket: &impl AsFd) {
    // Every TCP socket has it.
    let _ = setsockopt(socket, sockopt::OobInline, &true);
}

/// Binds a socket to a link. It takes no privilege if the socket is not bound to one yet.
#[expect(unsafe_code, reason = "`nix` knows the option by the link's name only")]
fn bind_to_link(socket: &OwnedFd, link: IfIndex) -> nix::Result<()> {
    let ifindex = link.get() as nix::libc::c_int;
    let len = size_of::<nix::libc::c_int>() as nix::libc::socklen_t;
    // SAFETY: the kernel reads a whole `int`, which lives until the call returns.
    let set = unsafe {
        nix::libc::setsockopt(
            socket.as_raw_fd(),
            nix::libc::SOL_SOCKET,
            nix::libc::SO_BINDTOIFINDEX,
            (&raw const ifindex).cast(),
            len,
        )
    };
    nix::Error::result(set).map(drop)
}

/// Address and port that the kernel gave; `None` if they are of another family.
pub(crate) fn address_of(address: &SockaddrStorage) -> Option<SocketAddr> {
    let four = address.as_sockaddr_in();
    let six = address.as_sockaddr_in6();
    four.map(|four| SocketAddr::V4((*four).into()))
        .or_else(|| six.map(|six| SocketAddr::V6((*six).into())))
}

#[cfg(test)]
#[path = "inet_test.rs"]
mod tests;
