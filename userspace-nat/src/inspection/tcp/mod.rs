//! Session of an inspected TCP connection, between guest and server.
//!
//! # Theory of operation
//! The session acknowledges the guest's data in place of the server. It sends the data to the
//! server in place of the guest, once the data is allowed. So the server receives exactly one copy
//! of each inspected byte, the inspected one, in whatever pieces and however often the guest sent
//! it; and a guest that sends one byte at a time is not delayed.
//!
//! ```text
//!  guest's stream   ──────────────┬───────────────┬────────────────┬──────────────┬─── ─ ─
//!                     acknowledged │ sent on,      │ may be sent    │ there, not   │ gaps
//!                     by the server│ not yet acked │ on             │ decided      │
//!                                  begin           begin + sent     begin + allowed begin + whole
//! ```
//!
//! Toward the guest, everything up to `whole` is acknowledged. The window ends where the server's
//! or the session's memory ends; until a name is admitted it extends somewhat beyond the received
//! data, so that the name can be completed. Both values are written into segments from the server,
//! so the guest sees one receiver. Sequence numbers are never changed. The guest's segments without
//! payload are forwarded. Until a name is admitted they are replaced by segments of the session,
//! whose window and timestamp are the SYN's and which acknowledge everything or nothing, so that
//! headers carry no message. Urgent data (RFC 6093) is dropped during a session: its receiver would
//! read another stream than the inspected one.
//!
//! | phase | the guest's payload | transition |
//! | --- | --- | --- |
//! | `Opening` | dropped | the server's SYN-ACK, to `Open` |
//! | `Open` | held, sent as far as allowed | all names were given, to `Passing` |
//! | `Passing` | what the session has not acknowledged goes on as it is | the server has acknowledged all that the session has: the kernel takes over, and holds the connection to its sequence numbers ([`slipgate_abi::sequence`]) |
//!
//! An attacker who knows the addresses and ports can forge a server's segments. A segment is
//! ignored if its sequence number is not in the guest's window, or if it acknowledges data that was
//! not sent (RFC 9293 section 3.10.7.4, RFC 5961 section 5).
//!
//! A reset ends the session and its flow: at once if its receiver is certain to accept it (RFC 9293
//! section 3.10.7), else after a time in which the guest did not contradict it.
//!
//! The session retransmits after a time-out or three duplicate acknowledgements (RFC 5681 section
//! 3.2), from the first unacknowledged byte on. Its congestion window begins with ten segments, as
//! in RFC 6928, and grows by the acknowledged bytes.
use std::rc::Rc;

use slipgate_abi::tcp::Flags;

use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    inspection::{
        HostName, Refused,
        protocol_sniffer::ProtocolSniffer,
        reassembly::{self, MAX_LEN, Reassembly},
    },
    name_gate::LearntName,
};
use slipgate_policy::Http;

mod decision;
mod early;
mod ending;
mod opening;
mod options;
mod receiver;
mod segment;
mod sender;
mod server;

pub(crate) use options::keep_known;
pub use segment::{Received, Segment, Wire, build_header};

use decision::Deadline;
use early::EarlyAnswer;
use opening::Opening;
use options::Options;
use server::Server;

/// Time from the SYN-ACK in which the guest must begin to send, ns.
pub const SILENT_NS: u64 = 30 * SECOND_NS;
/// Time in which the guest must complete what it has begun to send, ns.
pub const SLOW_NS: u64 = 10 * SECOND_NS;
/// Time in which a guest that does not accept a reset answers it (RFC 5961 section 3.2), ns.
pub const DOUBT_NS: u64 = 3 * SECOND_NS;
/// Retransmission time-out before a round trip was measured (RFC 6298 section 2), ns.
const FIRST_RTO_NS: u64 = SECOND_NS;
const MIN_RTO_NS: u64 = 200 * MILLISECOND_NS;
const MAX_RTO_NS: u64 = 10 * SECOND_NS;
/// Most retransmissions without an answer of the server.
const MAX_RETRIES: u32 = 8;
/// Retransmissions after which segments get smaller, because the path may not carry the server's
/// MSS (RFC 4821).
const RETRIES_AT_FULL_SIZE: u32 = 2;
const SMALL_MSS: usize = 536;
const INITIAL_SEGMENTS: usize = 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    #[default]
    Opening,
    Open,
    Passing,
}

/// Treatment of a packet that a session has examined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// Forward the packet unchanged.
    Pass,
    /// Forward the packet to the guest with the session's acknowledgement and window.
    PassAs {
        /// Acknowledgement number to write.
        acknowledgement: u32,
        /// Window field to write, scaled as the server's.
        window: u16,
    },
    /// Do not forward it: the session has taken its content.
    Held,
    /// Drop it: it is invalid.
    Dropped,
}

/// State of a session after a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The session goes on.
    Goes,
    /// The kernel may take the flow over.
    Released,
    /// The connection was reset. The flow must end, after packets that are under way.
    Reset,
    /// The flow must end; both sides were sent a reset.
    Refused(Refused),
}

/// Session of an inspected connection.
#[derive(Debug, Default)]
pub struct Session {
    phase: Phase,
    sniffer: ProtocolSniffer,
    stream: Reassembly,
    /// Number of the stream's whole bytes that may be sent.
    allowed: usize,
    /// Number of these that were sent since the last time-out; `sent_ever` counts all. The end of
    /// the stream counts as a byte.
    sent: usize,
    sent_ever: usize,
    /// Whether the server has acknowledged the end.
    end_acknowledged: bool,
    opening: Opening,
    /// Highest acknowledgement number of the guest; `guest_window` is the window that came with it.
    guest_ack: u32,
    guest_window: u16,
    /// Furthest end of the guest's window.
    guest_window_end: u32,
    /// Sequence number after the guest's data that was forwarded unchanged.
    passed_end: Option<u32>,
    /// Newest timestamp of the guest.
    guest_time: u32,
    /// Number of acknowledgements that may still go to the server before a name is admitted.
    owed: u32,
    server: Server,
    /// End of the window that the guest was offered.
    told_window_end: u32,
    /// The server's data since the hello, while it matters.
    answer: Option<Reassembly>,
    /// Sequence number after a request's content that may be sent; `early_answer` tells whether the
    /// server answered before that.
    content_end: Option<u32>,
    early_answer: EarlyAnswer,
    /// Names that this connection gave before.
    pub(crate) named: Vec<Rc<LearntName>>,
    opened_ns: u64,
    deadline: Option<Deadline>,
    /// Time at which a reset of the server is accepted, unless the guest contradicts, ns.
    reset_at_ns: Option<u64>,
    /// Whether any data of the guest was allowed.
    has_sent: bool,
    /// Whether a name was admitted.
    is_admitted: bool,
    resend_at_ns: Option<u64>,
    /// Retransmission time-out as measured; `rto_ns` is that after back-off.
    first_rto_ns: u64,
    rto_ns: u64,
    retries: u32,
    duplicates: u32,
    congestion_window: usize,
    path_mss: usize,
}

impl Session {
    /// Session for the flow that a guest's SYN opens. `tcp_header` is the SYN's, with its options.
    /// `mss`: what fits the path to the server, and the whole path, bytes.
    pub fn new(isn: u32, tcp_header: &[u8], mss: (u16, u16), mode: Http, now_ns: u64) -> Self {
        let opening = Opening::new(tcp_header, mss.1);
        Self {
            sniffer: ProtocolSniffer::new(mode),
            stream: Reassembly::new(isn.wrapping_add(1)),
            guest_time: opening.options.time.map_or(0, |(value, _)| value),
            opening,
            told_window_end: isn,
            opened_ns: now_ns,
            first_rto_ns: FIRST_RTO_NS,
            rto_ns: FIRST_RTO_NS,
            path_mss: usize::from(mss.0),
            ..Self::default()
        }
    }

    /// Memory held for the data of both sides, bytes.
    pub fn held(&self) -> usize {
        self.stream.held() + self.answer.as_ref().map_or(0, Reassembly::held)
    }

    /// Additional memory that would be held with a segment's payload, bytes.
    pub fn held_more_with(&self, segment: &Received<'_>) -> usize {
        if self.phase != Phase::Open {
            return 0;
        }
        // What it lets in may be answered.
        let answer = match self.answer {
            None if !segment.payload.is_empty() => reassembly::GROWTH,
            _ => 0,
        };
        self.stream
            .held_with(segment.sequence, segment.payload.len())
            - self.stream.held()
            + answer
    }

    /// Whether a name was admitted.
    pub fn is_admitted(&self) -> bool {
        self.is_admitted
    }

    /// Starts all timers again, after a time in which the guest could not send.
    pub fn begin_timers(&mut self, now_ns: u64) {
        let deadline = self.deadline;
        self.deadline = deadline.map(|deadline| Deadline::after(now_ns, deadline.why));
        let rto_ns = self.rto_ns;
        self.resend_at_ns = self.resend_at_ns.map(|_| now_ns + rto_ns);
        self.reset_at_ns = self.reset_at_ns.map(|_| now_ns + DOUBT_NS);
    }

    /// Adopts what fits the path to the server, bytes, as a router on it reported (RFC 1191, RFC
    /// 8201).
    pub fn path_carries(&mut self, mss: u16) {
        let mss = usize::from(mss).max(SMALL_MSS);
        self.path_mss = self.path_mss.min(mss);
    }

    /// Time at which [`Session::on_timer`] is due, ns; `None` if no timer runs.
    pub fn due_ns(&self) -> Option<u64> {
        let patience_ns = self.deadline.map(|deadline| deadline.at_ns);
        [patience_ns, self.resend_at_ns, self.reset_at_ns]
            .into_iter()
            .flatten()
            .min()
    }

    /// Processes a segment of the guest after the SYN, whose checksum is verified. `may` returns
    /// whether the rules admit a server of this name.
    pub fn guest_sent(
        &mut self,
        segment: &Received<'_>,
        wire: &mut dyn Wire,
        may: &mut dyn FnMut(&HostName, &mut Vec<Rc<LearntName>>) -> bool,
        now_ns: u64,
    ) -> (Fate, Outcome) {
        if segment.has(URGENT) {
            return (Fate::Dropped, Outcome::Goes);
        }
        match self.phase {
            Phase::Opening => return self.guest_sent_early(segment, wire),
            Phase::Open | Phase::Passing => {}
        }
        if segment.has(Flags::RST) {
            return self.guest_resets(segment, wire);
        }
        if segment.has(Flags::SYN) || !segment.has(Flags::ACK) {
            return (Fate::Dropped, Outcome::Goes);
        }
        self.reset_at_ns = None;
        let news = self.note_guest(segment);
        let fin = segment.has(Flags::FIN);
        if segment.payload.is_empty() && !fin {
            if self.is_admitted {
                return (Fate::Pass, Outcome::Goes);
            }
            if (segment.sequence.wrapping_sub(self.next_expected()) as i32) < 0 {
                // A probe of a window, or of whether anybody is there.
                self.acknowledge(wire);
            }
            self.acknowledge_server(wire);
            return (Fate::Held, Outcome::Goes);
        }
        if self.phase == Phase::Passing {
            let behind = segment.sequence.wrapping_sub(self.next_expected()) as i32;
            if behind >= 0 && self.stream.is_ended() {
                // Nothing comes after the end.
                return (Fate::Dropped, Outcome::Goes);
            }
            if behind >= 0 {
                let end = segment.sequence.wrapping_add(segment.sequence_len());
                advance(self.passed_end.get_or_insert(end), end);
                return (Fate::Pass, Outcome::Goes);
            }
            self.acknowledge(wire);
            return (Fate::Held, Outcome::Goes);
        }
        self.stream.insert(segment.sequence, segment.payload, fin);
        let before = wire.sent_to_server();
        let outcome = self.proceed(wire, may, now_ns);
        if let Outcome::Refused(_) = outcome {
            return (Fate::Held, outcome);
        }
        self.acknowledge(wire);
        if news && wire.sent_to_server() == before {
            // What it acknowledges may be waited for.
            self.acknowledge_server(wire);
        }
        (Fate::Held, outcome)
    }

    /// Processes a segment of the server, whose checksum is verified.
    pub fn server_sent(
        &mut self,
        segment: &Received<'_>,
        wire: &mut dyn Wire,
        may: &mut dyn FnMut(&HostName, &mut Vec<Rc<LearntName>>) -> bool,
        now_ns: u64,
    ) -> (Fate, Outcome) {
        match self.phase {
            Phase::Opening => return self.server_opens(segment, now_ns),
            Phase::Open | Phase::Passing => {}
        }
        if segment.has(Flags::RST) {
            return (Fate::Pass, self.server_resets(segment, now_ns));
        }
        if !segment.has(Flags::ACK) {
            return (Fate::Pass, Outcome::Goes);
        }
        if !self.is_in_sent_data(segment.acknowledgement) {
            // With the session's number in it the guest would believe it.
            return (Fate::Dropped, Outcome::Goes);
        }
        self.owe_for(segment);
        if !self.is_in_guests_window(segment) {
            // The guest answers as a receiver does, and so ends its server's doubt.
            let fate = self.pass_as(self.next_expected(), segment.is_syn());
            return (fate, Outcome::Goes);
        }
        self.server.note(segment);
        self.note_early_answer(segment);
        if self.acknowledged(segment, now_ns) {
            self.resend_from_begin(wire, now_ns);
        }
        let outcome = match self.listen(segment, now_ns) {
            Err(why) => self.refuse(why, wire),
            Ok(true) => self.proceed(wire, may, now_ns),
            Ok(false) => {
                self.transmit(wire, now_ns);
                self.outcome()
            }
        };
        let ahead = segment.acknowledgement.wrapping_sub(self.next_expected()) as i32 >= 0;
        if matches!(outcome, Outcome::Refused(_)) {
            return (Fate::Dropped, outcome);
        }
        if self.phase == Phase::Passing && ahead {
            return (Fate::Pass, outcome);
        }
        (
            self.pass_as(self.next_expected(), segment.is_syn()),
            outcome,
        )
    }

    /// Deadline has ended, or the server has not acknowledged in time.
    pub fn on_timer(&mut self, wire: &mut dyn Wire, now_ns: u64) -> Outcome {
        if self.reset_at_ns.is_some_and(|at| at <= now_ns) {
            return Outcome::Reset;
        }
        if let Some(deadline) = self.deadline.filter(|deadline| deadline.at_ns <= now_ns) {
            return self.refuse(deadline.why, wire);
        }
        if self.resend_at_ns.is_some_and(|at| at <= now_ns) {
            self.retries += 1;
            if self.retries > MAX_RETRIES {
                return self.refuse(Refused::Untaken, wire);
            }
            if self.retries > RETRIES_AT_FULL_SIZE {
                // For good: what comes next would be lost at full size like what was.
                self.path_mss = self.path_mss.min(SMALL_MSS);
            }
            self.rto_ns = (self.rto_ns * 2).min(MAX_RTO_NS);
            self.resend_from_begin(wire, now_ns);
        }
        Outcome::Goes
    }
}

/// URG flag (RFC 9293 section 3.1).
const URGENT: u8 = 0x20;

/// Whether a sequence number is after another.
fn is_after(number: u32, other: u32) -> bool {
    number.wrapping_sub(other) as i32 > 0
}

/// Moves a sequence number on to another one, if that is after it.
fn advance(number: &mut u32, to: u32) {
    if is_after(to, *number) {
        *number = to;
    }
}

#[cfg(test)]
#[path = "../tcp_test.rs"]
mod tests;
