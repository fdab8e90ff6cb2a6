//! State of one connection toward the guest.
//!
//! - `opening`: both handshakes;
//! - `receiving`: what a segment of the guest means;
//! - `times`: timestamps;
//! - `window`: acknowledgements, what they say of early segments, and the window that they announce;
//! - `sending`: data and FIN to the guest, and what is due at a time.
mod opening;
mod receiving;
mod sending;
mod times;
mod window;

use std::ops::Range;

use slipgate_abi::tcp::Flags;

use self::times::Times;
use super::{
    before,
    options::{SackBlocks, TIMESTAMPS_LEN},
    scoreboard::Scoreboard,
    wire::{Header, Segment, most_payload},
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

/// Consequence of a segment for the host's socket, besides the payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Host {
    /// The socket stays as it is.
    #[default]
    Stays,
    /// The guest reset the connection: reset the socket's.
    Reset,
    /// Both sides have ended: close the socket.
    Closes,
}

/// Result of a segment of the guest.
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
    /// The guest asks whether the connection lives (RFC 9293 section 3.8.4), after so long a silence, ns.
    pub keepalive_ns: Option<u64>,
    /// Consequence for the socket.
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
    /// Length of the options in its header, bytes.
    pub options_len: usize,
}

/// Action of a timer at a given time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Due {
    /// No timer is due.
    Nothing,
    /// This segment is to be sent: our SYN again, or a probe of a closed window.
    Send(Header),
    /// Send again from the oldest byte that the guest has not acknowledged.
    Resend,
    /// The guest does not answer: tell it and the socket.
    GiveUp(Header),
    /// The connection is over and may be forgotten.
    Forget,
}

/// State of one TCP connection toward the guest (RFC 9293).
#[derive(Clone, Debug)]
pub struct Connection {
    state: State,
    /// Next sequence number of the guest (RCV.NXT).
    next_from_guest: u32,
    /// Sequence number behind the window that was announced last. It never goes back.
    edge: u32,
    /// Sequence number behind which the window does not open, where the VM's rate holds its stream back.
    allowed: Option<u32>,
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
    /// Whether the guest takes selective acknowledgements, and so sends them.
    sack_permitted: bool,
    /// What the guest has behind a gap.
    scoreboard: Scoreboard,
    /// Sequence number before which each gap was sent again (HighRxt), and what was sent by then.
    resent: u32,
    sent_by_resent: u32,
    /// What was kept of the guest's behind a gap, the newest first.
    held: SackBlocks,
    times: Option<Times>,
    /// Time of the last event.
    now_ns: u64,
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
            sack_permitted: syn.options.sack_permitted,
            times: Times::new(syn, initial, 0),
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
            allowed: None,
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
            sack_permitted: false,
            scoreboard: Scoreboard::default(),
            resent: initial,
            sent_by_resent: initial,
            held: SackBlocks::default(),
            times: None,
            now_ns: 0,
            due_ns: None,
            waits: 0,
            unheard: 0,
        }
    }

    /// Returns the state of the connection (RFC 9293 section 3.3.2).
    pub fn state(&self) -> State {
        self.state
    }

    /// Returns the most payload that the guest takes in a packet, bytes: what it announced without the
    /// options of data segments (RFC 6691).
    pub fn mss(&self) -> u16 {
        let options = self.options_len() as u16;
        self.mss.saturating_sub(options).max(1)
    }

    /// Length of the options of segments with data, bytes. Selective acknowledgements have segments of
    /// their own.
    fn options_len(&self) -> usize {
        self.times.map_or(0, |_| TIMESTAMPS_LEN)
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

    /// Sequence number of the guest's SYN.
    pub fn first_of_guest(&self) -> u32 {
        self.next_from_guest.wrapping_sub(1)
    }

    /// Whether this SYN may open another connection of the same ports: this one is over, and the SYN is
    /// none that was on its way for long, since it is behind all that this one's guest has sent (RFC 9293
    /// section 3.10.7.4), or later by its timestamp (RFC 6191).
    pub fn may_be_followed_by(&self, syn: &Segment) -> bool {
        match self.state {
            State::Closed => true,
            State::TimeWait => !before(syn.sequence, self.next_from_guest) || self.is_later(syn),
            _ => false,
        }
    }

    /// Ends the connection by an RST to the guest: the host's was refused, reset, or is cut.
    pub fn reset(&mut self) -> Header {
        let flags = Flags::RST | Flags::ACK;
        let reset = match self.state {
            // The guest has said nothing that could be acknowledged.
            State::SynSent => Header {
                sequence: self.sent,
                flags: Flags::RST,
                ..Header::default()
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

    fn acknowledgement(&mut self) -> Header {
        Header {
            sack: self.held,
            ..self.header(Flags::ACK)
        }
    }

    fn header(&mut self, flags: u8) -> Header {
        // An RST needs none (RFC 7323 section 3.2).
        let timestamps = match flags & Flags::RST {
            0 => self.timestamps(),
            _ => None,
        };
        let window = self.edge.wrapping_sub(self.next_from_guest);
        let window = window >> self.scales.map_or(0, |(ours, _)| ours);
        Header {
            // Behind all that was sent: what is sent again is no reason to go back.
            sequence: self.sent,
            acknowledgement: self.next_from_guest,
            flags,
            window: window.min(u16::MAX.into()) as u16,
            timestamps,
            ..Header::default()
        }
    }

    fn wait_again(&mut self, now_ns: u64) {
        let first_ns = self.first_wait_ns().min(MOST_RETRANSMISSION_NS);
        let wait_ns = first_ns << self.waits.min(20);
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
mod sack_test;
#[cfg(test)]
#[path = "segments_test.rs"]
mod tests;
