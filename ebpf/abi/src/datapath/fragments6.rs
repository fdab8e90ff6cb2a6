//! Fragments of IPv6 (RFC 8200 section 4.5), which the engine reassembles.
//!
//! Those of a guest are handed over if their addresses are such as a guest's packet may have: only the
//! whole datagram shows its flow. Those of the world are handed over if their datagram is of a live
//! flow or to a forward, as in IPv4 ([`super::fragments_and_options`]): a first fragment has the ports,
//! and a table attributes the later ones to its flow or forward ([`super::fragment_table`]). So are those
//! to a guest's routed prefix, whose address shows the VM. Others are the host's; of those that come
//! before their first one a copy is kept ([`super::early_fragments`]).
use super::{
    Kernel,
    drops::{NOBODY, drop_packet},
    early_fragments::{TAKEN, keep},
    fragment_table::{self, Datagram6, STRANGER},
    guest_egress6::{is_guests, use_address},
    handover::hand_over,
    ipv6::{
        IPV6_LEN, Ipv6, V6,
        fragment::{HEADER_LEN, MORE, OFFSET},
    },
    packet::{ETHERNET_LEN, L4, Packet},
    routed_prefix,
    world_fragments::{flow_row, forward_row, hand_over_of, row_in},
};
use crate::{DropReason, Handover, Ip6, Protocol, Vm6Ref};

const TCP: u8 = Protocol::Tcp as u8;
/// Length of a TCP header without options, bytes.
const TCP_LEN: usize = 20;

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
    // Functions of their own, one after the other, for their stacks.
    let mut whose = match L2 {
        0 => whose_packet(kernel),
        _ => whose_frame(kernel),
    };
    if whose == NOBODY {
        whose = match L2 {
            0 => routed_packet(kernel),
            _ => routed_frame(kernel),
        };
    }
    if whose == NOBODY {
        whose = match L2 {
            0 => forwarded_packet(kernel),
            _ => forwarded_frame(kernel),
        };
    }
    whose = match L2 {
        0 => note_packet(kernel, whose),
        _ => note_frame(kernel, whose),
    };
    if whose == TAKEN {
        return kernel.discard();
    }
    if !fragment_table::is_guests(whose) {
        return routed_prefix::leave(kernel, packet);
    }
    if packet.gso_size != 0 {
        return drop_packet(
            kernel,
            row_in(whose),
            DropReason::Fragment,
            packet.segments(),
        );
    }
    hand_over_of::<V6, K, L2>(kernel, whose, packet.segments())
}

#[inline(never)]
fn whose_frame<K: Kernel>(kernel: K) -> u32 {
    whose::<K, ETHERNET_LEN>(kernel)
}

#[inline(never)]
fn whose_packet<K: Kernel>(kernel: K) -> u32 {
    whose::<K, 0>(kernel)
}

#[inline(never)]
fn routed_frame<K: Kernel>(kernel: K) -> u32 {
    routed::<K, ETHERNET_LEN>(kernel)
}

#[inline(never)]
fn routed_packet<K: Kernel>(kernel: K) -> u32 {
    routed::<K, 0>(kernel)
}

#[inline(never)]
fn forwarded_frame<K: Kernel>(kernel: K) -> u32 {
    forwarded::<K, ETHERNET_LEN>(kernel)
}

#[inline(never)]
fn forwarded_packet<K: Kernel>(kernel: K) -> u32 {
    forwarded::<K, 0>(kernel)
}

#[inline(never)]
fn note_frame<K: Kernel>(kernel: K, whose: u32) -> u32 {
    note::<K, ETHERNET_LEN>(kernel, whose)
}

#[inline(never)]
fn note_packet<K: Kernel>(kernel: K, whose: u32) -> u32 {
    note::<K, 0>(kernel, whose)
}

/// A fragment's place in its datagram.
struct Place {
    datagram: Datagram6,
    /// Number of the protocol, if it is the first one.
    protocol: u8,
    is_first: bool,
    has_more: bool,
    l3_len: u32,
}

/// Parses the headers of a fragment.
#[inline(always)]
fn place_of<K: Kernel, const L2: usize>(kernel: K) -> Option<Place> {
    let ip = kernel.header::<Ipv6>(L2)?;
    // SAFETY: `header` checked the bounds.
    let (source, destination, payload_len) =
        unsafe { ((*ip).source, (*ip).destination, (*ip).payload_len) };
    let mut header = L4 {
        ports: [0; 2],
        rest: [0; 2],
    };
    // What is behind the packet's end is padding of the link.
    let has_header = usize::from(u16::from_be(payload_len)) >= HEADER_LEN;
    if !has_header || !kernel.load(L2 + IPV6_LEN, &mut header) {
        return None;
    }
    let ([next, field], [high, low]) = (header.ports, header.rest.map(u16::from_be));
    let [protocol, _] = next.to_ne_bytes();
    let field = u16::from_be(field);
    Some(Place {
        datagram: Datagram6::new(
            Ip6::from_words(source),
            Ip6::from_words(destination),
            u32::from(high) << 16 | u32::from(low),
        ),
        protocol,
        is_first: field & OFFSET == 0,
        has_more: field & MORE != 0,
        l3_len: u32::from(u16::from_be(payload_len)) + IPV6_LEN as u32,
    })
}

/// Returns whose a fragment's datagram is by a flow or by its first fragment
/// ([`fragment_table::whose`]).
#[inline(always)]
fn whose<K: Kernel, const L2: usize>(kernel: K) -> u32 {
    let Some(fragment) = place_of::<K, L2>(kernel) else {
        return NOBODY;
    };
    let datagram = fragment.datagram;
    if fragment.is_first {
        let ends = (datagram.source, datagram.destination);
        let (at, end) = (L2 + IPV6_LEN + HEADER_LEN, L2 + fragment.l3_len as usize);
        flow_row::<V6, K>(kernel, ends, fragment.protocol, (at, end))
    } else {
        fragment_table::whose(kernel, &datagram)
    }
}

/// Returns whose a fragment's datagram is by its address; `NOBODY` if no prefix with that is routed to a VM.
#[inline(always)]
fn routed<K: Kernel, const L2: usize>(kernel: K) -> u32 {
    let Some(ip) = kernel.header::<Ipv6>(L2) else {
        return NOBODY;
    };
    // SAFETY: `header` checked the bounds.
    let destination = Ip6::from_words(unsafe { (*ip).destination });
    match routed_prefix::row_of(kernel, &destination) {
        NOBODY => NOBODY,
        row => row | STRANGER,
    }
}

/// Returns whose a first fragment's datagram is by a forward; `NOBODY` if it is to none.
#[inline(always)]
fn forwarded<K: Kernel, const L2: usize>(kernel: K) -> u32 {
    let Some(first) = place_of::<K, L2>(kernel) else {
        return NOBODY;
    };
    if !first.is_first {
        return NOBODY;
    }
    let ends = (first.datagram.source, first.datagram.destination);
    // All headers are in the first fragment (RFC 7112), so nothing behind its end is looked at.
    let headers_len = match first.protocol {
        TCP => TCP_LEN,
        _ => size_of::<L4>(),
    };
    // Read again: kept over the load of the fragment header, it would take stack (Linux 6.1).
    let Some(ip) = kernel.header::<Ipv6>(L2) else {
        return NOBODY;
    };
    // SAFETY: `header` checked the bounds.
    let payload_len = u16::from_be(unsafe { (*ip).payload_len });
    if usize::from(payload_len) < HEADER_LEN + headers_len {
        return NOBODY;
    }
    let at = L2 + IPV6_LEN + HEADER_LEN;
    forward_row::<V6, K>(kernel, ends, first.protocol, at, usize::MAX)
}

/// Records whose the datagram of a first fragment is, and keeps a copy of a later one if that is not
/// known. Returns whose it is now, or [`TAKEN`].
#[inline(always)]
fn note<K: Kernel, const L2: usize>(kernel: K, whose: u32) -> u32 {
    let Some(fragment) = place_of::<K, L2>(kernel) else {
        return whose;
    };
    if !fragment.is_first {
        if whose == NOBODY && kernel.gso_size() == 0 {
            return keep(kernel, &fragment.datagram, L2, fragment.l3_len);
        }
        return whose;
    }
    // One that is the whole datagram has nothing to do with others of its name (RFC 6946).
    if fragment.has_more {
        fragment_table::remember(kernel, &fragment.datagram, whose);
    }
    whose
}
