//! Non-blocking sockets toward a service on the host's loopback: 127.0.0.1, or ::1 for IPv6.
//!
//! Loopback is fast: in most cases a connection is accepted or refused by the time it is checked
//! first, before the poller waits.
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    os::fd::AsRawFd,
};

use nix::sys::socket::{SockType, SockaddrStorage, connect};

use crate::{inet, packet::Version};

/// Address of the service at a port, for a guest that uses this family.
pub(super) const fn at(version: Version, port: u16) -> SocketAddr {
    let loopback = match version {
        Version::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Version::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
    };
    SocketAddr::new(loopback, port)
}

/// A TCP socket that connects to a service; [`is_connected`] returns the result.
///
/// # Errors
/// If the socket cannot be made, or the connection fails at once.
pub(super) fn tcp(service: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::from(inet::open(service, SockType::Stream)?);
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Whether a socket of [`tcp`] is connected.
///
/// # Errors
/// If no service listens, or the socket connected to itself: the kernel may assign it the very port
/// that it connects to, and then treats its SYN as a peer's (RFC 9293 section 3.5, simultaneous
/// open).
pub(super) fn is_connected(stream: &TcpStream, service: SocketAddr) -> io::Result<bool> {
    match connect(stream.as_raw_fd(), &SockaddrStorage::from(service)) {
        Ok(()) | Err(nix::Error::EISCONN) => {}
        Err(nix::Error::EALREADY | nix::Error::EINPROGRESS) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    match stream.local_addr()? == service {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(true),
    }
}

/// A UDP socket connected to a service.
///
/// # Errors
/// If the socket cannot be made or connected.
pub(super) fn udp(service: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::from(inet::open(service, SockType::Datagram)?);
    match socket.local_addr()? == service {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(socket),
    }
}

/// Receives a datagram of the service on a socket of [`udp`]; `None` for a datagram of another
/// sender. A socket has a port before it is connected, and any process may send to it then.
pub(super) fn receive(
    socket: &UdpSocket,
    service: SocketAddr,
    buffer: &mut [u8],
) -> io::Result<Option<usize>> {
    let (len, from) = socket.recv_from(buffer)?;
    Ok((from == service).then_some(len))
}
