//! An inspected TCP connection.
//!
//! # Theory of operation
//! Toward the guest a session acknowledges what the guest sends, as the server would; toward the
//! server it sends that on, as the guest would, once it may be sent. So the server gets exactly one
//! copy of each inspected byte, the one that was inspected, whatever the guest sent in which pieces
//! how often; and a guest that sends a byte at a time is not left waiting.
//!
//! ```text
//!  guest's stream   ──────────────┬───────────────┬────────────────┬──────────────┬─── ─ ─
//!                     acknowledged │ sent on,      │ may be sent    │ there, not   │ gaps
//!                     by the server│ not yet acked │ on             │ decided      │
//!                                  begin           begin + sent     begin + allowed begin + whole
//! ```
//!
//! What the guest is told: everything up to `whole` is acknowledged, and the window ends where the
//! server's does, or where the session's own memory does; a little behind what is there until a name
//! is let in, for it must get whole. Both are put into whatever comes from the server, so the guest
//! sees one receiver. Sequence numbers are never changed. The guest's segments without payload go on;
//! until a name was let in, as segments of the session's own, whose window and time are the SYN's and
//! that acknowledge all or nothing: a header says nothing before. Urgent data (RFC 6093) is dropped
//! while there is a session: its receiver would read another stream than the one inspected.
//!
//! | phase | the guest's payload | leaves it |
//! | --- | --- | --- |
//! | `Opening` | dropped | the server's SYN-ACK, to `Open` |
//! | `Open` | held, sent on as it may be | all names are said, to `Passing` |
//! | `Passing` | what the session has not acknowledged goes on as it is | the server has acknowledged all that the session has: the kernel takes over, and holds the connection to its sequence numbers ([`slipgate_abi::sequence`]) |
//!
//! Whoever knows the addresses and ports can forge a server's segments. Nothing of one is believed
//! whose sequence number is not in the guest's window, or that acknowledges what was not sent (RFC
//! 9293 section 3.10.7.4, RFC 5961 section 5).
//!
//! A reset ends the session and the flow with it: at once if its receiver is known to believe it (RFC
//! 9293 section 3.10.7), else when the guest has said nothing for a while, who would have contradicted.
//!
//! What the session sends is sent again when a timer runs out, or three acknowledgements ask for it
//! (RFC 5681 section 3.2), from the first byte that is not acknowledged on. It begins with ten
//! segments (RFC 6928) and adds what is acknowledged.
use std::rc::Rc;

use slipgate_abi::tcp::Flags;

use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    inspection::{
        HostName, Refused,
        reassembly::{self, MAX_LEN, Reassembly},
        spoken::Spoken,
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
mod released;
mod segment;
mod sender;
mod server;

pub(crate) use options::keep_known;
pub use segment::{Received, Segment, Wire, build_header};

use decision::Patience;
use early::EarlyAnswer;
use opening::Opening;
use options::Options;
use server::Server;

/// A guest that says nothing has so long from the SYN-ACK on, ns.
pub const SILENT_NS: u64 = 30 * SECOND_NS;
/// What a guest has begun to say must be whole after so long, ns.
pub const SLOW_NS: u64 = 10 * SECOND_NS;
/// A guest that does not believe a reset answers it within so long (RFC 5961 section 3.2), ns.
pub const DOUBT_NS: u64 = 3 * SECOND_NS;
/// Before a round trip was measured (RFC 6298 section 2), ns.
const FIRST_RTO_NS: u64 = SECOND_NS;
const MIN_RTO_NS: u64 = 200 * MILLISECOND_NS;
const MAX_RTO_NS: u64 = 10 * SECOND_NS;
/// Retransmissions without any answer of the server.
const MAX_RETRIES: u32 = 8;
/// After so many, the path may not carry what the server takes: smaller segments (RFC 4821).
const RETRIES_AT_FULL_SIZE: u32 = 2;
const SMALL_MSS: usize = 536;
const INITIAL_SEGMENTS: usize = 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Opening,
    Open,
    Passing,
}

/// What becomes of a packet that was shown to a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It goes on as it is.
    Pass,
    /// It goes on to the guest, but acknowledges and offers what the session does.
    PassAs {
        /// Acknowledgement number.
        acknowledgement: u32,
        /// The window field, scaled as the server's.
        window: u16,
    },
    /// The session has taken what is in it.
    Held,
    /// It makes no sense.
    Dropped,
}

/// What a session has come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It goes on.
    Goes,
    /// The kernel may have the flow.
    Released,
    /// Its connection was reset: the flow is to be ended, behind what is under way.
    Reset,
    /// The flow is to be ended; both sides were told.
    Refused(Refused),
}

/// An inspected connection.
#[derive(Debug)]
pub struct Session {
    phase: Phase,
    spoken: Spoken,
    stream: Reassembly,
    /// Of the stream's whole bytes, how many may be sent on.
    allowed: usize,
    /// Of those, how many were sent since the last timeout, and ever. The end counts as a byte.
    sent: usize,
    sent_ever: usize,
    /// The end was acknowledged by the server.
    end_acknowledged: bool,
    opening: Opening,
    /// The highest acknowledgement number of the guest, and the window that came with it.
    guest_ack: u32,
    guest_window: u16,
    /// Where the guest's window ended at most.
    guest_window_end: u32,
    /// Behind what went on of the guest's as it was.
    passed_end: Option<u32>,
    /// The guest's newest timestamp.
    guest_time: u32,
    /// Before a name, so many acknowledgements may still go to the server.
    owed: u32,
    server: Server,
    /// Where the window ends that the guest was told of.
    told_window_end: u32,
    /// The server's bytes since the hello, while they matter.
    answer: Option<Reassembly>,
    /// Behind the last of a request's content that may be sent on, and whether the server answered before.
    content_end: Option<u32>,
    early_answer: EarlyAnswer,
    /// Names that this connection named before.
    pub(crate) named: Vec<Rc<LearntName>>,
    opened_ns: u64,
    patience: Patience,
    /// When a reset of the server's is believed, unless the guest contradicts.
    reset_at_ns: Option<u64>,
    /// Something of the guest's was let by.
    has_spoken: bool,
    /// A name was let in.
    is_let_in: bool,
    resend_at_ns: Option<u64>,
    /// As measured, and as it stands after back-off.
    first_rto_ns: u64,
    rto_ns: u64,
    retries: u32,
    duplicates: u32,
    congestion_window: usize,
    path_mss: usize,
}

impl Session {
    /// For the flow that a guest's SYN opens. `tcp_header`: the SYN's, with its options; `mtus`: of
    /// the way to the server, and of all of the path, bytes.
    pub fn new(isn: u32, tcp_header: &[u8], mtus: (u32, u32), mode: Http, now_ns: u64) -> Self {
        let opening = Opening::new(tcp_header, crate::mss::for_mtu(mtus.1));
        Self {
            phase: Phase::Opening,
            spoken: Spoken::new(mode),
            stream: Reassembly::new(isn.wrapping_add(1)),
            allowed: 0,
            sent: 0,
            sent_ever: 0,
            end_acknowledged: false,
            guest_ack: 0,
            guest_window: 0,
            guest_window_end: 0,
            passed_end: None,
            guest_time: opening.options.time.map_or(0, |(value, _)| value),
            opening,
            owed: 0,
            server: Server::default(),
            told_window_end: isn,
            answer: None,
            content_end: None,
            early_answer: EarlyAnswer::default(),
            named: Vec::new(),
            opened_ns: now_ns,
            patience: Patience::Endless,
            reset_at_ns: None,
            has_spoken: false,
            is_let_in: false,
            resend_at_ns: None,
            first_rto_ns: FIRST_RTO_NS,
            rto_ns: FIRST_RTO_NS,
            retries: 0,
            duplicates: 0,
            congestion_window: 0,
            path_mss: usize::from(crate::mss::for_mtu(mtus.0)),
        }
    }

    /// Memory held for what both sides said, bytes.
    pub fn held(&self) -> usize {
        self.stream.held() + self.answer.as_ref().map_or(0, Reassembly::held)
    }

    /// How much more would be held with a segment's payload, bytes.
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

    /// Whether a name was let in.
    pub fn is_let_in(&self) -> bool {
        self.is_let_in
    }

    /// Whoever is waited for could not say anything: all waits begin anew.
    pub fn begin_timers(&mut self, now_ns: u64) {
        self.patience = match self.patience {
            Patience::Endless => Patience::Endless,
            Patience::ToSpeak(_) => Patience::ToSpeak(now_ns + SILENT_NS),
            Patience::ToFinish(_) => Patience::ToFinish(now_ns + SLOW_NS),
            Patience::ToClose(_) => Patience::ToClose(now_ns + SLOW_NS),
        };
        let rto_ns = self.rto_ns;
        self.resend_at_ns = self.resend_at_ns.map(|_| now_ns + rto_ns);
        self.reset_at_ns = self.reset_at_ns.map(|_| now_ns + DOUBT_NS);
    }

    /// A router on the way to the server says what it carries, bytes (RFC 1191).
    pub fn path_carries(&mut self, mtu: u32) {
        let mss = usize::from(crate::mss::for_mtu(mtu)).max(SMALL_MSS);
        self.path_mss = self.path_mss.min(mss);
    }

    /// When [`Session::on_timer`] is due, ns.
    pub fn due_ns(&self) -> Option<u64> {
        let patience_ns = self.patience.ends_ns();
        [patience_ns, self.resend_at_ns, self.reset_at_ns]
            .into_iter()
            .flatten()
            .min()
    }

    /// A segment of the guest, its checksum verified, behind the SYN. `may` tells whether a server
    /// of this name may be spoken to.
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
            if self.is_let_in {
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
                let before = self.passed_end.get_or_insert(end);
                if end.wrapping_sub(*before) as i32 > 0 {
                    *before = end;
                }
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

    /// A segment of the server, its checksum verified.
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
        if !self.is_of_what_was_sent(segment.acknowledgement) {
            // With the session's number in it the guest would believe it.
            return (Fate::Dropped, Outcome::Goes);
        }
        self.owe_for(segment);
        if !self.is_in_guests_window(segment) {
            // The guest answers as a receiver does, and so ends its server's doubt.
            let fate = Fate::PassAs {
                acknowledgement: self.next_expected(),
                window: self.window(segment.has(Flags::SYN)),
            };
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
        let fate = Fate::PassAs {
            acknowledgement: self.next_expected(),
            window: self.window(segment.has(Flags::SYN)),
        };
        (fate, outcome)
    }

    /// Patience has ended, or the server has not acknowledged in time.
    pub fn on_timer(&mut self, wire: &mut dyn Wire, now_ns: u64) -> Outcome {
        if self.reset_at_ns.is_some_and(|at| at <= now_ns) {
            return Outcome::Reset;
        }
        match self.patience {
            Patience::ToSpeak(at) if at <= now_ns => return self.refuse(Refused::Silent, wire),
            Patience::ToFinish(at) if at <= now_ns => return self.refuse(Refused::Slow, wire),
            Patience::ToClose(at) if at <= now_ns => return self.refuse(Refused::Unanswered, wire),
            _ => {}
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

/// RFC 9293 section 3.1.
const URGENT: u8 = 0x20;

#[cfg(test)]
#[path = "../tcp_test.rs"]
mod tests;
