//! Sockets toward a service on the host's 127.0.0.1.
//!
//! Neither waits. Loopback is quick: a connection that is accepted or refused mostly is by the time
//! that it is asked about, before anything is waited for.
use std::{
    io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, connect, socket};

/// Where services are.
pub(super) const fn at(port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)
}

fn open(kind: SockType) -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socket(AddressFamily::Inet, kind, flags, None)
}

/// A TCP socket that is on its way to a port; [`is_connected`] says whether it is there.
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

/// Whether a socket of [`tcp`] has arrived.
///
/// # Errors
/// Nobody listens there, or the socket met itself: the kernel may give it the very port that it
/// looks for, and then takes its SYN for a peer's (RFC 9293 section 3.5, simultaneous open).
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

/// A UDP socket that knows this one port only.
pub(super) fn udp(port: u16) -> io::Result<UdpSocket> {
    let socket = UdpSocket::from(open(SockType::Datagram)?);
    connect(socket.as_raw_fd(), &SockaddrIn::from(at(port)))?;
    match socket.local_addr()? == at(port).into() {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(socket),
    }
}

/// A datagram of the service's on a socket of [`udp`]; `None`: somebody else's. Before it is
/// connected a socket has a port already, where anybody may leave one.
pub(super) fn receive(
    socket: &UdpSocket,
    port: u16,
    buffer: &mut [u8],
) -> io::Result<Option<usize>> {
    let (len, from) = socket.recv_from(buffer)?;
    Ok((from == SocketAddr::from(at(port))).then_some(len))
}
