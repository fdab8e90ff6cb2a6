//! The wire between the broker and another process of ours: one `SOCK_SEQPACKET` pair, made before
//! that one starts.
//!
//! A packet is a version byte, a form byte and JSON. JSON, because a debugger can read it and
//! nothing here is on a packet's way. What the broker has to say that is larger than a packet may be
//! goes in a memfd, whose descriptor comes first among those attached. The others send none: the
//! broker takes none, for reading a file of another's choice could keep it waiting, and their
//! sandboxes let them make none. What they say is bounded where it is made. End of file means that the peer is dead.
mod message;
mod metrics;
mod vmm;

use std::{
    fs::File,
    io::{self, IoSlice, IoSliceMut, Read, Seek, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use nix::{
    cmsg_space,
    sys::{
        memfd::{MFdFlags, memfd_create},
        socket::{
            AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType,
            recvmsg, sendmsg, setsockopt, socketpair, sockopt,
        },
        time::{TimeVal, TimeValLike as _},
    },
};
use serde::{Serialize, de::DeserializeOwned};

pub(crate) use message::*;
pub(crate) use metrics::*;
pub(crate) use vmm::*;

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
/// Most descriptors in one packet (the kernel's SCM_MAX_FD is 253).
pub(crate) const MAX_FDS: usize = 128;

/// What can go wrong on the channel.
#[derive(thiserror::Error, Debug)]
pub(crate) enum ChannelError {
    /// The kernel refused.
    #[error("{what} on the channel between slipgate's processes")]
    Io {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// Only the broker's may be so long.
    #[error("a message of {bytes} bytes is longer than the {MAX_PACKET} of a packet")]
    TooLong { bytes: usize },
    /// Not one of our messages.
    #[error("the other process speaks another version of the channel: {0}; restart slipgate")]
    Foreign(String),
}

impl ChannelError {
    /// Whether it is that the other process has ended.
    pub(crate) fn is_peer_gone(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
        let Self::Io { source, .. } = self else {
            return false;
        };
        matches!(source.kind(), BrokenPipe | ConnectionReset | NotConnected)
    }
}

/// One end.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: OwnedFd,
    /// Whether this is the broker's end: it sends files, and takes none; the others' take files, and
    /// send none.
    is_brokers: bool,
}

impl Channel {
    /// Two connected ends, the broker's first; the other one survives an `execve` only when its flag
    /// is cleared.
    pub(crate) fn pair() -> Result<(Self, Self), ChannelError> {
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
    pub(crate) fn from_fd(socket: OwnedFd) -> Self {
        Self {
            socket,
            is_brokers: false,
        }
    }

    /// Sends one message with descriptors, waiting for room.
    pub(crate) fn send<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ChannelError> {
        self.send_flagged(message, fds, MsgFlags::MSG_NOSIGNAL)
    }

    /// Sends one message without waiting; `false` when there is no room.
    pub(crate) fn try_send<T: Serialize>(&self, message: &T) -> Result<bool, ChannelError> {
        self.try_send_with(message, &[])
    }

    /// The same with descriptors.
    pub(crate) fn try_send_with<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<bool, ChannelError> {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        match self.send_flagged(message, fds, flags) {
            Ok(()) => Ok(true),
            Err(ChannelError::Io { source, .. }) if source.kind() == io::ErrorKind::WouldBlock => {
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    fn send_flagged<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
        flags: MsgFlags,
    ) -> Result<(), ChannelError> {
        let json = serde_json::to_vec(message)
            .map_err(|e| ChannelError::Foreign(format!("can't encode a message: {e}")))?;
        let mut raw: Vec<RawFd> = Vec::with_capacity(fds.len() + 1);
        let large;
        let bytes = json.len() + 2;
        let body: &[u8] = if bytes > MAX_PACKET {
            if !self.is_brokers {
                return Err(ChannelError::TooLong { bytes });
            }
            large = memfd(&json)?;
            raw.push(large.as_raw_fd());
            &[]
        } else {
            &json
        };
        let head = [VERSION, if raw.is_empty() { INLINE } else { IN_MEMFD }];
        raw.extend(fds.iter().map(AsRawFd::as_raw_fd));
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

    /// The next message and its descriptors, waiting for one. `None`: the peer is gone.
    pub(crate) fn receive<T: DeserializeOwned>(
        &self,
    ) -> Result<Option<(T, Vec<OwnedFd>)>, ChannelError> {
        match self.receive_flagged(MsgFlags::empty())? {
            Received::Message(message, fds) => Ok(Some((message, fds))),
            Received::End | Received::Nothing => Ok(None),
        }
    }

    /// The next message, if there is one.
    pub(crate) fn try_receive<T: DeserializeOwned>(&self) -> Result<Received<T>, ChannelError> {
        self.receive_flagged(MsgFlags::MSG_DONTWAIT)
    }

    fn receive_flagged<T: DeserializeOwned>(
        &self,
        flags: MsgFlags,
    ) -> Result<Received<T>, ChannelError> {
        let mut buffer = vec![0; MAX_PACKET];
        let mut space = cmsg_space!([RawFd; MAX_FDS + 1]);
        let (length, mut fds) = loop {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let received = recvmsg::<()>(
                self.socket.as_raw_fd(),
                &mut parts,
                Some(&mut space),
                flags | MsgFlags::MSG_CMSG_CLOEXEC,
            );
            match received {
                Ok(r) => break (r.bytes, descriptors(&r)?),
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => return Ok(Received::Nothing),
                Err(nix::Error::ECONNRESET) => return Ok(Received::End),
                Err(e) => return Err(io_error("receiving")(e)),
            }
        };
        let inline = match buffer[..length] {
            [] => return Ok(Received::End),
            [VERSION, INLINE, ref json @ ..] => Some(json),
            [VERSION, IN_MEMFD] if !self.is_brokers && !fds.is_empty() => None,
            [VERSION, ..] => return Err(ChannelError::Foreign("a malformed packet".into())),
            [other, ..] => {
                return Err(ChannelError::Foreign(format!(
                    "version {other}, not {VERSION}"
                )));
            }
        };
        let parsed = match inline {
            Some(json) => serde_json::from_slice(json),
            None => serde_json::from_slice(&read_memfd(fds.remove(0))?),
        };
        let message = parsed.map_err(|e| ChannelError::Foreign(e.to_string()))?;
        Ok(Received::Message(message, fds))
    }
}

/// What came.
#[derive(Debug)]
pub(crate) enum Received<T> {
    Message(T, Vec<OwnedFd>),
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

fn memfd(bytes: &[u8]) -> Result<OwnedFd, ChannelError> {
    let fd = memfd_create(c"slipgate-message", MFdFlags::MFD_CLOEXEC)
        .map_err(io_error("making a memory file"))?;
    let mut file = File::from(fd);
    file.write_all(bytes).map_err(|source| ChannelError::Io {
        what: "writing a large message",
        source,
    })?;
    Ok(file.into())
}

fn read_memfd(fd: OwnedFd) -> Result<Vec<u8>, ChannelError> {
    let mut file = File::from(fd);
    let mut json = Vec::new();
    let read = file.rewind().and_then(|()| file.read_to_end(&mut json));
    read.map_err(|source| ChannelError::Io {
        what: "reading a large message",
        source,
    })?;
    Ok(json)
}

fn descriptors(
    received: &nix::sys::socket::RecvMsg<'_, '_, ()>,
) -> Result<Vec<OwnedFd>, ChannelError> {
    let mut fds = Vec::new();
    for control in received
        .cmsgs()
        .map_err(io_error("receiving descriptors"))?
    {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel made these descriptors for us just now; nobody else owns them.
            fds.extend(
                raw.into_iter()
                    .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
            );
        }
    }
    if received.flags.contains(MsgFlags::MSG_CTRUNC) {
        return Err(ChannelError::Foreign(
            "more descriptors than expected".into(),
        ));
    }
    Ok(fds)
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
