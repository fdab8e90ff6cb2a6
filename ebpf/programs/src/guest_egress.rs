//! From a guest: established flows go on to the world, what needs a decision goes to the engine,
//! what no guest may send is dropped.
use core::sync::atomic::Ordering::Relaxed;
use slipgate_abi::cell::{load32, store64};

use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use slipgate_abi::{
    Direction, DropReason, Handover, Ip4, NextHopRef, SlotRef, Verdict, VmRef,
    link::NextHopFlags,
    portframe::PortFlags,
    segment::{MIN_TCP_GSO_SIZE, MIN_UDP_GSO_SIZE},
    slot::SlotFlags,
    tcp::{Phase, TcpBits},
    vm::VmFlags,
};

use crate::{
    arp,
    drops::{NOBODY, drop_frame, drop_packet},
    handover::hand_over,
    lookup,
    maps::{self, TAPS},
    packet::{ETHERNET_LEN, Ethernet, Macs, Packet, ether_type, icmp},
    skb::{Skb, redirect, redirect_by_neighbour},
    translate::{self, Rewrite},
};

const DNS_PORT: u16 = 53;
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
    if flags & VmFlags::CHECK_MAC != 0 && !sent_by(vm, macs) {
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

    let (guest, gateway, prefix_len) = network(vm);
    if packet.source != guest || group {
        return unusual(skb, row, &packet, guest, port_flags);
    }
    if matches!(transport, Err(DropReason::Malformed)) {
        return drop_packet(skb, row, DropReason::Malformed, packet.segments());
    }
    if packet.gso_size != 0 {
        if let Err(reason) = check_gso(&packet) {
            return drop_packet(skb, row, reason, packet.segments());
        }
    }
    if same_network(packet.destination, gateway, prefix_len) {
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
        Some(slot) => send_to_world::<false>(skb, row, &packet, slot),
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

/// Sends a packet of a guest on by its flow. `ENGINE`: the engine has seen it and has decided, so
/// nothing goes back there.
#[inline(always)]
pub(crate) fn send_to_world<const ENGINE: bool>(
    skb: Skb,
    row: u32,
    packet: &Packet,
    slot: SlotRef,
) -> i32 {
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
    if !ENGINE && lookup::opens(packet) && !opener_again(packet, slot, Direction::Tx) {
        return hand_over::<ETHERNET_LEN>(skb, row, Handover::Syn, 0);
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
        return hand_over::<ETHERNET_LEN>(skb, row, Handover::TooBig, 0);
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
    note(packet, slot, Direction::Tx);
    // SAFETY: no arguments.
    store64(slot.tx_last_ns(), unsafe { bpf_ktime_get_coarse_ns() });
    if way.neighbour_unknown {
        redirect_by_neighbour(way.ifindex)
    } else {
        redirect(way.ifindex)
    }
}

/// Whether a SYN is the retransmission of the one that opened the flow.
#[inline(always)]
pub(crate) fn opener_again(packet: &Packet, slot: SlotRef, from: Direction) -> bool {
    let inbound = slot.flags() & SlotFlags::INBOUND != 0;
    inbound == matches!(from, Direction::Rx)
        && packet.sequence == slot.isn()
        && matches!(TcpBits(load32(slot.tcp())).phase(), Phase::Opening)
}

/// Notes what a segment says about its connection.
#[inline(always)]
pub(crate) fn note(packet: &Packet, slot: SlotRef, direction: Direction) {
    if !packet.is_tcp() {
        return;
    }
    let (add, clear) = TcpBits(load32(slot.tcp())).observe(direction, packet.tcp_flags);
    slot.note_tcp(add);
    if clear.0 != 0 {
        slot.tcp().fetch_and(!clear.0, Relaxed);
    }
}

/// How to leave.
pub(crate) struct Way {
    pub(crate) ifindex: u32,
    pub(crate) mtu: u32,
    pub(crate) macs: Option<Macs>,
    pub(crate) neighbour_unknown: bool,
}

/// The flow's way; `None` when its uplink is gone.
#[inline(always)]
fn way_of(skb: Skb, slot: SlotRef) -> Option<Way> {
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
    let (ifindex, mtu, flags, macs) = unsafe {
        (
            (&raw const (*raw).ifindex).read_volatile(),
            (&raw const (*raw).mtu).read_volatile(),
            (&raw const (*raw).flags).read_volatile(),
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
        macs: (flags & NextHopFlags::NO_L2 == 0).then_some(macs),
        neighbour_unknown: false,
    })
}

/// The guest's and the gateway's MAC, as they stand in a frame to the guest.
#[inline(always)]
pub(crate) fn guest_macs(vm: VmRef) -> Macs {
    // SAFETY: a live row; the two arrays lie side by side, 2-aligned (asserted below).
    unsafe { (&raw const (*vm.as_ptr()).guest_mac).cast::<Macs>().read() }
}

const _: () = {
    use core::mem::offset_of;
    use slipgate_abi::{NextHop, Vm};
    assert!(offset_of!(Vm, gateway_mac) == offset_of!(Vm, guest_mac) + 6);
    assert!(offset_of!(Vm, guest_mac) % 2 == 0);
    assert!(offset_of!(NextHop, uplink_mac) == offset_of!(NextHop, neighbour_mac) + 6);
    assert!(offset_of!(NextHop, neighbour_mac) % 2 == 0);
};

#[inline(always)]
fn sent_by(vm: VmRef, macs: Macs) -> bool {
    let ours = guest_macs(vm);
    macs[3] == ours[0] && macs[4] == ours[1] && macs[5] == ours[2]
}

#[inline(always)]
fn network(vm: VmRef) -> (Ip4, Ip4, u32) {
    let row = vm.as_ptr();
    // SAFETY: a live row whose identity is constant while its TAP is attached.
    unsafe { ((*row).guest, (*row).gateway, (*row).prefix_len) }
}

#[inline(always)]
fn same_network(a: Ip4, b: Ip4, prefix_len: u32) -> bool {
    let differ = u32::from_be(a.to_wire() ^ b.to_wire());
    match prefix_len {
        0 => true,
        1..=31 => differ >> (32 - prefix_len) == 0,
        _ => differ == 0,
    }
}
