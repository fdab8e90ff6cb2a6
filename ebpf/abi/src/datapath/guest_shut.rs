//! Fallback after [`guest_egress`](super::guest_egress), which passes no frame on. A frame that
//! arrives here came by a TAP that has lost that program, and would otherwise reach the host's
//! stack, which might route it.
use super::{
    Kernel, Maps as _,
    drops::{NOBODY, drop_frame},
    packet::ETHERNET_LEN,
};
use crate::DropReason;

/// Drops the frame and counts it as `Unserved`.
#[inline(always)]
pub fn run<K: Kernel>(kernel: K) -> K::End {
    let tap = kernel.maps().tap(kernel.ifindex());
    let (id, row) = tap.map_or((0, NOBODY), |tap| (tap.vm, tap.vm_row));
    let row = if kernel.maps().vm(row, id).is_some() {
        row
    } else {
        NOBODY
    };
    drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Unserved)
}
