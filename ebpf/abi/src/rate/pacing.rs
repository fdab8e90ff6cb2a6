//! Limits of bytes that shape.
//!
//! # Theory of operation
//! A limit of bytes polices, or shapes if it has a *pacer*: a device with a queueing discipline that
//! lets the VM's packets go at the rate. Both count alike, so the paid time is also the time at which
//! a packet leaves the pacer's queue: a packet that finds it [`paced_ahead_ns`] ahead is dropped here,
//! counted, and the queue itself drops nothing. A queueing discipline counts frames with their
//! Ethernet headers, at a rate that is larger by that of a full packet, and so does a limit that
//! shapes ([`paced_bytes`]): full packets pass at the exact rate, smaller ones at a little less.
use core::sync::atomic::{AtomicU32, AtomicU64};

use super::{RateRef, SECOND_NS};
use crate::{
    Direction,
    cell::{load32, load64, store32, store64},
    segment::Segments,
};

/// Time's worth of the rate that a pacer lets pass at once after silence, ns.
pub const PACED_BURST_NS: u64 = 4_000_000;
/// Longest time that a packet waits in a pacer's queue, ns: what a full queue adds to the round trip.
const PACED_QUEUE_NS: u64 = 16_000_000;
/// Bytes that a pacer's queue holds however slow it is: a TCP sender needs some.
const PACED_QUEUE_BYTES: u64 = 32_768;

/// Length of an Ethernet header, bytes.
const ETHERNET_BYTES: u64 = 14;
/// Length of a full packet on an Ethernet link, L3 bytes.
const FULL_BYTES: u64 = 1_500;

/// L3 bytes that packets are charged for where the rate is shaped: as a queueing discipline counts
/// them, to the scale of full packets.
#[inline(always)]
pub const fn paced_bytes(segments: Segments) -> u64 {
    let frames = segments.bytes + ETHERNET_BYTES * segments.packets;
    (frames * FULL_BYTES).div_ceil(FULL_BYTES + ETHERNET_BYTES)
}

/// Rate of a pacer for a rate of L3 bytes: frames with their Ethernet headers, bytes per second. It
/// is faster by a thousandth, so that rounding never makes the queue the stricter of the two.
pub const fn pacer_rate(bytes_per_second: u64) -> u64 {
    let per_second = bytes_per_second as u128 * (FULL_BYTES + ETHERNET_BYTES) as u128;
    let per_second = per_second * 1_001 / (FULL_BYTES * 1_000) as u128 + 1;
    if per_second > u64::MAX as u128 {
        u64::MAX
    } else {
        per_second as u64
    }
}

/// Time by which the paid time of a limit that shapes may lie ahead, ns.
pub const fn paced_ahead_ns(bytes_per_second: u64) -> u64 {
    let least_ns = match (PACED_QUEUE_BYTES * SECOND_NS).checked_div(bytes_per_second) {
        Some(least_ns) => least_ns,
        None => 0,
    };
    let queue_ns = if least_ns > PACED_QUEUE_NS {
        least_ns
    } else {
        PACED_QUEUE_NS
    };
    PACED_BURST_NS + queue_ns
}

/// Major number of the handles of slipgate's queueing disciplines: "SG" in ASCII.
pub const PACING_HANDLE: u16 = 0x5347;

/// Handle of the class in which packets from the VM of this row wait at the pacing device.
#[inline(always)]
pub const fn pacing_class(row: u32) -> u32 {
    (PACING_HANDLE as u32) << 16 | (row & 0xffff)
}

impl RateRef {
    /// Has the limit of bytes of a direction shape by the queue of this device, or police if 0. The
    /// device has its queue before, and keeps it until afterwards.
    pub fn set_pacer(self, direction: Direction, ifindex: u32) {
        let [_, bytes] = self.limits(direction);
        let ahead_ns = paced_ahead_ns(load64(bytes.per_second()));
        store64(self.paced_ahead_ns(direction), ahead_ns);
        store32(self.pacer_word(direction), ifindex);
    }

    /// Ifindex of the device that shapes the bytes of a direction; 0 if they are policed.
    #[inline(always)]
    pub fn pacer(self, direction: Direction) -> u32 {
        load32(self.pacer_word(direction))
    }

    #[inline(always)]
    pub(super) fn paced_ahead_ns<'a>(self, direction: Direction) -> &'a AtomicU64 {
        // SAFETY: part of a valid row; both sides use atomics on this field.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.of(direction)).paced_ahead_ns) }
    }

    #[inline(always)]
    fn pacer_word<'a>(self, direction: Direction) -> &'a AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.of(direction)).pacer) }
    }
}

#[cfg(test)]
#[path = "pacing_test.rs"]
mod tests;
