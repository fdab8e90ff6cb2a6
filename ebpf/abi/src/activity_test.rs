extern crate std;

use core::mem::MaybeUninit;

use super::*;
use crate::Sequences;
use Direction::{Rx, Tx};

const A: u8 = Flags::ACK;

/// A TCP flow of which the engine wants to hear.
struct Flow {
    slot: MaybeUninit<Slot>,
    sequences: Sequences,
}

impl Flow {
    fn new(flags: u8) -> Self {
        let mut flow = Self {
            slot: MaybeUninit::zeroed(),
            sequences: Sequences::default(),
        };
        let at = flow.slot.as_mut_ptr();
        // SAFETY: in bounds of a live allocation, which nobody else reaches.
        unsafe {
            (&raw mut (*at).protocol).write(Protocol::Tcp);
            (&raw mut (*at).flags).write(flags);
            (&raw mut (*at).tx_last_ns).write(7);
            (&raw mut (*at).rx_last_ns).write(9);
        }
        flow
    }

    fn slot(&mut self) -> SlotRef {
        // SAFETY: it lives as long as `self`, and one thread reaches it.
        unsafe { SlotRef::new(self.slot.as_mut_ptr()) }
    }

    /// Whether these segments, each with its number and its length, are more than keep-alives.
    fn moves(&mut self, segments: &[(Direction, u8, u32, u32)]) -> bool {
        LastPackets::listen(self.slot(), 0);
        for &(direction, flags, sequence, len) in segments {
            let segment = Segment::new(flags, sequence, len, 1, 0);
            // SAFETY: it lives as long as `self`, and one thread reaches it.
            let sequences = unsafe { SequencesRef::new(&raw mut self.sequences) };
            crate::connection::note(self.slot(), sequences, direction, &segment, || 0);
        }
        LastPackets::of_live(self.slot(), 0) != LastPackets::default()
    }
}

#[test]
fn keep_alives_and_their_answers_move_nothing() {
    let mut flow = Flow::new(0);
    assert!(!flow.moves(&[]));
    assert!(!flow.moves(&[
        (Tx, A, 99, 0),
        (Rx, A, 500, 0),
        (Rx, A, 499, 0),
        (Tx, A, 100, 0)
    ]));
    // With the octet before: it is known as one from its second time on.
    assert!(flow.moves(&[(Tx, A, 99, 1)]));
    assert!(!flow.moves(&[(Tx, A, 99, 1), (Rx, A, 500, 0), (Tx, A, 99, 1)]));
    assert!(
        flow.moves(&[(Rx, A, 99, 1)]),
        "the other side's numbers are others"
    );
    assert!(!flow.moves(&[(Rx, A, 99, 1), (Tx, A, 99, 1)]));
}

#[test]
fn one_octet_that_is_new_moves_the_connection() {
    for direction in [Tx, Rx] {
        let mut flow = Flow::new(0);
        assert!(flow.moves(&[(direction, A, 100, 1), (direction.other(), A, 500, 0)]));
        assert!(flow.moves(&[(direction, A, 101, 1)]));
        assert!(flow.moves(&[(direction, A, 100, 2)]));
        for flags in [Flags::SYN, Flags::FIN | A, Flags::RST] {
            assert!(flow.moves(&[(direction, flags, 102, 0)]), "{flags}");
        }
    }
}

#[test]
fn a_forward_counts_once_its_client_is_proven() {
    let mut flow = Flow::new(SlotFlags::INBOUND);
    assert_eq!(LastPackets::of_live(flow.slot(), 0), LastPackets::default());
    flow.slot().tcp().fetch_or(TcpBits::OPENER_PROVEN, Relaxed);
    let seen = LastPackets {
        from_guest_ns: 7,
        to_guest_ns: 9,
    };
    assert_eq!(LastPackets::of_live(flow.slot(), 0), seen);
    assert_eq!(seen.latest_ns(), 9);
}

#[test]
fn datagrams_that_the_guest_refuses_do_not_count_until_it_sends() {
    for protocol in [Protocol::Udp, Protocol::Icmp] {
        let counts = |bits, sent, age_ns| counts(protocol, SlotFlags::INBOUND, bits, sent, age_ns);
        assert!(!counts(0, 0, 0) && counts(0, 0, UNANSWERED_COUNTS_AFTER_NS));
        assert!(!counts(TcpBits::REFUSED, 0, UNANSWERED_COUNTS_AFTER_NS));
        assert!(counts(TcpBits::REFUSED, 1, 0) && counts(0, 1, 0));
    }
}
