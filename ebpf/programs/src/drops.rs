//! Counts of dropped packets.
use slipgate_abi::{DropReason, count, segment::Segments};

use crate::maps::DROPS;

/// Counts packets in a row of `DROPS`, without dropping anything. For TC and XDP programs.
#[inline(always)]
pub(crate) fn count(row: u32, reason: DropReason, segments: Segments) {
    if let Some(drops) = DROPS.get_ptr_mut(row) {
        // SAFETY: a live row; both sides change it by atomics.
        unsafe { count::drop_packet(drops, reason, segments.packets, segments.bytes) };
    }
}
