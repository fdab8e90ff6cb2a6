extern crate std;

use core::mem::MaybeUninit;

use super::*;
use crate::{Sequences, SequencesRef, Slot};
use Direction::{Rx, Tx};

const S: u8 = Flags::SYN;
const SA: u8 = Flags::SYN | Flags::ACK;
const A: u8 = Flags::ACK;

/// A slot with these flags, and the rest zero.
fn slot_with(memory: &mut MaybeUninit<Slot>, flags: u8) -> SlotRef {
    let slot = memory.as_mut_ptr();
    // SAFETY: within the allocation, which outlives the caller's use.
    unsafe {
        (&raw mut (*slot).flags).write(flags);
        SlotRef::new(slot)
    }
}

/// As programs and engine do.
fn note_both(slot: SlotRef, direction: Direction, segment: &Segment) {
    let mut sequences = Sequences::default();
    // SAFETY: it lives as long as it is used.
    let sequences = unsafe { SequencesRef::new(&raw mut sequences) };
    crate::connection::note(slot, sequences, direction, segment, || 0);
    if is_pending(slot) {
        note(slot, direction, segment);
    }
}

/// Whether the opener is proven by these: direction, flags, sequence number, payload,
/// acknowledgement.
fn proven(flags: u8, segments: &[(Direction, u8, u32, u32, u32)]) -> bool {
    let mut memory = MaybeUninit::<Slot>::zeroed();
    let slot = slot_with(&mut memory, flags);
    for &(direction, flags, sequence, payload_len, acknowledgement) in segments {
        let segment = Segment::new(flags, sequence, payload_len, acknowledgement, 0);
        note_both(slot, direction, &segment);
    }
    is_proven(slot)
}

const IN: u8 = SlotFlags::INBOUND;
/// The guest's initial sequence number.
const G: u32 = 0xffff_ffff;

#[test]
fn who_acknowledges_the_guests_syn_is_there() {
    let opening = [(Rx, S, 5, 0, 0), (Tx, SA, G, 0, 6)];
    let then = |last| [opening[0], opening[1], last];
    assert!(!proven(IN, &opening));
    assert!(proven(IN, &then((Rx, A, 6, 0, 0))));
    // The third segment was lost, or has a request in it.
    assert!(proven(IN, &then((Rx, A, 6, 100, 0))));
    assert!(proven(IN, &then((Rx, A | Flags::FIN, 6, 0, 0))));
    // The guest's early data, which are acknowledged along.
    assert!(proven(IN, &then((Rx, A, 6, 0, 1_000))));
}

#[test]
fn who_does_not_know_the_guests_number_is_not() {
    let after = |last| proven(IN, &[(Rx, S, 5, 0, 0), (Tx, SA, G, 0, 6), last]);
    assert!(!after((Rx, A, 6, 0, G)));
    assert!(!after((Rx, A, 6, 0, 0x1_0000)));
    assert!(!after((Rx, A, 6, 0, 0x8000_0000)));
    assert!(!after((Rx, A | Flags::RST, 6, 0, 0)));
    assert!(!after((Rx, SA, 6, 0, 0)));
    assert!(!after((Rx, S, 5, 0, 0)));
    // Before the guest has answered there is nothing to know.
    assert!(!proven(IN, &[(Rx, S, 5, 0, 0), (Rx, A, 6, 0, 0)]));
}

#[test]
fn only_what_the_world_opened_is_looked_at() {
    let segments = [(Tx, S, 5, 0, 0), (Rx, SA, 9, 0, 6), (Tx, A, 6, 0, 10)];
    assert!(!proven(0, &segments));
}

/// The place is that of the end of the guest's FIN afterwards.
#[test]
fn what_a_fin_ends_at_is_known_all_the_same() {
    let f = A | Flags::FIN;
    let mut memory = MaybeUninit::<Slot>::zeroed();
    let slot = slot_with(&mut memory, IN);
    for (direction, flags, sequence, acknowledgement) in [
        (Rx, S, 5, 0),
        (Tx, SA, 9, 6),
        (Rx, A, 6, 10),
        (Tx, f, 10, 6),
        (Tx, SA, 77, 6),
        (Rx, f, 6, 11),
        (Tx, A, 11, 7),
    ] {
        let segment = Segment::new(flags, sequence, 0, acknowledgement, 0);
        note_both(slot, direction, &segment);
    }
    let bits = TcpBits(slot.tcp().load(Relaxed));
    assert_eq!(bits.phase(), crate::tcp::Phase::Closed);
}
