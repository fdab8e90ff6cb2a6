//! Behind [`guest_egress`](super::guest_egress), which lets no frame by: what comes here came to a
//! TAP that has lost it, and would go on to the host's own stack, which might even route it.
use super::{
    Kernel, Maps as _,
    drops::{NOBODY, drop_frame},
    packet::ETHERNET_LEN,
};
use crate::DropReason;

/// Drops the frame.
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
