//! Drops of packets. Each is counted with its reason.
use super::Kernel;
use crate::{DropReason, segment, segment::Segments};

/// Row that counts packets which cannot be attributed to a VM.
pub const NOBODY: u32 = 0;

/// Drops a frame whose headers were not parsed, and counts it.
#[cold]
#[inline(always)]
pub(super) fn drop_frame<K: Kernel, const L2: usize>(
    kernel: K,
    row: u32,
    reason: DropReason,
) -> K::End {
    drop_packet(kernel, row, reason, rough_segments::<K, L2>(kernel))
}

/// Drops a packet and counts its segments.
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

/// Estimate of a frame's packets and bytes while its headers are unknown, with the header length of
/// a TCP segment without options.
#[inline(always)]
fn rough_segments<K: Kernel, const L2: usize>(kernel: K) -> Segments {
    let l3_len = kernel.frame_len().saturating_sub(L2 as u32);
    segment::count(l3_len, 40, kernel.gso_size())
}
