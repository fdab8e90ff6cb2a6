//! A VM's limits, looked at only where one is set; see [`slipgate_abi::rate`].
use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use slipgate_abi::{Direction, DropReason, rate::RateRef, segment::Segments};

use crate::maps::RATES;

/// Lets a packet pass that is about to be translated, or says why not.
#[cold]
#[inline(always)]
pub(crate) fn take(row: u32, direction: Direction, segments: Segments) -> Result<(), DropReason> {
    let rx = u32::from(matches!(direction, Direction::Rx));
    result(charge(row, rx, segments.packets, segments.bytes))
}

/// Whether a packet would pass, or why not. It goes to the engine, which charges what it sends on.
#[cold]
#[inline(always)]
pub(crate) fn look(row: u32, direction: Direction) -> Result<(), DropReason> {
    let rx = u32::from(matches!(direction, Direction::Rx));
    result(charge(row, rx, 0, 0))
}

/// A reason as its number: more than words does not go through a call.
#[inline(always)]
fn result(number: u32) -> Result<(), DropReason> {
    match number {
        PASSES => Ok(()),
        reason if reason == DropReason::PacketRate as u32 => Err(DropReason::PacketRate),
        _ => Err(DropReason::ByteRate),
    }
}

const PASSES: u32 = u32::MAX;

/// Without packets, looks only.
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
    let passes = if packets == 0 {
        limits.look(direction, now_ns)
    } else {
        limits.take(direction, Segments { packets, bytes }, now_ns)
    };
    match passes {
        Ok(()) => PASSES,
        Err(reason) => reason as u32,
    }
}
