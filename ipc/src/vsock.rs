//! Requests of a guest for connections to programs of the host by vsock: from the VMM, which may make
//! no socket, to the thread of the broker that connects.
//!
//! A pair of SOCK_SEQPACKET sockets. A request is two numbers of four bytes, little-endian: its own,
//! and the port. An answer is the number of the request, and the connected socket if there is one. The
//! broker's end takes nothing else, and no descriptor.
use std::{
    io::{self, ErrorKind, IoSlice},
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair,
    },
    unistd::{read, write},
};

use crate::rights::{Passed, receive_with_one};

const REQUEST_BYTES: usize = 8;
const ANSWER_BYTES: usize = 4;

/// The broker's end.
#[derive(Debug)]
pub struct RequestReader(OwnedFd);

/// The VMM's end. Nothing waits at it.
#[derive(Debug)]
pub struct RequestWriter(OwnedFd);

/// Makes both ends. That of the VMM is passed to it as a descriptor.
///
/// # Errors
/// No descriptor is left.
pub fn pair() -> io::Result<(RequestReader, OwnedFd)> {
    let (reader, writer) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?;
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok((RequestReader(reader), writer))
}

impl RequestReader {
    /// Waits for the next request: its number, and the port. `None`: the VMM has closed its end.
    ///
    /// # Errors
    /// What came is no request.
    pub fn next(&self) -> io::Result<Option<(u32, u32)>> {
        let mut bytes = [0; REQUEST_BYTES + 1];
        loop {
            match read(&self.0, &mut bytes) {
                Ok(0) | Err(Errno::ECONNRESET) => return Ok(None),
                Ok(REQUEST_BYTES) => {
                    return Ok(Some((word(&bytes[..4]), word(&bytes[4..]))));
                }
                Ok(_) => return Err(ErrorKind::InvalidData.into()),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Answers a request, by a connected socket or by none. It waits for room.
    ///
    /// # Errors
    /// The VMM is gone.
    pub fn answer(&self, id: u32, socket: Option<BorrowedFd<'_>>) -> io::Result<()> {
        match self.send(id, socket) {
            // Too many descriptors of this user's are under way.
            Err(Errno::ETOOMANYREFS) => Ok(self.send(id, None)?),
            sent => Ok(sent?),
        }
    }

    fn send(&self, id: u32, socket: Option<BorrowedFd<'_>>) -> nix::Result<()> {
        let bytes = id.to_le_bytes();
        let part = [IoSlice::new(&bytes)];
        let raw = socket.map(|socket| [socket.as_raw_fd()]);
        let rights = raw.as_ref().map(|raw| [ControlMessage::ScmRights(raw)]);
        let rights = rights.as_ref().map_or(&[][..], |rights| &rights[..]);
        loop {
            let flags = MsgFlags::MSG_NOSIGNAL;
            match sendmsg::<()>(self.0.as_raw_fd(), &part, rights, flags, None) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(e),
            }
        }
    }
}

impl RequestWriter {
    /// Makes the end of a descriptor that the broker has passed.
    pub fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Asks for a connection to the program of a port. `id`: returned with the answer.
    ///
    /// # Errors
    /// The broker's end is gone, or has no room.
    pub fn ask(&self, id: u32, port: u32) -> io::Result<()> {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&id.to_le_bytes());
        bytes[4..].copy_from_slice(&port.to_le_bytes());
        loop {
            match write(&self.0, &bytes) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Returns the next answer: the number of its request, and the socket if the program was
    /// reached. `None`: there is no answer yet.
    ///
    /// # Errors
    /// The broker's end is gone, or what came is no answer.
    pub fn next(&self) -> io::Result<Option<(u32, Option<OwnedFd>)>> {
        let mut bytes = [0; ANSWER_BYTES + 1];
        loop {
            return match receive_with_one(self.0.as_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
                Ok((ANSWER_BYTES, passed)) => Ok(Some((
                    word(&bytes[..4]),
                    match passed {
                        Passed::One(socket) => Some(socket),
                        // No descriptor is left here.
                        Passed::Nothing | Passed::Refused => None,
                    },
                ))),
                Ok((0, _)) => Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => Err(ErrorKind::InvalidData.into()),
                Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => Err(e),
            };
        }
    }
}

impl AsFd for RequestWriter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The first four bytes, as a number.
fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

#[cfg(test)]
#[path = "vsock_test.rs"]
mod tests;
