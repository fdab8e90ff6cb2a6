//! Neighbour discovery of a guest (RFC 4861). Solicitations for the gateway are answered here, as ARP
//! is, so that a guest keeps its neighbour entry while the engine is down or busy. Other messages go
//! to the engine. Advertisements of routers and redirects are dropped: a guest is no router
//! (RFC 6105).
//!
//! The checksum of a solicitation is not verified: it may be partial, and what is answered is the
//! same as for any solicitation.
use core::sync::atomic::Ordering::Relaxed;

use super::{
    Kernel,
    drops::drop_packet,
    guest_egress::Arrival,
    guest_egress6::{is_guests, use_address},
    handover::hand_over,
    identity,
    ipv6::{IPV6_LEN, Ipv6, V6, icmpv6},
    packet::{ETHERNET_LEN, Ethernet, Macs, Packet, ether_type},
};
use crate::{DropReason, Handover, Ip6, Protocol, Vm6Ref, checksum};

/// Hop limit of all messages: no router has forwarded them.
pub(super) const ON_LINK: u8 = 255;
/// Options with the L2 address of the sender, and of the target.
const SOURCE_ADDRESS: u8 = 1;
const TARGET_ADDRESS: u8 = 2;
/// Flags of an advertisement: of a router, solicited, and the entry is to be replaced.
const ROUTER_SOLICITED_OVERRIDE: u32 = u32::to_be(0xe000_0000);
/// Group of all nodes of a link (RFC 2464 section 7).
const ALL_NODES_MAC: [u16; 3] = [0x3333_u16.to_be(), 0, 1_u16.to_be()];
/// As a proxy answers (RFC 4861 section 7.2.8): solicited, and a host's own answer goes before.
const SOLICITED: u32 = u32::to_be(0x4000_0000);

/// Solicitation or advertisement with one option, which is an L2 address of Ethernet.
#[repr(C, packed(2))]
struct Message {
    kind: u8,
    code: u8,
    checksum: u16,
    flags: u32,
    target: [u32; 4],
    option: u8,
    /// Length of the option in units of 8 bytes.
    option_len: u8,
    mac: [u16; 3],
}

pub(super) const MESSAGE_LEN: u32 = size_of::<Message>() as u32;
/// The same without an option.
pub(super) const BARE_LEN: u32 = MESSAGE_LEN - 8;

/// A solicitation as far as all have it.
#[repr(C, packed(2))]
pub(super) struct Asked {
    ethernet: Ethernet,
    ip: Ipv6,
    kind_code_checksum_flags: [u16; 4],
    target: [u32; 4],
}

#[repr(C, packed(2))]
struct Neighbour {
    ethernet: Ethernet,
    ip: Ipv6,
    message: Message,
}

impl Asked {
    /// Address that is asked for.
    #[inline(always)]
    pub(super) fn target(&self) -> Ip6 {
        Ip6::from_words(self.target)
    }

    /// Whether its code is the one that there is (RFC 4861 section 7.1.1).
    #[inline(always)]
    pub(super) fn has_code_zero(&self) -> bool {
        let [_, code] = self.kind_code_checksum_flags[0].to_ne_bytes();
        code == 0
    }
}

/// Processes a message of neighbour discovery.
#[inline(always)]
pub(super) fn run<K: Kernel>(
    kernel: K,
    arrival: Arrival,
    vm6: Vm6Ref,
    packet: &Packet<V6>,
    port_flags: u8,
) -> K::End {
    let row = arrival.row;
    if matches!(
        packet.icmp_type,
        icmpv6::ROUTER_ADVERTISEMENT | icmpv6::REDIRECT
    ) {
        let reason = DropReason::RouterAdvertisement;
        return drop_packet(kernel, row, reason, packet.segments());
    }
    if packet.ttl != ON_LINK || packet.gso_size != 0 {
        return drop_packet(kernel, row, DropReason::Malformed, packet.segments());
    }
    // Before a guest has an address, it asks whether others have it, and for routers.
    let may_be_unspecified = packet.icmp_type != icmpv6::NEIGHBOUR_ADVERTISEMENT;
    if !(is_guests(vm6, packet.source) || may_be_unspecified && packet.source.is_unspecified()) {
        return drop_packet(kernel, row, DropReason::Spoofed, packet.segments());
    }
    identity::learn(arrival.vm, arrival.macs);
    if packet.icmp_type == icmpv6::NEIGHBOUR_SOLICITATION
        && packet.l3_len == IPV6_LEN as u32 + MESSAGE_LEN
        && use_address(kernel, vm6, &packet.source) != 0
        && answer(
            kernel,
            vm6,
            &packet.source,
            identity::guest_macs(arrival.vm),
        )
    {
        vm6.neighbours_answered().fetch_add(1, Relaxed);
        return kernel.redirect(kernel.ifindex());
    }
    hand_over::<V6, K, ETHERNET_LEN>(kernel, row, Handover::Ndp, port_flags)
}

/// Hands over a message of multicast listener discovery, which a guest may send without an address
/// (RFC 3590).
#[inline(always)]
pub(super) fn of_listener<K: Kernel>(
    kernel: K,
    row: u32,
    vm6: Vm6Ref,
    packet: &Packet<V6>,
    port_flags: u8,
) -> K::End {
    if packet.gso_size != 0 {
        return drop_packet(kernel, row, DropReason::Malformed, packet.segments());
    }
    if !(packet.source.is_unspecified() || is_guests(vm6, packet.source)) {
        return drop_packet(kernel, row, DropReason::Spoofed, packet.segments());
    }
    hand_over::<V6, K, ETHERNET_LEN>(kernel, row, Handover::Ndp, port_flags)
}

/// Makes a solicitation for one of the gateway's addresses the answer to it. Returns whether it is
/// one; it is unchanged otherwise. `macs` are the guest's and the gateway's.
#[inline(always)]
fn answer<K: Kernel>(kernel: K, vm6: Vm6Ref, asker: &Ip6, macs: Macs) -> bool {
    let Some(frame) = kernel.pulled_header::<Neighbour>(0) else {
        return false;
    };
    // SAFETY: `pulled_header` checked the bounds.
    let Neighbour {
        ethernet,
        ip,
        message,
    } = unsafe { &mut *frame };
    let target = Ip6::from_words(message.target);
    let is_asked_for = target.is(vm6.gateway()) || target.is(vm6.gateway_local());
    let has_address = message.option == SOURCE_ADDRESS && message.option_len == 1;
    if !is_asked_for || !has_address || message.code != 0 {
        return false;
    }
    let ours = [macs[3], macs[4], macs[5]];
    let to = ethernet.macs;
    ethernet.macs = [to[3], to[4], to[5], ours[0], ours[1], ours[2]];
    ethernet.ether_type = ether_type::IPV6.to_be();
    ip.source = target.to_words();
    ip.destination = asker.to_words();
    message.kind = icmpv6::NEIGHBOUR_ADVERTISEMENT;
    message.flags = ROUTER_SOLICITED_OVERRIDE;
    message.option = TARGET_ADDRESS;
    message.mac = ours;
    message.checksum = checksum_of(target, *asker, ours);
    true
}

/// Makes a solicitation of the uplink's link for a guest's address the answer to it, with the
/// uplink's MAC. Returns whether it is one that can be answered; it is unchanged otherwise. A probe for
/// duplicates is from `::`, and its answer to all nodes and unsolicited (RFC 4861 section 7.2.4).
#[inline(always)]
pub(super) fn answer_for_guest<K: Kernel>(
    kernel: K,
    target: Ip6,
    asker: Ip6,
    ours: [u16; 3],
) -> bool {
    let Some(frame) = kernel.header::<Neighbour>(0) else {
        return false;
    };
    // SAFETY: `header` checked the bounds.
    let Neighbour {
        ethernet,
        ip,
        message,
    } = unsafe { &mut *frame };
    let is_probe = asker.is_unspecified();
    let has_address = message.option == SOURCE_ADDRESS;
    // A probe may have a nonce (RFC 7527), and there must be no address.
    let is_valid = match is_probe {
        true => !has_address,
        false => has_address && message.option_len == 1,
    };
    if !is_valid || message.code != 0 {
        return false;
    }
    let to = ethernet.macs;
    let (to, asker, flags) = match is_probe {
        true => (ALL_NODES_MAC, Ip6::ALL_NODES, 0),
        false => ([to[3], to[4], to[5]], asker, SOLICITED),
    };
    ethernet.macs = [to[0], to[1], to[2], ours[0], ours[1], ours[2]];
    ip.payload_len = (MESSAGE_LEN as u16).to_be();
    ip.source = target.to_words();
    ip.destination = asker.to_words();
    message.kind = icmpv6::NEIGHBOUR_ADVERTISEMENT;
    message.flags = flags;
    message.option = TARGET_ADDRESS;
    message.option_len = 1;
    message.mac = ours;
    message.checksum = checksum_for_guest(target, asker, ours, flags);
    true
}

/// Checksum of an advertisement, in network order (RFC 4443 section 2.3).
#[inline(always)]
fn checksum_of(target: Ip6, to: Ip6, mac: [u16; 3]) -> u16 {
    let first = u16::from_ne_bytes([icmpv6::NEIGHBOUR_ADVERTISEMENT, 0]);
    let option = u16::from_ne_bytes([TARGET_ADDRESS, 1]);
    let halves = [first, option, mac[0], mac[1], mac[2]];
    let words = [
        MESSAGE_LEN.to_be(),
        u32::to_be(Protocol::Icmpv6 as u32),
        ROUTER_SOLICITED_OVERRIDE,
    ];
    // The target is also the source.
    let addresses = [target.to_words(), target.to_words(), to.to_words()];
    let halves = halves.into_iter().map(u64::from);
    let words = words.into_iter().chain(addresses.into_iter().flatten());
    checksum::of_sum(halves.chain(words.map(u64::from)).sum())
}

/// The same of an answer for a guest. Written out: [`checksum_of`] stays inlined only while it has one
/// caller, and the guest's program has no stack left for a call.
#[inline(always)]
fn checksum_for_guest(target: Ip6, to: Ip6, mac: [u16; 3], flags: u32) -> u16 {
    let first = u16::from_ne_bytes([icmpv6::NEIGHBOUR_ADVERTISEMENT, 0]);
    let option = u16::from_ne_bytes([TARGET_ADDRESS, 1]);
    let of = |address: Ip6| {
        let [a, b, c, d] = address.to_words();
        a as u64 + b as u64 + c as u64 + d as u64
    };
    let message = first as u64 + option as u64 + mac[0] as u64 + mac[1] as u64 + mac[2] as u64;
    let lengths = MESSAGE_LEN.to_be() as u64 + u32::to_be(Protocol::Icmpv6 as u32) as u64;
    // The target is also the source.
    checksum::of_sum(message + lengths + flags as u64 + 2 * of(target) + of(to))
}
