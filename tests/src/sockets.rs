//! Socket options the standard library does not have.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, UdpSocket},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

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

/// A TCP socket bound to this port, which an ended connection may still have.
pub(crate) fn tcp_from(port: u16) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: socket takes numbers and returns a descriptor or -1.
    let fd = checked(unsafe { libc::socket(libc::AF_INET, kind, 0) })?;
    // SAFETY: a fresh descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    set(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    let from = sockaddr(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port));
    let len = size_of_val(&from) as libc::socklen_t;
    // SAFETY: the address is readable for the length given.
    checked(unsafe { libc::bind(socket.as_raw_fd(), (&raw const from).cast(), len) })?;
    Ok(socket)
}

/// Connects a socket and waits for the result.
pub(crate) fn connect(socket: &impl AsRawFd, to: SocketAddrV4) -> io::Result<()> {
    let to = sockaddr(to);
    let len = size_of_val(&to) as libc::socklen_t;
    // SAFETY: the address is readable for the length given.
    checked(unsafe { libc::connect(socket.as_raw_fd(), (&raw const to).cast(), len) }).map(drop)
}

fn sockaddr(address: SocketAddrV4) -> libc::sockaddr_in {
    // SAFETY: sockaddr_in is plain data, for which zeroes are valid.
    let mut out: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    out.sin_family = libc::AF_INET as u16;
    out.sin_port = address.port().to_be();
    out.sin_addr.s_addr = u32::from_ne_bytes(address.ip().octets());
    out
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
