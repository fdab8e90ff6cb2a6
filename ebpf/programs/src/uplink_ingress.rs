//! From the world: established flows go on to their guest. What is not ours passes as if we were
//! not there.
use core::sync::atomic::Ordering::Relaxed;

use aya_ebpf::{bindings::TC_ACT_UNSPEC, helpers::generated::bpf_ktime_get_coarse_ns};
use slipgate_abi::{
    Direction, DropReason, ForwardKey, ForwardTarget, Handover, Ip4, Protocol, SlotRef, Tuple,
    Verdict,
    cell::{load32, store64},
    portframe::PortFlags,
    vm::VmFlags,
};

use crate::{
    connection,
    drops::{NOBODY, drop_packet},
    handover::hand_over,
    handshake,
    identity::guest_macs,
    lookup::{self, Flow},
    maps::{self, FORWARDS},
    packet::{IPV4_LEN, Ipv4, L4, Packet, ether_type, icmp},
    rate,
    skb::{Skb, redirect},
    translate::{self, Rewrite},
    uncommon,
};

/// `skb->pkt_type` of a frame for this host.
const PACKET_HOST: u32 = 0;

/// Takes a packet of an uplink; `L2` is the length of its L2 header.
#[inline(always)]
pub(crate) fn run<const L2: usize>(skb: Skb) -> i32 {
    if skb.vlan_present() != 0 || skb.ether_type() != ether_type::IPV4 {
        return TC_ACT_UNSPEC;
    }
    // To a group, or seen only because the device is promiscuous.
    if L2 != 0 && skb.pkt_type() != PACKET_HOST {
        return TC_ACT_UNSPEC;
    }
    let mut packet = match Packet::parse_network::<L2>(skb) {
        Ok(packet) => packet,
        Err(reason) => return uncommon::run::<L2>(skb, reason),
    };
    if packet.parse_transport::<L2>(skb).is_err() {
        return TC_ACT_UNSPEC;
    }
    if packet.is_icmp() && packet.icmp_type != icmp::ECHO_REPLY {
        return match packet.icmp_type {
            icmp::UNREACHABLE | icmp::TIME_EXCEEDED | icmp::PARAMETER_PROBLEM => {
                icmp_error::<L2>(skb, &packet)
            }
            _ => TC_ACT_UNSPEC,
        };
    }
    match lookup::world_flow(&packet) {
        // A flow being opened or gone is a miss: the host must not answer for its forward.
        Some(flow) if load32(flow.slot.verdict()) != Verdict::Free as u32 => {
            send_to_guest::<L2, false>(skb, &packet, flow)
        }
        _ => forward::<L2>(skb, &packet),
    }
}

/// Delivers a packet of the world by its flow. `ENGINE`: the engine has seen it and has decided,
/// so nothing goes back there.
#[inline(always)]
pub(crate) fn send_to_guest<const L2: usize, const ENGINE: bool>(
    skb: Skb,
    packet: &Packet,
    flow: Flow,
) -> i32 {
    let slot = flow.slot;
    const FLAGS: u8 = PortFlags::FROM_UPLINK;
    let verdict = load32(slot.verdict());
    let known = matches!(
        Verdict::from_u32(verdict),
        Some(Verdict::Fast | Verdict::Engine | Verdict::Closing | Verdict::Drop)
    );
    if !known {
        if ENGINE {
            return drop_packet(skb, NOBODY, DropReason::NoFlow, packet.segments());
        }
        return TC_ACT_UNSPEC;
    }
    let row = slot.vm_row();
    let Some(vm) = maps::vm(row, slot.vm()) else {
        return drop_packet(skb, NOBODY, DropReason::StaleVm, packet.segments());
    };
    let flags = load32(vm.flags());
    if flags & VmFlags::FROZEN != 0 {
        return drop_packet(skb, row, DropReason::Frozen, packet.segments());
    }
    let tap = load32(vm.tap_ifindex());
    // Its TAP is away: the kernel would lose the packet without a trace.
    if tap == 0 {
        return drop_packet(skb, row, DropReason::StaleVm, packet.segments());
    }
    if verdict == Verdict::Drop as u32 {
        return drop_packet(skb, row, DropReason::Denied, packet.segments());
    }
    if connection::contradicts_itself(packet) {
        return drop_packet(skb, row, DropReason::BadTcpFlags, packet.segments());
    }
    if !ENGINE {
        if verdict != Verdict::Fast as u32 {
            return hand_over::<L2>(skb, row, Handover::Verdict, FLAGS);
        }
        if connection::opens(packet) && !connection::opener_again(packet, slot, Direction::Rx) {
            return hand_over::<L2>(skb, row, Handover::Syn, FLAGS);
        }
    }
    if packet.ttl <= 1 {
        if ENGINE {
            return drop_packet(skb, row, DropReason::TtlExpired, packet.segments());
        }
        return hand_over::<L2>(skb, row, Handover::TtlExpired, FLAGS);
    }
    // SAFETY: a live row; a u32 does not tear.
    if packet.largest() > unsafe { (&raw const (*vm.as_ptr()).mtu).read_volatile() } {
        if ENGINE {
            return drop_packet(skb, row, DropReason::TooBig, packet.segments());
        }
        // It is the engine's to charge, and to find out whether it goes on.
        if flags & VmFlags::LIMITED != 0
            && let Err(reason) = rate::look(row, Direction::Rx)
        {
            return drop_packet(skb, row, reason, packet.segments());
        }
        return hand_over::<L2>(skb, row, Handover::TooBig, FLAGS);
    }
    if flags & VmFlags::LIMITED != 0
        && let Err(reason) = rate::take(row, Direction::Rx, packet.segments())
    {
        return drop_packet(skb, row, reason, packet.segments());
    }
    if L2 == 0 && skb.push_ethernet().is_err() {
        return drop_packet(skb, row, DropReason::KernelRefused, packet.segments());
    }
    let to = Rewrite {
        direction: Direction::Rx,
        address: slot.guest(),
        port: slot.guest_port(),
        macs: Some(guest_macs(vm)),
    };
    if let Err(reason) = translate::rewrite(skb, packet, &to) {
        return drop_packet(skb, row, reason, packet.segments());
    }
    let segments = packet.segments();
    slot.rx_packets().fetch_add(segments.packets, Relaxed);
    slot.rx_bytes().fetch_add(segments.bytes, Relaxed);
    connection::note(skb, packet, flow, Direction::Rx);
    handshake::note(skb, packet, slot, Direction::Rx);
    // SAFETY: no arguments.
    store64(slot.rx_last_ns(), unsafe { bpf_ktime_get_coarse_ns() });
    redirect(tap)
}

/// Without a flow: the first packet of a forward, or not ours.
#[inline(always)]
fn forward<const L2: usize>(skb: Skb, packet: &Packet) -> i32 {
    if !packet.is_udp() && !connection::opens(packet) {
        return TC_ACT_UNSPEC;
    }
    // A forward of loopback is the host's alone. The host drops what comes by a link to it, but only
    // behind us.
    if packet.destination.is_loopback() {
        return TC_ACT_UNSPEC;
    }
    let mut key = ForwardKey {
        host: packet.destination,
        port: packet.destination_port,
        protocol: packet.protocol,
        pad: 0,
    };
    let target = match FORWARDS.get_ptr(key) {
        Some(target) => target,
        None => {
            key.host = Ip4::UNSPECIFIED;
            match FORWARDS.get_ptr(key) {
                // Of any of the host's addresses, and none that the host routes to.
                Some(target) if !skb.is_routed_on(packet.source, packet.destination) => target,
                _ => return TC_ACT_UNSPEC,
            }
        }
    };
    // SAFETY: the entry may be recycled under us; the row's id tells.
    let ForwardTarget { vm, vm_row, .. } = unsafe { *target };
    let Some(vm) = maps::vm(vm_row, vm) else {
        return drop_packet(skb, NOBODY, DropReason::StaleVm, packet.segments());
    };
    if load32(vm.flags()) & VmFlags::FROZEN != 0 {
        return drop_packet(skb, vm_row, DropReason::Frozen, packet.segments());
    }
    hand_over::<L2>(skb, vm_row, Handover::Forward, PortFlags::FROM_UPLINK)
}

/// An ICMP error: the packet it quotes (RFC 792: IP header and 8 bytes) tells whose it is.
#[inline(always)]
fn icmp_error<const L2: usize>(skb: Skb, packet: &Packet) -> i32 {
    let Some(slot) = quoted_flow::<L2>(skb) else {
        return TC_ACT_UNSPEC;
    };
    if load32(slot.verdict()) == Verdict::Free as u32 {
        return TC_ACT_UNSPEC;
    }
    let row = slot.vm_row();
    let Some(vm) = maps::vm(row, slot.vm()) else {
        return drop_packet(skb, NOBODY, DropReason::StaleVm, packet.segments());
    };
    if load32(vm.flags()) & VmFlags::FROZEN != 0 {
        return drop_packet(skb, row, DropReason::Frozen, packet.segments());
    }
    hand_over::<L2>(skb, row, Handover::Icmp, PortFlags::FROM_UPLINK)
}

#[inline(always)]
fn quoted_flow<const L2: usize>(skb: Skb) -> Option<SlotRef> {
    #[repr(C, packed(2))]
    struct Quoted {
        ip: Ipv4,
        l4: L4,
    }
    let quoted = skb.pulled_header::<Quoted>(L2 + IPV4_LEN + size_of::<L4>())?;
    // SAFETY: `pulled_header` checked the bounds.
    let quoted = unsafe { &*quoted };
    let [_, number] = quoted.ip.ttl_protocol.to_ne_bytes();
    let protocol = Protocol::from_ip(number)?;
    if quoted.ip.version_ihl != 0x45 || quoted.ip.fragment & u16::to_be(0x1fff) != 0 {
        return None;
    }
    let (ports, rest) = (quoted.l4.ports, quoted.l4.rest);
    let (local_port, remote_port) = match protocol {
        Protocol::Icmp if ports[0].to_ne_bytes()[0] != icmp::ECHO => return None,
        Protocol::Icmp => (u16::from_be(rest[0]), 0),
        Protocol::Tcp | Protocol::Udp => (u16::from_be(ports[0]), u16::from_be(ports[1])),
    };
    lookup::world_flow_by(&Tuple {
        scope: Tuple::WORLD,
        local: Ip4::from_wire(quoted.ip.source),
        remote: Ip4::from_wire(quoted.ip.destination),
        local_port,
        remote_port,
        protocol: number,
        pad: [0; 3],
    })
}
