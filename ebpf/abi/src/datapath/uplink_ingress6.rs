//! IPv6 packets from the world, which [`uplink_ingress`](super::uplink_ingress) passes on. Those of
//! established flows go to their guest, their fragments and first packets to forwards to the engine.
//! What is of a live flow and has extension headers is dropped, as packets with IPv4 options are.
//! Everything else is the host's, neighbour discovery of the uplink above all, but for what is to a
//! prefix that is routed to a guest ([`super::routed_prefix`]).
use super::{
    Kernel,
    drops::{NOBODY, drop_packet},
    family::Family as _,
    fragment_table::is_guests,
    fragments6,
    ipv6::{IPV6_LEN, Ipv6, V6, fragment, icmpv6, next_header},
    lookup,
    packet::{ETHERNET_LEN, L4, Packet},
    routed_prefix,
    uplink_ingress::{forward, icmp_error, send_to_guest},
    world_fragments::flow_row,
};
use crate::{DropReason, Ip6, Verdict, cell::load32};

/// Processes a packet that arrived by an uplink. `L2` is the length of its L2 header, bytes.
#[inline(always)]
pub(super) fn run<K: Kernel, const L2: usize>(kernel: K) -> K::End {
    if kernel.is_untagged_by_stack() {
        return kernel.pass();
    }
    let Ok(mut packet) = V6::parse::<K, L2>(kernel) else {
        return kernel.pass();
    };
    // To a group, or seen only because the device is promiscuous.
    if L2 != 0 && !kernel.is_to_this_host() {
        return routed_prefix::group::<K, L2>(kernel, &mut packet);
    }
    if packet.parse_transport::<K, L2>(kernel).is_err() {
        if packet.protocol == next_header::FRAGMENT {
            return fragments6::from_world::<K, L2>(kernel, &packet);
        }
        return behind_extensions::<K, L2>(kernel, &packet);
    }
    if packet.is_icmp() && packet.icmp_type != V6::ECHO_REPLY {
        return match packet.icmp_type {
            1..=icmpv6::PARAMETER_PROBLEM => icmp_error::<V6, K, L2>(kernel, &packet),
            icmpv6::NEIGHBOUR_SOLICITATION if L2 != 0 => {
                routed_prefix::neighbour_of_uplink(kernel, &packet)
            }
            _ => routed_prefix::leave(kernel, &packet),
        };
    }
    match lookup::world_flow(kernel.maps(), &packet) {
        Some(flow) if load32(flow.slot.verdict()) != Verdict::Free as u32 => {
            send_to_guest::<V6, K, L2, false>(kernel, &packet, flow)
        }
        _ => forward::<V6, K, L2>(kernel, &packet),
    }
}

/// Most extension headers that are passed over in search of the transport header.
const MOST_EXTENSIONS: usize = 4;

/// Drops a packet of a live flow that has extension headers, and leaves others as they are left without:
/// the host has no socket for it, and would answer a segment with RST.
#[cold]
#[inline(always)]
fn behind_extensions<K: Kernel, const L2: usize>(kernel: K, packet: &Packet<V6>) -> K::End {
    let row = match L2 {
        0 => flow_of_packet(kernel),
        _ => flow_of_frame(kernel),
    };
    if !is_guests(row) {
        return routed_prefix::leave(kernel, packet);
    }
    drop_packet(kernel, row, DropReason::ExtensionHeader, packet.segments())
}

#[inline(never)]
fn flow_of_frame<K: Kernel>(kernel: K) -> u32 {
    flow_behind_extensions::<K, ETHERNET_LEN>(kernel)
}

#[inline(never)]
fn flow_of_packet<K: Kernel>(kernel: K) -> u32 {
    flow_behind_extensions::<K, 0>(kernel)
}

/// Row of the VM that has a live flow by this uplink for a packet with extension headers
/// ([`flow_row`]); `NOBODY` also if there are too many of these, or others than are known. A first
/// fragment has its ports, a later one has none.
#[inline(always)]
fn flow_behind_extensions<K: Kernel, const L2: usize>(kernel: K) -> u32 {
    let Some(ip) = kernel.header::<Ipv6>(L2) else {
        return NOBODY;
    };
    // SAFETY: `header` checked the bounds.
    let (source, destination, payload_len, [mut number, _]) = unsafe {
        let ip = &*ip;
        (
            Ip6::from_words(ip.source),
            Ip6::from_words(ip.destination),
            u16::from_be(ip.payload_len),
            ip.next_header_hop_limit,
        )
    };
    let mut at = L2 + IPV6_LEN;
    let end = at + usize::from(payload_len);
    let mut header = L4 {
        ports: [0; 2],
        rest: [0; 2],
    };
    let mut passed = 0;
    while passed < MOST_EXTENSIONS {
        let is_fragment = number == next_header::FRAGMENT;
        if !is_fragment
            && !matches!(
                number,
                next_header::HOP_BY_HOP | next_header::ROUTING | next_header::DESTINATION_OPTIONS
            )
        {
            break;
        }
        if !kernel.load(at, &mut header) {
            return NOBODY;
        }
        let ports = header.ports;
        let ([next, units], offset) = (ports[0].to_ne_bytes(), u16::from_be(ports[1]));
        if is_fragment && offset & fragment::OFFSET != 0 {
            return NOBODY;
        }
        // A fragment header has no length.
        let units = if is_fragment { 0 } else { usize::from(units) };
        at += 8 * (units + 1);
        number = next;
        passed += 1;
    }
    // Without such a header the transport header itself is wrong, and the packet the host's.
    if passed == 0 {
        return NOBODY;
    }
    flow_row::<V6, K>(kernel, (source, destination), number, (at, end))
}
