//! State of one connection toward the guest.
mod opening;

use std::ops::Range;

use slipgate_abi::tcp::Flags;

use super::{
    before,
    wire::{Header, PSH, Segment, most_payload},
};
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    packet::Version,
};

/// First wait for an acknowledgement, ns.
pub const RETRANSMISSION_NS: u64 = 200 * MILLISECOND_NS;
/// Longest wait for an acknowledgement, ns: each is twice the one before.
pub const MOST_RETRANSMISSION_NS: u64 = 60 * SECOND_NS;
/// Waits without an acknowledgement after which the guest is given up: some ten minutes, as Linux
/// has it.
pub const GIVE_UP_AFTER: u32 = 16;
/// Time for which a connection that the server ended first is remembered, ns. Nothing on a guest's
/// link is older than what its queues hold.
pub const TIME_WAIT_NS: u64 = 10 * SECOND_NS;

/// Shift of our windows, if the guest offers window scaling: up to 16 MiB.
const OUR_SCALE: u8 = 8;
/// Returns the MSS of a guest that announces none (RFC 9293 section 3.7.1).
const fn default_mss(version: Version) -> u16 {
    match version {
        Version::V4 => 536,
        Version::V6 => 1_220,
    }
}
/// Segments that one frame becomes at most: a guest that announces a tiny MSS gets short frames.
const MOST_SEGMENTS: u32 = 128;
/// Duplicate acknowledgements that mean a loss (RFC 5681 section 3.2).
const DUPLICATES: u8 = 3;

/// States of RFC 9293 section 3.3.2. `Connecting` is before our SYN of a connection that the guest
/// opens: the host's connection is under way. `SynSent` is of one that the host opens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[expect(missing_docs, reason = "RFC 9293 describes them")]
pub enum State {
    Connecting,
    SynSent,
    SynReceived,
    Established,
    CloseWait,
    LastAck,
    FinWait1,
    FinWait2,
    Closing,
    TimeWait,
    Closed,
}

/// What a segment means for the host's socket, besides the payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Host {
    /// Nothing.
    #[default]
    Stays,
    /// The guest reset the connection: reset the socket's.
    Reset,
    /// Both sides have ended: close the socket.
    Closes,
}

/// What came of a segment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Received {
    /// Part of the segment's payload that is next for the socket, bytes.
    pub deliver: Range<u32>,
    /// Whether the guest's FIN is right behind that part.
    pub fin: bool,
    /// Bytes that the guest acknowledged: they are to be taken out of the socket's queue.
    pub acknowledged: u32,
    /// Whether the guest has lost something: what is sendable is to be sent, again.
    pub resend: bool,
    /// What to do to the socket.
    pub host: Host,
    /// Segment to send at once, whose acknowledgement is no ordinary one.
    pub reply: Option<Header>,
}

/// Place of the next bytes for the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sendable {
    /// Bytes in the socket's queue before them, which the guest has not acknowledged.
    pub offset: u32,
    /// Most bytes to send in one frame.
    pub most: u32,
}

/// What is due at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Due {
    /// Nothing.
    Nothing,
    /// This segment is to be sent: our SYN again, or a probe of a closed window.
    Send(Header),
    /// What is sendable is to be sent: the guest has not acknowledged what was.
    Resend,
    /// The guest does not answer: tell it and the socket.
    GiveUp(Header),
    /// The connection is over and may be forgotten.
    Forget,
}

/// One connection.
#[derive(Clone, Debug)]
pub struct Connection {
    state: State,
    /// Next sequence number of the guest (RCV.NXT).
    next_from_guest: u32,
    /// Sequence number behind the window that was announced last. It never goes back.
    edge: u32,
    /// Shifts of our windows and of the guest's, if both scale.
    scales: Option<(u8, u8)>,
    mss: u16,
    /// Most payload that a packet carries, whatever the guest announces.
    most_mss: u16,
    /// Most payload in one frame, bytes.
    most_payload: u32,
    /// Whether an acknowledgement is owed.
    owes_ack: bool,
    /// Whether bytes were turned away that the guest takes for under way.
    turned_away: bool,
    /// First sequence number that the guest has not acknowledged (SND.UNA).
    unacknowledged: u32,
    /// Next sequence number to send (SND.NXT).
    next: u32,
    /// Sequence number behind all that was sent so far.
    sent: u32,
    /// Sequence number of our FIN, once it was sent.
    fin: Option<u32>,
    /// The guest's window, bytes (SND.WND), and the segment that announced it (SND.WL1, SND.WL2).
    window: u32,
    window_by: (u32, u32),
    duplicates: u8,
    /// Sequence number up to which a loss is being repaired; further duplicates mean the same loss.
    repairing: Option<u32>,
    due_ns: Option<u64>,
    /// Waits since the guest last acknowledged something new, by which the next is longer.
    waits: u32,
    /// Waits since it was last heard.
    unheard: u32,
}

impl Connection {
    /// Takes a guest's SYN. `initial`: our initial sequence number.
    pub fn new(version: Version, syn: &Segment, initial: u32) -> Self {
        let first = syn.sequence.wrapping_add(1);
        Self {
            next_from_guest: first,
            edge: first,
            scales: syn.options.window_scale.map(|theirs| (OUR_SCALE, theirs)),
            mss: syn
                .options
                .mss
                .filter(|mss| *mss > 0)
                .unwrap_or(default_mss(version)),
            // That of a SYN is never scaled.
            window: syn.window.into(),
            window_by: (syn.sequence, initial),
            ..Self::at(State::Connecting, version, initial)
        }
    }

    /// A connection that has heard nothing of the guest yet. `initial`: our initial sequence number.
    fn at(state: State, version: Version, initial: u32) -> Self {
        Self {
            state,
            next_from_guest: 0,
            edge: 0,
            scales: None,
            mss: default_mss(version),
            most_mss: u16::MAX,
            most_payload: most_payload(version),
            owes_ack: false,
            turned_away: false,
            unacknowledged: initial,
            next: initial,
            sent: initial,
            fin: None,
            window: 0,
            window_by: (0, initial),
            duplicates: 0,
            repairing: None,
            due_ns: None,
            waits: 0,
            unheard: 0,
        }
    }

    /// Returns the state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Returns the most payload that the guest takes in a packet, bytes.
    pub fn mss(&self) -> u16 {
        self.mss
    }

    /// Returns the time at which [`Connection::on_time`] has something to do, ns.
    pub fn due_ns(&self) -> Option<u64> {
        self.due_ns
    }

    /// Returns the next sequence number of the guest (RCV.NXT).
    pub fn next_from_guest(&self) -> u32 {
        self.next_from_guest
    }

    /// Returns the window that was announced last and is not used yet, bytes.
    pub fn window_left(&self) -> u32 {
        self.edge.wrapping_sub(self.next_from_guest)
    }

    /// Returns the number of bytes and FINs from the first that the guest has not acknowledged to the
    /// next to send.
    pub fn under_way(&self) -> u32 {
        self.next.wrapping_sub(self.unacknowledged)
    }

    /// Whether the guest is to answer: it has not acknowledged something, or its window is probed.
    pub fn awaits_guest(&self) -> bool {
        self.due_ns.is_some() && !matches!(self.state, State::TimeWait | State::Closed)
    }

    /// Has no packet carry more payload than this, whatever the guest has announced: what its link
    /// takes.
    pub fn limit_mss(&mut self, most: u16) {
        self.most_mss = most.max(1);
        self.mss = self.mss.min(self.most_mss);
    }

    /// Whether the guest may still send data.
    pub fn is_receiving(&self) -> bool {
        use State::{Established, FinWait1, FinWait2};
        matches!(self.state, Established | FinWait1 | FinWait2)
    }

    /// Whether more of the socket's data may be sent.
    fn is_sending(&self) -> bool {
        use State::{CloseWait, Closing, Established, FinWait1, LastAck};
        // With a FIN sent, something of it or before it may have to be sent again.
        matches!(
            self.state,
            Established | CloseWait | FinWait1 | Closing | LastAck
        )
    }

    /// The host's connection stands: returns our SYN. `room`: of the socket's send queue, bytes.
    pub fn connected(&mut self, room: u32, now_ns: u64) -> Header {
        self.state = State::SynReceived;
        self.open_window(room.min(u16::MAX.into()));
        self.next = self.unacknowledged.wrapping_add(1);
        self.sent = self.next;
        self.wait_again(now_ns);
        self.syn()
    }

    fn syn(&self) -> Header {
        let window = self.edge.wrapping_sub(self.next_from_guest);
        Header {
            sequence: self.unacknowledged,
            window: window.min(u16::MAX.into()) as u16,
            window_scale: Some(self.scales.map(|(ours, _)| ours)),
            ..self.header(Flags::SYN | Flags::ACK)
        }
    }

    /// Ends the connection by an RST to the guest: the host's was refused, reset, or is cut.
    pub fn reset(&mut self) -> Header {
        let flags = Flags::RST | Flags::ACK;
        let reset = match self.state {
            // The guest has said nothing that could be acknowledged.
            State::SynSent => Header {
                sequence: self.sent,
                acknowledgement: 0,
                window: 0,
                ..self.header(Flags::RST)
            },
            // RFC 9293 section 3.10.7.1: the SYN had no acknowledgement to begin at.
            State::Connecting => Header {
                sequence: 0,
                window: 0,
                ..self.header(flags)
            },
            _ => Header {
                sequence: self.sent,
                ..self.header(flags)
            },
        };
        self.close();
        reset
    }

    /// Takes a segment of the guest.
    pub fn receive(&mut self, segment: &Segment, now_ns: u64) -> Received {
        let mut received = Received::default();
        if self.state == State::Closed {
            received.reply = super::reset_for(segment);
            return received;
        }
        if self.state == State::SynSent {
            return self.receive_answer(segment);
        }
        if segment.has(Flags::RST) {
            return self.receive_reset(segment);
        }
        if segment.has(Flags::SYN) {
            let is_first = segment.sequence.wrapping_add(1) == self.next_from_guest;
            received.reply = match self.state {
                State::Connecting => None,
                State::SynReceived if is_first && !segment.has(Flags::ACK) => Some(self.syn()),
                // A challenge (RFC 5961 section 4).
                _ => Some(self.acknowledgement()),
            };
            return received;
        }
        if self.state == State::Connecting || !segment.has(Flags::ACK) {
            return received;
        }
        self.unheard = 0;
        if self.state == State::SynReceived {
            if segment.acknowledgement != self.sent {
                received.reply = super::reset_for(segment);
                return received;
            }
            self.state = State::Established;
            self.unacknowledged = self.sent;
            self.waits = 0;
            self.rest();
        } else if before(self.sent, segment.acknowledgement) {
            // Of what was never sent (RFC 9293 section 3.10.7.4).
            self.owes_ack = true;
            return received;
        }
        self.receive_acknowledgement(segment, &mut received, now_ns);
        self.receive_payload(segment, &mut received);
        received
    }

    fn receive_reset(&mut self, segment: &Segment) -> Received {
        let mut received = Received::default();
        let behind = segment.sequence.wrapping_sub(self.next_from_guest);
        let window = self.edge.wrapping_sub(self.next_from_guest);
        if behind == 0 {
            received.host = match self.state {
                State::TimeWait => Host::Closes,
                _ => Host::Reset,
            };
            self.close();
        } else if behind < window {
            // RFC 5961 section 3: one that was guessed, or the guest sends the right one now.
            received.reply = Some(self.acknowledgement());
        }
        received
    }

    fn receive_acknowledgement(&mut self, segment: &Segment, received: &mut Received, now_ns: u64) {
        let to = segment.acknowledgement;
        let window = u32::from(segment.window) << self.scales.map_or(0, |(_, theirs)| theirs);
        let (sequence, acknowledgement) = self.window_by;
        // An old acknowledgement's window began elsewhere (RFC 9293 section 3.10.7.4).
        let is_newer = !before(to, self.unacknowledged)
            && (before(sequence, segment.sequence)
                || sequence == segment.sequence && !before(to, acknowledgement));
        let is_update = is_newer && window != self.window;
        if is_newer {
            self.window = window;
            self.window_by = (segment.sequence, to);
        }
        if before(self.unacknowledged, to) {
            let mut bytes = to.wrapping_sub(self.unacknowledged);
            let fin_acknowledged = self.fin.is_some_and(|fin| before(fin, to));
            bytes -= u32::from(fin_acknowledged);
            received.acknowledged = bytes;
            self.unacknowledged = to;
            if before(self.next, to) {
                self.next = to;
            }
            self.duplicates = 0;
            self.repairing = self.repairing.filter(|until| before(to, *until));
            self.waits = 0;
            self.rest();
            if self.unacknowledged != self.sent {
                self.wait_again(now_ns);
            }
            if fin_acknowledged {
                self.fin_is_acknowledged(received, now_ns);
            }
        } else if to == self.unacknowledged
            && segment.payload_len == 0
            && !segment.has(Flags::FIN)
            && !is_update
            && self.unacknowledged != self.sent
        {
            self.duplicates = self.duplicates.saturating_add(1);
            if self.duplicates == DUPLICATES && self.repairing.is_none() {
                self.repairing = Some(self.sent);
                self.next = self.unacknowledged;
                received.resend = true;
            }
        }
        if self.window > 0 && self.unacknowledged == self.sent {
            // No probe is due any more, and the waits for the next frame are none of the probes'.
            self.rest();
            self.waits = 0;
            if self.state == State::TimeWait {
                self.due_ns = Some(now_ns + TIME_WAIT_NS);
            }
        }
    }

    fn fin_is_acknowledged(&mut self, received: &mut Received, now_ns: u64) {
        match self.state {
            State::FinWait1 => self.state = State::FinWait2,
            State::Closing => self.wait_for_the_end(received, now_ns),
            State::LastAck => {
                received.host = Host::Closes;
                self.close();
            }
            _ => {}
        }
    }

    fn wait_for_the_end(&mut self, received: &mut Received, now_ns: u64) {
        self.state = State::TimeWait;
        self.due_ns = Some(now_ns + TIME_WAIT_NS);
        received.host = Host::Closes;
    }

    fn receive_payload(&mut self, segment: &Segment, received: &mut Received) {
        let fin = segment.has(Flags::FIN);
        let len = segment.payload_len;
        let old = self.next_from_guest.wrapping_sub(segment.sequence);
        if len == 0 && !fin {
            // Behind or before what is next it asks what that is: a keep-alive, a window probe.
            self.owes_ack |= old != 0;
            return;
        }
        self.owes_ack = true;
        if !self.is_receiving() || before(self.next_from_guest, segment.sequence) || old > len {
            return;
        }
        let room = self.edge.wrapping_sub(self.next_from_guest);
        let end = len.min(old.saturating_add(room));
        received.deliver = old..end;
        received.fin = fin && end == len;
    }

    /// The socket took so many bytes of what was received. Returns whether the guest has sent its
    /// last byte: no more is to be written to the socket.
    pub fn taken(&mut self, received: &Received, bytes: u32, now_ns: u64) -> bool {
        self.next_from_guest = self.next_from_guest.wrapping_add(bytes);
        if bytes < received.deliver.len() as u32 {
            self.turned_away = true;
            return false;
        }
        if !received.fin {
            return false;
        }
        self.next_from_guest = self.next_from_guest.wrapping_add(1);
        self.edge = match before(self.edge, self.next_from_guest) {
            true => self.next_from_guest,
            false => self.edge,
        };
        match self.state {
            State::Established => self.state = State::CloseWait,
            State::FinWait1 => self.state = State::Closing,
            State::FinWait2 => {
                self.state = State::TimeWait;
                self.due_ns = Some(now_ns + TIME_WAIT_NS);
            }
            _ => {}
        }
        true
    }

    /// Whether an acknowledgement is owed, for which [`Connection::acknowledge`] is to be called.
    pub fn owes_acknowledgement(&self) -> bool {
        self.owes_ack
    }

    /// Whether the window is smaller than a frame, so that the guest may be waiting for room.
    pub fn is_short_of_room(&self) -> bool {
        let window = self.edge.wrapping_sub(self.next_from_guest);
        self.is_receiving() && (self.turned_away || window < self.most_payload)
    }

    /// Whether bytes were turned away that the guest has not been asked for again.
    pub fn has_turned_away(&self) -> bool {
        self.turned_away
    }

    /// Returns an acknowledgement, with a window for `room` bytes.
    pub fn acknowledge(&mut self, room: u32) -> Header {
        self.open_window(if self.turned_away { 0 } else { room });
        self.owes_ack = false;
        self.acknowledgement()
    }

    /// The socket has room again, bytes. Returns an acknowledgement that says so, and how many times
    /// to send it: so often that a guest whose bytes were turned away sends them again at once.
    pub fn reopen(&mut self, room: u32) -> (Header, u8) {
        let times = if self.turned_away { 1 + DUPLICATES } else { 1 };
        self.turned_away = false;
        (self.acknowledge(room), times)
    }

    fn open_window(&mut self, room: u32) {
        let most = u32::from(u16::MAX) << self.scales.map_or(0, |(ours, _)| ours);
        let edge = self.next_from_guest.wrapping_add(room.min(most));
        if before(self.edge, edge) && self.is_receiving_or_before() {
            self.edge = edge;
        }
    }

    fn is_receiving_or_before(&self) -> bool {
        self.is_receiving()
            || matches!(
                self.state,
                State::Connecting | State::SynSent | State::SynReceived
            )
    }

    fn acknowledgement(&self) -> Header {
        self.header(Flags::ACK)
    }

    fn header(&self, flags: u8) -> Header {
        let window = self.edge.wrapping_sub(self.next_from_guest);
        let window = window >> self.scales.map_or(0, |(ours, _)| ours);
        Header {
            // Behind all that was sent: what is sent again is no reason to go back.
            sequence: self.sent,
            acknowledgement: self.next_from_guest,
            flags,
            window: window.min(u16::MAX.into()) as u16,
            window_scale: None,
        }
    }

    /// Returns the place of the next bytes for the guest, if it takes some now. If there are any,
    /// [`Connection::send`] is to be called; at the end of the server's data,
    /// [`Connection::send_fin`].
    pub fn sendable(&self) -> Option<Sendable> {
        if !self.is_sending() || self.fin.is_some_and(|fin| before(fin, self.next)) {
            return None;
        }
        let offset = self.next.wrapping_sub(self.unacknowledged);
        let room = self.window.saturating_sub(offset);
        let least = u32::from(self.mss).min(self.window / 2).max(1);
        // Small pieces only when nothing is under way (RFC 9293 section 3.8.6.2.1).
        let most = room
            .min(self.most_payload)
            .min(u32::from(self.mss) * MOST_SEGMENTS);
        (room >= least || room > 0 && offset == 0).then_some(Sendable { offset, most })
    }

    /// The next bytes for the guest wait for its window, which is probed from now on: the segment
    /// that opens it may be lost.
    pub fn blocked(&mut self, now_ns: u64) {
        if self.is_sending() && self.unacknowledged == self.sent && self.due_ns.is_none() {
            self.wait_again(now_ns);
        }
    }

    /// Returns the header for the next `bytes` of the socket's data.
    pub fn send(&mut self, bytes: u32, room: Option<u32>, now_ns: u64) -> Header {
        if let Some(room) = room {
            self.open_window(if self.turned_away { 0 } else { room });
            self.owes_ack = false;
        }
        let header = Header {
            sequence: self.next,
            ..self.header(Flags::ACK | PSH)
        };
        self.advance(bytes, now_ns);
        header
    }

    /// All of the server's data was sent, and it has ended its side. Returns our FIN.
    pub fn send_fin(&mut self, now_ns: u64) -> Option<Header> {
        if !self.is_sending() || self.fin.is_some_and(|fin| fin != self.next) {
            return None;
        }
        let header = Header {
            sequence: self.next,
            ..self.header(Flags::ACK | Flags::FIN)
        };
        self.fin = Some(self.next);
        self.advance(1, now_ns);
        self.state = match self.state {
            State::Established => State::FinWait1,
            State::CloseWait => State::LastAck,
            other => other,
        };
        Some(header)
    }

    fn advance(&mut self, numbers: u32, now_ns: u64) {
        self.next = self.next.wrapping_add(numbers);
        if before(self.sent, self.next) {
            self.sent = self.next;
        }
        if self.due_ns.is_none() {
            self.wait_again(now_ns);
        }
    }

    /// Does what is due.
    pub fn on_time(&mut self, now_ns: u64) -> Due {
        if self.due_ns.is_none_or(|due_ns| due_ns > now_ns) {
            return Due::Nothing;
        }
        self.due_ns = None;
        match self.state {
            State::TimeWait | State::Closed => {
                self.close();
                return Due::Forget;
            }
            State::Connecting => return Due::Nothing,
            State::SynSent if self.next == self.unacknowledged => {
                return Due::Send(self.first_syn(now_ns));
            }
            _ => {}
        }
        self.waits += 1;
        self.unheard += 1;
        let is_probe = self.unacknowledged == self.sent;
        // A guest that answers each probe keeps its connection, however long its window is closed.
        if self.unheard > GIVE_UP_AFTER {
            return Due::GiveUp(self.reset());
        }
        self.wait_again(now_ns);
        match self.state {
            State::SynSent => return Due::Send(self.opening_syn()),
            State::SynReceived => return Due::Send(self.syn()),
            _ => {}
        }
        // A byte that the guest has: it answers with its window (as Linux probes).
        let probe = Header {
            sequence: self.unacknowledged.wrapping_sub(1),
            ..self.acknowledgement()
        };
        if is_probe {
            return Due::Send(probe);
        }
        self.duplicates = 0;
        self.repairing = Some(self.sent);
        self.next = self.unacknowledged;
        match self.window {
            // An acknowledgement that came late has closed it over what was sent: that is sent again
            // once the guest has said what its window is.
            0 => Due::Send(probe),
            _ => Due::Resend,
        }
    }

    fn wait_again(&mut self, now_ns: u64) {
        let wait_ns = RETRANSMISSION_NS << self.waits.min(20);
        self.due_ns = Some(now_ns + wait_ns.min(MOST_RETRANSMISSION_NS));
    }

    fn rest(&mut self) {
        self.due_ns = None;
    }

    fn close(&mut self) {
        self.state = State::Closed;
        self.due_ns = None;
        self.owes_ack = false;
    }
}

#[cfg(test)]
#[path = "segments_test.rs"]
mod tests;
