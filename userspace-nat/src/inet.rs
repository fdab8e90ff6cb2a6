//! Sockets of the host of either address family: `AF_INET` and `AF_INET6`.
use std::{
    net::SocketAddr,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, socket};

/// Opens a non-blocking socket that is connected to `to`, or is about to be.
///
/// # Errors
/// If the socket cannot be made, or the connection fails at once.
pub(crate) fn open(to: SocketAddr, kind: SockType) -> nix::Result<OwnedFd> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let fd = socket(family, kind, flags, None)?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(nix::Error::EINPROGRESS) => Ok(fd),
        Err(error) => Err(error),
    }
}

/// Address and port that the kernel gave; `None` if they are of another family.
pub(crate) fn address_of(address: &SockaddrStorage) -> Option<SocketAddr> {
    let four = address.as_sockaddr_in();
    let six = address.as_sockaddr_in6();
    four.map(|four| SocketAddr::V4((*four).into()))
        .or_else(|| six.map(|six| SocketAddr::V6((*six).into())))
}
