extern crate std;
use std::{boxed::Box, mem::MaybeUninit};

use super::*;
use crate::{Slot, connection};

const ISN: u32 = 0xffff_ff00;
const FIRST: u32 = ISN + 1;
/// Number of inspected bytes.
const HELLO: u32 = 500;
const RELEASED: u32 = FIRST.wrapping_add(HELLO);
const SERVER_FIRST: u32 = 7_001;
const WINDOW: u32 = 80_000;
const SECOND_NS: u64 = 1_000_000_000;

/// A connection that was released, at 1 s.
struct Held {
    /// Zeroes, as the kernel makes it; reached through [`SlotRef`] alone.
    slot: Box<MaybeUninit<Slot>>,
    sequences: Box<Sequences>,
    now_ns: u64,
}

impl Held {
    fn new() -> Self {
        let mut slot = Box::new(MaybeUninit::<Slot>::zeroed());
        let at = slot.as_mut_ptr();
        // SAFETY: in bounds of a live allocation, which nobody else reaches.
        unsafe {
            (&raw mut (*at).isn).write(ISN);
            (&raw mut (*at).created_ns).write(SECOND_NS);
        }
        let mut held = Self {
            slot,
            sequences: Box::default(),
            now_ns: 2 * SECOND_NS,
        };
        let sent = SendSpace {
            acknowledged: RELEASED,
            end: RELEASED,
            window: WINDOW,
            window_scale: 2,
            ..SendSpace::default()
        };
        let received = SendSpace {
            acknowledged: SERVER_FIRST,
            end: SERVER_FIRST,
            window: 0,
            ..SendSpace::default()
        };
        let (slot, sequences) = held.refs();
        let sequences_now = Sequences::released(sent, received, SERVER_FIRST, 2 * SECOND_NS);
        sequences.hold(slot, sequences_now);
        held
    }

    fn refs(&mut self) -> (SlotRef, SequencesRef) {
        // SAFETY: both live as long as `self`, and one thread reaches them.
        unsafe {
            (
                SlotRef::new(self.slot.as_mut_ptr()),
                SequencesRef::new(&raw mut *self.sequences),
            )
        }
    }

    /// The guest sends: whether it passes, and is noted if so.
    fn guest(&mut self, flags: u8, sequence: u32, len: u32, acknowledgement: u32) -> bool {
        let segment = segment(flags, sequence, len, acknowledgement);
        let now_ns = self.now_ns;
        let (slot, sequences) = self.refs();
        let passes = sequences.is_guests(slot, &segment, || now_ns);
        if passes {
            connection::note(slot, sequences, Direction::Tx, &segment, || now_ns);
        }
        passes
    }

    fn server(&mut self, flags: u8, sequence: u32, len: u32, acknowledgement: u32) {
        let segment = segment(flags, sequence, len, acknowledgement);
        let now_ns = self.now_ns;
        let (slot, sequences) = self.refs();
        connection::note(slot, sequences, Direction::Rx, &segment, || now_ns);
    }

    fn bits(&mut self) -> u32 {
        load32(self.refs().0.tcp())
    }
}

fn segment(flags: u8, sequence: u32, len: u32, acknowledgement: u32) -> Segment {
    Segment::new(flags, sequence, len, acknowledgement, 60_000)
}

const A: u8 = Flags::ACK;
const FA: u8 = Flags::FIN | Flags::ACK;
const R: u8 = Flags::RST;
const RA: u8 = Flags::RST | Flags::ACK;

#[test]
fn what_lies_before_the_release_is_not_the_connections() {
    for (what, sequence, passes) in [
        ("the handshake's ACK", FIRST, false),
        ("the inspected bytes again", RELEASED - 2, false),
        ("a keep-alive", RELEASED - 1, true),
        ("what comes next", RELEASED, true),
    ] {
        let mut held = Held::new();
        assert_eq!(held.guest(A, sequence, 0, SERVER_FIRST), passes, "{what}");
        assert_eq!(held.guest(A, sequence, 1, SERVER_FIRST), passes, "{what}");
    }
}

#[test]
fn it_ends_within_the_servers_window() {
    let mut held = Held::new();
    assert!(held.guest(A, RELEASED, WINDOW, SERVER_FIRST));
    assert!(!held.guest(A, RELEASED, WINDOW + 1, SERVER_FIRST));
    assert!(!held.guest(A, RELEASED.wrapping_add(WINDOW), 1, SERVER_FIRST));
    // A window is scaled, and the largest counts; it begins at what was acknowledged.
    held.server(A, SERVER_FIRST, 0, RELEASED.wrapping_add(1_000));
    let end = RELEASED.wrapping_add(1_000 + 60_000 * 4);
    assert!(held.guest(A, end.wrapping_sub(1), 1, SERVER_FIRST));
    assert!(!held.guest(A, end, 1, SERVER_FIRST));
    // What may have been lost of the answer is sent again; not what lies before.
    let far = RELEASED.wrapping_add(1_000_000);
    held.guest(A, end.wrapping_sub(1), 1, SERVER_FIRST);
    for at in (RELEASED.wrapping_add(2_000)..).step_by(200_000).take(6) {
        held.guest(A, at, 0, SERVER_FIRST);
        held.guest(A, at.wrapping_add(199_999), 1, SERVER_FIRST);
        held.server(A, SERVER_FIRST, 0, at.wrapping_add(200_000));
    }
    assert!(held.guest(A, far, 10, SERVER_FIRST));
    assert!(!held.guest(A, RELEASED.wrapping_add(2_000), 10, SERVER_FIRST));
}

#[test]
fn it_acknowledges_what_the_server_has_sent() {
    let mut held = Held::new();
    assert!(!held.guest(A, RELEASED, 0, SERVER_FIRST + 1));
    assert!(!held.guest(A, RELEASED, 0, SERVER_FIRST - 1));
    held.server(A, SERVER_FIRST, 5_000, RELEASED);
    assert!(held.guest(A, RELEASED, 0, SERVER_FIRST + 5_000));
    assert!(!held.guest(A, RELEASED, 0, SERVER_FIRST + 5_001));
    // A segment that was overtaken.
    assert!(held.guest(A, RELEASED, 0, SERVER_FIRST));
    // Only a reset may acknowledge nothing, and a SYN is none of it.
    assert!(!held.guest(0, RELEASED, 10, 0));
    assert!(held.guest(R, RELEASED, 0, 0));
    for flags in [Flags::SYN, Flags::SYN | Flags::ACK] {
        assert!(!held.guest(flags, RELEASED, 0, SERVER_FIRST));
    }
}

#[test]
fn a_forged_segment_of_the_servers_moves_nothing() {
    let mut held = Held::new();
    held.server(A, SERVER_FIRST, 100, RELEASED);
    let before = *held.sequences;
    for (flags, sequence, acknowledgement) in [
        // Acknowledges what was not sent; lies outside of the guest's window; acknowledges nothing.
        (A, SERVER_FIRST + 100, RELEASED + 1),
        (RA, SERVER_FIRST + 100, RELEASED + 1),
        (FA, SERVER_FIRST + 100, RELEASED - 2),
        (A, SERVER_FIRST + 65_536, RELEASED),
        (A, SERVER_FIRST - 2, RELEASED),
        (R, SERVER_FIRST + 65_536, 0),
        // Resets that the guest would not believe, though they lie in its window.
        (R, SERVER_FIRST + 1_000, 0),
        (R, SERVER_FIRST - 1, 0),
        (0, SERVER_FIRST + 100, RELEASED),
    ] {
        held.server(flags, sequence, 1, acknowledgement);
        assert_eq!(
            *held.sequences, before,
            "{flags:#x} {sequence} {acknowledgement}"
        );
        assert_eq!(held.bits(), TcpBits::HELD);
    }
}

#[test]
fn after_a_reset_no_octet_goes_on_and_nothing_takes_it_back() {
    for by_server in [false, true] {
        let mut held = Held::new();
        match by_server {
            false => assert!(held.guest(R, RELEASED, 0, 0)),
            true => held.server(R, SERVER_FIRST, 0, 0),
        }
        assert_eq!(held.bits(), TcpBits::HELD | TcpBits::RST);
        // As a receiver answers a reset that it doubts (RFC 5961 section 3.2).
        assert!(held.guest(A, RELEASED, 0, SERVER_FIRST));
        assert!(!held.guest(A, RELEASED, 1, SERVER_FIRST));
        assert!(!held.guest(FA, RELEASED, 0, SERVER_FIRST));
        held.server(A, SERVER_FIRST, 5, RELEASED);
        assert!(!held.guest(A, RELEASED, 1, SERVER_FIRST + 5));
        assert_eq!(held.bits() & TcpBits::RST, TcpBits::RST);
    }
}

#[test]
fn nothing_comes_behind_a_fin() {
    let mut held = Held::new();
    assert!(held.guest(FA, RELEASED, 10, SERVER_FIRST));
    assert!(!held.guest(A, RELEASED.wrapping_add(11), 1, SERVER_FIRST));
    // Again, whole or in part, and the acknowledgement of what the server still says.
    assert!(held.guest(FA, RELEASED.wrapping_add(5), 5, SERVER_FIRST));
    held.server(FA, SERVER_FIRST, 7, RELEASED.wrapping_add(11));
    assert!(held.guest(A, RELEASED.wrapping_add(11), 0, SERVER_FIRST + 8));
}

/// The guest sends so much more than 4 GiB that numbers come again.
#[test]
fn the_handshakes_numbers_are_refused_when_they_come_again() {
    let mut held = Held::new();
    let mut at = RELEASED;
    const STEP: u32 = 60_000;
    let sent = || u64::from(u32::MAX) + 1 - u64::from(HELLO) - 10;
    for _ in 0..sent() / u64::from(STEP) {
        assert!(held.guest(A, at, STEP, SERVER_FIRST));
        at = at.wrapping_add(STEP);
        held.server(A, SERVER_FIRST, 0, at);
    }
    while at != FIRST {
        let step = FIRST.wrapping_sub(at).min(STEP);
        assert!(held.guest(A, at, step, SERVER_FIRST));
        at = at.wrapping_add(step);
        held.server(A, SERVER_FIRST, 0, at);
    }
    assert!(!held.guest(A, FIRST, 0, SERVER_FIRST));
    assert!(!held.guest(A, FIRST, 100, SERVER_FIRST));
    // Any other number is the connection's; and those too when no server can know a cookie by them.
    assert!(held.guest(A, FIRST.wrapping_sub(1), 0, SERVER_FIRST));
    held.now_ns = SECOND_NS + COOKIE_LIFE_NS + 1;
    assert!(held.guest(A, FIRST, 100, SERVER_FIRST));
}

/// How a server comes to forget a connection.
type Forgets = fn(&mut Held);

/// Linux knows its cookie by the difference of the two numbers.
#[test]
fn numbers_moved_on_from_the_handshakes_are_refused_where_the_server_may_have_forgotten() {
    const MOVED: u32 = 1_000;
    const ANSWER: u32 = 3_000;
    let sent = RELEASED.wrapping_add(2_000);
    let conversation = || {
        let mut held = Held::new();
        assert!(held.guest(A, RELEASED, 2_000, SERVER_FIRST));
        held.server(A, SERVER_FIRST, ANSWER, sent);
        assert!(held.guest(A, sent, 0, SERVER_FIRST + ANSWER));
        held
    };
    let moved = |by: u32| {
        let sequence = FIRST.wrapping_add(MOVED).wrapping_add(by);
        (sequence, SERVER_FIRST + MOVED)
    };
    // While it lives an echo has such numbers all the time.
    let (sequence, acknowledgement) = moved(0);
    assert!(conversation().guest(A, sequence, 0, acknowledgement));
    let cases: [(&str, Forgets); 4] = [
        ("reset by the guest", |held| {
            assert!(held.guest(R, RELEASED.wrapping_add(2_000), 0, 0));
        }),
        ("reset by the server", |held| {
            held.server(R, SERVER_FIRST + ANSWER, 0, 0);
        }),
        ("both FINs", |held| {
            let end = RELEASED.wrapping_add(2_000);
            assert!(held.guest(FA, end, 0, SERVER_FIRST + ANSWER));
            held.server(FA, SERVER_FIRST + ANSWER, 0, end.wrapping_add(1));
            let last = (end.wrapping_add(1), SERVER_FIRST + ANSWER + 1);
            assert!(held.guest(A, last.0, 0, last.1));
        }),
        ("silence", |held| held.now_ns += 21 * SECOND_NS),
    ];
    for (what, forgets) in cases {
        for by in [0, 3, 7, 3u32.wrapping_neg()] {
            let mut held = conversation();
            forgets(&mut held);
            let (sequence, acknowledgement) = moved(by);
            assert!(!held.guest(A, sequence, 0, acknowledgement), "{what}");
            assert!(!held.guest(A, sequence, 10, acknowledgement), "{what}");
            held.now_ns = SECOND_NS + COOKIE_LIFE_NS + 1;
            assert!(held.guest(A, sequence, 0, acknowledgement), "{what}, late");
        }
        let mut held = conversation();
        forgets(&mut held);
        let (sequence, acknowledgement) = moved(8);
        assert!(held.guest(A, sequence, 0, acknowledgement), "{what}");
    }
    // What the server says shows that it has not.
    let mut held = conversation();
    held.now_ns += 21 * SECOND_NS;
    held.server(A, SERVER_FIRST + ANSWER, 0, sent);
    let (sequence, acknowledgement) = moved(0);
    assert!(held.guest(A, sequence, 0, acknowledgement));
}

#[test]
fn a_word_never_moves_back() {
    let word = AtomicU32::new(u32::MAX - 5);
    advance(&word, u32::MAX - 6);
    assert_eq!(load32(&word), u32::MAX - 5);
    advance(&word, 3);
    assert_eq!(load32(&word), 3);
    advance(&word, u32::MAX);
    assert_eq!(load32(&word), 3);
}
