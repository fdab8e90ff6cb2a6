//! Non-blocking sockets toward a service on the host's 127.0.0.1.
//!
//! Loopback is fast: in most cases a connection is accepted or refused by the time it is checked
//! first, before the poller waits.
use std::{
    io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, connect, socket};

/// Address of the service at a port.
pub(super) const fn at(port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)
}

fn open(kind: SockType) -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socket(AddressFamily::Inet, kind, flags, None)
}

/// A TCP socket that connects to a port; [`is_connected`] returns the result.
///
/// # Errors
/// If the socket cannot be made, or the connection fails at once.
pub(super) fn tcp(port: u16) -> io::Result<TcpStream> {
    let fd = open(SockType::Stream)?;
    match connect(fd.as_raw_fd(), &SockaddrIn::from(at(port))) {
        Ok(()) | Err(nix::Error::EINPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let stream = TcpStream::from(fd);
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Whether a socket of [`tcp`] is connected.
///
/// # Errors
/// If no service listens, or the socket connected to itself: the kernel may assign it the very port
/// that it connects to, and then treats its SYN as a peer's (RFC 9293 section 3.5, simultaneous
/// open).
pub(super) fn is_connected(stream: &TcpStream, port: u16) -> io::Result<bool> {
    match connect(stream.as_raw_fd(), &SockaddrIn::from(at(port))) {
        Ok(()) | Err(nix::Error::EISCONN) => {}
        Err(nix::Error::EALREADY | nix::Error::EINPROGRESS) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    match stream.local_addr()? == at(port).into() {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(true),
    }
}

/// A UDP socket connected to a port.
///
/// # Errors
/// If the socket cannot be made or connected.
pub(super) fn udp(port: u16) -> io::Result<UdpSocket> {
    let socket = UdpSocket::from(open(SockType::Datagram)?);
    connect(socket.as_raw_fd(), &SockaddrIn::from(at(port)))?;
    match socket.local_addr()? == at(port).into() {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(socket),
    }
}

/// Receives a datagram of the service on a socket of [`udp`]; `None` for a datagram of another
/// sender. A socket has a port before it is connected, and any process may send to it then.
pub(super) fn receive(
    socket: &UdpSocket,
    port: u16,
    buffer: &mut [u8],
) -> io::Result<Option<usize>> {
    let (len, from) = socket.recv_from(buffer)?;
    Ok((from == SocketAddr::from(at(port))).then_some(len))
}
