//! Path of a packet to the world: by a next hop with known MAC addresses, or by the kernel's
//! neighbour table.
use super::{Kernel, Maps as _, packet::Macs};
use crate::{NextHop, NextHopRef, SlotRef, cell::load32};

/// Path by which a packet leaves.
pub(super) struct Path {
    pub(super) ifindex: u32,
    pub(super) mtu: u32,
    pub(super) macs: Option<Macs>,
    pub(super) neighbour_unknown: bool,
}

/// Path of a flow; `None` if its uplink is gone.
#[inline(always)]
pub(super) fn path_of<K: Kernel>(kernel: K, slot: SlotRef) -> Option<Path> {
    let hop = kernel.maps().next_hop(load32(slot.next_hop()));
    if let Some(path) = hop.and_then(path_by) {
        return Some(path);
    }
    let ifindex = load32(slot.uplink_ifindex());
    let mtu = kernel.mtu_of(ifindex)?;
    Some(Path {
        ifindex,
        mtu: match hop.map(NextHopRef::route_mtu) {
            None | Some(0) => mtu,
            Some(route_mtu) => mtu.min(route_mtu),
        },
        macs: None,
        neighbour_unknown: true,
    })
}

/// Path by a next hop; `None` if its fields may not be used or are being written.
#[inline(always)]
pub(super) fn path_by(hop: NextHopRef) -> Option<Path> {
    hop.read(|hop| {
        // SAFETY: a live element, read word by word; `read` finds out whether they go together.
        let (ifindex, mtu, macs) = unsafe {
            (
                (&raw const (*hop).ifindex).read_volatile(),
                (&raw const (*hop).mtu).read_volatile(),
                (&raw const (*hop).neighbour_mac)
                    .cast::<Macs>()
                    .read_volatile(),
            )
        };
        Path {
            ifindex,
            mtu,
            // Without L2 header they are zeroes, and the redirect strips them.
            macs: Some(macs),
            neighbour_unknown: false,
        }
    })
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(NextHop, uplink_mac) == offset_of!(NextHop, neighbour_mac) + 6);
    assert!(offset_of!(NextHop, neighbour_mac) % 2 == 0);
};
