//! Which packets of a flow count as activity of its VM.
//!
//! # Theory of operation
//! A slot has the times of its last packets, whatever these were. Two kinds must not keep a VM
//! awake: packets of a forward that nobody behind it has accepted, and, where the VM's policy says
//! so, TCP keep-alives. The bits of the slot tell both; [`counts`] is the rule for whoever reads
//! times of slots.
//!
//! A keep-alive (RFC 9293 section 3.8.4) repeats the octet before the next one to be sent, or has
//! that number and no octet; its answer is a bare acknowledgement. So the engine sets
//! [`TcpBits::QUIET`], and the first segment that is neither clears it, with the other changes of
//! the connection's state ([`crate::connection::note`]). While the bit is set, each segment of the
//! flow takes that way. In a flow that moves data it is cleared at once, and other segments are not
//! even tested for it: the mask of bits that concern a segment has one bit more.
//!
//! | segment | has content |
//! | --- | --- |
//! | SYN, FIN, RST | yes |
//! | two octets of payload or more | yes |
//! | one octet | unless it has the number of the last segment of one octet in this direction |
//! | none: acknowledgements, window updates, probes of a closed window | no |
#[cfg(not(target_arch = "bpf"))]
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::{
    Direction, SequencesRef,
    cell::{load32, store32},
    tcp::{Flags, Segment, TcpBits},
};
#[cfg(not(target_arch = "bpf"))]
use crate::{Protocol, Slot, SlotRef, slot::SlotFlags};

impl TcpBits {
    /// Of a flow of another protocol than TCP: the guest has refused it by an ICMP error. It counts
    /// again once the guest sends in it.
    pub const REFUSED: u32 = 1 << 10;
}

/// Whether a segment moves anything: see the module's table. A segment of one octet is remembered.
#[inline(always)]
pub(crate) fn has_content(
    sequences: SequencesRef,
    direction: Direction,
    segment: &Segment,
) -> bool {
    if segment.flags & (Flags::SYN | Flags::FIN | Flags::RST) != 0 {
        return true;
    }
    let octets = segment.end.wrapping_sub(segment.sequence);
    if octets != 1 {
        return octets != 0;
    }
    let last = match direction {
        Direction::Tx => sequences.octet_tx(),
        Direction::Rx => sequences.octet_rx(),
    };
    if load32(last) == segment.sequence {
        return false;
    }
    store32(last, segment.sequence);
    true
}

/// Age from which a flow counts that a forward's datagram opened and that the guest has not answered,
/// ns: by then the guest has refused it, if it does.
#[cfg(not(target_arch = "bpf"))]
pub const UNANSWERED_COUNTS_AFTER_NS: u64 = 1_000_000_000;

/// Whether the times of a flow's packets are times of its VM's activity. `bits`: of the slot, as its
/// `flags` and `tx_packets`. `age_ns`: since its admission.
#[cfg(not(target_arch = "bpf"))]
pub const fn counts(
    protocol: Protocol,
    flags: u8,
    bits: u32,
    tx_packets: u64,
    age_ns: u64,
) -> bool {
    match protocol {
        Protocol::Tcp => {
            let is_inbound = flags & SlotFlags::INBOUND != 0;
            bits & TcpBits::QUIET == 0 && (!is_inbound || bits & TcpBits::OPENER_PROVEN != 0)
        }
        _ => {
            let is_old = age_ns >= UNANSWERED_COUNTS_AFTER_NS;
            tx_packets > 0 || bits & TcpBits::REFUSED == 0 && is_old
        }
    }
}

/// Times of the last packets of a VM that count: `CLOCK_MONOTONIC`, ns; 0 if there was none.
#[cfg(not(target_arch = "bpf"))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LastPackets {
    /// Of the guest.
    pub from_guest_ns: u64,
    /// To the guest.
    pub to_guest_ns: u64,
}

#[cfg(not(target_arch = "bpf"))]
impl LastPackets {
    /// Those of a flow; none if its packets do not count. `now_ns`: `CLOCK_MONOTONIC`.
    pub const fn of(slot: &Slot, now_ns: u64) -> Self {
        let age_ns = now_ns.saturating_sub(slot.created_ns);
        match counts(slot.protocol, slot.flags, slot.tcp, slot.tx_packets, age_ns) {
            true => Self {
                from_guest_ns: slot.tx_last_ns,
                to_guest_ns: slot.rx_last_ns,
            },
            false => Self {
                from_guest_ns: 0,
                to_guest_ns: 0,
            },
        }
    }

    /// Those of a live flow; none if its packets do not count.
    pub fn of_live(slot: SlotRef, now_ns: u64) -> Self {
        // The bits first: see [`Self::listen`].
        let bits = slot.tcp().load(Acquire);
        Self::with_bits(slot, bits, now_ns)
    }

    /// Those of a live flow, as [`Self::of_live`], and asks for the next segment with content: until
    /// that comes, no packet of the flow counts. The bit is set before the times are read, and the
    /// programs write the time before they clear it, so no segment is missed between two calls.
    pub fn listen(slot: SlotRef, now_ns: u64) -> Self {
        let mut bits = slot.tcp().load(Acquire);
        if bits & TcpBits::QUIET == 0 && slot.protocol() == Protocol::Tcp as u8 {
            bits = slot.tcp().fetch_or(TcpBits::QUIET, AcqRel);
        }
        Self::with_bits(slot, bits, now_ns)
    }

    /// Those of a live flow whose keep-alives count: takes back what [`Self::listen`] asked for.
    pub fn count_all(slot: SlotRef, now_ns: u64) -> Self {
        let mut bits = slot.tcp().load(Acquire);
        if bits & TcpBits::QUIET != 0 {
            slot.tcp().fetch_and(!TcpBits::QUIET, AcqRel);
            bits &= !TcpBits::QUIET;
        }
        Self::with_bits(slot, bits, now_ns)
    }

    fn with_bits(slot: SlotRef, bits: u32, now_ns: u64) -> Self {
        let protocol = Protocol::from_number(slot.protocol());
        let tx_packets = slot.tx_packets().load(Relaxed);
        let age_ns = now_ns.saturating_sub(slot.created_ns());
        match protocol.is_some_and(|it| counts(it, slot.flags(), bits, tx_packets, age_ns)) {
            true => Self {
                from_guest_ns: slot.tx_last_ns().load(Relaxed),
                to_guest_ns: slot.rx_last_ns().load(Relaxed),
            },
            false => Self::default(),
        }
    }

    /// The later time of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            from_guest_ns: self.from_guest_ns.max(other.from_guest_ns),
            to_guest_ns: self.to_guest_ns.max(other.to_guest_ns),
        }
    }

    /// Time of the last packet of either, ns.
    pub fn latest_ns(&self) -> u64 {
        self.from_guest_ns.max(self.to_guest_ns)
    }
}

#[cfg(test)]
#[path = "activity_test.rs"]
mod tests;
