//! Packets of the world to prefixes and single addresses that the network routes to this host, and whose
//! addresses are guests'.
//!
//! A flow of such a guest has its guest's address on both links, so its packets are found and sent on
//! as any other flow's. What belongs to no flow and opens none is dropped here: the host's stack would
//! answer in the place of a guest, or send the packet back to the router it came from.
//!
//! Where the prefix is on the uplink's own link, neighbours ask for the guests' addresses there.
//! Solicitations for those that are bound to a guest are answered with the uplink's MAC (RFC 4861
//! section 7.2.8), also while the engine is down, and so are probes for duplicates of these, which a
//! neighbour sends before it takes an address. Others to a group are left to the host, which has no answer;
//! others to an address of a guest's prefix are dropped.
use core::sync::atomic::Ordering::Relaxed;

use super::{
    Kernel, Maps as _,
    drops::{NOBODY, drop_packet},
    ipv6::{IPV6_LEN, V6, icmpv6},
    neighbour::{self, Asked, BARE_LEN, MESSAGE_LEN, ON_LINK},
    packet::{ETHERNET_LEN, Packet},
};
use crate::{
    DropReason, ForwardKey6, Ip6,
    cell::load32,
    vm6::{GUEST_ADDRESSES, Vm6Flags, Vm6Ref},
};

/// Leaves a packet to the host, unless it is to a guest's routed prefix: it is dropped then.
#[inline(always)]
pub(super) fn leave<K: Kernel>(kernel: K, packet: &Packet<V6>) -> K::End {
    let row = row_of(kernel, &packet.destination);
    if row == NOBODY {
        return kernel.pass();
    }
    drop_packet(kernel, row, DropReason::NoFlow, packet.segments())
}

/// Answers a neighbour solicitation for a guest's address, or leaves the packet as [`leave`] does.
#[inline(always)]
pub(super) fn neighbour_of_uplink<K: Kernel>(kernel: K, packet: &Packet<V6>) -> K::End {
    let is_solicitation = packet.is_icmp()
        && packet.icmp_type == icmpv6::NEIGHBOUR_SOLICITATION
        && packet.l3_len >= IPV6_LEN as u32 + BARE_LEN;
    // A probe for duplicates is to a group (RFC 4861 section 7.1.1), and has no option or a nonce.
    let is_probe = packet.source.is_unspecified() && packet.destination.is_multicast();
    let is_bare = packet.l3_len == IPV6_LEN as u32 + BARE_LEN;
    // It becomes longer, by what would be behind it otherwise.
    let ends_with_frame = kernel.frame_len() == ETHERNET_LEN as u32 + packet.l3_len;
    let has_one = packet.l3_len == IPV6_LEN as u32 + MESSAGE_LEN;
    let is_from_neighbour = match packet.source.is_unspecified() {
        true => is_probe && (is_bare && ends_with_frame || has_one),
        false => has_one && !packet.source.is_multicast(),
    };
    if is_solicitation
        && packet.ttl == ON_LINK
        && packet.gso_size == 0
        && is_from_neighbour
        && let Some(target) = target_of(kernel)
        && let Some(vm6) = kernel.maps().vm6(proxied_row(kernel, &target))
        && load32(vm6.flags()) & Vm6Flags::ON != 0
        && let Some(mac) = mac_here(kernel, vm6)
        // The answer has an option. What asks without one is answered whenever it can be made longer.
        && (!is_bare || kernel.grow(8))
        && neighbour::answer_for_guest(kernel, target, packet.source, mac)
    {
        vm6.neighbours_answered().fetch_add(1, Relaxed);
        return kernel.redirect(kernel.ifindex());
    }
    leave(kernel, packet)
}

/// The uplink's MAC, unless the link changes meanwhile: the MAC may be half another's then.
#[inline(always)]
fn mac_here<K: Kernel>(kernel: K, vm6: Vm6Ref) -> Option<[u16; 3]> {
    let mac = vm6.proxy_mac();
    (load32(vm6.proxy_ifindex()) == kernel.ifindex()).then_some(mac)
}

/// Address that a solicitation asks for; `None`: it is none that is answered.
#[inline(always)]
fn target_of<K: Kernel>(kernel: K) -> Option<Ip6> {
    let frame = kernel.pulled_header::<Asked>(0)?;
    // SAFETY: `pulled_header` checked the bounds.
    let asked = unsafe { &*frame };
    asked.has_code_zero().then(|| asked.target())
}

/// Row of the VM to which this address or its /64 is routed; `NOBODY` if there is none.
#[inline(never)]
pub(super) fn row_of<K: Kernel>(kernel: K, address: &Ip6) -> u32 {
    let maps = kernel.maps();
    let target = match maps.forward6(&ForwardKey6::of_routed_address(*address)) {
        None => maps.forward6(&ForwardKey6::of_routed(*address)),
        of_one => of_one,
    };
    let Some(target) = target else {
        return NOBODY;
    };
    match kernel.maps().vm(target.vm_row, target.vm) {
        Some(_) => target.vm_row,
        None => NOBODY,
    }
}

/// Row of the VM to which an address is bound that neighbours on this link may ask for.
#[inline(never)]
fn proxied_row<K: Kernel>(kernel: K, address: &Ip6) -> u32 {
    let row = row_of(kernel, address);
    let Some(vm6) = kernel.maps().vm6(row) else {
        return NOBODY;
    };
    if load32(vm6.flags()) & Vm6Flags::ON == 0 || load32(vm6.proxy_ifindex()) != kernel.ifindex() {
        return NOBODY;
    }
    let mut place = 0;
    while place < GUEST_ADDRESSES {
        if vm6.guest_address(place).is(*address) {
            return row;
        }
        place += 1;
    }
    NOBODY
}

/// Processes a packet that is to a group, or not to this host.
#[inline(always)]
pub(super) fn group<K: Kernel, const L2: usize>(kernel: K, packet: &mut Packet<V6>) -> K::End {
    if L2 != ETHERNET_LEN
        || !packet.destination.is_multicast()
        || packet.parse_transport::<K, L2>(kernel).is_err()
    {
        return kernel.pass();
    }
    neighbour_of_uplink(kernel, packet)
}
