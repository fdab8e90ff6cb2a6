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
use slipgate_abi::tcp::Flags;

use crate::{clock::SECOND_NS, packet::Version, payload::Payload, space::Target};

use super::{
    Connection, Due, Header, Host, Received, Segment, Sendable, State,
    early::{EarlyRoom, EarlySegments},
    queue,
    wire::URG,
};

/// Length of the place for bytes that are not looked at: so many may be under way to a guest on one
/// connection where the kernel can't peek at a place (before Linux 6.9).
pub(crate) const SCRATCH_LEN: usize = 65_536;
/// Room of a send queue below which the guest waits for more, as a part of the queue. The kernel
/// says that a queue has room when it is a third empty (`sk_stream_is_writeable`), by its own count.
const LOW_ROOM_PART: u32 = 5;
/// Longest silence that a socket may be told to ask after, seconds (Linux: `MAX_TCP_KEEPIDLE`).
const MOST_KEEPALIVE_S: u16 = 32_767;
/// Silence after which one keep-alive of the guest is enough for the socket to ask too, ns; after a
/// shorter one it takes two in a row.
const LONG_SILENCE_NS: u64 = 60 * SECOND_NS;
/// Longest time between two questions that are not answered, seconds: Linux's own.
const MOST_BETWEEN_KEEPALIVES_S: u16 = 75;
/// Payload of a frame for the guest from which on the next is likely to be as long, bytes.
const BULK: u32 = 16_384;

// An idle connection has no memory but this, and its place in a table.
const _: () = assert!(size_of::<Stream>() <= 512);

/// A connection: its state toward the guest, and its socket toward the host or the server.
#[derive(Debug)]
pub(crate) struct Stream {
    connection: Connection,
    /// `None` once both sides have ended.
    socket: Option<OwnedFd>,
    peeking: Peeking,
    /// Whether the socket sends what it is given at once.
    is_without_delay: bool,
    /// Whether the socket may have bytes for the guest, or its end, that were not sent.
    has_more: bool,
    /// Whether the socket's peer has ended: nothing comes behind what is in the queue.
    hung_up: bool,
    /// Room of the send queue as last read, less what was sent since, bytes; and the queue's size.
    room: u32,
    queue_len: u32,
    /// Bytes that the queue was last asked to take; 0: it is the kernel's to say.
    queue_for: u32,
    /// Whether an event tells when the send queue has room.
    waits_for_room: bool,
    /// Segments of the guest that came behind a gap.
    early: EarlySegments,
    /// Bytes of them that the socket took since the guest was last heard.
    delivered_since: u32,
    /// Payload of the last frame for the guest, bytes.
    last_len: u32,
    /// Silence after which the socket asks whether its peer lives, seconds; 0: it does not ask.
    keepalive_s: u16,
    /// The guest's last segment was a keep-alive, after so long a silence, ns.
    asked_after_ns: Option<u64>,
}

/// Where the kernel peeks next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Peeking {
    /// At the first byte in its queue, always: it was not told anything else, and short answers never
    /// need it.
    First,
    /// So many bytes behind the first, and behind what was peeked.
    At(u32),
    /// At the first, for it can't be told (before Linux 6.9).
    OnlyFirst,
}

/// Where bytes go that are not looked at, how much the VM's connections may keep of what came early, and
/// where sockets go whose both sides have ended, if these are not to be closed at once.
#[derive(Debug)]
pub(crate) struct Workspace<'w> {
    pub(crate) scratch: &'w mut [u8],
    pub(crate) early: &'w EarlyRoom,
    pub(crate) closed: Option<&'w mut Vec<OwnedFd>>,
}

/// Result of a guest's segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Taken {
    /// Bytes that the socket took, and bytes that the guest has acknowledged.
    pub(crate) delivered: u32,
    pub(crate) acknowledged: u32,
    /// Segment to send at once.
    pub(crate) reply: Option<Header>,
    /// Change of the socket that the segment asks for.
    pub(crate) host: Host,
}

/// The next frame for the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// A frame with so many bytes of payload.
    Frame(Header, u32),
    /// The end of the socket's data.
    End(Header),
    /// Nothing to send at present.
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

    /// `connection` with its socket, which does not block, keeps urgent data in place, and may not be
    /// connected yet.
    pub(crate) fn new(connection: Connection, socket: OwnedFd) -> Self {
        Self {
            connection,
            socket: Some(socket),
            peeking: Peeking::First,
            is_without_delay: false,
            has_more: false,
            hung_up: false,
            room: 0,
            queue_len: 1,
            queue_for: 0,
            waits_for_room: false,
            early: EarlySegments::default(),
            delivered_since: 0,
            last_len: 0,
            keepalive_s: 0,
            asked_after_ns: None,
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

    /// Takes the number of bytes that the socket took since the guest was last heard.
    pub(crate) fn take_delivered(&mut self) -> u32 {
        std::mem::take(&mut self.delivered_since)
    }

    /// Whether the socket may have something for the guest that was not sent.
    pub(crate) fn has_more(&self) -> bool {
        self.has_more
    }

    /// Whether the socket's peer sends nothing behind what is in the queue.
    pub(crate) fn has_hung_up(&self) -> bool {
        self.hung_up
    }

    /// The socket is connected, so the guest's SYN is answered. Returns our SYN. An event of a socket
    /// whose connection was refused says that it failed; the caller has seen that it did not. What the
    /// socket has for the guest by now, [`Stream::readable`] says.
    ///
    /// # Errors
    /// There is no socket any more.
    pub(crate) fn connected(&mut self, now_ns: u64) -> io::Result<Header> {
        let Some(socket) = &self.socket else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        (self.room, self.queue_len) = queue::whole_room(socket);
        Ok(self.connection.connected(self.room, now_ns))
    }

    /// Takes a segment of the guest, and those that came before it and had to wait for it.
    ///
    /// # Errors
    /// The socket's connection has failed: the guest's is to be reset.
    pub(crate) fn receive<'p>(
        &mut self,
        segment: &Segment,
        payload: impl Into<Payload<'p>>,
        workspace: Workspace<'_>,
        now_ns: u64,
    ) -> io::Result<Taken> {
        let Workspace {
            scratch,
            early,
            closed,
        } = workspace;
        let payload = payload.into();
        if segment.has(URG) && !payload.is_empty() {
            early.note_urgent();
        }
        self.early
            .keep(&mut self.connection, segment, &payload, early);
        let mut taken = self.receive_one(segment, &payload, (scratch, early), now_ns)?;
        taken.delivered += self.take_delivered();
        taken.delivered += self.deliver_early(now_ns)?;
        let is_over = taken.host == Host::Closes || self.is_over();
        if is_over
            && let Some(socket) = self.socket.take()
            && let Some(closed) = closed
        {
            closed.push(socket);
        }
        Ok(taken)
    }

    /// Gives the socket the early segments whose turn has come. Returns the bytes that it took. What it
    /// does not take stays here: the guest was told that it need not send that again.
    fn deliver_early(&mut self, now_ns: u64) -> io::Result<u32> {
        let mut delivered = 0;
        while let Some(early) = self.early.next(&self.connection) {
            let mut received = self.connection.receive_early(&early.segment());
            let offered = received.deliver.len() as u32;
            let got = self.offer(&received, &Payload::from(&*early.payload))?;
            delivered += got;
            if got < offered {
                received.deliver.end = received.deliver.start + got;
                received.fin = false;
            }
            self.took(&received, got, now_ns);
            if got < offered {
                self.early.put_back(early);
                break;
            }
        }
        Ok(delivered)
    }

    /// Whether both sides have ended, so that the socket has nothing more to do.
    fn is_over(&self) -> bool {
        self.connection.state() == State::TimeWait
    }

    /// Offers the socket what was received. Returns the bytes that it took.
    fn offer(&mut self, received: &Received, payload: &Payload<'_>) -> io::Result<u32> {
        let offered = received.deliver.start as usize..received.deliver.end as usize;
        let offered = payload.get(offered).unwrap_or_default();
        let Some(socket) = self.socket.as_ref().filter(|_| !offered.is_empty()) else {
            return Ok(0);
        };
        if !std::mem::replace(&mut self.is_without_delay, true) {
            // Small writes of the guest were its own decision.
            let _ = setsockopt(socket, sockopt::TcpNoDelay, &true);
        }
        let taken = queue::send_to(socket, &offered)?;
        self.room = self.room.saturating_sub(taken);
        Ok(taken)
    }

    /// The socket took so many bytes of what was received.
    fn took(&mut self, received: &Received, bytes: u32, now_ns: u64) {
        let has_ended = self.connection.taken(received, bytes, now_ns);
        // If both have, the close says so by itself.
        if has_ended
            && !self.is_over()
            && let Some(socket) = &self.socket
        {
            // The peer has reset it otherwise, which is heard in its turn.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Write);
        }
    }

    /// Keeps what the socket did not take of a segment, `taken` being what it did, if there is room for it:
    /// a guest that sends selective acknowledgements would send it again only by its timer.
    fn keep_rest(
        &mut self,
        segment: &Segment,
        payload: &Payload<'_>,
        (received, taken): (&mut Received, u32),
        room: &EarlyRoom,
    ) {
        let (from, end) = (received.deliver.start + taken, received.deliver.end);
        let rest = payload.get(from as usize..end as usize);
        let Some(rest) = rest.filter(|rest| !rest.is_empty()) else {
            return;
        };
        let fin = if received.fin { Flags::FIN } else { 0 };
        let kept = Segment {
            sequence: segment.sequence.wrapping_add(from),
            flags: Flags::ACK | fin,
            payload_len: rest.len() as u32,
            ..Segment::default()
        };
        if self.early.insert(&kept, &rest, room) {
            received.deliver.end = from;
            received.fin = false;
        }
    }

    /// The guest asks after a silence whether the connection lives. It is answered here, so the socket asks
    /// its peer from now on, in the guest's rhythm: a peer that is gone would never be noticed otherwise.
    fn keep_alive(&mut self, silent_ns: u64) {
        let silent_s = silent_ns
            .div_ceil(SECOND_NS)
            .clamp(1, MOST_KEEPALIVE_S.into()) as u16;
        // A guest that sends none costs nothing, and one that does only where it asks more often.
        if self.keepalive_s != 0 && self.keepalive_s <= silent_s {
            return;
        }
        let Some(socket) = &self.socket else {
            return;
        };
        self.keepalive_s = silent_s;
        // What the guest does where nobody answers can't be seen, since it is answered: most wait less
        // then. The peer is given up after about as long a silence again.
        let between_s = (silent_s / 8).clamp(1, MOST_BETWEEN_KEEPALIVES_S);
        let times = silent_s.clamp(3, 8);
        // A socket that does not know them keeps the host's own rhythm.
        let _ = setsockopt(socket, sockopt::TcpKeepInterval, &between_s.into());
        let _ = setsockopt(socket, sockopt::TcpKeepCount, &times.into());
        let _ = setsockopt(socket, sockopt::KeepAlive, &true);
        // The last: where the time is over already the socket asks at once.
        let _ = setsockopt(socket, sockopt::TcpKeepIdle, &silent_s.into());
    }

    fn receive_one(
        &mut self,
        segment: &Segment,
        payload: &Payload<'_>,
        (scratch, early): (&mut [u8], &EarlyRoom),
        now_ns: u64,
    ) -> io::Result<Taken> {
        let mut received = self.connection.receive(segment, now_ns);
        let mut taken = Taken {
            acknowledged: received.acknowledged,
            reply: received.reply,
            host: received.host,
            ..Taken::default()
        };
        // All of it may have been sent, so that no event of the socket's says that there is more.
        self.has_more |= received.resend;
        let asked_after_ns = std::mem::replace(&mut self.asked_after_ns, received.keepalive_ns);
        if let Some(silent_ns) = received.keepalive_ns {
            // One alone may be another question, such as about a window that has just been opened.
            match asked_after_ns {
                Some(before_ns) => self.keep_alive(silent_ns.max(before_ns)),
                None if silent_ns >= LONG_SILENCE_NS => self.keep_alive(silent_ns),
                None => {}
            }
        }
        match received.host {
            Host::Stays => {}
            Host::Reset => {
                self.reset_peer();
                return Ok(taken);
            }
            // Nothing more is to be delivered.
            Host::Closes => return Ok(taken),
        }
        if self.socket.is_some() {
            taken.delivered = self.offer(&received, payload)?;
            self.keep_rest(segment, payload, (&mut received, taken.delivered), early);
            self.took(&received, taken.delivered, now_ns);
        }
        if let Some(socket) = &self.socket {
            let bytes = received.acknowledged;
            if bytes > 0 {
                if let Peeking::At(at) = &mut self.peeking {
                    *at = at.saturating_sub(bytes);
                }
                queue::discard(socket, bytes as usize, scratch)?;
            }
        }
        Ok(taken)
    }

    /// Takes the error with which the socket's connection has failed, if an event says so.
    pub(crate) fn failure(&self) -> Option<io::Error> {
        queue::error_of(self.socket.as_ref()?).err()
    }

    /// The socket is readable, or its peer has ended (`hung_up`).
    pub(crate) fn readable(&mut self, hung_up: bool) {
        self.has_more = true;
        self.hung_up |= hung_up;
    }

    /// The send queue has room. Returns an acknowledgement that says so, and how many times to send
    /// it, if the guest waits for that.
    pub(crate) fn writable(&mut self, now_ns: u64) -> Option<(Header, u8)> {
        if !std::mem::take(&mut self.waits_for_room) {
            return None;
        }
        // Its failure is an event of its own.
        self.delivered_since += self.deliver_early(now_ns).unwrap_or(0);
        if self.is_over() {
            // Nothing else is behind it that should go first.
            self.socket = None;
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

    /// Whether the last frame for the guest was so long that the next may be as well.
    pub(crate) fn is_bulk(&self) -> bool {
        self.last_len >= BULK
    }

    /// Peeks what is next at a place for the guest into `into`.
    ///
    /// # Errors
    /// The socket's connection has failed.
    pub(crate) fn next<'t>(
        &mut self,
        offset: u32,
        into: impl Into<Target<'t>>,
        scratch: &mut [u8],
        now_ns: u64,
    ) -> io::Result<Next> {
        let mut into = into.into();
        let Some(socket) = &self.socket else {
            self.has_more = false;
            return Ok(Next::Nothing);
        };
        let is_there = match self.peeking {
            Peeking::At(at) => at == offset,
            Peeking::First | Peeking::OnlyFirst => offset == 0,
        };
        let can_be_told = self.peeking != Peeking::OnlyFirst;
        let skipped = match is_there {
            true => 0,
            false if can_be_told && queue::peek_at(socket, offset) => {
                self.peeking = Peeking::At(offset);
                0
            }
            false => {
                self.peeking = Peeking::OnlyFirst;
                offset as usize
            }
        };
        if skipped > scratch.len() {
            // There is more, and an acknowledgement brings it within reach.
            return Ok(Next::Nothing);
        }
        // Known before the look: what is behind the skipped bytes then is the end.
        let hung_up = self.hung_up && skipped > 0;
        let got = loop {
            match queue::peek(socket, skipped, scratch, &mut into) {
                Ok(got) => break got as u32,
                Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                    Some(Errno::EINTR) => {}
                    // A peek ends in front of urgent data, and passes it if it begins there: once an
                    // acknowledgement has brought that within reach.
                    Some(Errno::EAGAIN) if skipped > 0 && queue::received(socket) > skipped => {
                        return Ok(Next::Nothing);
                    }
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
        self.last_len = got;
        if let Peeking::At(at) = &mut self.peeking {
            *at += got;
        }
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

    /// Has the send queue take a window of so many bytes. By itself it begins with less than a guest that is
    /// far away needs, and grows by what its own connection has under way, which may be little.
    pub(crate) fn widen_queue(&mut self, window: u32) {
        if window > self.queue_for
            && let Some(socket) = &self.socket
        {
            self.queue_for = window;
            queue::enlarge(socket, window);
            (self.room, self.queue_len) = queue::room(socket);
        }
    }

    /// Lets the guest send so many bytes more, as far as the socket has room.
    pub(crate) fn allow(&mut self, bytes: u32) {
        self.connection.allow(bytes);
        self.reopen_window();
    }

    /// Has the window open as far as the socket has room and the guest may send.
    pub(crate) fn reopen_window(&mut self) {
        let room = self.room();
        self.connection.widen_window(room);
    }

    /// Whether an event should tell when the send queue has room again, because the guest may wait for
    /// that. The caller asks for one anew, so that the kernel notes that somebody waits, or reports at
    /// once that there is room; and says so by [`Stream::waits_for_room`].
    pub(crate) fn wants_room(&self) -> bool {
        let is_low = self.room < self.queue_len / LOW_ROOM_PART;
        let is_short =
            self.connection.is_short_of_room() && (is_low || self.connection.has_turned_away());
        self.socket.is_some()
            && !self.waits_for_room
            && (is_short || self.early.is_due(&self.connection))
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
        self.peeking = Peeking::OnlyFirst;
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
