//! The wire between the broker and another process of slipgate's: one `SOCK_SEQPACKET` pair, made
//! before that process starts.
//!
//! A packet is a version byte, a form byte and JSON. A message of the broker's that is larger than a
//! packet goes in a memfd, whose descriptor comes first among those attached. The others send no
//! memfd: the broker takes no descriptor at all, for reading a file of another's choice could keep
//! it waiting, and their sandboxes let them make none. What they say is bounded where it is made.
//! End of file means that the peer is dead.
use std::{
    fs::File,
    io::{self, IoSlice, IoSliceMut, Read, Seek, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
};

use nix::{
    cmsg_space,
    sys::{
        memfd::{MFdFlags, memfd_create},
        socket::{
            AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recvmsg, sendmsg,
            setsockopt, socketpair, sockopt,
        },
        time::{TimeVal, TimeValLike as _},
    },
};

use crate::{
    descriptors::{Inbound, Outbound},
    rights,
};

/// Version of every message; both ends are one binary, unless it was replaced in between.
const VERSION: u8 = 1;
/// JSON follows.
const INLINE: u8 = 0;
/// JSON is in the first descriptor.
const IN_MEMFD: u8 = 1;
/// Largest packet, bytes. A seqpacket must fit the socket's send buffer.
const MAX_PACKET: usize = 64 * 1024;
/// How long the broker waits for room where it waits at all: a process that was stopped takes nothing.
const SEND_WITHIN_MS: i64 = 10_000;
/// Most descriptors in one message.
pub const MAX_FDS: usize = 128;
/// Most descriptors that the kernel lets come with one packet (`SCM_MAX_FD`, <net/scm.h>): with room
/// for them all, the control data is never cut short.
const MAX_FDS_OF_PACKET: usize = 253;
/// Largest message in a memfd, bytes: far more than a policy with long deny files.
const MAX_LARGE: u64 = 1 << 30;

/// What can go wrong on the channel.
#[derive(thiserror::Error, Debug)]
pub enum ChannelError {
    /// The kernel refused.
    #[error("{what} on the channel between slipgate's processes")]
    Io {
        /// The attempt.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Only the broker may send so much.
    #[error("a message of {bytes} bytes is longer than the {MAX_PACKET} of a packet")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The sender has to divide it.
    #[error("a message with {count} descriptors has more than the {MAX_FDS} that one may have")]
    TooManyDescriptors {
        /// How many it has.
        count: usize,
    },
    /// Not one of our messages.
    #[error("the other process speaks another version of the channel: {0}; restart slipgate")]
    Foreign(String),
}

impl ChannelError {
    /// Whether it is that the other process has ended.
    pub fn is_peer_gone(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
        let Self::Io { source, .. } = self else {
            return false;
        };
        matches!(source.kind(), BrokenPipe | ConnectionReset | NotConnected)
    }
}

/// One end.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    /// Whether this is the broker's end: it sends files, and takes none; the others' take files, and
    /// send none.
    is_brokers: bool,
}

impl Channel {
    /// Two connected ends, the broker's first; the other one survives an `execve` only when its flag
    /// is cleared.
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
        };
        Ok((ours, Self::from_fd(b)))
    }

    /// From an inherited descriptor.
    pub fn from_fd(socket: OwnedFd) -> Self {
        Self {
            socket,
            is_brokers: false,
        }
    }

    /// Sends a message, waiting for room.
    ///
    /// # Errors
    /// The message is too large for this end, the peer is gone, or the kernel refuses.
    pub fn send(&self, message: impl Outbound) -> Result<(), ChannelError> {
        self.send_packet(&Packet::new(message)?, MsgFlags::MSG_NOSIGNAL)
    }

    /// Sends a message without waiting; `false` when there is no room.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn try_send(&self, message: impl Outbound) -> Result<bool, ChannelError> {
        self.try_send_packet(&Packet::new(message)?)
    }

    /// Sends a packet without waiting; `false` when there is no room.
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

    /// The next message, waiting for one. `None`: the peer is gone.
    ///
    /// # Errors
    /// What came is no such message, or the kernel refuses.
    pub fn receive<M: Inbound>(&self) -> Result<Option<M>, ChannelError> {
        match self.receive_flagged(MsgFlags::empty())? {
            Received::Message(message) => Ok(Some(message)),
            Received::End | Received::Nothing => Ok(None),
        }
    }

    /// The next message, if there is one.
    ///
    /// # Errors
    /// As [`Channel::receive`].
    pub fn try_receive<M: Inbound>(&self) -> Result<Received<M>, ChannelError> {
        self.receive_flagged(MsgFlags::MSG_DONTWAIT)
    }

    fn receive_flagged<M: Inbound>(&self, flags: MsgFlags) -> Result<Received<M>, ChannelError> {
        let mut buffer = vec![0; MAX_PACKET];
        // Without room for any, the kernel gives the broker no descriptor.
        let mut space = (!self.is_brokers).then(|| cmsg_space!([RawFd; MAX_FDS_OF_PACKET]));
        let (length, fds) = loop {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let received = recvmsg::<()>(
                self.socket.as_raw_fd(),
                &mut parts,
                space.as_deref_mut(),
                flags | MsgFlags::MSG_CMSG_CLOEXEC,
            );
            match received {
                Ok(r) if self.is_brokers => break (r.bytes, Vec::new()),
                Ok(r) => {
                    let fds = rights::take(&r).map_err(io_error("receiving descriptors"))?;
                    break (r.bytes, fds);
                }
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
}

/// Decodes a packet and the descriptors that came with it. Where none came, none is read from: that
/// is how the broker decodes.
///
/// # Errors
/// It is of another version, no such message, or has another number of descriptors.
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

/// What came.
#[derive(Debug)]
pub enum Received<M> {
    /// A message.
    Message(M),
    /// Nothing yet.
    Nothing,
    /// The peer is gone.
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

/// Bytes in a file of memory, to be read by [`read_memory_file`] in another process.
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

/// All bytes of a file that [`memory_file`] made. For the broker's files alone: a file of another
/// process's choice could keep the reader waiting.
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
