//! Rate limits of a VM, checked only if one is set; see [`crate::rate`].
use super::{Kernel, Maps as _};
use crate::{Direction, DropReason, segment::Segments};

/// Charges a packet that is about to be translated. Returns the device by which it is to be sent, if
/// its rate is shaped; 0 if not.
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
) -> Result<u32, DropReason> {
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
    result(charge(kernel, row, rx, 0, 0)).map(drop)
}

/// Decodes the result of [`charge`].
#[inline(always)]
fn result(word: u64) -> Result<u32, DropReason> {
    let (number, pacer) = (word as u32, (word >> 32) as u32);
    match number {
        PASSES => Ok(pacer),
        reason if reason == DropReason::PacketRate as u32 => Err(DropReason::PacketRate),
        reason if reason == DropReason::ByteBudget as u32 => Err(DropReason::ByteBudget),
        _ => Err(DropReason::ByteRate),
    }
}

const PASSES: u32 = u32::MAX;

/// Charges the packets, or only checks the limits if `packets` is 0. Returns in one word, which is
/// all that a BPF function call can, [`PASSES`] with the pacer in the upper half, or the number of the
/// drop reason.
#[inline(never)]
fn charge<K: Kernel>(kernel: K, row: u32, rx: u32, packets: u64, bytes: u64) -> u64 {
    let Some(limits) = kernel.maps().rates(row) else {
        return u64::from(PASSES);
    };
    let direction = if rx != 0 {
        Direction::Rx
    } else {
        Direction::Tx
    };
    // Exact, because a pacer's queue is short beside a tick of the coarse time.
    let now_ns = kernel.now_ns();
    let passes = if packets == 0 {
        limits.look(direction, now_ns)
    } else {
        limits.take(direction, Segments { packets, bytes }, now_ns)
    };
    match passes {
        Ok(()) => u64::from(PASSES) | (u64::from(limits.pacer(direction)) << 32),
        Err(reason) => u64::from(reason as u32),
    }
}
