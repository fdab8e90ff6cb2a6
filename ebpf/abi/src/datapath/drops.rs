//! Dropping is counting.
use super::Kernel;
use crate::{DropReason, segment, segment::Segments};

/// Row of what no VM can be blamed for.
pub const NOBODY: u32 = 0;

/// Drops a frame whose headers were not parsed.
#[cold]
#[inline(always)]
pub(super) fn drop_frame<K: Kernel, const L2: usize>(
    kernel: K,
    row: u32,
    reason: DropReason,
) -> K::End {
    drop_packet(kernel, row, reason, rough_segments::<K, L2>(kernel))
}

/// Drops a packet.
#[cold]
#[inline(always)]
pub(super) fn drop_packet<K: Kernel>(
    kernel: K,
    row: u32,
    reason: DropReason,
    segments: Segments,
) -> K::End {
    kernel.drop_counted(row, reason, segments)
}

/// What a frame counts as while its headers are unknown: those of a plain TCP segment are taken.
#[inline(always)]
fn rough_segments<K: Kernel, const L2: usize>(kernel: K) -> Segments {
    let l3_len = kernel.frame_len().saturating_sub(L2 as u32);
    segment::count(l3_len, 40, kernel.gso_size())
}
