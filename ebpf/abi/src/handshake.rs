//! Whether who opened a TCP connection by a forward is there at all.
//!
//! # Theory of operation
//! The source of a SYN may be forged. A guest that listens answers it like any, so that both SYNs are
//! seen and [`Phase`](crate::tcp::Phase) is Established, although nobody is there. Who gets the guest's
//! SYN-ACK knows the guest's initial sequence number, and acknowledges it in the third segment of the
//! handshake (RFC 9293 section 3.5); who has forged the SYN does not, and has to guess. So the end of
//! the guest's SYN is kept where that of its FIN will be, and a segment of the opener's that
//! acknowledges it sets [`TcpBits::OPENER_PROVEN`], for good.
//!
//! A guest that sends data along with its SYN-ACK (RFC 7413) may have that acknowledged first:
//! [`EARLY_DATA`] bytes behind the SYN are as good. A blind guess hits with 1.5 in 100,000.
use core::sync::atomic::Ordering::{AcqRel, Relaxed};

use crate::{
    Direction, SlotRef,
    cell::{load32, store32},
    slot::SlotFlags,
    tcp::{Flags, Segment, TcpBits},
};

impl TcpBits {
    /// The opener of a connection that a forward let in has acknowledged the guest's SYN.
    pub const OPENER_PROVEN: u32 = 1 << 15;
}

/// How far behind the guest's SYN the opener's acknowledgement may lie, bytes.
const EARLY_DATA: u32 = 1 << 16;

/// Whether segments of a TCP flow may still tell.
#[inline(always)]
pub fn is_pending(slot: SlotRef) -> bool {
    slot.flags() & SlotFlags::INBOUND != 0 && load32(slot.tcp()) & TcpBits::OPENER_PROVEN == 0
}

/// Notes what a segment that was translated says of a handshake that is pending. Both sides do it by
/// this function, after [`connection::note`](crate::connection::note).
#[inline(always)]
pub fn note(slot: SlotRef, direction: Direction, segment: &Segment) {
    const KIND: u8 = Flags::SYN | Flags::ACK | Flags::RST;
    let bits = load32(slot.tcp());
    let guests_syn_end = slot.fin_end(Direction::Tx);
    let kind = segment.flags & KIND;
    match direction {
        Direction::Tx if kind == Flags::SYN | Flags::ACK && bits & TcpBits::FIN_TX == 0 => {
            store32(guests_syn_end, segment.end);
        }
        Direction::Rx if kind == Flags::ACK && bits & TcpBits::SYN_TX != 0 => {
            let behind = segment.acknowledgement.wrapping_sub(load32(guests_syn_end));
            if behind < EARLY_DATA {
                slot.tcp().fetch_or(TcpBits::OPENER_PROVEN, AcqRel);
            }
        }
        _ => {}
    }
}

/// Whether the opener has proven to be there.
pub fn is_proven(slot: SlotRef) -> bool {
    slot.tcp().load(Relaxed) & TcpBits::OPENER_PROVEN != 0
}

#[cfg(test)]
#[path = "handshake_test.rs"]
mod tests;
