//! Sequence number limits of connections that were inspected.
//!
//! # Theory of operation
//! An inspect rule admits *one connection*, by its first data. After that the kernel carries it,
//! and knows only its tuple. A server can make another connection of the same tuple from a lone
//! ACK: with SYN cookies (RFC 4987 section 3.6) it needs only the ACK of a handshake that it
//! forgot, sent again after the first connection has ended. So the segments of a connection that
//! was released to the kernel must lie within its sequence numbers. Programs and engine apply the
//! same rules:
//!
//! - A segment from the guest begins at `low` or after it. At the release, `low` is one octet
//!   before the server's acknowledgement (a keep-alive repeats that octet, RFC 9293 section 3.8.4).
//!   It then follows the server's acknowledgements at a distance of the largest window the server
//!   ever offered: a guest whose acknowledgements were lost repeats no more than that.
//! - It ends within that window after the server's acknowledgement, and not after the guest's FIN.
//! - It acknowledges data that the server has sent, and nothing acknowledged long before.
//! - After a reset by either side, no payload from the guest passes ([`TcpBits::RST`] is final).
//!
//! Linux recognizes its cookie by the *difference* of the two numbers (`check_tcp_syn_cookie`): the
//! handshake's numbers, both increased by the same amount, are accepted as well. So segments with
//! that difference are refused for as long as a cookie is valid ([`COOKIE_LIFE_NS`]) if the server
//! may have forgotten the connection: it was reset, or both sides have ended it, or the server has
//! been silent for [`FORGETS_AFTER`]. Within that time the handshake's own numbers, which recur
//! after 4 GiB, are always refused. The price: a connection whose two sides have sent equally much,
//! to within a few octets, and whose server is silent for so long, has to wait.
//!
//! An attacker who knows the addresses can forge segments of the server. So a segment from the
//! world is recorded only if it acknowledges data that the guest has sent and lies in the guest's
//! window (RFC 9293 section 3.10.7.4), and a reset only if the guest would accept it (RFC 5961
//! section 3.2): between the guest's acknowledgement and the end of the data sent to it. It is
//! delivered in any case; the guest's stack decides about it.
//!
//! Words only ever move forward, by compare-and-swap, so CPUs that see segments at once agree.
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::{
    Direction, SlotRef,
    cell::{load32, store32},
    handle::handle,
    tcp::{Flags, Segment, TcpBits},
};

/// Time after a connection was opened in which a server may make it again from the handshake's ACK,
/// ns. Linux: less than two minutes (`MAX_SYNCOOKIE_AGE`).
pub const COOKIE_LIFE_NS: u64 = 150 * 1_000_000_000;

/// Silence after which a server may have forgotten the connection, in units of
/// [`Sequences::server_seen`]: 20 s. Linux forgets one that it has closed after 60 s.
pub const FORGETS_AFTER: u32 = ((20 * 1_000_000_000u64) >> SEEN_SHIFT) as u32;

/// Shift that converts ns to the unit of [`Sequences::server_seen`].
const SEEN_SHIFT: u32 = 20;

/// How far the difference may be from the handshake's: Linux encodes the index of an MSS in it, 0
/// to 3.
const COOKIE_SLACK: i32 = 7;

/// How far a guest's acknowledgement may lie before its newest, bytes: segments overtake each other
/// in several queues.
const ACKNOWLEDGED_AGAIN: u32 = 1 << 20;

/// Window that every receiver can offer, bytes. It is used in place of a smaller largest window, so
/// that a probe of a closed window passes.
const LEAST_WINDOW: u32 = 65_535;

/// Sequence numbers of one direction: the sender's, and the receiver's acknowledgements and
/// windows.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SendSpace {
    /// Lowest sequence number that may be sent or acknowledged again.
    pub low: u32,
    /// Newest acknowledgement number of the receiver.
    pub acknowledged: u32,
    /// Sequence number after the last octet that was sent.
    pub end: u32,
    /// Largest window that the receiver offered, bytes.
    pub window: u32,
    /// Shift count of the receiver's windows (RFC 7323 section 2).
    pub window_scale: u32,
}

/// One element of `SEQUENCES`, whose index is the slot's. It is valid while [`TcpBits::HELD`] is
/// set in the slot, but for the words of segments of one octet.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sequences {
    /// Data that the guest sends.
    pub tx: SendSpace,
    /// Data that the server sends.
    pub rx: SendSpace,
    /// Sequence number of the server's first octet: the number that the handshake's ACK
    /// acknowledges.
    pub server_first: u32,
    /// Time of the server's last segment, `CLOCK_MONOTONIC` in units of 2^20 ns, about a
    /// millisecond.
    pub server_seen: u32,
    /// Sequence number of the guest's last segment of one octet that was seen while the flow was
    /// [`TcpBits::QUIET`]. This field and the next are valid without [`TcpBits::HELD`], too.
    pub octet_tx: u32,
    /// The same of the peer's.
    pub octet_rx: u32,
    /// Explicit padding, always zero.
    pub pad: [u32; 2],
}

const _: () = assert!(size_of::<Sequences>() == 64);

impl Sequences {
    /// Sequence numbers of a connection whose server has acknowledged all the data that was
    /// inspected. `sent` and `received` must have `acknowledged`, `end`, `window` and
    /// `window_scale` filled in.
    pub const fn released(
        mut sent: SendSpace,
        mut received: SendSpace,
        server_first: u32,
        now_ns: u64,
    ) -> Self {
        sent.low = sent.acknowledged.wrapping_sub(1);
        received.low = received.acknowledged;
        sent.window = at_least(sent.window);
        received.window = at_least(received.window);
        Self {
            tx: sent,
            rx: received,
            server_first,
            server_seen: (now_ns >> SEEN_SHIFT) as u32,
            octet_tx: 0,
            octet_rx: 0,
            pad: [0; 2],
        }
    }
}

handle! {
    /// Handle to a live element, accessed by atomics only.
    SequencesRef(Sequences);
    atomic {
        /// Sequence number of the server's first octet.
        server_first: AtomicU32,
        /// Time of the server's last segment, in units of 2^20 ns.
        server_seen: AtomicU32,
        /// Sequence number of the guest's last segment of one octet.
        octet_tx: AtomicU32,
        /// Sequence number of the peer's last segment of one octet.
        octet_rx: AtomicU32,
    }
    constant {}
}

macro_rules! word {
    ($self:ident, $side:expr, $field:ident) => {{
        let side: *mut SendSpace = $self.side($side);
        // SAFETY: `new` promised a valid element; both sides use atomics on its words.
        unsafe { AtomicU32::from_ptr(&raw mut (*side).$field) }
    }};
}

impl SequencesRef {
    /// Limits the connection in `slot` to these sequence numbers from now on. Only the owner calls
    /// this, once, before the kernel has the flow.
    pub fn hold(self, slot: SlotRef, sequences: Sequences) {
        for (side, from) in [(Direction::Tx, sequences.tx), (Direction::Rx, sequences.rx)] {
            store32(word!(self, side, low), from.low);
            store32(word!(self, side, acknowledged), from.acknowledged);
            store32(word!(self, side, end), from.end);
            store32(word!(self, side, window), from.window);
            store32(word!(self, side, window_scale), from.window_scale);
        }
        store32(self.server_first(), sequences.server_first);
        store32(self.server_seen(), sequences.server_seen);
        // Not relaxed: a reader that sees the bit must see the numbers.
        slot.tcp()
            .fetch_or(TcpBits::HELD, core::sync::atomic::Ordering::AcqRel);
    }

    /// Whether a segment from the guest belongs to the connection. `now_ns` returns
    /// `CLOCK_MONOTONIC`, ns; it is called only when the time is needed.
    #[inline(always)]
    pub fn is_guests(self, slot: SlotRef, segment: &Segment, now_ns: impl Fn() -> u64) -> bool {
        let bits = load32(slot.tcp());
        let is_reset = segment.flags & Flags::RST != 0;
        let has_ack = segment.flags & Flags::ACK != 0;
        if segment.flags & Flags::SYN != 0 || !(has_ack || is_reset) {
            return false;
        }
        let low = load32(word!(self, Direction::Tx, low));
        let acknowledged = load32(word!(self, Direction::Tx, acknowledged));
        let window = load32(word!(self, Direction::Tx, window));
        let window_end = acknowledged.wrapping_add(window);
        if is_before(segment.sequence, low) || is_before(window_end, segment.end) {
            return false;
        }
        if bits & TcpBits::FIN_TX != 0
            && is_before(load32(slot.fin_end(Direction::Tx)), segment.end)
        {
            return false;
        }
        if bits & TcpBits::RST != 0 && segment.end != segment.sequence {
            return false;
        }
        if !has_ack {
            return true;
        }
        let oldest = load32(word!(self, Direction::Rx, low));
        let newest = load32(word!(self, Direction::Rx, end));
        if is_before(segment.acknowledgement, oldest) || is_before(newest, segment.acknowledgement)
        {
            return false;
        }
        let sent = segment.sequence.wrapping_sub(slot.isn().wrapping_add(1));
        let received = segment
            .acknowledgement
            .wrapping_sub(load32(self.server_first()));
        let apart = sent.wrapping_sub(received) as i32;
        if !(-COOKIE_SLACK..=COOKIE_SLACK).contains(&apart) {
            return true;
        }
        let now_ns = now_ns();
        if now_ns.wrapping_sub(slot.created_ns()) > COOKIE_LIFE_NS {
            return true;
        }
        // Behind the guest's FIN nothing can follow, whatever comes of this.
        let is_last = bits & TcpBits::FIN_TX != 0
            && segment.sequence == load32(slot.fin_end(Direction::Tx))
            && segment.end == segment.sequence;
        const FINS: u32 = TcpBits::FIN_TX | TcpBits::FIN_RX;
        let seen = load32(self.server_seen());
        let silent = ((now_ns >> SEEN_SHIFT) as u32).wrapping_sub(seen) as i32;
        let may_be_forgotten =
            bits & TcpBits::RST != 0 || bits & FINS == FINS || silent >= FORGETS_AFTER as i32;
        is_last || !(sent == 0 || may_be_forgotten)
    }

    /// Whether a segment from the world can be the server's.
    #[inline(always)]
    pub fn is_servers(self, segment: &Segment) -> bool {
        let acknowledged = load32(word!(self, Direction::Rx, acknowledged));
        let window = load32(word!(self, Direction::Rx, window));
        let low = load32(word!(self, Direction::Rx, low));
        if is_before(segment.end, low)
            || is_before(acknowledged.wrapping_add(window), segment.sequence)
        {
            return false;
        }
        if segment.flags & Flags::RST != 0 {
            let newest = load32(word!(self, Direction::Rx, end));
            if is_before(segment.sequence, acknowledged) || is_before(newest, segment.sequence) {
                return false;
            }
        }
        if segment.flags & Flags::ACK == 0 {
            return segment.flags & Flags::RST != 0;
        }
        let oldest = load32(word!(self, Direction::Tx, low));
        let newest = load32(word!(self, Direction::Tx, end));
        !is_before(segment.acknowledgement, oldest) && !is_before(newest, segment.acknowledgement)
    }

    /// Records the numbers of a segment of the connection. Programs and engine both call this
    /// function, for segments that [`Self::is_guests`] or [`Self::is_servers`] accepts.
    #[inline(always)]
    pub fn note(self, direction: Direction, segment: &Segment, now_ns: impl Fn() -> u64) {
        if matches!(direction, Direction::Rx) {
            store32(self.server_seen(), (now_ns() >> SEEN_SHIFT) as u32);
        }
        advance(word!(self, direction, end), segment.end);
        if segment.flags & Flags::ACK == 0 {
            return;
        }
        let other = direction.other();
        let scale = load32(word!(self, other, window_scale)) & 0xf;
        let offered = u32::from(segment.window) << scale;
        let largest = word!(self, other, window);
        if load32(largest) < offered {
            // What another CPU stores at once was offered too.
            store32(largest, offered);
        }
        let acknowledged = segment.acknowledgement;
        advance(word!(self, other, acknowledged), acknowledged);
        let again = match other {
            Direction::Tx => load32(largest),
            Direction::Rx => ACKNOWLEDGED_AGAIN,
        };
        advance(word!(self, other, low), acknowledged.wrapping_sub(again));
    }

    /// Copy of the element, for display and tests.
    pub fn read(self) -> Sequences {
        let side = |side| SendSpace {
            low: load32(word!(self, side, low)),
            acknowledged: load32(word!(self, side, acknowledged)),
            end: load32(word!(self, side, end)),
            window: load32(word!(self, side, window)),
            window_scale: load32(word!(self, side, window_scale)),
        };
        Sequences {
            tx: side(Direction::Tx),
            rx: side(Direction::Rx),
            server_first: load32(self.server_first()),
            server_seen: load32(self.server_seen()),
            octet_tx: load32(self.octet_tx()),
            octet_rx: load32(self.octet_rx()),
            pad: [0; 2],
        }
    }

    #[inline(always)]
    fn side(&self, of: Direction) -> *mut SendSpace {
        // SAFETY: `new` promised a valid element.
        unsafe {
            match of {
                Direction::Tx => &raw mut (*self.0).tx,
                Direction::Rx => &raw mut (*self.0).rx,
            }
        }
    }
}

/// Whether `a` comes before `b` in sequence space (RFC 9293 section 3.4).
#[inline(always)]
const fn is_before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

const fn at_least(window: u32) -> u32 {
    if window < LEAST_WINDOW {
        LEAST_WINDOW
    } else {
        window
    }
}

/// Moves a word forward, never back. It tries four times: a CPU that loses more often is overtaken
/// by newer segments.
#[inline(always)]
fn advance(word: &AtomicU32, to: u32) {
    let mut before = load32(word);
    for _ in 0..4 {
        if !is_before(before, to) {
            return;
        }
        match word.compare_exchange(before, to, Relaxed, Relaxed) {
            Ok(_) => return,
            Err(now) => before = now,
        }
    }
}

#[cfg(test)]
#[path = "sequence_test.rs"]
mod tests;
