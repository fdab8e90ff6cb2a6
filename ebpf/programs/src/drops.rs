//! Dropping is counting.
use slipgate_abi::{DropReason, count, segment::Segments};

use crate::maps::DROPS;

/// Counts without dropping, in whichever program.
#[inline(always)]
pub(crate) fn count(row: u32, reason: DropReason, segments: Segments) {
    if let Some(drops) = DROPS.get_ptr_mut(row) {
        // SAFETY: a live row; both sides change it by atomics.
        unsafe { count::drop_packet(drops, reason, segments.packets, segments.bytes) };
    }
}
