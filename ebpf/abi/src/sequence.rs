//! Where a connection stands in sequence space, for connections that were inspected.
//!
//! # Theory of operation
//! An inspect rule lets in *one connection*, by what it says first. Once that is said the kernel
//! carries it, and what the kernel has is a tuple. A server can make another connection of the same
//! tuple from a lone ACK: with SYN cookies (RFC 4987 section 3.6) all that it needs is the ACK of a
//! handshake that it forgot, sent again after the first connection has ended. So a connection that was
//! released to the kernel is held to its numbers, by both sides of the datapath alike:
//!
//! - What the guest sends begins at `low` or behind it. That starts one octet before what the server
//!   had acknowledged at the release (a keep-alive repeats that octet, RFC 9293 section 3.8.4), and
//!   follows what the server acknowledges, by the largest window that it ever offered: a guest whose
//!   acknowledgements got lost repeats no more than that.
//! - It ends within that window of what the server has acknowledged, and behind a FIN there is nothing.
//! - It acknowledges what the server has sent, and nothing that was acknowledged long before.
//! - After a reset, of either side, no octet of the guest's goes on ([`TcpBits::RST`] is for good).
//!
//! Linux knows its cookie by the *difference* of the two numbers (`check_tcp_syn_cookie`): the
//! handshake's, moved on by as much each, are as good. So what has that difference is refused for as long
//! as a cookie is good ([`COOKIE_LIFE_NS`]) where the server may have forgotten the connection: it was
//! reset, or both sides have ended it, or the server has said nothing for [`FORGETS_AFTER`]. The
//! handshake's own numbers are refused always, and come again after 4 GiB. The price: a connection both of
//! whose sides have said as much, to a few octets, and whose server is silent for so long, waits.
//!
//! Whoever knows the addresses can forge the server's segments: one counts only if it acknowledges what
//! the guest has sent, and lies in the guest's window (RFC 9293 section 3.10.7.4), and a reset only if
//! the guest would believe it (RFC 5961 section 3.2): between what it has acknowledged and what was sent
//! to it. It is delivered all the same; the guest's stack knows what to make of it.
//!
//! Words only ever move forward, by compare-and-swap, so CPUs that see segments at once agree.
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::{
    Direction, SlotRef,
    cell::{load32, store32},
    tcp::{Flags, Segment, TcpBits},
};

/// For so long after a connection was opened a server may make it again from the handshake's ACK, ns.
/// Linux: less than two minutes (`MAX_SYNCOOKIE_AGE`).
pub const COOKIE_LIFE_NS: u64 = 150 * 1_000_000_000;

/// A server that has said nothing for so long may have forgotten the connection, in
/// [`Sequences::server_seen`]'s unit: 20 s. Linux forgets one that it has closed after 60 s.
pub const FORGETS_AFTER: u32 = ((20 * 1_000_000_000u64) >> SEEN_SHIFT) as u32;

/// From ns to the unit of [`Sequences::server_seen`].
const SEEN_SHIFT: u32 = 20;

/// How far the difference may be from the handshake's: Linux puts the index of an MSS in it, 0 to 3.
const COOKIE_SLACK: i32 = 7;

/// How far an acknowledgement of the guest's may lie behind its newest: segments overtake each
/// other on their way through several queues.
const ACKNOWLEDGED_AGAIN: u32 = 1 << 20;

/// A window that every receiver can offer, bytes. Also what is taken for the largest window where a
/// smaller one was offered, so that a probe of a closed window passes.
const LEAST_WINDOW: u32 = 65_535;

/// What one side sends, and the other side's receiving of it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SendSpace {
    /// What lies before may not be sent, or acknowledged, again.
    pub low: u32,
    /// What the receiver has acknowledged.
    pub acknowledged: u32,
    /// Behind all that was sent.
    pub end: u32,
    /// The largest window that the receiver offered, bytes.
    pub window: u32,
    /// How the receiver's windows are scaled (RFC 7323 section 2).
    pub window_scale: u32,
}

/// One element of `SEQUENCES`; its index is the slot's. Means something while [`TcpBits::HELD`] is
/// set in the slot.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sequences {
    /// What the guest sends.
    pub tx: SendSpace,
    /// What the server sends.
    pub rx: SendSpace,
    /// The number of the server's first octet: what the handshake's ACK acknowledges.
    pub server_first: u32,
    /// When the server was last heard, `CLOCK_MONOTONIC` in units of 2^20 ns, about a millisecond.
    pub server_seen: u32,
    /// Zero.
    pub pad: [u32; 4],
}

const _: () = assert!(size_of::<Sequences>() == 64);

impl Sequences {
    /// Of a connection of which the server has acknowledged all that was inspected. `sent` and
    /// `received` have [`SendSpace::acknowledged`], `end`, `window` and `window_scale` filled in.
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
            pad: [0; 4],
        }
    }
}

/// A live element, reached by atomics only.
#[derive(Clone, Copy, Debug)]
pub struct SequencesRef(*mut Sequences);

// SAFETY: every access goes through atomics, but for `set` (see there).
unsafe impl Send for SequencesRef {}
// SAFETY: as above.
unsafe impl Sync for SequencesRef {}

macro_rules! word {
    ($self:ident, $side:expr, $field:ident) => {{
        let side: *mut SendSpace = $self.side($side);
        // SAFETY: `new` promised a valid element; both sides use atomics on its words.
        unsafe { AtomicU32::from_ptr(&raw mut (*side).$field) }
    }};
}

impl SequencesRef {
    /// # Safety
    /// `element` points to an element of `SEQUENCES` and stays mapped as long as the result is used.
    #[inline(always)]
    pub const unsafe fn new(element: *mut Sequences) -> Self {
        Self(element)
    }

    /// Holds the connection in `slot` to these numbers from now on. Only the owner calls this, once,
    /// before the kernel has the flow.
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
        // Not relaxed: whoever sees the bit sees the numbers.
        slot.tcp()
            .fetch_or(TcpBits::HELD, core::sync::atomic::Ordering::AcqRel);
    }

    /// Whether a segment of the guest's is the connection's. `now_ns` is asked only when it matters.
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

    /// Whether a segment of the world's can be the server's.
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

    /// Takes in where a segment of the connection shows that it stands. Both sides do it by this
    /// function, for a segment that [`Self::is_guests`] or [`Self::is_servers`] believes.
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

    /// A copy, for display and tests.
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
            pad: [0; 4],
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

    #[inline(always)]
    fn server_first(&self) -> &AtomicU32 {
        // SAFETY: as in `word!`.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0).server_first) }
    }

    #[inline(always)]
    fn server_seen(&self) -> &AtomicU32 {
        // SAFETY: as in `word!`.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0).server_seen) }
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

/// Moves a word forward, never back. A few tries: who loses so often is overtaken by newer segments.
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
