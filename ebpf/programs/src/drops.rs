//! Dropping is counting.
use aya_ebpf::bindings::TC_ACT_SHOT;
use slipgate_abi::{DropReason, count, segment::Segments};

use crate::{maps::DROPS, skb::Skb};

/// Counts without dropping, in whichever program.
#[inline(always)]
pub(crate) fn count(row: u32, reason: DropReason, segments: Segments) {
    if let Some(drops) = DROPS.get_ptr_mut(row) {
        // SAFETY: a live row; both sides change it by atomics.
        unsafe { count::drop_packet(drops, reason, segments.packets, segments.bytes) };
    }
}

/// Counts a packet and drops it. Arguments in words: they go through a call.
#[inline(never)]
pub(crate) fn shoot(skb: Skb, row: u32, reason: u32, packets: u64, bytes: u64) -> i32 {
    #[cfg(feature = "log")]
    {
        use slipgate_abi::datapath::Kernel;
        aya_log_ebpf::debug!(
            &skb.context(),
            "drop: ifindex {} vm row {} reason {} packets {} bytes {}",
            skb.ifindex(),
            row,
            reason,
            packets,
            bytes
        );
    }
    #[cfg(not(feature = "log"))]
    let _ = skb;
    if let Some(&reason) = DropReason::ALL.get(reason as usize) {
        count(row, reason, Segments { packets, bytes });
    }
    TC_ACT_SHOT
}
