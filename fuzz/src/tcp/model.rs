//! RFC 9293's states of a connection that a guest opens, and what a segment means in each.
use slipgate_abi::tcp::Flags;
use userspace_nat::tcp::{Host, Segment, State};

/// Whether `a` is before `b` (RFC 9293 section 3.4). Of two that are half of the space apart each is.
pub(super) fn before(a: u32, b: u32) -> bool {
    a != b && b.wrapping_sub(a) <= 1 << 31
}

/// Whether a timestamp is older than another (RFC 7323 section 5.3). Of two that are half of the space apart
/// neither is.
fn is_older(a: u32, b: u32) -> bool {
    a != b && b.wrapping_sub(a) < 1 << 31
}

/// Silence after which a value of the guest means nothing: Linux's `TCP_PAWS_WRAP`, ns.
const OUTDATED_NS: u64 = 2_147 * 1_000_000_000;

/// State of the connection as RFC 9293 requires it.
pub(super) struct Model {
    pub(super) state: State,
    /// RCV.NXT, and the furthest right edge of a window that may have been announced.
    pub(super) next_from_guest: u32,
    pub(super) furthest_edge: u32,
    /// The right edge that the guest has read last.
    pub(super) read_edge: Option<u32>,
    /// Whether bytes were turned away that were not asked for again.
    pub(super) turned_away: bool,
    pub(super) initial: u32,
    /// SND.UNA, and behind all that was sent.
    pub(super) unacknowledged: u32,
    pub(super) sent: u32,
    /// The furthest right edge of the guest's windows, and their shift.
    pub(super) their_edge: u32,
    pub(super) their_scale: u8,
    /// Sequence number of our FIN.
    pub(super) fin: Option<u32>,
    pub(super) scales: bool,
    pub(super) sack_permitted: bool,
    /// TS.Recent and when it came, Last.ACK.sent, and our time in the last header; `None` without
    /// timestamps.
    pub(super) recent: Option<u32>,
    pub(super) recent_ns: u64,
    pub(super) acknowledged: u32,
    pub(super) our_time: Option<u32>,
}

/// Answer to a segment.
#[derive(Debug)]
pub(super) enum Reply {
    Nothing,
    Reset,
    Syn,
    Acknowledgement,
}

/// Required result of a segment, besides its payload.
pub(super) struct Expected {
    pub(super) host: Host,
    pub(super) acknowledged: u32,
    pub(super) reply: Reply,
}

impl Model {
    /// A connection that the guest opens by this SYN. `ours`: our initial sequence number.
    pub(super) fn new(syn: &Segment, ours: u32) -> Self {
        let first = syn.sequence.wrapping_add(1);
        Self {
            state: State::Connecting,
            next_from_guest: first,
            furthest_edge: first,
            read_edge: None,
            turned_away: false,
            their_edge: ours.wrapping_add(1).wrapping_add(syn.window.into()),
            their_scale: syn.options.window_scale.unwrap_or(0),
            initial: ours,
            unacknowledged: ours,
            sent: ours,
            fin: None,
            scales: syn.options.window_scale.is_some(),
            sack_permitted: syn.options.sack_permitted,
            recent: syn.timestamps.map(|times| times.value),
            recent_ns: 0,
            acknowledged: first,
            our_time: None,
        }
    }

    /// A segment arrives (RFC 9293 section 3.10.7; RFC 5961 sections 3 and 4).
    pub(super) fn arrives(&mut self, segment: &Segment, now_ns: u64) -> Expected {
        let only = |reply| Expected {
            host: Host::Stays,
            acknowledged: 0,
            reply,
        };
        let is_first = segment.sequence.wrapping_add(1) == self.next_from_guest;
        if self.state == State::Closed {
            return only(if segment.has(Flags::RST) {
                Reply::Nothing
            } else {
                Reply::Reset
            });
        }
        if segment.has(Flags::RST) {
            let behind = segment.sequence.wrapping_sub(self.next_from_guest);
            if behind == 0 {
                // All but our FIN was acknowledged: the guest has forgotten a connection that is over.
                let has_all = self.fin == Some(self.unacknowledged);
                let host = match self.state {
                    State::TimeWait => Host::Closes,
                    State::LastAck | State::Closing if has_all => Host::Closes,
                    _ => Host::Reset,
                };
                self.state = State::Closed;
                return Expected {
                    host,
                    ..only(Reply::Nothing)
                };
            }
            let window = self.furthest_edge.wrapping_sub(self.next_from_guest);
            return only(if behind < window {
                Reply::Acknowledgement
            } else {
                Reply::Nothing
            });
        }
        if segment.has(Flags::SYN) {
            return only(match self.state {
                State::Connecting => Reply::Nothing,
                State::SynReceived if is_first && !segment.has(Flags::ACK) => Reply::Syn,
                _ => Reply::Acknowledgement,
            });
        }
        if self.state == State::Connecting || !segment.has(Flags::ACK) {
            return only(Reply::Nothing);
        }
        // RFC 7323 section 5.3, R1: a segment that is older than the newest one is dropped, unless nothing
        // came for so long that the clock of microseconds may have wrapped.
        let is_recent = now_ns - self.recent_ns < OUTDATED_NS;
        let times = self.recent.zip(segment.timestamps);
        if times.is_some_and(|(recent, theirs)| is_older(theirs.value, recent) && is_recent) {
            return only(Reply::Nothing);
        }
        let to = segment.acknowledgement;
        if self.state == State::SynReceived {
            if to != self.sent {
                return only(Reply::Reset);
            }
            self.state = State::Established;
            self.unacknowledged = to;
        }
        if before(self.sent, to) {
            return only(Reply::Nothing);
        }
        // Section 4.3: what is in order is echoed.
        if let Some((_, theirs)) = times
            && !before(self.acknowledged, segment.sequence)
        {
            self.recent = Some(theirs.value);
            self.recent_ns = now_ns;
        }
        if before(to, self.unacknowledged) {
            return only(Reply::Nothing);
        }
        let edge = to.wrapping_add(u32::from(segment.window) << self.their_scale);
        if before(self.their_edge, edge) {
            self.their_edge = edge;
        }
        let numbers = to.wrapping_sub(self.unacknowledged);
        let is_fin = numbers > 0 && self.fin.is_some_and(|fin| fin.wrapping_add(1) == to);
        self.unacknowledged = to;
        let mut host = Host::Stays;
        if is_fin {
            (self.state, host) = match self.state {
                State::FinWait1 => (State::FinWait2, Host::Stays),
                State::Closing => (State::TimeWait, Host::Closes),
                State::LastAck => (State::Closed, Host::Closes),
                other => (other, Host::Stays),
            };
        }
        Expected {
            host,
            acknowledged: numbers - u32::from(is_fin),
            reply: Reply::Nothing,
        }
    }

    /// A window for so many bytes is announced. It grows only, and bytes that were turned away are not
    /// wanted before there is room for them.
    pub(super) fn announces(&mut self, room: u32) {
        let room = if self.turned_away { 0 } else { room };
        let most = u32::from(u16::MAX) << if self.scales { 8 } else { 0 };
        let edge = self.next_from_guest.wrapping_add(room.min(most));
        let is_open = self.is_receiving() || self.state == State::SynReceived;
        if is_open && before(self.furthest_edge, edge) {
            self.furthest_edge = edge;
        }
    }

    pub(super) fn is_receiving(&self) -> bool {
        use State::{Established, FinWait1, FinWait2};
        matches!(self.state, Established | FinWait1 | FinWait2)
    }

    pub(super) fn may_send(&self) -> bool {
        use State::{CloseWait, Closing, Established, FinWait1, LastAck};
        matches!(
            self.state,
            Established | CloseWait | FinWait1 | Closing | LastAck
        )
    }

    /// Whether something is under way that the guest has to acknowledge.
    pub(super) fn is_awaiting(&self) -> bool {
        let is_up = !matches!(self.state, State::Connecting | State::Closed);
        is_up && self.unacknowledged != self.sent
    }

    /// The socket took so many bytes, and the guest's FIN if it was right behind.
    pub(super) fn takes(&mut self, bytes: u32, is_last: bool) {
        self.next_from_guest = self.next_from_guest.wrapping_add(bytes);
        if !is_last {
            return;
        }
        self.next_from_guest = self.next_from_guest.wrapping_add(1);
        if before(self.furthest_edge, self.next_from_guest) {
            self.furthest_edge = self.next_from_guest;
        }
        self.state = match self.state {
            State::Established => State::CloseWait,
            State::FinWait1 => State::Closing,
            State::FinWait2 => State::TimeWait,
            other => other,
        };
    }

    pub(super) fn sends(&mut self, end: u32) {
        if before(self.sent, end) {
            self.sent = end;
        }
    }

    pub(super) fn sends_fin(&mut self, sequence: u32) {
        assert!(self.fin.is_none_or(|fin| fin == sequence), "one FIN");
        self.fin = Some(sequence);
        self.sends(sequence.wrapping_add(1));
        self.state = match self.state {
            State::Established => State::FinWait1,
            State::CloseWait => State::LastAck,
            other => other,
        };
    }
}
