//! A VM's limits, looked at only where one is set; see [`slipgate_abi::rate`].
use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use slipgate_abi::{Direction, DropReason, rate::RateRef, segment::Segments};

use crate::maps::RATES;

/// Lets a packet pass that is about to be translated, or says why not.
#[cold]
#[inline(always)]
pub(crate) fn take(row: u32, direction: Direction, segments: Segments) -> Result<(), DropReason> {
    let rx = u32::from(matches!(direction, Direction::Rx));
    // A reason as its number: more than words does not go through a call.
    match charge(row, rx, segments.packets, segments.bytes) {
        PASSES => Ok(()),
        reason if reason == DropReason::PacketRate as u32 => Err(DropReason::PacketRate),
        _ => Err(DropReason::ByteRate),
    }
}

const PASSES: u32 = u32::MAX;

#[inline(never)]
fn charge(row: u32, rx: u32, packets: u64, bytes: u64) -> u32 {
    let Some(limits) = RATES.get_ptr_mut(row) else {
        return PASSES;
    };
    // SAFETY: an array's element never moves.
    let limits = unsafe { RateRef::new(limits) };
    let direction = if rx != 0 {
        Direction::Rx
    } else {
        Direction::Tx
    };
    // SAFETY: no arguments. Its tick of some milliseconds is short beside the burst.
    let now_ns = unsafe { bpf_ktime_get_coarse_ns() };
    match limits.take(direction, Segments { packets, bytes }, now_ns) {
        Ok(()) => PASSES,
        Err(reason) => reason as u32,
    }
}
