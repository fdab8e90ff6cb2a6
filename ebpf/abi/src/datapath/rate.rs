//! Rate limits of a VM, checked only if one is set; see [`crate::rate`].
use super::{Kernel, Maps as _};
use crate::{Direction, DropReason, segment::Segments};

/// Charges a packet that is about to be translated.
///
/// # Errors
/// The drop reason if a limit is exceeded.
#[cold]
#[inline(always)]
pub(super) fn take<K: Kernel>(
    kernel: K,
    row: u32,
    direction: Direction,
    segments: Segments,
) -> Result<(), DropReason> {
    let rx = u32::from(matches!(direction, Direction::Rx));
    result(charge(kernel, row, rx, segments.packets, segments.bytes))
}

/// Checks whether a packet that goes to the engine would pass. The engine charges packets that it
/// sends.
///
/// # Errors
/// The drop reason if a limit is exceeded.
#[cold]
#[inline(always)]
pub(super) fn look<K: Kernel>(kernel: K, row: u32, direction: Direction) -> Result<(), DropReason> {
    let rx = u32::from(matches!(direction, Direction::Rx));
    result(charge(kernel, row, rx, 0, 0))
}

/// Decodes the result of [`charge`]. A BPF function call returns only one word.
#[inline(always)]
fn result(number: u32) -> Result<(), DropReason> {
    match number {
        PASSES => Ok(()),
        reason if reason == DropReason::PacketRate as u32 => Err(DropReason::PacketRate),
        _ => Err(DropReason::ByteRate),
    }
}

const PASSES: u32 = u32::MAX;

/// Charges the packets, or only checks the limits if `packets` is 0. Returns [`PASSES`] or the
/// number of the drop reason.
#[inline(never)]
fn charge<K: Kernel>(kernel: K, row: u32, rx: u32, packets: u64, bytes: u64) -> u32 {
    let Some(limits) = kernel.maps().rates(row) else {
        return PASSES;
    };
    let direction = if rx != 0 {
        Direction::Rx
    } else {
        Direction::Tx
    };
    // Its tick of some milliseconds is short beside the burst.
    let now_ns = kernel.coarse_now_ns();
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
