//! TCP connections: the state machine's driver.
use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use hashbrown::HashMap;
use nix::{
    errno::Errno,
    libc,
    sys::{
        epoll::{Epoll, EpollEvent, EpollFlags},
        socket::{MsgFlags, Shutdown, send, setsockopt, shutdown, sockopt},
    },
};
use slipgate_model::FlowTuple;

use super::{
    Delivered, Endpoint, FRAMES_PER_TURN, Kind, L3_START, Sockets, ToGuest, system, watch,
};
use crate::{
    packet::{Packet, Version, transport::Tcp},
    port::VirtioNetHdr,
    tcp::{Connection, Due, Header, Host, Segment, State, headers_len, reset_for, write_headers},
};

/// Events of a connection, all edge-triggered: bytes that were peeked stay readable.
const EVENTS: EpollFlags = EpollFlags::EPOLLIN
    .union(EpollFlags::EPOLLOUT)
    .union(EpollFlags::EPOLLRDHUP)
    .union(EpollFlags::EPOLLET);
/// Room of a send queue below which the guest waits for more, as a part of the queue. The kernel
/// says that a queue has room when it is a third empty (`sk_stream_is_writeable`), by its own count.
const LOW_ROOM_PART: u32 = 5;

/// A connection: its state toward the guest, and its socket toward the server.
#[derive(Debug)]
pub(super) struct Stream {
    connection: Connection,
    /// `None` once both sides have ended.
    socket: Option<OwnedFd>,
    /// Where the kernel peeks next, from the first byte in its queue; `None` if it can't be told.
    peeks_at: Option<u32>,
    /// Whether the socket may have bytes for the guest, or its end, that were not sent.
    has_more: bool,
    /// Whether the server has ended: nothing comes behind what is in the queue.
    hung_up: bool,
    /// Room of the send queue as last read, less what was sent since, bytes; and the queue's size.
    room: u32,
    queue_len: u32,
    /// Whether an event tells when the send queue has room.
    waits_for_room: bool,
}

impl Stream {
    /// Has the socket's close reset the connection.
    pub(super) fn reset_peer(&mut self) {
        if let Some(socket) = self.socket.take() {
            let at_once = libc::linger {
                l_onoff: 1,
                l_linger: 0,
            };
            // Without it the connection ends as if in order: no worse can come of an error.
            let _ = setsockopt(&socket, sockopt::Linger, &at_once);
        }
    }

    /// Room of the send queue, read again once much of it was used.
    fn room(&mut self) -> u32 {
        if self.room < self.queue_len / 2
            && let Some(socket) = &self.socket
        {
            (self.room, self.queue_len) = system::room(socket);
        }
        self.room
    }
}

impl Sockets {
    pub(super) fn take_segment(
        &mut self,
        tuple: FlowTuple,
        packet: &Packet<'_>,
        tcp: &Tcp,
        epoll: &Epoll,
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) {
        let l4 = packet.ip.payload();
        let segment = Segment::read(tcp, l4);
        let known = self.by_tuple.get(&tuple).copied();
        let key = match known {
            Some(key) if tcp.is_opening_syn() && self.is_over(key) => {
                self.remove(key);
                return self.open_stream(tuple, &segment, epoll, guest);
            }
            Some(key) => key,
            None if tcp.is_opening_syn() => {
                return self.open_stream(tuple, &segment, epoll, guest);
            }
            None => {
                if let Some(reset) = reset_for(&segment) {
                    self.write(&tuple, &reset, 0, u16::MAX, guest);
                }
                return;
            }
        };
        let Some(stream) = stream_of(&mut self.endpoints, key) else {
            return;
        };
        let received = stream.connection.receive(&segment, now_ns);
        match received.host {
            Host::Stays => {}
            Host::Reset => return self.abort(key),
            Host::Closes => stream.socket = None,
        }
        let mut failed = None;
        if let Some(socket) = &stream.socket {
            let payload = &l4[tcp.header_len..];
            let offered = received.deliver.start as usize..received.deliver.end as usize;
            let taken = match offered.is_empty() {
                true => Ok(0),
                false => send_to(socket, &payload[offered]),
            };
            match taken {
                Ok(taken) => {
                    stream.room = stream.room.saturating_sub(taken);
                    if stream.connection.taken(&received, taken, now_ns) {
                        // The server has reset it otherwise, which is heard in its turn.
                        let _ = shutdown(socket.as_raw_fd(), Shutdown::Write);
                    }
                }
                Err(error) => failed = Some(error),
            }
            if received.acknowledged > 0 {
                let bytes = received.acknowledged;
                stream.peeks_at = stream.peeks_at.map(|at| at.saturating_sub(bytes));
                let discarded = system::discard(socket, bytes as usize, &mut self.scratch);
                failed = failed.or(discarded.err());
            }
        }
        if failed.is_some() {
            return self.reset_guest(key, guest);
        }
        if let Some(stream) = self.stream(key)
            && stream.connection.state() == State::TimeWait
        {
            stream.socket = None;
        }
        if let Some(reply) = received.reply {
            self.write_of(key, &reply, guest);
        }
        self.settle(key);
    }

    /// Whether a connection is over, so that another may have its tuple.
    fn is_over(&mut self, key: u32) -> bool {
        let state = self.stream(key).map(|stream| stream.connection.state());
        matches!(state, None | Some(State::TimeWait | State::Closed))
    }

    fn stream(&mut self, key: u32) -> Option<&mut Stream> {
        stream_of(&mut self.endpoints, key)
    }

    fn open_stream(
        &mut self,
        tuple: FlowTuple,
        syn: &Segment,
        epoll: &Epoll,
        guest: &mut impl ToGuest,
    ) {
        let version = Version::of(tuple.remote);
        let mut connection = Connection::new(version, syn, rand::random());
        let socket = match system::open(&tuple) {
            Ok(socket) => socket,
            Err(_) => {
                let reset = connection.reset();
                self.write(&tuple, &reset, 0, u16::MAX, guest);
                return;
            }
        };
        // Small writes of the guest were its own decision.
        let _ = setsockopt(&socket, sockopt::TcpNoDelay, &true);
        let peeks_at = system::peek_at(&socket, 0).then_some(0);
        let stream = Stream {
            connection,
            socket: Some(socket),
            peeks_at,
            has_more: false,
            hung_up: false,
            room: 0,
            queue_len: 1,
            waits_for_room: false,
        };
        let key = self.add(tuple, Kind::Stream(Box::new(stream)));
        let watched = self
            .stream(key)
            .and_then(|stream| stream.socket.as_ref())
            .map(|socket| watch(epoll, socket, key, EVENTS));
        if !matches!(watched, Some(Ok(()))) {
            self.reset_guest(key, guest);
        }
    }

    pub(super) fn stream_ready(
        &mut self,
        key: u32,
        flags: EpollFlags,
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) {
        let Some(stream) = self.stream(key) else {
            return;
        };
        let Some(socket) = &stream.socket else {
            return;
        };
        stream.hung_up |= flags.contains(EpollFlags::EPOLLRDHUP);
        let failed = flags.intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP);
        if stream.connection.state() == State::Connecting {
            if !failed && !flags.contains(EpollFlags::EPOLLOUT) {
                return;
            }
            if system::error_of(socket).is_err() || failed {
                return self.reset_guest(key, guest);
            }
            (stream.room, stream.queue_len) = system::room(socket);
            let header = stream.connection.connected(stream.room, now_ns);
            stream.has_more = true;
            self.write_of(key, &header, guest);
            return self.settle(key);
        }
        if failed && system::error_of(socket).is_err() {
            return self.reset_guest(key, guest);
        }
        stream.has_more |= flags.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP);
        if flags.contains(EpollFlags::EPOLLOUT) && stream.waits_for_room {
            stream.waits_for_room = false;
            (stream.room, stream.queue_len) = system::room(socket);
            let (header, times) = stream.connection.reopen(stream.room);
            for _ in 0..times {
                self.write_of(key, &header, guest);
            }
        }
        self.settle(key);
    }

    pub(super) fn stream_due(&mut self, key: u32, guest: &mut impl ToGuest, now_ns: u64) {
        let Some(stream) = self.stream(key) else {
            return;
        };
        match stream.connection.on_time(now_ns) {
            Due::Nothing => {}
            Due::Send(header) => self.write_of(key, &header, guest),
            Due::Resend => stream.has_more = true,
            Due::GiveUp(header) => {
                stream.reset_peer();
                self.write_of(key, &header, guest);
                return self.remove(key);
            }
            Due::Forget => return self.remove(key),
        }
        self.settle(key);
    }

    /// Sends what the socket has, as far as the guest takes it, and the acknowledgement that is
    /// owed.
    pub(super) fn stream_sends(
        &mut self,
        key: u32,
        epoll: &Epoll,
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) {
        let mut frames = 0;
        let mut lost = false;
        while let Some(stream) = self.stream(key)
            && stream.has_more
            && let Some(place) = stream.connection.sendable()
        {
            if frames == FRAMES_PER_TURN || !guest.has_room() {
                self.queue(key);
                break;
            }
            match self.send_next(key, place.offset, place.most, guest, now_ns) {
                Ok(true) => frames += 1,
                Ok(false) => break,
                Err(_) => {
                    lost = true;
                    break;
                }
            }
        }
        if lost {
            return self.reset_guest(key, guest);
        }
        let Some(stream) = self.stream(key) else {
            return;
        };
        if stream.has_more && stream.connection.sendable().is_none() {
            stream.connection.blocked(now_ns);
        }
        if stream.connection.owes_acknowledgement() {
            let room = stream.room();
            let header = stream.connection.acknowledge(room);
            self.write_of(key, &header, guest);
        }
        self.wait_for_room(key, epoll);
        self.settle_timer(key);
    }

    /// Sends the next frame of the socket's data, or its end. Returns whether there was any.
    fn send_next(
        &mut self,
        key: u32,
        offset: u32,
        most: u32,
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) -> io::Result<bool> {
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return Ok(false);
        };
        let (Kind::Stream(stream), tuple) = (&mut endpoint.socket, endpoint.tuple) else {
            return Ok(false);
        };
        let Some(socket) = &stream.socket else {
            stream.has_more = false;
            return Ok(false);
        };
        let skipped = match stream.peeks_at {
            Some(at) if at == offset => 0,
            Some(_) if system::peek_at(socket, offset) => {
                stream.peeks_at = Some(offset);
                0
            }
            _ => offset as usize,
        };
        if skipped > self.scratch.len() {
            // There is more, and an acknowledgement brings it within reach.
            return Ok(false);
        }
        let start = L3_START + headers_len(Version::of(tuple.remote));
        let into = &mut self.buffer[start..start + most as usize];
        // Known before the look: what is behind the skipped bytes then is the end.
        let hung_up = stream.hung_up && skipped > 0;
        let got = match system::peek(socket, skipped, &mut self.scratch, into) {
            Ok(got) => got as u32,
            Err(error) if hung_up && error.raw_os_error() == Some(Errno::EAGAIN as i32) => 0,
            Err(error) if error.raw_os_error() == Some(Errno::EAGAIN as i32) => {
                stream.has_more = false;
                return Ok(false);
            }
            Err(error) if error.raw_os_error() == Some(Errno::EINTR as i32) => return Ok(true),
            Err(error) => return Err(error),
        };
        if got == 0 {
            stream.has_more = false;
            let fin = stream.connection.send_fin(now_ns);
            if let Some(header) = fin {
                self.write_of(key, &header, guest);
            }
            return Ok(false);
        }
        stream.peeks_at = stream.peeks_at.map(|at| at + got);
        let room = stream.room();
        let mss = stream.connection.mss();
        let header = stream.connection.send(got, Some(room), now_ns);
        self.write(&tuple, &header, got as usize, mss, guest);
        Ok(true)
    }

    /// Has an event tell when the send queue has room again, if the guest may wait for that.
    fn wait_for_room(&mut self, key: u32, epoll: &Epoll) {
        let Some(stream) = self.stream(key) else {
            return;
        };
        let Some(socket) = &stream.socket else {
            return;
        };
        let is_low = stream.room < stream.queue_len / LOW_ROOM_PART;
        if stream.waits_for_room
            || !stream.connection.is_short_of_room()
            || !is_low && !stream.connection.has_turned_away()
        {
            return;
        }
        // Asked anew, the kernel notes that somebody waits, or reports at once that there is room.
        let asked = epoll.modify(socket, &mut EpollEvent::new(EVENTS, key.into()));
        stream.waits_for_room = asked.is_ok();
    }

    /// After an event: has the connection send what it owes, and its timer run.
    fn settle(&mut self, key: u32) {
        let Some(stream) = self.stream(key) else {
            return;
        };
        if stream.connection.state() == State::Closed {
            return self.remove(key);
        }
        if stream.connection.owes_acknowledgement() || stream.has_more {
            self.queue(key);
        }
        self.settle_timer(key);
    }

    fn settle_timer(&mut self, key: u32) {
        let due_ns = self
            .stream(key)
            .and_then(|stream| stream.connection.due_ns());
        if let Some(due_ns) = due_ns {
            self.schedule(key, due_ns);
        }
    }

    /// Ends a connection whose server refused, reset or can't be reached.
    fn reset_guest(&mut self, key: u32, guest: &mut impl ToGuest) {
        if let Some(stream) = self.stream(key) {
            let header = stream.connection.reset();
            self.write_of(key, &header, guest);
        }
        self.abort(key);
    }

    fn write_of(&mut self, key: u32, header: &Header, guest: &mut impl ToGuest) {
        let Some(tuple) = self.endpoints.get(&key).map(|endpoint| endpoint.tuple) else {
            return;
        };
        if self.write(&tuple, header, 0, u16::MAX, guest) == Delivered::NoFlow {
            // Cut, or ended by its silence: the sweep finds those that say nothing.
            self.abort(key);
        }
    }

    /// Writes a segment, whose payload is in its place in the buffer.
    fn write(
        &mut self,
        tuple: &FlowTuple,
        header: &Header,
        payload_len: usize,
        mss: u16,
        guest: &mut impl ToGuest,
    ) -> Delivered {
        let end = L3_START + header.headers_len(Version::of(tuple.remote)) + payload_len;
        let (from, to) = (tuple.remote_addr(), tuple.local_addr());
        let l3 = &mut self.buffer[L3_START..end];
        let vnet: VirtioNetHdr = write_headers(l3, from, to, header, mss);
        guest.deliver(vnet, &mut self.buffer[..end])
    }
}

fn stream_of(endpoints: &mut HashMap<u32, Endpoint>, key: u32) -> Option<&mut Stream> {
    match &mut endpoints.get_mut(&key)?.socket {
        Kind::Stream(stream) => Some(stream),
        Kind::Datagrams(_) => None,
    }
}

fn send_to(socket: &OwnedFd, bytes: &[u8]) -> io::Result<u32> {
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    loop {
        match send(socket.as_raw_fd(), bytes, flags) {
            Ok(taken) => return Ok(taken as u32),
            Err(Errno::EAGAIN | Errno::ENOBUFS) => return Ok(0),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
#[path = "stream_test.rs"]
mod tests;
