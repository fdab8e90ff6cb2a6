//! From a guest: established flows go on to the world, what needs a decision goes to the engine,
//! what no guest may send is dropped.
use core::sync::atomic::Ordering::Relaxed;

use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use slipgate_abi::{
    Direction, DropReason, Handover, Ip4, Verdict,
    cell::{load32, store64},
    portframe::PortFlags,
    segment::{MIN_TCP_GSO_SIZE, MIN_UDP_GSO_SIZE},
    vm::VmFlags,
};

use crate::{
    arp, connection,
    drops::{NOBODY, drop_frame, drop_packet},
    handover::hand_over,
    handshake, identity,
    lookup::{self, Flow},
    maps::{self, TAPS},
    packet::{ETHERNET_LEN, Ethernet, Packet, ether_type, icmp},
    rate,
    skb::{Skb, redirect, redirect_by_neighbour},
    translate::{self, Rewrite},
    way::way_of,
};

/// Every packet to it is the resolver's, whatever its address.
pub(crate) const DNS_PORT: u16 = 53;
const DHCP_SERVER_PORT: u16 = 67;
const DHCP_CLIENT_PORT: u16 = 68;
/// Shortest Ethernet frame without FCS, and with it: up to here a frame may be padded.
const PADDED_LEN: u32 = 64;

/// Takes a frame of the guest behind the TAP it came in by.
#[inline(always)]
pub(crate) fn run(skb: Skb) -> i32 {
    let Some(tap) = TAPS.get_ptr(skb.ifindex()) else {
        return drop_frame::<ETHERNET_LEN>(skb, NOBODY, DropReason::StaleVm);
    };
    // SAFETY: the entry may be recycled under us; the row's id tells.
    let (id, row) = unsafe { ((*tap).vm, (*tap).vm_row) };
    let Some(vm) = maps::vm(row, id) else {
        return drop_frame::<ETHERNET_LEN>(skb, NOBODY, DropReason::StaleVm);
    };
    let ether_type = skb.ether_type();
    if skb.vlan_present() != 0
        || ether_type == ether_type::VLAN
        || ether_type == ether_type::SERVICE_VLAN
    {
        return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Tagged);
    }
    let flags = load32(vm.flags());
    if flags & VmFlags::FROZEN != 0 {
        return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Frozen);
    }
    let Some(ethernet) = skb.pulled_header::<Ethernet>(0) else {
        return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Malformed);
    };
    // SAFETY: `pulled_header` checked the bounds.
    let macs = unsafe { (*ethernet).macs };
    if flags & VmFlags::CHECK_MAC != 0 && !identity::sent_by(vm, macs) {
        return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Spoofed);
    }
    let group = macs[0].to_ne_bytes()[0] & 1 != 0;
    let port_flags = if group { PortFlags::GROUP } else { 0 };
    if ether_type != ether_type::IPV4 {
        return match ether_type {
            ether_type::ARP => arp::run(skb, row, vm, port_flags),
            _ if group => drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Group),
            ether_type::IPV6 => drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Ipv6),
            _ => drop_frame::<ETHERNET_LEN>(skb, row, DropReason::EtherType),
        };
    }
    let mut packet = match Packet::parse_network::<ETHERNET_LEN>(skb) {
        Ok(packet) => packet,
        Err(reason) => return drop_frame::<ETHERNET_LEN>(skb, row, reason),
    };
    // Bytes after the packet would travel uncounted.
    if skb.len() > PADDED_LEN && skb.len() != packet.l3_len + ETHERNET_LEN as u32 {
        return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Malformed);
    }
    let transport = packet.parse_transport::<ETHERNET_LEN>(skb);

    let (guest, gateway, prefix_len) = identity::network(vm);
    if packet.source != guest || group {
        return unusual(skb, row, &packet, guest, port_flags);
    }
    if matches!(transport, Err(DropReason::Malformed)) {
        return drop_packet(skb, row, DropReason::Malformed, packet.segments());
    }
    if connection::contradicts_itself(&packet) {
        return drop_packet(skb, row, DropReason::BadTcpFlags, packet.segments());
    }
    if packet.gso_size != 0
        && let Err(reason) = check_gso(&packet)
    {
        return drop_packet(skb, row, reason, packet.segments());
    }
    if identity::same_network(packet.destination, gateway, prefix_len) {
        let dhcp = packet.destination == gateway && is_dhcp(&packet);
        let why = if dhcp {
            Handover::Dhcp
        } else {
            Handover::Local
        };
        return hand_over::<ETHERNET_LEN>(skb, row, why, 0);
    }
    if let Err(reason) = transport {
        return drop_packet(skb, row, reason, packet.segments());
    }
    if packet.is_icmp() {
        if packet.icmp_type != icmp::ECHO {
            return hand_over::<ETHERNET_LEN>(skb, row, Handover::Icmp, 0);
        }
    } else if packet.destination_port == DNS_PORT {
        return hand_over::<ETHERNET_LEN>(skb, row, Handover::Miss, 0);
    }
    match lookup::guest_flow(id, &packet) {
        Some(flow) => send_to_world::<false>(skb, row, flags, &packet, flow),
        None => hand_over::<ETHERNET_LEN>(skb, row, Handover::Miss, 0),
    }
}

/// From another source address than the guest's, or to a group: DHCP or nothing.
#[inline(always)]
fn unusual(skb: Skb, row: u32, packet: &Packet, guest: Ip4, port_flags: u8) -> i32 {
    let reason = if packet.source != guest && packet.source != Ip4::UNSPECIFIED {
        DropReason::Spoofed
    } else if is_dhcp(packet) && packet.gso_size == 0 {
        return hand_over::<ETHERNET_LEN>(skb, row, Handover::Dhcp, port_flags);
    } else if port_flags & PortFlags::GROUP != 0 {
        DropReason::Group
    } else {
        DropReason::Spoofed
    };
    drop_packet(skb, row, reason, packet.segments())
}

#[inline(always)]
fn is_dhcp(packet: &Packet) -> bool {
    packet.is_udp()
        && packet.source_port == DHCP_CLIENT_PORT
        && packet.destination_port == DHCP_SERVER_PORT
}

/// Refuses segment sizes that no real connection has.
#[inline(always)]
fn check_gso(packet: &Packet) -> Result<(), DropReason> {
    if packet.is_tcp() {
        if packet.gso_size < MIN_TCP_GSO_SIZE {
            return Err(DropReason::GsoBomb);
        }
    } else if packet.is_udp() {
        if packet.gso_size < MIN_UDP_GSO_SIZE {
            return Err(DropReason::GsoBomb);
        }
    } else {
        return Err(DropReason::Malformed);
    }
    Ok(())
}

/// Sends a packet of a guest on by its flow. `flags`: the VM's. `ENGINE`: the engine has seen it
/// and has decided, so nothing goes back there.
#[inline(always)]
pub(crate) fn send_to_world<const ENGINE: bool>(
    skb: Skb,
    row: u32,
    flags: u32,
    packet: &Packet,
    flow: Flow,
) -> i32 {
    let slot = flow.slot;
    let verdict = load32(slot.verdict());
    if verdict != Verdict::Fast as u32 {
        if verdict == Verdict::Drop as u32 {
            return drop_packet(skb, row, DropReason::Denied, packet.segments());
        }
        let known = verdict == Verdict::Engine as u32 || verdict == Verdict::Closing as u32;
        if !ENGINE {
            let why = if known {
                Handover::Verdict
            } else {
                Handover::Miss
            };
            return hand_over::<ETHERNET_LEN>(skb, row, why, 0);
        }
        if !known {
            return drop_packet(skb, row, DropReason::NoFlow, packet.segments());
        }
    }
    if !ENGINE
        && connection::opens(packet)
        && !connection::opener_again(packet, slot, Direction::Tx)
    {
        return hand_over::<ETHERNET_LEN>(skb, row, Handover::Syn, 0);
    }
    if connection::is_strange(skb, packet, flow) {
        return drop_packet(skb, row, DropReason::OutOfWindow, packet.segments());
    }
    if packet.ttl <= 1 {
        if ENGINE {
            return drop_packet(skb, row, DropReason::TtlExpired, packet.segments());
        }
        return hand_over::<ETHERNET_LEN>(skb, row, Handover::TtlExpired, 0);
    }
    let Some(way) = way_of(skb, slot) else {
        return drop_packet(skb, row, DropReason::KernelRefused, packet.segments());
    };
    if packet.largest() > way.mtu {
        if ENGINE {
            return drop_packet(skb, row, DropReason::TooBig, packet.segments());
        }
        // It is the engine's to charge, and to find out whether it goes on.
        if flags & VmFlags::LIMITED != 0
            && let Err(reason) = rate::look(row, Direction::Tx)
        {
            return drop_packet(skb, row, reason, packet.segments());
        }
        return hand_over::<ETHERNET_LEN>(skb, row, Handover::TooBig, 0);
    }
    if flags & VmFlags::LIMITED != 0
        && let Err(reason) = rate::take(row, Direction::Tx, packet.segments())
    {
        return drop_packet(skb, row, reason, packet.segments());
    }
    let to = Rewrite {
        direction: Direction::Tx,
        address: slot.nat(),
        port: slot.nat_port(),
        macs: way.macs,
    };
    if let Err(reason) = translate::rewrite(skb, packet, &to) {
        return drop_packet(skb, row, reason, packet.segments());
    }
    let segments = packet.segments();
    slot.tx_packets().fetch_add(segments.packets, Relaxed);
    slot.tx_bytes().fetch_add(segments.bytes, Relaxed);
    connection::note(skb, packet, flow, Direction::Tx);
    handshake::note(skb, packet, slot, Direction::Tx);
    // SAFETY: no arguments.
    store64(slot.tx_last_ns(), unsafe { bpf_ktime_get_coarse_ns() });
    if way.neighbour_unknown {
        redirect_by_neighbour(way.ifindex)
    } else {
        redirect(way.ifindex)
    }
}
