//! Packets from the world. Those of established flows go to their guest. All packets that are not
//! slipgate's pass to the host unchanged. Those of IPv6 go on in
//! [`uplink_ingress6`](super::uplink_ingress6).
use core::sync::atomic::Ordering::Relaxed;

use super::{
    Kernel, Maps as _, Program6, connection,
    drops::{NOBODY, drop_packet},
    family::Family,
    fragments_and_options,
    handover::hand_over,
    handshake,
    identity::guest_macs,
    ipv4::V4,
    lookup::{self, Flow},
    packet::{Packet, ether_type, icmp},
    rate,
    translate::{self, Rewrite},
};
use crate::{
    Direction, DropReason, ForwardTarget, Handover, Verdict,
    cell::{load32, store64},
    portframe::PortFlags,
    vm::VmFlags,
};

/// Processes a packet that arrived by an uplink. `L2` is the length of its L2 header, bytes.
#[inline(always)]
pub fn run<K: Kernel, const L2: usize>(kernel: K) -> K::End {
    if kernel.ether_type() == ether_type::IPV6 {
        let program = match L2 {
            0 => Program6::UplinkIngressL3,
            _ => Program6::UplinkIngress,
        };
        // Without it no guest has flows of IPv6.
        return kernel.go_on(program).unwrap_or_else(|_| kernel.pass());
    }
    if kernel.is_untagged_by_stack() || kernel.ether_type() != ether_type::IPV4 {
        return kernel.pass();
    }
    // To a group, or seen only because the device is promiscuous.
    if L2 != 0 && !kernel.is_to_this_host() {
        return kernel.pass();
    }
    let mut packet = match V4::parse::<K, L2>(kernel) {
        Ok(packet) => packet,
        Err(reason) => return fragments_and_options::run::<K, L2>(kernel, reason),
    };
    if packet.parse_transport::<K, L2>(kernel).is_err() {
        return kernel.pass();
    }
    if packet.is_icmp() && packet.icmp_type != V4::ECHO_REPLY {
        return match packet.icmp_type {
            icmp::UNREACHABLE | icmp::TIME_EXCEEDED | icmp::PARAMETER_PROBLEM => {
                icmp_error::<V4, K, L2>(kernel, &packet)
            }
            _ => kernel.pass(),
        };
    }
    match lookup::world_flow(kernel.maps(), &packet) {
        // A flow being opened or gone is a miss: the host must not answer for its forward.
        Some(flow) if load32(flow.slot.verdict()) != Verdict::Free as u32 => {
            send_to_guest::<V4, K, L2, false>(kernel, &packet, flow)
        }
        _ => forward::<V4, K, L2>(kernel, &packet),
    }
}

/// Delivers a packet from the world by its flow. With `ENGINE`, the packet comes from the engine,
/// which has decided, so it never returns there.
#[inline(always)]
pub(super) fn send_to_guest<F: Family, K: Kernel, const L2: usize, const ENGINE: bool>(
    kernel: K,
    packet: &Packet<F>,
    flow: Flow<F>,
) -> K::End {
    let slot = flow.slot;
    const FLAGS: u8 = PortFlags::FROM_UPLINK;
    let verdict = load32(slot.verdict());
    let known = matches!(
        Verdict::from_u32(verdict),
        Some(Verdict::Fast | Verdict::Engine | Verdict::Closing | Verdict::Drop)
    );
    if !known {
        if ENGINE {
            return drop_packet(kernel, NOBODY, DropReason::NoFlow, packet.segments());
        }
        return F::leave(kernel, packet);
    }
    let row = slot.vm_row();
    let Some(vm) = kernel.maps().vm(row, slot.vm()) else {
        return drop_packet(kernel, NOBODY, DropReason::StaleVm, packet.segments());
    };
    let flags = load32(vm.flags());
    if flags & VmFlags::FROZEN != 0 {
        return drop_packet(kernel, row, DropReason::Frozen, packet.segments());
    }
    let tap = load32(vm.tap_ifindex());
    let is_held = !ENGINE && flags & VmFlags::ASLEEP != 0;
    // Its TAP is away: the kernel would lose the packet without a trace.
    if tap == 0 && !is_held {
        return drop_packet(kernel, row, DropReason::StaleVm, packet.segments());
    }
    if verdict == Verdict::Drop as u32 {
        return drop_packet(kernel, row, DropReason::Denied, packet.segments());
    }
    if connection::contradicts_itself(packet) {
        return drop_packet(kernel, row, DropReason::BadTcpFlags, packet.segments());
    }
    if !ENGINE {
        // Another uplink's network could guess its tuple, to inject packets.
        if !kernel.arrived_by(load32(slot.uplink_ifindex())) {
            return drop_packet(kernel, row, DropReason::NoFlow, packet.segments());
        }
        let is_of_another =
            || connection::opens(packet) && !connection::opener_again(packet, slot, Direction::Rx);
        // One call for all: each takes stack of its own, of which a chain of calls has 512 bytes.
        let why = if is_held {
            Some(Handover::Asleep)
        } else if verdict != Verdict::Fast as u32 {
            Some(Handover::Verdict)
        } else if is_of_another() {
            Some(Handover::Syn)
        } else if connection::is_challenged(packet, slot) {
            Some(Handover::Challenge)
        } else {
            None
        };
        if let Some(why) = why {
            return hand_over::<F, K, L2>(kernel, row, why, FLAGS);
        }
    }
    if packet.ttl <= 1 {
        if ENGINE {
            return drop_packet(kernel, row, DropReason::TtlExpired, packet.segments());
        }
        return hand_over::<F, K, L2>(kernel, row, Handover::TtlExpired, FLAGS);
    }
    // SAFETY: a live row; a u32 does not tear.
    if packet.largest() > unsafe { (&raw const (*vm.as_ptr()).mtu).read_volatile() } {
        if ENGINE {
            return drop_packet(kernel, row, DropReason::TooBig, packet.segments());
        }
        // It is the engine's to charge, and to find out whether it goes on.
        if flags & VmFlags::LIMITED != 0
            && let Err(reason) = rate::look(kernel, row, Direction::Rx)
        {
            return drop_packet(kernel, row, reason, packet.segments());
        }
        return hand_over::<F, K, L2>(kernel, row, Handover::TooBig, FLAGS);
    }
    if flags & VmFlags::LIMITED != 0
        && let Err(reason) = rate::take(kernel, row, Direction::Rx, packet.segments())
    {
        return drop_packet(kernel, row, reason, packet.segments());
    }
    if L2 == 0 && kernel.push_ethernet().is_err() {
        return drop_packet(kernel, row, DropReason::KernelRefused, packet.segments());
    }
    let to = Rewrite {
        direction: Direction::Rx,
        address: F::guest(slot, flow.beside),
        port: slot.guest_port(),
        macs: Some(guest_macs(vm)),
    };
    if let Err(reason) = translate::rewrite(kernel, packet, &to) {
        return drop_packet(kernel, row, reason, packet.segments());
    }
    let segments = packet.segments();
    slot.rx_packets().fetch_add(segments.packets, Relaxed);
    slot.rx_bytes().fetch_add(segments.bytes, Relaxed);
    // Before the bits, which tell that there is something new to see ([`crate::activity`]).
    store64(slot.rx_last_ns(), kernel.coarse_now_ns());
    connection::note(kernel, packet, flow, Direction::Rx);
    handshake::note(kernel, packet, slot, Direction::Rx);
    kernel.redirect(tap)
}

/// Processes a packet without flow: hands it to the engine if a forward matches and it opens a
/// flow, else leaves it to the host.
#[inline(always)]
pub(super) fn forward<F: Family, K: Kernel, const L2: usize>(
    kernel: K,
    packet: &Packet<F>,
) -> K::End {
    if !packet.is_udp() && !connection::opens(packet) {
        return F::leave(kernel, packet);
    }
    let ends = (packet.source, packet.destination);
    let Some(target) = target_of::<F, K>(kernel, ends, packet.destination_port, packet.protocol)
    else {
        return F::leave(kernel, packet);
    };
    let ForwardTarget { vm, vm_row, .. } = target;
    let Some(vm) = kernel.maps().vm(vm_row, vm) else {
        return drop_packet(kernel, NOBODY, DropReason::StaleVm, packet.segments());
    };
    if load32(vm.flags()) & VmFlags::FROZEN != 0 {
        return drop_packet(kernel, vm_row, DropReason::Frozen, packet.segments());
    }
    hand_over::<F, K, L2>(kernel, vm_row, Handover::Forward, PortFlags::FROM_UPLINK)
}

/// Returns where a first packet with these addresses, this destination port and this protocol is
/// forwarded; `None` if it is the host's own.
#[inline(always)]
pub(super) fn target_of<F: Family, K: Kernel>(
    kernel: K,
    (source, destination): (F::Address, F::Address),
    port: u16,
    protocol: u8,
) -> Option<ForwardTarget> {
    // A forward of loopback is the host's alone. The host drops what comes by a link to it, but only
    // behind us.
    if F::is_loopback(destination) {
        return None;
    }
    let of = |host| F::forward(kernel.maps(), host, port, protocol);
    match of(destination) {
        Some(target) => Some(target),
        // Of any of the host's addresses, and none that the host routes to.
        None => of(F::UNSPECIFIED).filter(|_| !F::is_routed_on(kernel, source, destination)),
    }
}

/// Processes an ICMP error. The packet it quotes (RFC 792: IP header and 8 bytes, RFC 4443: as much
/// as fits) identifies the flow.
#[inline(always)]
pub(super) fn icmp_error<F: Family, K: Kernel, const L2: usize>(
    kernel: K,
    packet: &Packet<F>,
) -> K::End {
    let quoted = F::quoted::<K, L2>(kernel);
    let flow = quoted.and_then(|tuple| lookup::world_flow_by::<_, F>(kernel.maps(), &tuple));
    let Some(slot) = flow else {
        return F::leave(kernel, packet);
    };
    let is_its = kernel.arrived_by(load32(slot.uplink_ifindex()));
    if load32(slot.verdict()) == Verdict::Free as u32 || !is_its {
        return F::leave(kernel, packet);
    }
    let row = slot.vm_row();
    let Some(vm) = kernel.maps().vm(row, slot.vm()) else {
        return drop_packet(kernel, NOBODY, DropReason::StaleVm, packet.segments());
    };
    if load32(vm.flags()) & VmFlags::FROZEN != 0 {
        return drop_packet(kernel, row, DropReason::Frozen, packet.segments());
    }
    hand_over::<F, K, L2>(kernel, row, Handover::Icmp, PortFlags::FROM_UPLINK)
}
