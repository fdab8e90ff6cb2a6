//! Messages of the vhost-user protocol (QEMU's docs/interop/vhost-user.rst), and the connection on
//! which they come.
//!
//! A message is a header of three 32-bit words (request, flags, length of the body) and a body, in the
//! byte order of the host; descriptors come beside its bytes. Nothing waits: what has come of a
//! message is kept until the rest has.
use std::{
    io::IoSlice,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, sendmsg},
};
use slipgate_model::rights::{Received, receive};

/// Length of a header, bytes.
pub(super) const HEADER_LEN: usize = 12;
/// Longest body that is taken, bytes: a table of memory has less.
const MOST_BODY: usize = 512;
/// Descriptors of one message at most: one for each region of memory.
pub(super) const MOST_FDS: usize = 8;
/// Flags of a header: the version in the lower two bits, an answer, and the wish for one.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 0x3;
const IS_REPLY: u32 = 0x4;
const NEEDS_REPLY: u32 = 0x8;

/// Numbers of the requests that are served.
pub(super) mod request {
    pub(in super::super) const GET_FEATURES: u32 = 1;
    pub(in super::super) const SET_FEATURES: u32 = 2;
    pub(in super::super) const SET_OWNER: u32 = 3;
    pub(in super::super) const RESET_OWNER: u32 = 4;
    pub(in super::super) const SET_MEM_TABLE: u32 = 5;
    pub(in super::super) const SET_VRING_NUM: u32 = 8;
    pub(in super::super) const SET_VRING_ADDR: u32 = 9;
    pub(in super::super) const SET_VRING_BASE: u32 = 10;
    pub(in super::super) const GET_VRING_BASE: u32 = 11;
    pub(in super::super) const SET_VRING_KICK: u32 = 12;
    pub(in super::super) const SET_VRING_CALL: u32 = 13;
    pub(in super::super) const SET_VRING_ERR: u32 = 14;
    pub(in super::super) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(in super::super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(in super::super) const GET_QUEUE_NUM: u32 = 17;
    pub(in super::super) const SET_VRING_ENABLE: u32 = 18;
    pub(in super::super) const SEND_RARP: u32 = 19;
    /// Not of the protocol: where slipgate's own VMM reads what the rings have carried.
    pub(in super::super) const SET_TALLY: u32 = 0x5347_0001;
}

/// Why a VMM's connection is closed: it broke the protocol, asked for something that this backend does
/// not do, or the host is short of descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Wrong {
    /// A message has a header that is not valid.
    #[error("a header of another version, or with too long a body")]
    Header,
    /// The request is not among those offered.
    #[error("request {0}, which is not offered")]
    Request(u32),
    /// The body does not fit the request.
    #[error("request {0} with an invalid body")]
    Body(u32),
    /// The descriptors are too few or too many.
    #[error("request {0} with too few or too many descriptors")]
    Descriptors(u32),
    /// A region of the guest's memory cannot be mapped.
    #[error("memory that can't be mapped")]
    Memory,
    /// A ring is not in the guest's memory.
    #[error("a ring that is not in the guest's memory")]
    Ring,
    /// A descriptor that can't be waited on.
    #[error("a descriptor that can't be waited on")]
    Kick,
    /// It takes no answers.
    #[error("an answer that the VMM does not read")]
    Answer,
    /// Not its fault: this process had no place for descriptors of a message.
    #[error("descriptors for which this process, or the host, has no place")]
    NoPlace,
}

/// How a connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// The VMM has closed it.
    Gone,
    /// It is to be closed.
    Wrong(Wrong),
}

/// A complete message of the VMM.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) request: u32,
    pub(super) needs_reply: bool,
    pub(super) body: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

impl Message {
    /// The words of 32 bits of the body, which has as many.
    pub(super) fn words<const N: usize>(&self) -> Result<[u32; N], Wrong> {
        let mut words = [0; N];
        if self.body.len() != 4 * N {
            return Err(Wrong::Body(self.request));
        }
        for (word, bytes) in words.iter_mut().zip(self.body.chunks_exact(4)) {
            *word = bytes.try_into().map_or(0, u32::from_ne_bytes);
        }
        Ok(words)
    }

    /// The words of 64 bits behind the first `from` bytes of the body, of which there are as many.
    pub(super) fn longs<const N: usize>(&self, from: usize) -> Result<[u64; N], Wrong> {
        let mut longs = [0; N];
        if self.body.len() != from + 8 * N {
            return Err(Wrong::Body(self.request));
        }
        for (long, bytes) in longs.iter_mut().zip(self.body[from..].chunks_exact(8)) {
            *long = bytes.try_into().map_or(0, u64::from_ne_bytes);
        }
        Ok(longs)
    }
}

/// The connection of a VMM.
#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    /// Bytes of the next message that have come so far.
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// For tests: what the host says to the next reads.
    #[cfg(test)]
    pub(super) refuses: Vec<Errno>,
}

impl Connection {
    /// A connection by a stream socket.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            bytes: Vec::new(),
            fds: Vec::new(),
            #[cfg(test)]
            refuses: Vec::new(),
        }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Receives the next message; `None`: it has not come yet, or not all of it.
    pub(super) fn receive(&mut self) -> Result<Option<Message>, End> {
        loop {
            let missing = match self.header()? {
                None => HEADER_LEN - self.bytes.len(),
                Some((request, flags, body)) => {
                    let missing = HEADER_LEN + body - self.bytes.len();
                    if missing == 0 {
                        let bytes = std::mem::take(&mut self.bytes);
                        return Ok(Some(Message {
                            request,
                            needs_reply: flags & NEEDS_REPLY != 0,
                            body: bytes[HEADER_LEN..].to_vec(),
                            fds: std::mem::take(&mut self.fds),
                        }));
                    }
                    missing
                }
            };
            if !self.read(missing)? {
                return Ok(None);
            }
        }
    }

    /// The header, once it is whole: request, flags and length of the body.
    fn header(&self) -> Result<Option<(u32, u32, usize)>, End> {
        let Some(header) = self.bytes.first_chunk::<HEADER_LEN>() else {
            return Ok(None);
        };
        let word = |at: usize| {
            let bytes = [header[at], header[at + 1], header[at + 2], header[at + 3]];
            u32::from_ne_bytes(bytes)
        };
        let (request, flags, body) = (word(0), word(4), word(8) as usize);
        let is_request = flags & VERSION_MASK == VERSION && flags & IS_REPLY == 0;
        if !is_request || body > MOST_BODY {
            return Err(End::Wrong(Wrong::Header));
        }
        Ok(Some((request, flags, body)))
    }

    /// Reads up to so many bytes. Returns whether there were some.
    ///
    /// A host that is short of memory for the call fails it before anything is taken (ENOBUFS, ENOMEM): it is
    /// tried again, since the event is there until the bytes are read. Shortage of descriptors (EMFILE,
    /// ENFILE) is no error of the call. The kernel takes the bytes then, gives what descriptors there is a
    /// place for and closes the others, and says that the control data was cut (`MSG_CTRUNC`). No call
    /// brings these again, and a VMM that goes on would believe that they are in use: so its connection is
    /// closed ([`Wrong::NoPlace`]), and when it connects again it gives all anew.
    fn read(&mut self, most: usize) -> Result<bool, End> {
        let mut bytes = [0; HEADER_LEN + MOST_BODY];
        let received = match self.take(&mut bytes[..most]) {
            Ok(received) => received,
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ENOBUFS | Errno::ENOMEM) => return Ok(false),
            Err(_) => return Err(End::Gone),
        };
        let has_no_place = received.was_cut && received.fds.len() < MOST_FDS;
        self.fds.extend(received.fds);
        if received.len == 0 {
            return Err(End::Gone);
        }
        self.bytes.extend_from_slice(&bytes[..received.len]);
        if has_no_place {
            return Err(End::Wrong(Wrong::NoPlace));
        }
        if received.was_cut || self.fds.len() > MOST_FDS {
            return Err(End::Wrong(Wrong::Header));
        }
        Ok(true)
    }

    fn take(&mut self, into: &mut [u8]) -> Result<Received, Errno> {
        #[cfg(test)]
        if let Some(error) = self.refuses.pop() {
            return Err(error);
        }
        let flags = MsgFlags::MSG_DONTWAIT;
        receive(self.socket.as_fd(), into, MOST_FDS, flags)
    }

    /// Answers a request with this body.
    pub(super) fn answer(&self, request: u32, body: &[u8]) -> Result<(), End> {
        let words = [request, VERSION | IS_REPLY, body.len() as u32];
        let header: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let parts = [IoSlice::new(&header), IoSlice::new(body)];
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        match sendmsg::<()>(self.socket.as_raw_fd(), &parts, &[], flags, None) {
            Ok(sent) if sent == HEADER_LEN + body.len() => Ok(()),
            // A VMM awaits each answer: there is room for one.
            Ok(_) | Err(Errno::EAGAIN) => Err(End::Wrong(Wrong::Answer)),
            Err(_) => Err(End::Gone),
        }
    }
}
