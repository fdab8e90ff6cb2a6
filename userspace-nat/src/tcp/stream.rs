//! A connection toward the guest with its socket: what becomes of payload, acknowledgements and the
//! socket's events. Who drives it writes the frames and waits for the socket.
use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{
    errno::Errno,
    libc,
    sys::socket::{Shutdown, setsockopt, shutdown, sockopt},
};

use crate::packet::Version;

use super::{
    Connection, Due, Header, Host, Segment, Sendable, State,
    early::{EarlyRoom, EarlySegments},
    queue,
};

/// Length of the place for bytes that are not looked at: so many may be under way to a guest on one
/// connection where the kernel can't peek at a place (before Linux 6.9).
pub(crate) const SCRATCH_LEN: usize = 65_536;
/// Room of a send queue below which the guest waits for more, as a part of the queue. The kernel
/// says that a queue has room when it is a third empty (`sk_stream_is_writeable`), by its own count.
const LOW_ROOM_PART: u32 = 5;

/// A connection: its state toward the guest, and its socket toward the host or the server.
#[derive(Debug)]
pub(crate) struct Stream {
    connection: Connection,
    /// `None` once both sides have ended.
    socket: Option<OwnedFd>,
    /// Where the kernel peeks next, from the first byte in its queue; `None` if it can't be told.
    peeks_at: Option<u32>,
    /// Whether the socket may have bytes for the guest, or its end, that were not sent.
    has_more: bool,
    /// Whether the socket's peer has ended: nothing comes behind what is in the queue.
    hung_up: bool,
    /// Room of the send queue as last read, less what was sent since, bytes; and the queue's size.
    room: u32,
    queue_len: u32,
    /// Whether an event tells when the send queue has room.
    waits_for_room: bool,
    /// What the guest sent behind a gap.
    early: EarlySegments,
}

/// Where bytes go that are not looked at, and how much the VM's connections may keep of what came
/// early.
#[derive(Debug)]
pub(crate) struct Workspace<'w> {
    pub(crate) scratch: &'w mut [u8],
    pub(crate) early: &'w EarlyRoom,
}

/// What came of a guest's segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Taken {
    /// Bytes that the socket took, and bytes that the guest has acknowledged.
    pub(crate) delivered: u32,
    pub(crate) acknowledged: u32,
    /// Segment to send at once.
    pub(crate) reply: Option<Header>,
    /// What the guest did to the connection.
    pub(crate) host: Host,
}

/// What is next for the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// A frame with so many bytes of payload.
    Frame(Header, u32),
    /// The end of the socket's data.
    End(Header),
    /// Nothing now.
    Nothing,
}

impl Stream {
    /// A connection to open to the guest, for a socket that is connected. Its SYN is due at once.
    pub(crate) fn open(version: Version, socket: OwnedFd, now_ns: u64) -> Self {
        let (room, queue_len) = queue::room(&socket);
        let connection = Connection::open(version, rand::random(), room, now_ns);
        Self {
            room,
            queue_len,
            ..Self::new(connection, socket)
        }
    }

    /// `connection` with its socket, which does not block and may not be connected yet.
    pub(crate) fn new(connection: Connection, socket: OwnedFd) -> Self {
        // Small writes of the guest were its own decision.
        let _ = setsockopt(&socket, sockopt::TcpNoDelay, &true);
        let peeks_at = queue::peek_at(&socket, 0).then_some(0);
        Self {
            connection,
            socket: Some(socket),
            peeks_at,
            has_more: false,
            hung_up: false,
            room: 0,
            queue_len: 1,
            waits_for_room: false,
            early: EarlySegments::default(),
        }
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(crate) fn connection_mut(&mut self) -> &mut Connection {
        &mut self.connection
    }

    /// The socket; `None` once both sides have ended.
    pub(crate) fn socket(&self) -> Option<&OwnedFd> {
        self.socket.as_ref()
    }

    /// Has the socket's close reset its connection.
    pub(crate) fn reset_peer(&mut self) {
        if let Some(socket) = self.socket.take() {
            reset_by_close(&socket);
        }
    }

    /// Whether the socket may have something for the guest that was not sent.
    pub(crate) fn has_more(&self) -> bool {
        self.has_more
    }

    /// Whether the socket's peer sends nothing behind what is in the queue.
    pub(crate) fn has_hung_up(&self) -> bool {
        self.hung_up
    }

    /// The socket is connected, so the guest's SYN is answered. Returns our SYN.
    ///
    /// # Errors
    /// Its connection was refused.
    pub(crate) fn connected(&mut self, now_ns: u64) -> io::Result<Header> {
        let Some(socket) = &self.socket else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        queue::error_of(socket)?;
        (self.room, self.queue_len) = queue::room(socket);
        self.has_more = true;
        Ok(self.connection.connected(self.room, now_ns))
    }

    /// Takes a segment of the guest, and those that came before it and had to wait for it.
    ///
    /// # Errors
    /// The socket's connection has failed: the guest's is to be reset.
    pub(crate) fn receive(
        &mut self,
        segment: &Segment,
        payload: &[u8],
        workspace: Workspace<'_>,
        now_ns: u64,
    ) -> io::Result<Taken> {
        let Workspace { scratch, early } = workspace;
        self.early.keep(&self.connection, segment, payload, early);
        let mut taken = self.receive_one(segment, payload, scratch, now_ns)?;
        while let Some(next) = self.early.next(&self.connection) {
            let more = self.receive_one(&next.segment, &next.payload, scratch, now_ns)?;
            taken.delivered += more.delivered;
            taken.acknowledged += more.acknowledged;
            taken.reply = taken.reply.or(more.reply);
            if more.host != Host::Stays {
                taken.host = more.host;
            }
        }
        Ok(taken)
    }

    fn receive_one(
        &mut self,
        segment: &Segment,
        payload: &[u8],
        scratch: &mut [u8],
        now_ns: u64,
    ) -> io::Result<Taken> {
        let received = self.connection.receive(segment, now_ns);
        let mut taken = Taken {
            acknowledged: received.acknowledged,
            reply: received.reply,
            host: received.host,
            ..Taken::default()
        };
        // All of it may have been sent, so that no event of the socket's says that there is more.
        self.has_more |= received.resend;
        match received.host {
            Host::Stays => {}
            Host::Reset => {
                self.reset_peer();
                return Ok(taken);
            }
            Host::Closes => self.socket = None,
        }
        if let Some(socket) = &self.socket {
            let offered = received.deliver.start as usize..received.deliver.end as usize;
            let offered = payload.get(offered).unwrap_or_default();
            if !offered.is_empty() {
                taken.delivered = queue::send_to(socket, offered)?;
            }
            self.room = self.room.saturating_sub(taken.delivered);
            if self.connection.taken(&received, taken.delivered, now_ns) {
                // The peer has reset it otherwise, which is heard in its turn.
                let _ = shutdown(socket.as_raw_fd(), Shutdown::Write);
            }
            let bytes = received.acknowledged;
            if bytes > 0 {
                self.peeks_at = self.peeks_at.map(|at| at.saturating_sub(bytes));
                queue::discard(socket, bytes as usize, scratch)?;
            }
        }
        if self.connection.state() == State::TimeWait {
            self.socket = None;
        }
        Ok(taken)
    }

    /// Whether the socket's connection has failed, if an event says so.
    pub(crate) fn has_failed(&self) -> bool {
        let socket = self.socket.as_ref();
        socket.is_some_and(|socket| queue::error_of(socket).is_err())
    }

    /// The socket is readable, or its peer has ended (`hung_up`).
    pub(crate) fn readable(&mut self, hung_up: bool) {
        self.has_more = true;
        self.hung_up |= hung_up;
    }

    /// The send queue has room. Returns an acknowledgement that says so, and how many times to send
    /// it, if the guest waits for that.
    pub(crate) fn writable(&mut self) -> Option<(Header, u8)> {
        if !std::mem::take(&mut self.waits_for_room) {
            return None;
        }
        (self.room, self.queue_len) = queue::room(self.socket.as_ref()?);
        Some(self.connection.reopen(self.room))
    }

    /// Does what is due at this time.
    pub(crate) fn on_time(&mut self, now_ns: u64) -> Due {
        let due = self.connection.on_time(now_ns);
        match due {
            // What was sent may have to be sent again, now or once a probe is answered.
            Due::Resend | Due::Send(_) => self.has_more = true,
            Due::GiveUp(_) => self.reset_peer(),
            Due::Nothing | Due::Forget => {}
        }
        due
    }

    /// Returns the place of the next bytes for the guest, if it takes some and there may be some.
    pub(crate) fn sendable(&mut self, now_ns: u64) -> Option<Sendable> {
        if !self.has_more {
            return None;
        }
        let place = self.connection.sendable();
        if place.is_none() {
            self.connection.blocked(now_ns);
        }
        place
    }

    /// Peeks what is next at a place for the guest into `into`.
    ///
    /// # Errors
    /// The socket's connection has failed.
    pub(crate) fn next(
        &mut self,
        offset: u32,
        into: &mut [u8],
        scratch: &mut [u8],
        now_ns: u64,
    ) -> io::Result<Next> {
        let Some(socket) = &self.socket else {
            self.has_more = false;
            return Ok(Next::Nothing);
        };
        let skipped = match self.peeks_at {
            Some(at) if at == offset => 0,
            Some(_) if queue::peek_at(socket, offset) => {
                self.peeks_at = Some(offset);
                0
            }
            _ => offset as usize,
        };
        if skipped > scratch.len() {
            // There is more, and an acknowledgement brings it within reach.
            return Ok(Next::Nothing);
        }
        // Known before the look: what is behind the skipped bytes then is the end.
        let hung_up = self.hung_up && skipped > 0;
        let got = loop {
            match queue::peek(socket, skipped, scratch, into) {
                Ok(got) => break got as u32,
                Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                    Some(Errno::EINTR) => {}
                    Some(Errno::EAGAIN) if hung_up => break 0,
                    Some(Errno::EAGAIN) => {
                        self.has_more = false;
                        return Ok(Next::Nothing);
                    }
                    _ => return Err(error),
                },
            }
        };
        if got == 0 {
            self.has_more = false;
            let fin = self.connection.send_fin(now_ns);
            return Ok(fin.map_or(Next::Nothing, Next::End));
        }
        self.peeks_at = self.peeks_at.map(|at| at + got);
        let room = self.room();
        Ok(Next::Frame(
            self.connection.send(got, Some(room), now_ns),
            got,
        ))
    }

    /// Returns the acknowledgement that is owed.
    pub(crate) fn acknowledgement(&mut self) -> Option<Header> {
        if !self.connection.owes_acknowledgement() {
            return None;
        }
        let room = self.room();
        Some(self.connection.acknowledge(room))
    }

    /// Whether an event should tell when the send queue has room again, because the guest may wait for
    /// that. The caller asks for one anew, so that the kernel notes that somebody waits, or reports at
    /// once that there is room; and says so by [`Stream::waits_for_room`].
    pub(crate) fn wants_room(&self) -> bool {
        let is_low = self.room < self.queue_len / LOW_ROOM_PART;
        self.socket.is_some()
            && !self.waits_for_room
            && self.connection.is_short_of_room()
            && (is_low || self.connection.has_turned_away())
    }

    /// An event was asked for.
    pub(crate) fn waits_for_room(&mut self) {
        self.waits_for_room = true;
    }

    /// Room of the send queue, read again once much of it was used.
    fn room(&mut self) -> u32 {
        if self.room < self.queue_len / 2
            && let Some(socket) = &self.socket
        {
            (self.room, self.queue_len) = queue::room(socket);
        }
        self.room
    }

    /// As on a kernel that can't be told where to peek.
    #[cfg(test)]
    pub(crate) fn without_places(mut self) -> Self {
        if let Some(socket) = &self.socket {
            queue::peek_at(socket, u32::MAX);
        }
        self.peeks_at = None;
        self
    }
}

/// Has a socket's close reset its connection.
pub(crate) fn reset_by_close(socket: &OwnedFd) {
    let at_once = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    // Without it the connection ends as if in order: no worse can come of an error.
    let _ = setsockopt(socket, sockopt::Linger, &at_once);
}
