//! A question's socket to a resolver: UDP, or TCP when the answer was truncated.
//!
//! Each question has a socket of its own, so that the kernel picks a random source port (RFC 5452
//! section 9.2). The socket is connected, so it receives from the resolver only.
use std::{
    fmt,
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd, BorrowedFd},
};

use nix::sys::socket::SockType;
use slipgate_abi::{IfIndex, Protocol, VmId};

use crate::{inet, poll::Interest};

/// How a question leaves the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Way {
    /// Link by which it leaves or not at all; `None`: as the host's own do.
    pub link: Option<IfIndex>,
}

/// The ways to resolvers by their protocol, those that there are.
pub(super) type Known = Vec<((SocketAddr, Protocol), Way)>;

/// How VMs' questions leave.
pub trait Ways: fmt::Debug {
    /// Whether a VM's questions leave as the host's own do, to whatever resolver.
    fn are_hosts(&self, vm: VmId) -> bool;

    /// Returns how a VM's questions to a resolver leave by UDP or TCP; `None`: not at all.
    fn way(&self, vm: VmId, resolver: SocketAddr, by: Protocol) -> Option<Way>;
}

/// Ways of VMs whose questions leave as the host's own do.
#[derive(Clone, Copy, Debug, Default)]
pub struct AsTheHost;

impl Ways for AsTheHost {
    fn are_hosts(&self, _: VmId) -> bool {
        true
    }

    fn way(&self, _: VmId, _: SocketAddr, _: Protocol) -> Option<Way> {
        Some(Way::default())
    }
}

/// A UDP socket that knows one resolver only.
pub(super) fn udp(to: SocketAddr, way: Way) -> io::Result<UdpSocket> {
    let socket = inet::open_by(to, SockType::Datagram, way.link)?;
    Ok(UdpSocket::from(socket))
}

/// One query over TCP (RFC 7766), from the connection to the answer.
#[derive(Debug)]
pub(super) struct Tcp {
    stream: TcpStream,
    /// The query behind its length, and how much of it is sent.
    query: Vec<u8>,
    sent: usize,
    /// Part of the answer received so far, without its length prefix.
    answer: Vec<u8>,
}

impl Tcp {
    pub(super) fn open(to: SocketAddr, way: Way, query: &[u8]) -> io::Result<Self> {
        let len = u16::try_from(query.len()).map_err(io::Error::other)?;
        Ok(Self {
            stream: TcpStream::from(inet::open_by(to, SockType::Stream, way.link)?),
            query: [&len.to_be_bytes(), query].concat(),
            sent: 0,
            answer: Vec::new(),
        })
    }

    pub(super) fn interest(&self) -> Interest {
        if self.sent < self.query.len() {
            Interest::Write
        } else {
            Interest::Read
        }
    }

    /// Sends and receives as far as possible without blocking. Returns the answer once it is
    /// complete.
    ///
    /// # Errors
    /// The connection fails, or ends before the answer is complete.
    pub(super) fn progress(&mut self, scratch: &mut [u8]) -> io::Result<Option<Vec<u8>>> {
        while self.sent < self.query.len() {
            match self.stream.write(&self.query[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        loop {
            // Reading stops at the length announced: the memory is bounded by it.
            let wanted = match self.answer.first_chunk::<2>() {
                None => 2,
                Some(len) => 2 + usize::from(u16::from_be_bytes(*len)),
            };
            if self.answer.len() == wanted && wanted != 2 {
                return Ok(Some(self.answer.split_off(2)));
            }
            let room = (wanted - self.answer.len()).min(scratch.len());
            match self.stream.read(&mut scratch[..room]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.answer.extend_from_slice(&scratch[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

impl AsFd for Tcp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
