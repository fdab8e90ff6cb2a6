//! The state machine toward the guest (`userspace-nat/src/tcp`), beside a model of RFC 9293's states.
//!
//! Input: `initial (8) | step …`. A step is a byte that says what happens, and its operands: a segment
//! of the guest, near what is expected; events of the host's socket; the time. The model has sequence
//! numbers and states of its own, from the RFC's text, and no code of the machine's. Numbers of the
//! guest and of the server's stream are compared at each step, and each header that comes out is read as
//! a guest would. The model knows timestamps (RFC 7323), if the SYN has them: which segments are too old,
//! what is echoed, and that our time does not go back. Selective acknowledgements (RFC 2018) are any near
//! what was sent: nothing beyond it or behind what is acknowledged is sent for them.
mod model;

use slipgate_abi::tcp::Flags;
use userspace_nat::packet::Version;
use userspace_nat::tcp::{
    Connection, Due, GIVE_UP_AFTER, Header, MOST_RETRANSMISSION_NS, Received, SackBlocks, Segment,
    State, SynOptions, TIME_WAIT_NS, Timestamps,
};

use self::model::{Model, Reply, before};
use crate::tape::Tape;

/// Steps of an input at most.
const MOST_STEPS: usize = 512;
/// Bytes of the server at most: sequence numbers stay within half of their space.
const MOST_BYTES: u32 = 1 << 24;
/// By how much a window may seem to go back, bytes: what its scale rounds off.
const ROUNDED: u32 = 255;

/// Passes a connection's life.
pub fn tcp(input: &[u8]) {
    let mut tape = Tape::new(input);
    let [theirs, ours] = [
        u32::from_be_bytes(tape.array()),
        u32::from_be_bytes(tape.array()),
    ];
    let knobs = tape.u8();
    let options = SynOptions {
        mss: (knobs & 1 != 0).then(|| tape.u16()),
        window_scale: (knobs & 2 != 0).then(|| tape.u8() % 15),
        sack_permitted: knobs & 4 != 0,
    };
    let timestamps = (knobs & 8 != 0).then(|| Timestamps {
        value: u32::from_be_bytes(tape.array()),
        echo: 0,
    });
    let syn = Segment {
        sequence: theirs,
        flags: Flags::SYN,
        window: tape.u16(),
        options,
        timestamps,
        ..Segment::default()
    };
    let mut pair = Pair::new(&syn, ours);
    for _ in 0..MOST_STEPS {
        if tape.is_at_end() {
            break;
        }
        pair.step(&mut tape);
        pair.compare();
    }
    pair.falls_silent();
}

/// The machine and the model, and the host's socket between them.
struct Pair {
    machine: Connection,
    model: Model,
    now_ns: u64,
    /// Bytes of the server in the socket's queue, and whether no more come.
    queued: u32,
    is_ended: bool,
    /// All bytes that the server has sent.
    served: u32,
}

impl Pair {
    fn new(syn: &Segment, ours: u32) -> Self {
        Self {
            machine: Connection::new(Version::V4, syn, ours),
            model: Model::new(syn, ours),
            now_ns: 1,
            queued: 0,
            is_ended: false,
            served: 0,
        }
    }

    fn step(&mut self, tape: &mut Tape<'_>) {
        let is_up = !matches!(self.model.state, State::Connecting | State::Closed);
        match tape.u8() % 12 {
            // What a guest would send next, in order.
            0 => {
                let len = tape.u16().into();
                let fin = tape.u8() & 1 != 0;
                let flags = if fin {
                    Flags::ACK | Flags::FIN
                } else {
                    Flags::ACK
                };
                self.segment(
                    self.model.next_from_guest,
                    self.model.sent,
                    flags,
                    8_000,
                    len,
                    tape,
                );
            }
            // Anything near.
            1..=3 => {
                let near = |tape: &mut Tape<'_>| i32::from(tape.u16() as i16) as u32;
                let sequence = self.model.next_from_guest.wrapping_add(near(tape));
                let from = if tape.u8() & 1 != 0 {
                    self.model.sent
                } else {
                    self.model.unacknowledged
                };
                let acknowledgement = from.wrapping_add(near(tape));
                let (flags, window, len) = (tape.u8(), tape.u16(), tape.u16());
                self.segment(sequence, acknowledgement, flags, window, len.into(), tape);
            }
            // An acknowledgement of something under way.
            4 => {
                let under_way = self.model.sent.wrapping_sub(self.model.unacknowledged);
                let some = u32::from(tape.u16()).min(under_way);
                let to = self.model.unacknowledged.wrapping_add(some);
                let window = tape.u16();
                self.segment(self.model.next_from_guest, to, Flags::ACK, window, 0, tape);
            }
            5 if self.model.state == State::Connecting => {
                let room = tape.u16().into();
                let header = self.machine.connected(room, self.now_ns);
                self.model.recent_ns = self.now_ns;
                self.model.state = State::SynReceived;
                self.model.sent = self.model.initial.wrapping_add(1);
                self.model.announces(room);
                assert_eq!(header.flags, Flags::SYN | Flags::ACK);
                assert_eq!(header.sequence, self.model.initial);
                assert_eq!(header.acknowledgement, self.model.next_from_guest);
                assert_eq!(header.sack_permitted, self.model.sack_permitted);
                self.read_times(&header);
                assert_eq!(
                    header.window_scale.map(|it| it.is_some()),
                    Some(self.model.scales)
                );
            }
            6 => {
                let more = u32::from(tape.u16());
                if !self.is_ended && self.served + more < MOST_BYTES {
                    self.queued += more;
                    self.served += more;
                }
            }
            7 => self.is_ended = true,
            8 if is_up => self.send(tape),
            9 if is_up && self.machine.owes_acknowledgement() => {
                let room = u32::from(tape.u16()) << (tape.u8() % 8);
                self.model.announces(room);
                let header = self.machine.acknowledge(room);
                assert!(!self.machine.owes_acknowledgement());
                self.read(&header, Flags::ACK);
            }
            10 if is_up && self.machine.has_turned_away() => {
                let room = tape.u16().into();
                self.model.turned_away = false;
                self.model.announces(room);
                let (header, times) = self.machine.reopen(room);
                assert_eq!(times, 4, "three duplicates behind the first");
                self.read(&header, Flags::ACK);
            }
            11 => self.time(tape),
            // The host's connection is refused, reset, or cut.
            _ if tape.u8() == 7 => {
                let was = self.model.state;
                let header = self.machine.reset();
                assert_eq!(header.flags, Flags::RST | Flags::ACK);
                let sequence = if was == State::Connecting {
                    0
                } else {
                    self.model.sent
                };
                assert_eq!(header.sequence, sequence);
                assert_eq!(header.acknowledgement, self.model.next_from_guest);
                self.model.state = State::Closed;
            }
            _ => {}
        }
    }

    /// A segment of the guest comes.
    fn segment(
        &mut self,
        sequence: u32,
        acknowledgement: u32,
        flags: u8,
        window: u16,
        payload_len: u32,
        tape: &mut Tape<'_>,
    ) {
        let segment = Segment {
            sequence,
            acknowledgement,
            flags,
            window,
            payload_len,
            options: SynOptions::default(),
            timestamps: self.timestamps(tape),
            sack: self.sack(tape),
        };
        let expected = self.model.arrives(&segment, self.now_ns);
        let received = self.machine.receive(&segment, self.now_ns);
        assert_eq!(received.host, expected.host, "{segment:?}");
        assert_eq!(received.acknowledged, expected.acknowledged, "{segment:?}");
        match (received.reply, expected.reply) {
            (None, Reply::Nothing) => {}
            (Some(header), Reply::Reset) => {
                assert!(header.flags & Flags::RST != 0, "{segment:?} {header:?}");
                let at = if segment.has(Flags::ACK) {
                    acknowledgement
                } else {
                    0
                };
                assert_eq!(header.sequence, at, "{segment:?}");
            }
            (Some(header), Reply::Syn) => {
                self.read_times(&header);
                assert_eq!(header.flags, Flags::SYN | Flags::ACK, "{segment:?}");
                assert_eq!(header.sequence, self.model.initial);
            }
            (Some(header), Reply::Acknowledgement) => self.read(&header, Flags::ACK),
            (reply, expected) => panic!("{reply:?}, not {expected:?}, to {segment:?}"),
        }
        // What is acknowledged leaves the socket's queue, and was in it.
        self.queued = self
            .queued
            .checked_sub(received.acknowledged)
            .expect("the guest acknowledged what was sent");
        self.deliver(&segment, &received, tape);
    }

    /// Timestamps of a guest's segment: near its last ones, or none.
    fn timestamps(&self, tape: &mut Tape<'_>) -> Option<Timestamps> {
        let recent = self.model.recent?;
        let value = match tape.u8() {
            0..=191 => recent.wrapping_add(tape.u8().into()),
            192..=223 => recent.wrapping_sub(tape.u8().into()),
            224..=239 => u32::from_be_bytes(tape.array()),
            240.. => return None,
        };
        let echo = self
            .model
            .our_time
            .unwrap_or(0)
            .wrapping_sub(tape.u8().into());
        Some(Timestamps { value, echo })
    }

    /// Blocks that the guest says it has.
    fn sack(&self, tape: &mut Tape<'_>) -> SackBlocks {
        let mut blocks = SackBlocks::default();
        for _ in 0..tape.u8() % 8 {
            let first = self.model.unacknowledged.wrapping_add(tape.u16().into());
            let first = first.wrapping_sub(16);
            blocks.push((first, first.wrapping_add(tape.u16().into())));
        }
        blocks
    }

    /// The socket takes some of what the guest sent.
    fn deliver(&mut self, segment: &Segment, received: &Received, tape: &mut Tape<'_>) {
        let part = &received.deliver;
        if part.is_empty() && !received.fin {
            return;
        }
        assert!(self.model.is_receiving(), "{segment:?}");
        let at = segment.sequence.wrapping_add(part.start);
        assert_eq!(at, self.model.next_from_guest, "in order: {segment:?}");
        assert!(part.start <= part.end && part.end <= segment.payload_len);
        let end = segment.sequence.wrapping_add(part.end);
        let edge = self.model.furthest_edge;
        assert!(!before(edge, end), "beyond every window: {segment:?}");
        assert!(
            !received.fin || part.end == segment.payload_len,
            "{segment:?}"
        );
        let len = part.len() as u32;
        let taken = if tape.u8() & 3 == 0 {
            len.min(tape.u16().into())
        } else {
            len
        };
        let is_last = self.machine.taken(received, taken, self.now_ns);
        assert_eq!(is_last, received.fin && taken == len);
        self.model.turned_away |= taken < len;
        self.model.takes(taken, is_last);
    }

    /// The socket has something, or its end, for the guest.
    fn send(&mut self, tape: &mut Tape<'_>) {
        let Some(sendable) = self.machine.sendable() else {
            self.machine.blocked(self.now_ns);
            return;
        };
        assert!(self.model.may_send(), "{:?}", self.model.state);
        assert!(sendable.most > 0);
        assert_eq!(
            sendable.options_len,
            if self.model.recent.is_some() { 12 } else { 0 }
        );
        let left = self.queued.checked_sub(sendable.offset);
        let left = left.expect("the place is within the queue");
        let bytes = left.min(sendable.most).min(u32::from(tape.u16()).max(1));
        if bytes > 0 {
            let room = (tape.u8() & 1 != 0).then(|| u32::from(tape.u16()));
            if let Some(room) = room {
                self.model.announces(room);
            }
            let header = self.machine.send(bytes, room, self.now_ns);
            let at = self.model.unacknowledged.wrapping_add(sendable.offset);
            assert_eq!(header.sequence, at);
            self.read_at(&header, Flags::ACK | 8);
            let end = header.sequence.wrapping_add(bytes);
            assert!(
                !before(self.model.their_edge, end),
                "beyond every window of the guest's"
            );
            self.model.sends(end);
        } else if self.is_ended {
            let Some(header) = self.machine.send_fin(self.now_ns) else {
                return;
            };
            self.read_at(&header, Flags::ACK | Flags::FIN);
            // Behind all of the server's bytes.
            let end = self.model.unacknowledged.wrapping_add(self.queued);
            assert_eq!(header.sequence, end);
            self.model.sends_fin(header.sequence);
        }
    }

    fn time(&mut self, tape: &mut Tape<'_>) {
        self.now_ns += u64::from(tape.u16()) << (tape.u8() % 24);
        let due = self.machine.on_time(self.now_ns);
        self.due(due);
    }

    fn due(&mut self, due: Due) {
        match due {
            Due::Nothing | Due::Resend => {}
            Due::Send(header) if self.model.state == State::SynReceived => {
                self.read_times(&header);
                assert_eq!(header.flags, Flags::SYN | Flags::ACK);
                assert_eq!(header.sequence, self.model.initial);
            }
            // A byte that the guest has.
            Due::Send(header) => {
                let first = self.model.unacknowledged;
                assert_eq!(header.sequence, first.wrapping_sub(1));
                self.read_at(&header, Flags::ACK);
            }
            Due::GiveUp(header) => {
                assert!(header.flags & Flags::RST != 0);
                self.model.state = State::Closed;
            }
            Due::Forget => {
                assert!(matches!(self.model.state, State::TimeWait | State::Closed));
                self.model.state = State::Closed;
            }
        }
    }

    /// Reads a header that is no segment of the stream's.
    fn read(&mut self, header: &Header, flags: u8) {
        assert_eq!(header.sequence, self.model.sent, "{header:?}");
        self.read_at(header, flags);
    }

    /// Reads a header as the guest does.
    fn read_at(&mut self, header: &Header, flags: u8) {
        assert_eq!(header.flags, flags, "{header:?}");
        assert_eq!(
            header.acknowledgement, self.model.next_from_guest,
            "{header:?}"
        );
        assert_eq!(header.window_scale, None);
        assert!(header.sack.is_empty(), "nothing is kept here");
        self.read_times(header);
        let shift = if self.model.scales { 8 } else { 0 };
        let edge = header
            .acknowledgement
            .wrapping_add(u32::from(header.window) << shift);
        assert!(!before(self.model.furthest_edge, edge), "{header:?}");
        if let Some(last) = self.model.read_edge.filter(|_| self.model.is_receiving()) {
            let back = last.wrapping_sub(edge);
            assert!(
                !before(edge, last) || back <= ROUNDED,
                "it shrank: {header:?}"
            );
        }
        self.model.read_edge = Some(edge);
    }

    /// Reads the timestamps of a header that acknowledges something.
    fn read_times(&mut self, header: &Header) {
        self.model.acknowledged = header.acknowledgement;
        let echo = header.timestamps.map(|times| times.echo);
        assert_eq!(echo, self.model.recent, "{header:?}");
        if let (Some(times), Some(last)) = (header.timestamps, self.model.our_time) {
            assert!(!before(times.value, last), "our time went back: {header:?}");
        }
        self.model.our_time = header.timestamps.map(|times| times.value);
    }

    fn compare(&self) {
        assert_eq!(self.machine.state(), self.model.state);
        assert_eq!(self.machine.has_turned_away(), self.model.turned_away);
        assert_eq!(self.machine.is_receiving(), self.model.is_receiving());
        if self.model.is_awaiting() {
            assert!(
                self.machine.due_ns().is_some(),
                "what is under way has a timer"
            );
        }
    }

    /// Nobody says anything more: the connection ends, or has nothing under way.
    fn falls_silent(&mut self) {
        for _ in 0..2 * GIVE_UP_AFTER {
            let Some(due_ns) = self.machine.due_ns() else {
                break;
            };
            let longest = MOST_RETRANSMISSION_NS.max(TIME_WAIT_NS);
            assert!(due_ns <= self.now_ns + longest, "it waits for too long");
            self.now_ns = self.now_ns.max(due_ns);
            let due = self.machine.on_time(self.now_ns);
            self.due(due);
            self.compare();
        }
        assert_eq!(self.machine.due_ns(), None, "it gives up");
        assert!(!self.model.is_awaiting());
    }
}
