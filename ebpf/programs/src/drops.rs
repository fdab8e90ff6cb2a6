//! Dropping is counting.
use aya_ebpf::bindings::TC_ACT_SHOT;
use slipgate_abi::{DropReason, count, segment::Segments};

use crate::{maps::DROPS, skb::Skb};

/// Row of what no VM can be blamed for.
pub(crate) const NOBODY: u32 = 0;

/// Counts without dropping, in whichever program.
#[inline(always)]
pub(crate) fn count(row: u32, reason: DropReason, segments: Segments) {
    if let Some(drops) = DROPS.get_ptr_mut(row) {
        // SAFETY: a live row; both sides change it by atomics.
        unsafe { count::drop_packet(drops, reason, segments.packets, segments.bytes) };
    }
}

/// Drops a frame whose headers were not parsed.
#[cold]
#[inline(always)]
pub(crate) fn drop_frame<const L2: usize>(skb: Skb, row: u32, reason: DropReason) -> i32 {
    drop_packet(skb, row, reason, skb.rough_segments(L2))
}

/// Drops a packet.
#[cold]
#[inline(always)]
pub(crate) fn drop_packet(skb: Skb, row: u32, reason: DropReason, segments: Segments) -> i32 {
    shoot(skb, row, reason as u32, segments.packets, segments.bytes)
}

#[inline(never)]
fn shoot(skb: Skb, row: u32, reason: u32, packets: u64, bytes: u64) -> i32 {
    #[cfg(feature = "log")]
    aya_log_ebpf::debug!(
        &skb.context(),
        "drop: ifindex {} vm row {} reason {} packets {} bytes {}",
        skb.ifindex(),
        row,
        reason,
        packets,
        bytes
    );
    #[cfg(not(feature = "log"))]
    let _ = skb;
    if let Some(&reason) = DropReason::ALL.get(reason as usize) {
        count(row, reason, Segments { packets, bytes });
    }
    TC_ACT_SHOT
}
