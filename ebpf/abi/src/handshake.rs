//! Proof that the host that opened a TCP connection by a forward exists at its address.
//!
//! # Theory of operation
//! The source of a SYN may be forged. A listening guest answers it like any other. Both SYNs are
//! then seen and [`Phase`](crate::tcp::Phase) is Established, although no host has that address. A
//! real opener receives the guest's SYN-ACK, learns its initial sequence number, and acknowledges
//! it in the third segment of the handshake (RFC 9293 section 3.5). A forger does not receive it
//! and has to guess. So the end of the guest's SYN is stored where that of its FIN will be, and a
//! segment from the opener that acknowledges it sets [`TcpBits::OPENER_PROVEN`], which is never
//! cleared.
//!
//! If a guest sends data with its SYN-ACK (RFC 7413), the first acknowledgement may cover that
//! data: up to [`EARLY_DATA`] bytes after the SYN are accepted. A blind guess succeeds with
//! probability 1.5 in 100,000.
use core::sync::atomic::Ordering::{AcqRel, Relaxed};

use crate::{
    Direction, SlotRef,
    cell::{load32, store32},
    slot::SlotFlags,
    tcp::{Flags, Segment, TcpBits},
};

impl TcpBits {
    /// The opener of a connection that a forward admitted has acknowledged the guest's SYN.
    pub const OPENER_PROVEN: u32 = 1 << 15;
}

/// How far after the guest's SYN the opener's acknowledgement may lie, bytes.
const EARLY_DATA: u32 = 1 << 16;

/// Whether the flow was opened by the world and its opener is not proven yet.
#[inline(always)]
pub fn is_pending(slot: SlotRef) -> bool {
    slot.flags() & SlotFlags::INBOUND != 0 && load32(slot.tcp()) & TcpBits::OPENER_PROVEN == 0
}

/// Records what a translated segment shows about a pending handshake. Programs and engine both call
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

/// Whether the opener has acknowledged the guest's SYN.
pub fn is_proven(slot: SlotRef) -> bool {
    slot.tcp().load(Relaxed) & TcpBits::OPENER_PROVEN != 0
}

#[cfg(test)]
#[path = "handshake_test.rs"]
mod tests;
