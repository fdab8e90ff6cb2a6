//! Fragments of IPv6 (RFC 8200 section 4.5), which the engine reassembles.
//!
//! Those of a guest are handed over if their addresses are such as a guest's packet may have: only the
//! whole datagram shows its flow. Those of the world are handed over if their datagram is of a live
//! flow, as in IPv4 ([`super::fragments_and_options`]): a first fragment has the ports, and a table
//! attributes the later ones to its flow ([`super::fragment_table`]). Others are the host's.
use super::{
    Kernel,
    drops::{NOBODY, drop_packet},
    fragment_table::{self, Datagram6},
    guest_egress6::{is_guests, use_address},
    handover::hand_over,
    ipv6::{
        IPV6_LEN, Ipv6, V6,
        fragment::{HEADER_LEN, MORE, OFFSET},
    },
    packet::{ETHERNET_LEN, L4, Packet},
    routed_prefix,
    world_fragments::{flow_row, hand_over_of},
};
use crate::{DropReason, Handover, Ip6, Vm6Ref};

/// Processes a fragment from a guest. `group`: its MAC address is of a group.
#[inline(always)]
pub(super) fn from_guest<K: Kernel>(
    kernel: K,
    row: u32,
    vm6: Vm6Ref,
    packet: &Packet<V6>,
    group: bool,
) -> K::End {
    let to = packet.destination;
    let is_on_link = to.same_prefix(vm6.gateway()) || to.is_link_local();
    let reason = if !is_guests(vm6, packet.source)
        || packet.source.is_link_local() && !is_on_link && !to.is_multicast()
    {
        DropReason::Spoofed
    } else if group || to.is_multicast() {
        DropReason::Group
    } else if packet.gso_size != 0 {
        DropReason::Fragment
    } else {
        // Whether it is bound is the engine's question: it binds it for a whole datagram only.
        use_address(kernel, vm6, &packet.source);
        return hand_over::<V6, K, ETHERNET_LEN>(kernel, row, Handover::Fragment, 0);
    };
    drop_packet(kernel, row, reason, packet.segments())
}

/// Processes a fragment from the world. `L2` is the length of its L2 header, bytes.
#[cold]
#[inline(always)]
pub(super) fn from_world<K: Kernel, const L2: usize>(kernel: K, packet: &Packet<V6>) -> K::End {
    let row = match L2 {
        0 => row_of_packet(kernel),
        _ => row_of_frame(kernel),
    };
    if row == NOBODY {
        return routed_prefix::leave(kernel, packet);
    }
    if packet.gso_size != 0 {
        return drop_packet(kernel, row, DropReason::Fragment, packet.segments());
    }
    hand_over_of::<V6, K, L2>(kernel, row, packet.segments())
}

#[inline(never)]
fn row_of_frame<K: Kernel>(kernel: K) -> u32 {
    row_of::<K, ETHERNET_LEN>(kernel)
}

#[inline(never)]
fn row_of_packet<K: Kernel>(kernel: K) -> u32 {
    row_of::<K, 0>(kernel)
}

/// Row of the VM that a fragment's datagram belongs to; `NOBODY` if it is no flow's, or its first
/// fragment is not recorded.
#[inline(always)]
fn row_of<K: Kernel, const L2: usize>(kernel: K) -> u32 {
    let Some(ip) = kernel.header::<Ipv6>(L2) else {
        return NOBODY;
    };
    // SAFETY: `header` checked the bounds.
    let (source, destination) = unsafe { ((*ip).source, (*ip).destination) };
    let mut header = L4 {
        ports: [0; 2],
        rest: [0; 2],
    };
    if !kernel.load(L2 + IPV6_LEN, &mut header) {
        return NOBODY;
    }
    let ([next, field], [high, low]) = (header.ports, header.rest);
    let [next, _] = next.to_ne_bytes();
    let field = u16::from_be(field);
    let datagram = Datagram6 {
        source: Ip6::from_words(source),
        destination: Ip6::from_words(destination),
        id: u32::from(high) << 16 | u32::from(low),
    };
    if field & OFFSET != 0 {
        return fragment_table::row_of(kernel, &datagram);
    }
    let ends = (datagram.source, datagram.destination);
    let row = flow_row::<V6, K>(kernel, ends, next, L2 + IPV6_LEN + HEADER_LEN);
    // One that is the whole datagram has nothing to do with others of its name (RFC 6946).
    if field & MORE != 0 {
        fragment_table::remember(kernel, &datagram, row);
    }
    row
}
