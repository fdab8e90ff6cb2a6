//! Tracking of a TCP connection: records its segments in the flow's slot. The BPF programs and the
//! engine use the same function.
use core::sync::atomic::Ordering::{AcqRel, Relaxed};

use crate::{
    Direction, SequencesRef, SlotRef, activity,
    cell::{load32, store32},
    slot::SlotFlags,
    tcp::{Flags, Segment, TcpBits},
};

/// Records a translated segment in its flow's slot. `sequences` is the slot's element of
/// `SEQUENCES`. `now_ns` returns `CLOCK_MONOTONIC`, ns; it is called only when the time is needed.
#[inline(always)]
pub fn note(
    slot: SlotRef,
    sequences: SequencesRef,
    direction: Direction,
    segment: &Segment,
    now_ns: impl Fn() -> u64,
) {
    let bits = TcpBits(load32(slot.tcp()));
    if bits.0 & TcpBits::HELD != 0 {
        if matches!(direction, Direction::Rx) && !sequences.is_servers(segment) {
            return;
        }
        sequences.note(direction, segment, &now_ns);
    }
    if bits.0 & TcpBits::QUIET != 0 && activity::has_content(sequences, direction, segment) {
        // Not relaxed: a reader that sees the bit cleared must see the segment's time.
        slot.tcp().fetch_and(!TcpBits::QUIET, AcqRel);
    }
    let fin_end = load32(slot.fin_end(direction.other()));
    let (add, clear) = bits.observe(direction, segment, fin_end);
    if add.0 & (TcpBits::FIN_TX | TcpBits::FIN_RX) != 0 {
        let end = slot.fin_end(direction);
        // A retransmitted FIN has the same end.
        if load32(end) != segment.end {
            store32(end, segment.end);
        }
    }
    if bits.0 & add.0 != add.0 {
        // Not relaxed: a reader that sees the bit of a FIN must see its end.
        slot.tcp().fetch_or(add.0, AcqRel);
    }
    if clear.0 != 0 {
        slot.tcp().fetch_and(!clear.0, Relaxed);
    }
    let answer = Flags::SYN | Flags::ACK;
    let to_opener = if slot.flags() & SlotFlags::INBOUND != 0 {
        matches!(direction, Direction::Tx)
    } else {
        matches!(direction, Direction::Rx)
    };
    if segment.flags & (answer | Flags::RST) == answer
        && to_opener
        && load32(slot.connect_us()) == 0
    {
        let took_us = now_ns().wrapping_sub(slot.created_ns()) / 1_000;
        if took_us <= u32::MAX as u64 {
            store32(
                slot.connect_us(),
                if took_us == 0 { 1 } else { took_us as u32 },
            );
        }
    }
}
