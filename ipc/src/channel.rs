//! The channel between the broker and another process of slipgate: one `SOCK_SEQPACKET` pair, made
//! before that process starts.
//!
//! A packet is a version byte, a form byte and JSON. The broker sends a message larger than a
//! packet in a memfd, whose descriptor comes first among those attached. Other processes send no
//! memfd. The broker reads no file that another process chose, because that could block it, and
//! takes no descriptor at all, but for one a message on a channel that was made for it
//! ([`Channel::take_descriptors`]); and the other processes' sandboxes do not let them create
//! memfds. Their messages are bounded where they are built. End of file means that the peer is dead.
use std::{
    fs::File,
    io::{self, IoSlice, Read, Seek, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
};

use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, setsockopt,
        socketpair, sockopt,
    },
    time::{TimeVal, TimeValLike as _},
};
use slipgate_model::rights::receive;

use crate::{
    descriptors::{Inbound, Outbound},
    rights::{self, Passed},
};

/// Version of every message; both ends are one binary, unless it was replaced in between.
const VERSION: u8 = 1;
/// Form byte of a packet in which the JSON follows.
const INLINE: u8 = 0;
/// Form byte of a packet whose JSON is in the memfd that is its first descriptor.
const IN_MEMFD: u8 = 1;
/// Largest packet, bytes. A seqpacket must fit the socket's send buffer.
const MAX_PACKET: usize = 64 * 1024;
/// Time limit for the broker's sends to wait for room, ms: a stopped process reads nothing.
const SEND_WITHIN_MS: i64 = 10_000;
/// Largest number of descriptors in one message.
pub const MAX_FDS: usize = 128;
/// Largest number of descriptors that the kernel passes with one packet (`SCM_MAX_FD`,
/// <net/scm.h>): with room for all of them, the control data is cut short only where this process has no
/// descriptors left.
const MAX_FDS_OF_PACKET: usize = 253;
/// Largest message in a memfd, bytes: far more than a policy with long deny files.
const MAX_LARGE: u64 = 1 << 30;

/// Failure on a [`Channel`].
#[derive(thiserror::Error, Debug)]
pub enum ChannelError {
    /// A system call failed.
    #[error("{what} on the channel between slipgate's processes")]
    Io {
        /// The operation that failed, for the error's text.
        what: &'static str,
        /// Error that the kernel returned.
        #[source]
        source: io::Error,
    },
    /// The message exceeds a packet, and this end may not send a larger one.
    #[error("a message of {bytes} bytes is longer than the {MAX_PACKET} of a packet")]
    TooLong {
        /// Length of the message, bytes.
        bytes: usize,
    },
    /// The message has more descriptors than [`MAX_FDS`]; the sender has to divide it.
    #[error("a message with {count} descriptors has more than the {MAX_FDS} that one may have")]
    TooManyDescriptors {
        /// Number of descriptors in the message.
        count: usize,
    },
    /// The packet is malformed or of another version.
    #[error("the other process speaks another version of the channel: {0}; restart slipgate")]
    Foreign(String),
}

impl ChannelError {
    /// Whether the error says that the other process has ended.
    pub fn is_peer_gone(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
        let Self::Io { source, .. } = self else {
            return false;
        };
        matches!(source.kind(), BrokenPipe | ConnectionReset | NotConnected)
    }
}

/// One end of the channel between the broker and another process.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    /// Whether this is the broker's end: it sends files, and takes none; the others' take files,
    /// and send none.
    is_brokers: bool,
    /// Whether the broker's end takes a descriptor with a message.
    takes_one: bool,
}

impl Channel {
    /// Makes two connected ends, the broker's first. The other end survives an `execve` only once
    /// its close-on-exec flag is cleared.
    ///
    /// # Errors
    /// The kernel makes no socket pair.
    pub fn pair() -> Result<(Self, Self), ChannelError> {
        let (a, b) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .map_err(io_error("making a socket pair"))?;
        let patience = TimeVal::milliseconds(SEND_WITHIN_MS);
        setsockopt(&a, sockopt::SendTimeout, &patience)
            .map_err(io_error("limiting the wait for room"))?;
        let ours = Self {
            socket: a,
            is_brokers: true,
            takes_one: false,
        };
        Ok((ours, Self::from_fd(b)))
    }

    /// Makes the end that a process inherited as a descriptor.
    pub fn from_fd(socket: OwnedFd) -> Self {
        Self {
            socket,
            is_brokers: false,
            takes_one: false,
        }
    }

    /// From now on, the broker's end takes messages with one descriptor, too.
    pub fn take_descriptors(&mut self) {
        self.takes_one = true;
    }

    /// Sends a message, waiting for room.
    ///
    /// # Errors
    /// The message is too large for this end, the peer is gone, or the kernel refuses.
    pub fn send(&self, message: impl Outbound) -> Result<(), ChannelError> {
        self.send_packet(&Packet::new(message)?, MsgFlags::MSG_NOSIGNAL)
    }

    /// Sends a message without waiting; returns `false` when there is no room.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn try_send(&self, message: impl Outbound) -> Result<bool, ChannelError> {
        self.try_send_packet(&Packet::new(message)?)
    }

    /// Sends a packet without waiting; returns `false` when there is no room.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn try_send_packet(&self, packet: &Packet<impl AsFd>) -> Result<bool, ChannelError> {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        match self.send_packet(packet, flags) {
            Ok(()) => Ok(true),
            Err(ChannelError::Io { source, .. }) if source.kind() == io::ErrorKind::WouldBlock => {
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    fn send_packet(&self, packet: &Packet<impl AsFd>, flags: MsgFlags) -> Result<(), ChannelError> {
        let Packet { json, fds } = packet;
        let mut raw: Vec<RawFd> = Vec::with_capacity(fds.len() + 1);
        let large;
        let bytes = json.len() + 2;
        let is_large = bytes > MAX_PACKET;
        let body: &[u8] = if is_large {
            if !self.is_brokers || json.len() as u64 > MAX_LARGE {
                return Err(ChannelError::TooLong { bytes });
            }
            large = memory_file(json)?;
            raw.push(large.as_raw_fd());
            &[]
        } else {
            json
        };
        let head = [VERSION, if is_large { IN_MEMFD } else { INLINE }];
        raw.extend(fds.iter().map(|fd| fd.as_fd().as_raw_fd()));
        let rights = [ControlMessage::ScmRights(&raw)];
        let rights = if raw.is_empty() { &[][..] } else { &rights[..] };
        let parts = [IoSlice::new(&head), IoSlice::new(body)];
        loop {
            match sendmsg::<()>(self.socket.as_raw_fd(), &parts, rights, flags, None) {
                Ok(_) => return Ok(()),
                Err(nix::Error::EINTR) => {}
                Err(e) => return Err(io_error("sending")(e)),
            }
        }
    }

    /// Receives the next message, waiting for it. Returns `None` when the peer has closed its end.
    ///
    /// # Errors
    /// The packet is no such message, or the kernel refuses.
    pub fn receive<M: Inbound>(&self) -> Result<Option<M>, ChannelError> {
        match self.receive_flagged(MsgFlags::empty())? {
            Received::Message(message) => Ok(Some(message)),
            Received::End | Received::Nothing => Ok(None),
        }
    }

    /// Receives the next message without waiting.
    ///
    /// # Errors
    /// As [`Channel::receive`].
    pub fn try_receive<M: Inbound>(&self) -> Result<Received<M>, ChannelError> {
        self.receive_flagged(MsgFlags::MSG_DONTWAIT)
    }

    fn receive_flagged<M: Inbound>(&self, flags: MsgFlags) -> Result<Received<M>, ChannelError> {
        let mut buffer = vec![0; MAX_PACKET];
        if self.takes_one {
            return self.receive_with_one(&mut buffer, flags);
        }
        // Without room for any, the kernel gives the broker no descriptor.
        let most_fds = match self.is_brokers {
            true => 0,
            false => MAX_FDS_OF_PACKET,
        };
        let (length, fds) = loop {
            match receive(self.as_fd(), &mut buffer, most_fds, flags) {
                Ok(received) if received.was_cut && !self.is_brokers => {
                    return Err(io_error("receiving descriptors")(nix::Error::EMFILE));
                }
                Ok(received) => break (received.len, received.fds),
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => return Ok(Received::Nothing),
                Err(nix::Error::ECONNRESET) => return Ok(Received::End),
                Err(e) => return Err(io_error("receiving")(e)),
            }
        };
        if length == 0 {
            return Ok(Received::End);
        }
        decode(&buffer[..length], fds).map(Received::Message)
    }

    /// Receives a packet and its descriptor. The file behind that is not touched.
    fn receive_with_one<M: Inbound>(
        &self,
        buffer: &mut [u8],
        flags: MsgFlags,
    ) -> Result<Received<M>, ChannelError> {
        let (length, passed) = loop {
            match rights::receive_with_one(self.as_fd(), buffer, flags) {
                Ok(received) => break received,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Received::Nothing),
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(Received::End),
                Err(source) => {
                    let what = "receiving";
                    return Err(ChannelError::Io { what, source });
                }
            }
        };
        match (&buffer[..length], passed) {
            ([], _) => Ok(Received::End),
            // A file in place of the JSON is the broker's to send.
            ([VERSION, IN_MEMFD], _) => Err(malformed()),
            (_, Passed::Refused) => Err(ChannelError::Foreign(
                "more than one descriptor, or none left here".into(),
            )),
            (packet, Passed::One(fd)) => decode(packet, vec![fd]).map(Received::Message),
            (packet, Passed::Nothing) => decode(packet, Vec::new()).map(Received::Message),
        }
    }
}

/// A message in the form in which it is sent.
#[derive(Debug)]
pub struct Packet<F = OwnedFd> {
    json: Vec<u8>,
    fds: Vec<F>,
}

impl<F: AsFd> Packet<F> {
    /// Encodes a message.
    ///
    /// # Errors
    /// It has too many descriptors, or can't be written as JSON.
    pub fn new<M: Outbound<Descriptor = F>>(message: M) -> Result<Self, ChannelError> {
        let mut fds = Vec::new();
        let wire = message.take_out(&mut fds);
        if fds.len() > MAX_FDS {
            return Err(ChannelError::TooManyDescriptors { count: fds.len() });
        }
        let json = serde_json::to_vec(&wire)
            .map_err(|e| ChannelError::Foreign(format!("can't encode a message: {e}")))?;
        Ok(Self { json, fds })
    }

    /// Length of the encoded message, bytes.
    pub fn size(&self) -> usize {
        self.json.len()
    }
}

/// Decodes a packet and the descriptors that came with it. Without descriptors, as in the broker,
/// no descriptor is ever read from.
///
/// # Errors
/// The packet is of another version, is no such message, or has the wrong number of descriptors.
pub fn decode<M: Inbound>(packet: &[u8], fds: Vec<OwnedFd>) -> Result<M, ChannelError> {
    let mut fds = fds.into_iter();
    let large;
    let json = match packet {
        [VERSION, INLINE, json @ ..] => json,
        [VERSION, IN_MEMFD] => {
            let memfd = fds.next().ok_or_else(malformed)?;
            large = read_memory_file(memfd)?;
            &large
        }
        [VERSION, ..] | [] => return Err(malformed()),
        [other, ..] => {
            return Err(ChannelError::Foreign(format!(
                "version {other}, not {VERSION}"
            )));
        }
    };
    let foreign = |e: &dyn std::fmt::Display| ChannelError::Foreign(e.to_string());
    let wire = serde_json::from_slice(json).map_err(|e| foreign(&e))?;
    let message = M::put_back(wire, &mut fds).map_err(|e| foreign(&e))?;
    match fds.len() {
        0 => Ok(message),
        more => Err(ChannelError::Foreign(format!(
            "{more} descriptors more than the message has"
        ))),
    }
}

fn malformed() -> ChannelError {
    ChannelError::Foreign("a malformed packet".into())
}

/// Result of a receive call that does not wait.
#[derive(Debug)]
pub enum Received<M> {
    /// The next message that was received.
    Message(M),
    /// No message is waiting.
    Nothing,
    /// The peer has closed its end.
    End,
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Writes bytes to a memory file, to be read by [`read_memory_file`] in another process.
///
/// # Errors
/// The kernel made no file, or had no memory for it.
pub fn memory_file(bytes: &[u8]) -> Result<OwnedFd, ChannelError> {
    let fd = memfd_create(c"slipgate-message", MFdFlags::MFD_CLOEXEC)
        .map_err(io_error("making a memory file"))?;
    let mut file = File::from(fd);
    file.write_all(bytes).map_err(|source| ChannelError::Io {
        what: "writing a large message",
        source,
    })?;
    Ok(file.into())
}

/// Reads all bytes of a file that [`memory_file`] made. Only for files of the broker: a file that
/// another process chose could block the reader.
///
/// # Errors
/// The file cannot be read.
pub fn read_memory_file(fd: OwnedFd) -> Result<Vec<u8>, ChannelError> {
    let mut file = File::from(fd);
    let mut bytes = Vec::new();
    let read = file
        .rewind()
        .and_then(|()| file.take(MAX_LARGE).read_to_end(&mut bytes));
    read.map_err(|source| ChannelError::Io {
        what: "reading a large message",
        source,
    })?;
    Ok(bytes)
}

fn io_error(what: &'static str) -> impl Fn(nix::Error) -> ChannelError {
    move |e| ChannelError::Io {
        what,
        source: e.into(),
    }
}

#[cfg(test)]
#[path = "channel_test.rs"]
mod tests;
