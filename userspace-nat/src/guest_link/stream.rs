//! A stream socket as the guest's link: a VMM connects to it, and frames come and go by
//! [`framing`](super::framing).
//!
//! # Theory of operation
//! | state | entered by | frames for the guest |
//! | --- | --- | --- |
//! | waiting | the start; the guest's connection has ended | dropped as `stale_vm` |
//! | connected | a connection was accepted, or the one that there was at the start | queued, or dropped as `engine_busy` |
//! | over | the only guest's connection has ended | dropped as `stale_vm` |
//!
//! One guest at a time: whoever connects meanwhile waits in the socket's backlog. When a connection
//! ends, what was under way on it is forgotten, and flows stay until their own time-outs; a guest that
//! comes back goes on with them. A link for one guest only shuts the listening socket down, which is how
//! the process that shares it learns the end. A connection that was made by others
//! ([`StreamLink::connected`]) is shut down likewise.
//!
//! The queue for the guest is bounded twice. From [`ENOUGH_QUEUED`] on no data is taken from the world's
//! sockets ([`GuestLink::room`](super::GuestLink::room)), so that a guest that reads slowly loses no stream data. From
//! [`MOST_QUEUED`](super::framing::MOST_QUEUED) on a frame is dropped and counted. Nothing waits for the
//! guest: what the socket does not take stays queued until epoll reports room, or, where the host has no
//! memory for it, for [`SHORTAGE_NS`]. Then an event would tell of room at once, again and again.
use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollEvent, EpollFlags},
        socket::{MsgFlags, Shutdown, recv, send, shutdown},
    },
};
use slipgate_abi::DropReason;

use super::{
    accepting::{self, Accepted, Short, Warned},
    framing::{FrameQueue, FrameReader, TooLong},
    joining, segmentation,
};
use crate::{
    clock::MILLISECOND_NS,
    port::{VNET_LEN, VirtioNetHdr},
};

/// Bytes in the queue from which no more data is made for the guest.
pub(super) const ENOUGH_QUEUED: usize = 256 << 10;

/// Time after which is tried again what the host had no memory or no descriptor for, ns.
pub(super) const SHORTAGE_NS: u64 = 10 * MILLISECOND_NS;

/// Result of a read from the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// A frame of this length, with its `virtio_net_hdr`.
    Frame(usize),
    /// Nothing can be read at present.
    Nothing,
    /// The connection has ended, after so many bytes of a frame that is not whole.
    Ended(usize),
    /// The connection was closed: it announced a frame that can't be.
    Closed(TooLong),
}

/// A listening socket or the socket of a connection, and the guest that is connected.
#[derive(Debug)]
pub struct StreamLink {
    origin: Origin,
    is_for_one: bool,
    state: State,
    reader: FrameReader,
    queue: FrameQueue,
    /// Time at which to write or accept again, because the host was short of something, ns.
    again_ns: Option<u64>,
    warned: Warned,
    /// For tests: what the host says to a write.
    #[cfg(test)]
    refuses: Option<Errno>,
}

/// Where guests come from.
#[derive(Debug)]
enum Origin {
    /// A listening socket, from which they are accepted.
    Listener(OwnedFd),
    /// A copy of the socket of the one connection that there is; and that socket, until it is watched.
    Given {
        copy: OwnedFd,
        unwatched: Option<OwnedFd>,
    },
}

impl Origin {
    fn fd(&self) -> &OwnedFd {
        match self {
            Self::Listener(fd) | Self::Given { copy: fd, .. } => fd,
        }
    }
}

#[derive(Debug)]
enum State {
    Waiting,
    Connected {
        socket: OwnedFd,
        /// Whether an event tells when the socket takes more.
        waits_for_room: bool,
        /// Whether a write has failed for good.
        is_broken: bool,
        /// Whether the host had no memory for the last one.
        lacks_memory: bool,
    },
    Over,
}

impl StreamLink {
    /// A link by a listening socket, non-blocking. `is_for_one`: whether it is over when the first guest
    /// has gone.
    pub fn new(listener: OwnedFd, is_for_one: bool) -> Self {
        Self::from(Origin::Listener(listener), is_for_one)
    }

    /// A link by a stream socket to which a guest is connected already: it is over when that has gone.
    ///
    /// # Errors
    /// No descriptor is left for a copy.
    pub fn connected(socket: OwnedFd) -> io::Result<Self> {
        let copy = socket.try_clone()?;
        let unwatched = Some(socket);
        Ok(Self::from(Origin::Given { copy, unwatched }, true))
    }

    fn from(origin: Origin, is_for_one: bool) -> Self {
        Self {
            origin,
            is_for_one,
            state: State::Waiting,
            reader: FrameReader::default(),
            queue: FrameQueue::default(),
            again_ns: None,
            warned: Warned::default(),
            #[cfg(test)]
            refuses: None,
        }
    }

    /// Adds the listening socket, if there is one, to a set.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn watch(&self, epoll: &Epoll, listener_key: u64) -> io::Result<()> {
        // Edge-triggered: it is accepted from when there is no guest, whatever the event.
        let events = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        match &self.origin {
            Origin::Listener(fd) => Ok(epoll.add(fd, EpollEvent::new(events, listener_key))?),
            Origin::Given { .. } => Ok(()),
        }
    }

    /// Accepts the guest that waits, if none is connected. To be called at the end of every turn: who has
    /// waited causes no event.
    pub fn accept(&mut self, epoll: &Epoll, key: u64, now_ns: u64) -> Accepted {
        let is_too_early = self.again_ns.is_some_and(|again_ns| now_ns < again_ns);
        if !matches!(self.state, State::Waiting) || is_too_early {
            return Accepted::No;
        }
        self.again_ns = None;
        let accepted = match &mut self.origin {
            Origin::Listener(listener) => accepting::accept(listener, epoll, key, &mut self.warned),
            Origin::Given { unwatched, .. } => match unwatched.take() {
                // No other guest ever comes: it is not refused.
                Some(socket) => {
                    let watched = accepting::watch(&socket, epoll, key);
                    self.warned.of(watched.err(), "waits");
                    match watched {
                        Ok(()) => Ok(Some(socket)),
                        Err(_) => {
                            *unwatched = Some(socket);
                            Err(Short { has_refused: false })
                        }
                    }
                }
                None => Ok(None),
            },
        };
        let socket = match accepted {
            Ok(Some(socket)) => socket,
            Ok(None) => return Accepted::No,
            Err(short) => {
                self.again_ns = Some(now_ns + SHORTAGE_NS);
                return short.accepted();
            }
        };
        self.state = State::Connected {
            socket,
            waits_for_room: false,
            is_broken: false,
            lacks_memory: false,
        };
        tracing::debug!("the guest has connected");
        Accepted::Yes
    }

    /// Whether frames were read that [`StreamLink::next`] has not returned.
    pub fn has_input(&self) -> bool {
        self.reader.has_whole()
    }

    /// Reads once, if no whole frame is held. Returns the end of the connection.
    pub fn fill(&mut self) -> Option<Input> {
        let State::Connected { socket, .. } = &self.state else {
            return None;
        };
        if self.reader.has_whole() {
            return None;
        }
        let room = self.reader.room();
        match recv(socket.as_raw_fd(), room, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Some(self.end()),
            Ok(len) => {
                self.reader.filled(len);
                None
            }
            // The event is there until it is read.
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ENOBUFS | Errno::ENOMEM) => None,
            Err(_) => Some(self.end()),
        }
    }

    /// Copies the next frame that is held to the beginning of `into`, with its `virtio_net_hdr`: of TCP
    /// segments that follow each other, all that one frame represents. `into` has room for the longest.
    pub fn next(&mut self, into: &mut [u8]) -> Input {
        match self.reader.next_frame() {
            Ok(Some(frame)) => {
                let len = VNET_LEN + frame.len();
                into[VNET_LEN..len].copy_from_slice(frame);
                Input::Frame(joining::join(&mut self.reader, into, len))
            }
            Ok(None) => Input::Nothing,
            Err(too_long) => {
                self.end();
                Input::Closed(too_long)
            }
        }
    }

    /// Bytes that wait for the guest; `None` while none is connected.
    pub fn queued(&mut self) -> Option<usize> {
        if self.queue.unsent().len() >= ENOUGH_QUEUED {
            self.flush();
        }
        matches!(self.state, State::Connected { .. }).then(|| self.queue.unsent().len())
    }

    /// Makes room for a frame, `len` bytes from the Ethernet header on. Returns the reason if there is
    /// none.
    pub fn refusal(&mut self, vnet: VirtioNetHdr, len: usize) -> Option<DropReason> {
        if !matches!(self.state, State::Connected { .. }) {
            return Some(DropReason::StaleVm);
        }
        if segmentation::has_room(&self.queue, vnet, len) {
            return None;
        }
        self.flush();
        let has_room = segmentation::has_room(&self.queue, vnet, len);
        (!has_room).then_some(DropReason::EngineBusy)
    }

    /// Queues a frame, with its `virtio_net_hdr`. Returns the reason if it was dropped.
    pub fn send(&mut self, frame: &[u8]) -> Option<DropReason> {
        let (vnet, frame) = frame.split_first_chunk::<VNET_LEN>()?;
        let vnet = VirtioNetHdr::decode(vnet);
        let refusal = self.refusal(vnet, frame.len());
        if refusal.is_some() {
            return refusal;
        }
        let queued = segmentation::push(&mut self.queue, vnet, frame);
        (!queued).then_some(DropReason::EngineBusy)
    }

    /// Time at which a turn is due without an event, ns.
    pub fn due_ns(&self) -> Option<u64> {
        self.again_ns
    }

    /// At the end of a turn: writes what is queued, and has an event tell when more can be written, or
    /// the time ([`StreamLink::due_ns`]). Returns the end of the connection, if writing failed.
    ///
    /// # Errors
    /// The kernel can't watch the connection.
    pub fn settle(&mut self, epoll: &Epoll, key: u64, now_ns: u64) -> io::Result<Option<Input>> {
        self.flush();
        let State::Connected {
            socket,
            waits_for_room,
            is_broken,
            lacks_memory,
        } = &mut self.state
        else {
            return Ok(None);
        };
        if *is_broken {
            return Ok(Some(self.end()));
        }
        self.again_ns = lacks_memory.then_some(now_ns + SHORTAGE_NS);
        let is_left = !self.queue.unsent().is_empty() && !*lacks_memory;
        if is_left != *waits_for_room {
            let events = match is_left {
                true => EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT,
                false => EpollFlags::EPOLLIN,
            };
            epoll.modify(socket.as_fd(), &mut EpollEvent::new(events, key))?;
            *waits_for_room = is_left;
        }
        Ok(None)
    }

    /// Writes as much of the queue as the socket takes.
    fn flush(&mut self) {
        let State::Connected {
            socket,
            is_broken,
            lacks_memory,
            ..
        } = &mut self.state
        else {
            return;
        };
        *lacks_memory = false;
        let write = |bytes: &[u8]| {
            #[cfg(test)]
            if let Some(error) = self.refuses {
                return Err(error);
            }
            let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
            send(socket.as_raw_fd(), bytes, flags)
        };
        while !self.queue.unsent().is_empty() && !*is_broken {
            match write(self.queue.unsent()) {
                Ok(len) => self.queue.sent(len),
                Err(Errno::EAGAIN) => return,
                Err(Errno::EINTR) => {}
                // The guest is there as before. What it gets later is still whole frames in order, and
                // what finds no place in the queue meanwhile is dropped and counted.
                Err(Errno::ENOBUFS | Errno::ENOMEM) => {
                    *lacks_memory = true;
                    return;
                }
                Err(_) => *is_broken = true,
            }
        }
    }

    /// Ends the guest's connection, and forgets what was under way on it.
    fn end(&mut self) -> Input {
        let cut = self.reader.held();
        self.reader.clear();
        self.queue.clear();
        self.again_ns = None;
        self.state = match self.is_for_one {
            true => State::Over,
            false => State::Waiting,
        };
        if self.is_for_one {
            // Nobody connects any more, and whoever else has the socket sees it hang up.
            let _ = shutdown(self.origin.fd().as_raw_fd(), Shutdown::Both);
        }
        tracing::debug!("the guest's connection has ended");
        Input::Ended(cut)
    }
}

#[cfg(test)]
#[path = "stream_test.rs"]
mod tests;
