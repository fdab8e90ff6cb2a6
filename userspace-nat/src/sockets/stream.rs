//! TCP connections: the state machine's driver.
use std::{io, os::fd::OwnedFd};

use hashbrown::HashMap;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use slipgate_model::FlowTuple;

use super::{
    Delivered, Endpoint, FRAMES_PER_TURN, Kind, L3_START, Sockets, ToGuest,
    pace::{ByteRate, ByteRates},
    watch,
};
use crate::{
    packet::{Packet, Version, transport::Tcp},
    payload::{Payload, Rest},
    port::VirtioNetHdr,
    space::Space,
    tcp::{
        Connection, Due, Header, Host, Next, Segment, Sendable, State, Stream, Workspace,
        headers_len, reset_for, write_headers,
    },
};

/// Events of a connection, all edge-triggered: bytes that were peeked stay readable.
const EVENTS: EpollFlags = EpollFlags::EPOLLIN
    .union(EpollFlags::EPOLLOUT)
    .union(EpollFlags::EPOLLRDHUP)
    .union(EpollFlags::EPOLLET);
impl Sockets {
    pub(super) fn take_segment(
        &mut self,
        tuple: FlowTuple,
        (packet, tcp, rest): (&Packet<'_>, &Tcp, Option<&Rest>),
        epoll: &Epoll,
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) {
        let l4 = packet.ip.payload();
        let segment = Segment::read(tcp, l4);
        let known = self.by_tuple.get(&tuple).copied();
        if tcp.is_opening_syn()
            && let Some(opened) = self.host.take_claimed(&tuple)
        {
            // A new flow has the tuple, whatever became of the one before.
            if let Some(key) = known {
                self.abort(key);
            }
            return self.begin_stream(tuple, &segment, opened, epoll, guest);
        }
        let key = match known {
            Some(key) if tcp.is_opening_syn() && self.is_over(key, &segment) => {
                self.remove(key);
                // The socket before may be one that is not closed yet: the host has one of a tuple.
                self.host.close_all();
                let opened = self.host.open(&tuple);
                return self.begin_stream(tuple, &segment, opened, epoll, guest);
            }
            Some(key) => key,
            None if tcp.is_opening_syn() => {
                let opened = self.host.open(&tuple);
                return self.begin_stream(tuple, &segment, opened, epoll, guest);
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
        let payload = Payload::new(&l4[tcp.header_len..], rest);
        let mut closed = self.host.closing();
        let workspace = Workspace {
            scratch: &mut self.scratch,
            early: &self.early,
            closed: Some(&mut closed),
        };
        let taken = stream.receive(&segment, payload, workspace, now_ns);
        drop(closed);
        let Ok(taken) = taken else {
            return self.reset_guest(key, guest);
        };
        if taken.host == Host::Reset {
            return self.abort(key);
        }
        if let Some(reply) = taken.reply {
            self.write_of(key, &reply, guest);
        }
        self.settle(key);
    }

    /// Whether a connection is over, so that another may have its tuple: the one that this SYN opens.
    fn is_over(&mut self, key: u32, syn: &Segment) -> bool {
        let stream = self.stream(key);
        stream.is_none_or(|stream| stream.connection().may_be_followed_by(syn))
    }

    pub(super) fn stream(&mut self, key: u32) -> Option<&mut Stream> {
        stream_of(&mut self.endpoints, key)
    }

    /// Begins a connection for a guest's SYN. `opened`: what the host said to its socket.
    pub(crate) fn begin_stream(
        &mut self,
        tuple: FlowTuple,
        syn: &Segment,
        opened: io::Result<OwnedFd>,
        epoll: &Epoll,
        guest: &mut impl ToGuest,
    ) {
        let version = Version::of(tuple.remote);
        let mut connection = Connection::new(version, syn, rand::random());
        let socket = match opened {
            Ok(socket) => socket,
            // The host's own table has no way there.
            Err(error) if is_unreachable(&error) => {
                return self.syn_unreachable(&tuple, syn.sequence, &error, guest);
            }
            Err(_) => {
                let reset = connection.reset();
                self.write(&tuple, &reset, 0, u16::MAX, guest);
                return;
            }
        };
        let stream = Stream::new(connection, socket);
        let key = self.add(tuple, Kind::Stream(Box::new(stream)));
        let watched = self
            .stream(key)
            .and_then(|stream| stream.socket())
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
        let Some(stream) = self.stream(key).filter(|it| it.socket().is_some()) else {
            return;
        };
        let failed = flags.intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP);
        let is_readable = flags.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP);
        let hung_up = flags.contains(EpollFlags::EPOLLRDHUP);
        if stream.connection().state() == State::Connecting {
            if failed {
                return match stream.failure() {
                    Some(error) if is_unreachable(&error) => {
                        self.tell_unreachable(key, &error, guest)
                    }
                    _ => self.reset_guest(key, guest),
                };
            }
            if !flags.contains(EpollFlags::EPOLLOUT) {
                return;
            }
            self.hold_first_window(key, guest);
            let Some(stream) = self.stream(key) else {
                return;
            };
            return match stream.connected(now_ns) {
                Ok(header) => {
                    // What comes later is an event of its own: to look for it now would be in vain.
                    if is_readable {
                        stream.readable(hung_up);
                    }
                    self.write_of(key, &header, guest);
                    self.settle(key);
                }
                Err(_) => self.reset_guest(key, guest),
            };
        }
        if failed && stream.failure().is_some() {
            return self.reset_guest(key, guest);
        }
        if is_readable {
            stream.readable(hung_up);
        }
        if flags.contains(EpollFlags::EPOLLOUT)
            && let Some((header, times)) = stream.writable(now_ns)
        {
            let is_held = stream.connection().is_window_held();
            for _ in 0..times {
                self.write_of(key, &header, guest);
            }
            if is_held {
                // The acknowledgement had the window that was left: it is opened further.
                self.queue(key);
            }
        }
        self.settle(key);
    }

    pub(super) fn stream_due(&mut self, key: u32, guest: &mut impl ToGuest, now_ns: u64) {
        let is_held = self.is_held_by_rate(key);
        let Some(stream) = self.stream(key) else {
            return;
        };
        if is_held && stream.connection_mut().waits_to_resend(now_ns) {
            return self.settle_timer(key);
        }
        match stream.on_time(now_ns) {
            Due::Nothing | Due::Resend => {}
            Due::Send(header) => self.write_of(key, &header, guest),
            Due::GiveUp(header) => {
                self.write_of(key, &header, guest);
                return self.remove(key);
            }
            Due::Forget => return self.remove(key),
        }
        self.settle(key);
    }

    /// Sends what the socket has, as far as the guest takes it, and the acknowledgement that is
    /// owed. Where the rate to the guest is limited, data waits for its turn.
    pub(super) fn stream_sends(
        &mut self,
        key: u32,
        rates: ByteRates,
        epoll: &Epoll,
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) {
        let mut frames = 0;
        if rates.to_guest.is_some() {
            self.wait_to_send(key, now_ns);
        } else {
            while let Some(stream) = self.stream(key)
                && let Some(place) = stream.sendable(now_ns)
            {
                if frames == FRAMES_PER_TURN || !guest.has_room() {
                    self.queue(key);
                    break;
                }
                match self.send_next(key, place, guest, now_ns) {
                    Ok(true) => frames += 1,
                    Ok(false) => break,
                    Err(_) => return self.reset_guest(key, guest),
                }
            }
        }
        let Some(stream) = self.stream(key) else {
            return;
        };
        if rates.from_guest.is_some() || stream.connection().is_window_held() {
            self.open_window_of(key, rates.from_guest.as_ref(), now_ns);
        }
        self.acknowledge(key, guest);
        self.wait_for_room(key, epoll);
        self.settle_timer(key);
    }

    /// Sends one frame of a stream whose rate is limited. The stream waits again if it has more.
    pub(super) fn stream_sends_one(
        &mut self,
        key: u32,
        rate: &ByteRate,
        epoll: &Epoll,
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) {
        let Some(stream) = self.stream(key) else {
            return;
        };
        let Some(mut place) = stream.sendable(now_ns) else {
            // The guest's window may have closed meanwhile: then there are probes.
            self.wait_for_room(key, epoll);
            return self.settle_timer(key);
        };
        place.most = place.most.min(rate.most_payload(stream.connection().mss()));
        match self.send_next(key, place, guest, now_ns) {
            Ok(true) => self.wait_to_send(key, now_ns),
            Ok(false) => {}
            Err(_) => return self.reset_guest(key, guest),
        }
        self.wait_for_room(key, epoll);
        self.settle_timer(key);
    }

    /// Sends the acknowledgement that a stream owes.
    fn acknowledge(&mut self, key: u32, guest: &mut impl ToGuest) {
        if let Some(stream) = self.stream(key)
            && let Some(header) = stream.acknowledgement()
        {
            self.write_of(key, &header, guest);
        }
    }

    /// Sends the next frame of the socket's data, or its end. Returns whether more may follow.
    fn send_next(
        &mut self,
        key: u32,
        place: Sendable,
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) -> io::Result<bool> {
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return Ok(false);
        };
        let (Kind::Stream(stream), tuple) = (&mut endpoint.socket, endpoint.tuple) else {
            return Ok(false);
        };
        let headers_len = headers_len(Version::of(tuple.remote)) + place.options_len;
        let start = L3_START + headers_len;
        let mss = stream.connection().mss();
        let is_bulk = stream.is_bulk() && headers_len + usize::from(mss) <= usize::from(self.mtu);
        let mut space = match is_bulk {
            true => guest.space(&tuple, headers_len, place.most as usize),
            false => None,
        };
        let mut next = match &space {
            Some(space) => stream.next(place.offset, space, &mut self.scratch, now_ns),
            None => {
                let into = &mut self.buffer[start..start + place.most as usize];
                stream.next(place.offset, into, &mut self.scratch, now_ns)
            }
        };
        // The guest's memory can't be written, and the socket has all bytes yet.
        if is_fault(&next)
            && let Some(space) = space.take()
        {
            guest.forget(space);
            let into = &mut self.buffer[start..start + place.most as usize];
            next = stream.next(place.offset, into, &mut self.scratch, now_ns);
        }
        if let Ok(Next::Frame(header, len)) = next {
            match space {
                Some(space) => self.write_in(&tuple, &header, (space, len as usize), mss, guest),
                None => self.write(&tuple, &header, len as usize, mss, guest),
            };
            return Ok(true);
        }
        if let Some(space) = space {
            guest.forget(space);
        }
        if let Next::End(header) = next? {
            self.write_of(key, &header, guest);
        }
        Ok(false)
    }

    /// Has an event tell when the send queue has room again, if the guest may wait for that.
    fn wait_for_room(&mut self, key: u32, epoll: &Epoll) {
        let Some(stream) = self.stream(key) else {
            return;
        };
        if !stream.wants_room() {
            return;
        }
        let Some(socket) = stream.socket() else {
            return;
        };
        let asked = epoll.modify(socket, &mut EpollEvent::new(EVENTS, key.into()));
        if asked.is_ok() {
            stream.waits_for_room();
        }
    }

    /// After an event: has the connection send what it owes, and its timer run.
    fn settle(&mut self, key: u32) {
        let Some(stream) = self.stream(key) else {
            return;
        };
        if stream.connection().state() == State::Closed {
            return self.remove(key);
        }
        if stream.connection().owes_acknowledgement() || stream.has_more() {
            match stream.connection().state() {
                // Nobody waits for the last one.
                State::TimeWait => self.put_off.acknowledge(key),
                _ => self.queue(key),
            }
        }
        self.settle_timer(key);
    }

    fn settle_timer(&mut self, key: u32) {
        let due_ns = self
            .stream(key)
            .and_then(|stream| stream.connection().due_ns());
        if let Some(due_ns) = due_ns {
            self.schedule(key, due_ns);
        }
    }

    /// Ends a connection whose server refused, reset or can't be reached.
    fn reset_guest(&mut self, key: u32, guest: &mut impl ToGuest) {
        if let Some(stream) = self.stream(key) {
            let header = stream.connection_mut().reset();
            self.write_of(key, &header, guest);
        }
        self.abort(key);
    }

    /// Ends a connection that the network refused before it stood, as the network would tell the guest
    /// itself: by an ICMP error about its SYN (RFC 1122 section 4.2.3.9).
    fn tell_unreachable(&mut self, key: u32, error: &io::Error, guest: &mut impl ToGuest) {
        let Some(endpoint) = self.endpoints.get(&key) else {
            return;
        };
        if let Kind::Stream(stream) = &endpoint.socket {
            let (tuple, first) = (endpoint.tuple, stream.connection().first_of_guest());
            self.syn_unreachable(&tuple, first, error, guest);
        }
        self.abort(key);
    }

    fn write_of(&mut self, key: u32, header: &Header, guest: &mut impl ToGuest) {
        let Some(tuple) = self.endpoints.get(&key).map(|endpoint| endpoint.tuple) else {
            return;
        };
        let written = self.write(&tuple, header, 0, u16::MAX, guest);
        if matches!(written, Delivered::NoFlow | Delivered::Passed) {
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

    /// As [`Self::write`], of a segment whose payload is in a space, with its length.
    fn write_in(
        &mut self,
        tuple: &FlowTuple,
        header: &Header,
        (space, len): (Space, usize),
        mss: u16,
        guest: &mut impl ToGuest,
    ) -> Delivered {
        let headers_end = L3_START + header.headers_len(Version::of(tuple.remote));
        let (from, to) = (tuple.remote_addr(), tuple.local_addr());
        // Of the payload only the length is looked at, since the checksum is the device's to complete.
        let l3 = &mut self.buffer[L3_START..headers_end + len];
        let vnet: VirtioNetHdr = write_headers(l3, from, to, header, mss);
        guest.deliver_in(vnet, &mut self.buffer[..headers_end], space, len)
    }
}

/// Whether an error means that the network has no way to the server, or that somebody on the way lets
/// nothing through.
fn is_unreachable(error: &io::Error) -> bool {
    use nix::libc::{EHOSTUNREACH, ENETUNREACH};
    matches!(error.raw_os_error(), Some(EHOSTUNREACH | ENETUNREACH))
}

/// Whether the kernel could not write where the bytes were to go.
fn is_fault(next: &io::Result<Next>) -> bool {
    let error = next.as_ref().err().and_then(io::Error::raw_os_error);
    error == Some(nix::libc::EFAULT)
}

fn stream_of(endpoints: &mut HashMap<u32, Endpoint>, key: u32) -> Option<&mut Stream> {
    match &mut endpoints.get_mut(&key)?.socket {
        Kind::Stream(stream) => Some(stream),
        Kind::Datagrams(_) => None,
    }
}

#[cfg(test)]
#[path = "stream_test.rs"]
mod tests;
