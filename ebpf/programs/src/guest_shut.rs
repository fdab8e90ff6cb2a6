//! Behind [`guest_egress`](crate::guest_egress), which lets no frame by: what comes here came to a
//! TAP that has lost it, and would go on to the host's own stack, which might even route it.
use slipgate_abi::DropReason;

use crate::{
    drops::{NOBODY, drop_frame},
    maps::{self, TAPS},
    packet::ETHERNET_LEN,
    skb::Skb,
};

/// Drops the frame.
#[inline(always)]
pub(crate) fn run(skb: Skb) -> i32 {
    let tap = TAPS.get_ptr(skb.ifindex());
    // SAFETY: the entry may be recycled under us; the row's id tells.
    let (id, row) = tap.map_or((0, NOBODY), |tap| unsafe { ((*tap).vm, (*tap).vm_row) });
    let row = if maps::vm(row, id).is_some() {
        row
    } else {
        NOBODY
    };
    drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Unserved)
}
