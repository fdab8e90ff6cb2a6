//! How a packet leaves for the world: by a next hop with known MACs, or by the kernel's neighbour
//! table.
use slipgate_abi::{NextHop, NextHopRef, SlotRef, cell::load32};

use crate::{maps, packet::Macs, skb::Skb};

/// How to leave.
pub(crate) struct Way {
    pub(crate) ifindex: u32,
    pub(crate) mtu: u32,
    pub(crate) macs: Option<Macs>,
    pub(crate) neighbour_unknown: bool,
}

/// The flow's way; `None` when its uplink is gone.
#[inline(always)]
pub(crate) fn way_of(skb: Skb, slot: SlotRef) -> Option<Way> {
    if let Some(way) = maps::next_hop(load32(slot.next_hop())).and_then(way_by) {
        return Some(way);
    }
    let ifindex = slot.uplink_ifindex();
    Some(Way {
        ifindex,
        mtu: skb.mtu_of(ifindex)?,
        macs: None,
        neighbour_unknown: true,
    })
}

/// The way by a next hop, if it is valid.
#[inline(always)]
pub(crate) fn way_by(hop: NextHopRef) -> Option<Way> {
    if load32(hop.valid()) != 1 {
        return None;
    }
    let raw = hop.as_ptr();
    // SAFETY: a live element. A writer that comes between clears `valid` first, which the second
    // look finds; what it tore is then not used.
    let (ifindex, mtu, macs) = unsafe {
        (
            (&raw const (*raw).ifindex).read_volatile(),
            (&raw const (*raw).mtu).read_volatile(),
            (&raw const (*raw).neighbour_mac)
                .cast::<Macs>()
                .read_volatile(),
        )
    };
    if load32(hop.valid()) != 1 {
        return None;
    }
    Some(Way {
        ifindex,
        mtu,
        // Without L2 header they are zeroes, and the redirect strips them.
        macs: Some(macs),
        neighbour_unknown: false,
    })
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(NextHop, uplink_mac) == offset_of!(NextHop, neighbour_mac) + 6);
    assert!(offset_of!(NextHop, neighbour_mac) % 2 == 0);
};
