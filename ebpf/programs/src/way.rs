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
    let hop = maps::next_hop(load32(slot.next_hop()));
    if let Some(way) = hop.and_then(way_by) {
        return Some(way);
    }
    let ifindex = slot.uplink_ifindex();
    let mtu = skb.mtu_of(ifindex)?;
    Some(Way {
        ifindex,
        mtu: match hop.map(NextHopRef::route_mtu) {
            None | Some(0) => mtu,
            Some(route_mtu) => mtu.min(route_mtu),
        },
        macs: None,
        neighbour_unknown: true,
    })
}

/// The way by a next hop, if it may be used and nobody writes it just now.
#[inline(always)]
pub(crate) fn way_by(hop: NextHopRef) -> Option<Way> {
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
        Way {
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
