//! From the engine: what the header in place of the MAC addresses says is done.
use slipgate_abi::{Command, DropReason, PortHeader, VmRef, cell::load32, vm::VmFlags};

use crate::{
    drops::{NOBODY, drop_frame, drop_packet},
    guest_egress::send_to_world,
    identity::guest_macs,
    lookup, maps,
    packet::{ETHERNET_LEN, Ethernet, Macs, Packet, ether_type},
    skb::{Skb, redirect, redirect_by_neighbour},
    uplink_ingress::send_to_guest,
    way::way_by,
};

/// Takes a frame that came in by the engine port.
#[inline(always)]
pub(crate) fn run(skb: Skb) -> i32 {
    let Some(ethernet) = skb.pulled_header::<Ethernet>(0) else {
        return drop_frame::<ETHERNET_LEN>(skb, NOBODY, DropReason::BadCommand);
    };
    // SAFETY: `pulled_header` checked the bounds; halves and bytes of the same length.
    let bytes = unsafe { core::mem::transmute::<Macs, [u8; PortHeader::LEN]>((*ethernet).macs) };
    let Some(header) = PortHeader::decode(&bytes) else {
        return drop_frame::<ETHERNET_LEN>(skb, NOBODY, DropReason::BadCommand);
    };
    let row = u32::from(header.vm_row);
    match Command::from_u8(header.code) {
        Some(Command::Emit) => emit(skb, row, header.id),
        Some(Command::EmitBy) => emit_by(skb, row, header.id),
        Some(command) => {
            let Some(vm) = maps::vm(row, header.id) else {
                return drop_frame::<ETHERNET_LEN>(skb, NOBODY, DropReason::StaleVm);
            };
            let flags = load32(vm.flags());
            if flags & VmFlags::FROZEN != 0 {
                return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Frozen);
            }
            if matches!(command, Command::ToGuest) {
                return to_guest(skb, row, vm);
            }
            let forward = matches!(command, Command::Forward);
            translated(skb, row, header.id, flags, forward)
        }
        None => drop_frame::<ETHERNET_LEN>(skb, NOBODY, DropReason::BadCommand),
    }
}

/// As it is, to the VM.
#[inline(always)]
fn to_guest(skb: Skb, row: u32, vm: VmRef) -> i32 {
    let tap = load32(vm.tap_ifindex());
    // Its TAP is away: the kernel would lose the frame without a trace.
    if tap == 0 {
        return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::StaleVm);
    }
    if !set_macs(skb, guest_macs(vm)) {
        return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::KernelRefused);
    }
    redirect(tap)
}

/// As it is, to the world, by a next hop.
#[inline(always)]
fn emit(skb: Skb, row: u32, index: u32) -> i32 {
    let row = match emitting_row(row) {
        Ok(row) => row,
        Err(row) => return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Frozen),
    };
    let hop = if index == 0 {
        None
    } else {
        maps::next_hop(index)
    };
    let Some(hop) = hop else {
        return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::BadCommand);
    };
    if let Some(way) = way_by(hop) {
        if let Some(macs) = way.macs
            && !set_macs(skb, macs)
        {
            return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::KernelRefused);
        }
        return redirect(way.ifindex);
    }
    // SAFETY: a live element; a u32 does not tear.
    let ifindex = unsafe { (&raw const (*hop.as_ptr()).ifindex).read_volatile() };
    by_neighbour(skb, row, ifindex)
}

/// As it is, to the world, to whom no next hop leads.
#[inline(always)]
fn emit_by(skb: Skb, row: u32, ifindex: u32) -> i32 {
    match emitting_row(row) {
        Ok(row) => by_neighbour(skb, row, ifindex),
        Err(row) => drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Frozen),
    }
}

#[inline(always)]
fn by_neighbour(skb: Skb, row: u32, ifindex: u32) -> i32 {
    if ifindex == 0 {
        return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::BadCommand);
    }
    redirect_by_neighbour(ifindex)
}

/// Where an emission is counted, as an error when its VM is frozen. The header's id is the way's, so
/// the row is all that names the VM.
#[inline(always)]
fn emitting_row(row: u32) -> Result<u32, u32> {
    match maps::vm_row(row).filter(|vm| load32(vm.id()) != 0) {
        None => Ok(NOBODY),
        Some(vm) if load32(vm.flags()) & VmFlags::FROZEN != 0 => Err(row),
        Some(_) => Ok(row),
    }
}

/// By its flow.
#[inline(always)]
fn translated(skb: Skb, row: u32, id: u32, flags: u32, forward: bool) -> i32 {
    if skb.ether_type() != ether_type::IPV4 {
        return drop_frame::<ETHERNET_LEN>(skb, row, DropReason::BadCommand);
    }
    let mut packet = match Packet::parse_network::<ETHERNET_LEN>(skb) {
        Ok(packet) => packet,
        Err(reason) => return drop_frame::<ETHERNET_LEN>(skb, row, reason),
    };
    if let Err(reason) = packet.parse_transport::<ETHERNET_LEN>(skb) {
        return drop_packet(skb, row, reason, packet.segments());
    }
    if forward {
        match lookup::guest_flow(id, &packet) {
            Some(flow) => send_to_world::<true>(skb, row, flags, &packet, flow),
            None => drop_packet(skb, row, DropReason::NoFlow, packet.segments()),
        }
    } else {
        match lookup::world_flow(&packet) {
            Some(flow) if flow.slot.vm() == id => {
                send_to_guest::<ETHERNET_LEN, true>(skb, &packet, flow)
            }
            _ => drop_packet(skb, row, DropReason::NoFlow, packet.segments()),
        }
    }
}

#[inline(always)]
fn set_macs(skb: Skb, macs: Macs) -> bool {
    match skb.header::<Ethernet>(0) {
        Some(ethernet) => {
            // SAFETY: `header` checked the bounds.
            unsafe { (*ethernet).macs = macs };
            true
        }
        None => false,
    }
}
