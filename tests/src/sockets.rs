//! Socket options the standard library does not have.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, socket};

use crate::error::checked;

/// Sets the receive buffer to `bytes`, above the system's limit too (root).
pub(crate) fn set_receive_buffer(socket: &impl AsFd, bytes: i32) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, bytes)
}

/// A UDP socket at any port that is of the family of an address, and not yet connected to it.
pub(crate) fn udp_toward(address: SocketAddr) -> io::Result<UdpSocket> {
    match address {
        SocketAddr::V4(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)),
    }
}

/// Sets an option whose value is an int.
pub(crate) fn set(socket: &impl AsFd, level: i32, option: i32, value: i32) -> io::Result<()> {
    set_value(socket, level, option, &value)
}

/// Sets an option to any plain value.
pub(crate) fn set_value<T: Copy>(
    socket: &impl AsFd,
    level: i32,
    option: i32,
    value: &T,
) -> io::Result<()> {
    let (fd, len) = (
        socket.as_fd().as_raw_fd(),
        size_of::<T>() as libc::socklen_t,
    );
    // SAFETY: the value is readable for the length given; the kernel checks that length.
    checked(unsafe { libc::setsockopt(fd, level, option, (&raw const *value).cast(), len) })
        .map(drop)
}

/// A packet socket of this kind that receives packets of `protocol`, none if that is 0, from all
/// devices until it is bound to one.
pub(crate) fn packet(kind: i32, protocol: u16) -> io::Result<OwnedFd> {
    let kind = kind | libc::SOCK_CLOEXEC;
    // SAFETY: socket takes numbers and returns a descriptor or -1.
    let fd = checked(unsafe { libc::socket(libc::AF_PACKET, kind, i32::from(protocol.to_be())) })?;
    // SAFETY: a fresh descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A device, as packet sockets name it.
pub(crate) fn link(ifindex: u32, protocol: u16) -> libc::sockaddr_ll {
    // SAFETY: sockaddr_ll is plain data, for which zeroes are valid.
    let mut link: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    link.sll_family = libc::AF_PACKET as u16;
    link.sll_protocol = protocol.to_be();
    link.sll_ifindex = ifindex as i32;
    link
}

/// Binds a packet socket to a device and a protocol, for sending and receiving.
pub(crate) fn bind_to_link(socket: &OwnedFd, ifindex: u32, protocol: u16) -> io::Result<()> {
    let link = link(ifindex, protocol);
    let len = size_of_val(&link) as libc::socklen_t;
    // SAFETY: the address is readable for the length given.
    checked(unsafe { libc::bind(socket.as_raw_fd(), (&raw const link).cast(), len) }).map(drop)
}

/// A TCP socket toward an address, bound to this port, which an ended connection may still have.
pub(crate) fn tcp_from(port: u16, to: SocketAddr) -> io::Result<OwnedFd> {
    let (family, any) = match to {
        SocketAddr::V4(_) => (AddressFamily::Inet, Ipv4Addr::UNSPECIFIED.into()),
        SocketAddr::V6(_) => (AddressFamily::Inet6, Ipv6Addr::UNSPECIFIED.into()),
    };
    let made = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    set(&made, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    let from = SockaddrStorage::from(SocketAddr::new(any, port));
    bind(made.as_raw_fd(), &from)?;
    Ok(made)
}

/// Connects a socket and waits for the result.
pub(crate) fn connect(socket: &impl AsRawFd, to: SocketAddr) -> io::Result<()> {
    let to = SockaddrStorage::from(to);
    Ok(nix::sys::socket::connect(socket.as_raw_fd(), &to)?)
}

/// Waits until `fd` has one of `events`, at most `timeout_ms` (-1: without limit). Returns the
/// events, or 0 after the time.
pub(crate) fn poll(fd: &impl AsFd, events: i16, timeout_ms: i32) -> io::Result<i16> {
    let mut polled = libc::pollfd {
        fd: fd.as_fd().as_raw_fd(),
        events,
        revents: 0,
    };
    // SAFETY: one pollfd, writable.
    match checked(unsafe { libc::poll(&raw mut polled, 1, timeout_ms) }) {
        Ok(_) => Ok(polled.revents),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        Err(error) => Err(error),
    }
}
