//! IPv6 frames from a guest, which [`guest_egress`](super::guest_egress) passes on.
//!
//! A guest has several addresses and makes them itself. One that is bound to it ([`crate::vm6`]) may
//! open flows; a packet from another of its prefixes goes to the engine, which binds the address. A
//! packet that has a flow needs no look at the bound addresses: its source is the flow's guest.
//!
//! Only the first header is looked at: fragments go to the engine, and packets with other extension
//! headers are dropped, except the router alert of multicast listener discovery.
use super::{
    Kernel, Maps as _, connection,
    drops::{drop_frame, drop_packet},
    family::Family as _,
    fragments6,
    guest_egress::{Arrival, DNS_PORT, arrive, check_gso, has_more_behind, send_to_world},
    handover::hand_over,
    ipv6::{IPV6_LEN, V6, icmpv6, next_header},
    lookup, neighbour,
    packet::{ETHERNET_LEN, L4, Packet},
};
use crate::{
    DropReason, Handover, Ip6, Protocol, Vm6Ref,
    cell::{load32, store64},
    portframe::PortFlags,
    vm6::Vm6Flags,
};

const DHCP_CLIENT_PORT: u16 = 546;
const DHCP_SERVER_PORT: u16 = 547;

/// Processes an IPv6 frame from the guest attached to the TAP on which it arrived.
#[inline(always)]
pub(super) fn run<K: Kernel>(kernel: K) -> K::End {
    let arrival = match arrive(kernel) {
        Ok(arrival) => arrival,
        Err(end) => return end,
    };
    let Arrival { id, row, flags, .. } = arrival;
    let group = arrival.is_to_group();
    let port_flags = if group { PortFlags::GROUP } else { 0 };
    let vm6 = match kernel.maps().vm6(row) {
        Some(vm6) if load32(vm6.flags()) & Vm6Flags::ON != 0 => vm6,
        _ if group => return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Group),
        _ => return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Ipv6),
    };
    let mut packet = match V6::parse::<K, ETHERNET_LEN>(kernel) {
        Ok(packet) => packet,
        Err(reason) => return drop_frame::<K, ETHERNET_LEN>(kernel, row, reason),
    };
    if has_more_behind(kernel, &packet) {
        return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Malformed);
    }
    let transport = packet.parse_transport::<K, ETHERNET_LEN>(kernel);
    match (packet.protocol, packet.icmp_type) {
        (next_header::HOP_BY_HOP, _) if is_listeners(kernel) != 0 => {
            return neighbour::of_listener(kernel, row, vm6, &packet, port_flags);
        }
        (next_header::HOP_BY_HOP | next_header::ROUTING | next_header::DESTINATION_OPTIONS, _) => {
            return drop_packet(kernel, row, DropReason::ExtensionHeader, packet.segments());
        }
        (next_header::FRAGMENT, _) => {
            return fragments6::from_guest(kernel, row, vm6, &packet, group);
        }
        (
            ICMP,
            icmpv6::ROUTER_SOLICITATION
            | icmpv6::NEIGHBOUR_SOLICITATION
            | icmpv6::NEIGHBOUR_ADVERTISEMENT
            | icmpv6::ROUTER_ADVERTISEMENT
            | icmpv6::REDIRECT,
        ) => return neighbour::run(kernel, arrival, vm6, &packet, port_flags),
        _ => {}
    }
    if !is_guests(vm6, packet.source) {
        return drop_packet(kernel, row, DropReason::Spoofed, packet.segments());
    }
    if matches!(transport, Err(DropReason::Malformed)) {
        return drop_packet(kernel, row, DropReason::Malformed, packet.segments());
    }
    if connection::contradicts_itself(&packet) {
        return drop_packet(kernel, row, DropReason::BadTcpFlags, packet.segments());
    }
    if packet.gso_size != 0
        && let Err(reason) = check_gso(&packet)
    {
        return drop_packet(kernel, row, reason, packet.segments());
    }
    let to = packet.destination;
    let is_local = to.same_prefix(vm6.gateway()) || to.is_link_local();
    if (is_local || to.is_multicast()) && is_dhcp(&packet) {
        return hand_over::<V6, K, ETHERNET_LEN>(kernel, row, Handover::Dhcp, port_flags);
    }
    if group || to.is_multicast() {
        return drop_packet(kernel, row, DropReason::Group, packet.segments());
    }
    if is_local {
        return decide(kernel, row, vm6, &packet, Handover::Local);
    }
    // It is valid on the link only (RFC 4291 section 2.5.6).
    if packet.source.is_link_local() {
        return drop_packet(kernel, row, DropReason::Spoofed, packet.segments());
    }
    if let Err(reason) = transport {
        return drop_packet(kernel, row, reason, packet.segments());
    }
    if packet.is_icmp() {
        if packet.icmp_type != V6::ECHO {
            return decide(kernel, row, vm6, &packet, Handover::Icmp);
        }
    } else if packet.destination_port == DNS_PORT {
        return decide(kernel, row, vm6, &packet, Handover::Miss);
    }
    match lookup::guest_flow(kernel.maps(), id, &packet) {
        Some(flow) => send_to_world::<V6, K, false>(kernel, row, flags, &packet, flow),
        None => decide(kernel, row, vm6, &packet, Handover::Miss),
    }
}

const ICMP: u8 = Protocol::Icmpv6 as u8;

/// Hands over a packet that needs a decision: for `why`, or for its source address if that is not
/// bound yet.
#[inline(always)]
fn decide<K: Kernel>(
    kernel: K,
    row: u32,
    vm6: Vm6Ref,
    packet: &Packet<V6>,
    why: Handover,
) -> K::End {
    let why = match use_address(kernel, vm6, &packet.source) {
        0 => Handover::Address,
        _ => why,
    };
    hand_over::<V6, K, ETHERNET_LEN>(kernel, row, why, 0)
}

/// Whether a guest may use an address: it is of the VM's /64, its single address or link-local, and not
/// the gateway's.
#[inline(always)]
pub fn is_guests(vm6: Vm6Ref, address: Ip6) -> bool {
    (vm6.has_in_prefix(address) || address.is_link_local())
        && !address.is(vm6.gateway())
        && !address.is(vm6.gateway_local())
}

/// Returns 1 if the address is bound to the guest, else 0, and notes that it is in use. Arguments and
/// result are words, as a BPF function call requires.
#[inline(never)]
pub(super) fn use_address<K: Kernel>(kernel: K, vm6: Vm6Ref, address: &Ip6) -> u32 {
    let Some(place) = vm6.place_of(*address) else {
        return 0;
    };
    store64(vm6.used_ns(place), kernel.coarse_now_ns());
    1
}

#[inline(always)]
fn is_dhcp(packet: &Packet<V6>) -> bool {
    packet.is_udp()
        && packet.source_port == DHCP_CLIENT_PORT
        && packet.destination_port == DHCP_SERVER_PORT
        && packet.gso_size == 0
}

/// Returns 1 if a packet with a hop-by-hop header is a message that a listener sends: that header has
/// eight bytes, for the router alert (RFC 2711), and ICMPv6 follows.
#[inline(never)]
fn is_listeners<K: Kernel>(kernel: K) -> u32 {
    let mut header = L4 {
        ports: [0; 2],
        rest: [0; 2],
    };
    let offset = ETHERNET_LEN + IPV6_LEN;
    if !kernel.load(offset, &mut header) || header.ports[0].to_ne_bytes() != [ICMP, 0] {
        return 0;
    }
    if !kernel.load(offset + size_of::<L4>(), &mut header) {
        return 0;
    }
    let [kind, _] = header.ports[0].to_ne_bytes();
    u32::from(matches!(
        kind,
        icmpv6::LISTENER_REPORT | icmpv6::LISTENER_DONE | icmpv6::LISTENER_REPORT_2
    ))
}
