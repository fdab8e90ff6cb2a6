//! Frames from the engine: executes the command in the header in place of the MAC addresses. Those
//! of IPv6 go on in a program of their own, by the same functions.
use super::{
    Kernel, Maps as _, Program6,
    drops::{NOBODY, drop_frame, drop_packet},
    egress_path::path_by,
    family::Family,
    guest_egress::send_to_world,
    identity::guest_macs,
    ipv4::V4,
    lookup, order,
    packet::{ETHERNET_LEN, Ethernet, Macs, ether_type},
    uplink_ingress::send_to_guest,
};
use crate::{Command, DropReason, PortHeader, VmRef, cell::load32, portframe::Order, vm::VmFlags};

/// Processes a frame that arrived by the engine port.
#[inline(always)]
pub fn run<K: Kernel>(kernel: K) -> K::End {
    if kernel.ether_type() == ether_type::IPV6 {
        let end = kernel.go_on(Program6::EnginePort);
        return end.unwrap_or_else(|refused| {
            drop_frame::<K, ETHERNET_LEN>(kernel, NOBODY, refused.into())
        });
    }
    run_of::<V4, K>(kernel)
}

/// Processes a frame of a family, or of no IP if the family is IPv4.
#[inline(always)]
pub(super) fn run_of<F: Family, K: Kernel>(kernel: K) -> K::End {
    let Some(ethernet) = kernel.pulled_header::<Ethernet>(0) else {
        return drop_frame::<K, ETHERNET_LEN>(kernel, NOBODY, DropReason::BadCommand);
    };
    // SAFETY: `pulled_header` checked the bounds; halves and bytes of the same length.
    let bytes = unsafe { core::mem::transmute::<Macs, [u8; PortHeader::LEN]>((*ethernet).macs) };
    let Some(header) = PortHeader::decode(&bytes) else {
        return drop_frame::<K, ETHERNET_LEN>(kernel, NOBODY, DropReason::BadCommand);
    };
    let row = u32::from(header.vm_row);
    match Command::from_u8(header.code) {
        Some(Command::Emit) => emit(kernel, row, header.id),
        Some(Command::EmitBy) => emit_by(kernel, row, header.id),
        Some(Command::Open) => open::<F, K>(kernel, row, Order::decode(header.id)),
        Some(command) => {
            let Some(vm) = kernel.maps().vm(row, header.id) else {
                return drop_frame::<K, ETHERNET_LEN>(kernel, NOBODY, DropReason::StaleVm);
            };
            let flags = load32(vm.flags());
            if flags & VmFlags::FROZEN != 0 {
                return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Frozen);
            }
            if matches!(command, Command::ToGuest) {
                return to_guest(kernel, row, vm);
            }
            let forward = matches!(command, Command::Forward);
            translated::<F, K>(kernel, row, header.id, flags, forward)
        }
        None => drop_frame::<K, ETHERNET_LEN>(kernel, NOBODY, DropReason::BadCommand),
    }
}

/// Opens a flow, and sends its first packet.
#[inline(always)]
fn open<F: Family, K: Kernel>(kernel: K, row: u32, order: Order) -> K::End {
    // The engine finds out itself what keeps the flow from being opened.
    let Some(vm) = kernel.maps().vm_row(row) else {
        return kernel.discard();
    };
    let (id, flags) = (load32(vm.id()), load32(vm.flags()));
    if id == 0 || flags & VmFlags::FROZEN != 0 || kernel.ether_type() != F::ETHER_TYPE {
        return kernel.discard();
    }
    let Ok(mut packet) = F::parse::<K, ETHERNET_LEN>(kernel) else {
        return kernel.discard();
    };
    if packet.parse_transport::<K, ETHERNET_LEN>(kernel).is_err() {
        return kernel.discard();
    }
    match order::open(kernel.maps(), id, order, &packet) {
        Some(flow) => send_to_world::<F, K, true>(kernel, row, flags, &packet, flow),
        None => kernel.discard(),
    }
}

/// Delivers a packet unchanged to the VM.
#[inline(always)]
fn to_guest<K: Kernel>(kernel: K, row: u32, vm: VmRef) -> K::End {
    let tap = load32(vm.tap_ifindex());
    // The TAP is detached: the kernel would lose the frame without counting it.
    if tap == 0 {
        return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::StaleVm);
    }
    if !set_macs(kernel, guest_macs(vm)) {
        return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::KernelRefused);
    }
    kernel.redirect(tap)
}

/// Sends a packet unchanged to the world by a next hop.
#[inline(always)]
fn emit<K: Kernel>(kernel: K, row: u32, index: u32) -> K::End {
    let row = match emitting_row(kernel, row) {
        Ok(row) => row,
        Err(row) => return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Frozen),
    };
    let hop = if index == 0 {
        None
    } else {
        kernel.maps().next_hop(index)
    };
    let Some(hop) = hop else {
        return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::BadCommand);
    };
    if let Some(path) = path_by(hop) {
        if let Some(macs) = path.macs
            && !set_macs(kernel, macs)
        {
            return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::KernelRefused);
        }
        return kernel.redirect(path.ifindex);
    }
    // SAFETY: a live element; a u32 does not tear.
    let ifindex = unsafe { (&raw const (*hop.as_ptr()).ifindex).read_volatile() };
    by_neighbour(kernel, row, ifindex)
}

/// Sends a packet unchanged to the world by an uplink, for destinations without a next hop.
#[inline(always)]
fn emit_by<K: Kernel>(kernel: K, row: u32, ifindex: u32) -> K::End {
    match emitting_row(kernel, row) {
        Ok(row) => by_neighbour(kernel, row, ifindex),
        Err(row) => drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Frozen),
    }
}

#[inline(always)]
fn by_neighbour<K: Kernel>(kernel: K, row: u32, ifindex: u32) -> K::End {
    if ifindex == 0 {
        return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::BadCommand);
    }
    kernel.redirect_by_neighbour(ifindex)
}

/// Row that counts an emission; as an error if its VM is frozen. The header's id is that of the
/// next hop, so only the row names the VM.
#[inline(always)]
fn emitting_row<K: Kernel>(kernel: K, row: u32) -> Result<u32, u32> {
    match kernel.maps().vm_row(row).filter(|vm| load32(vm.id()) != 0) {
        None => Ok(NOBODY),
        Some(vm) if load32(vm.flags()) & VmFlags::FROZEN != 0 => Err(row),
        Some(_) => Ok(row),
    }
}

/// Translates a packet by its flow and sends or delivers it.
#[inline(always)]
fn translated<F: Family, K: Kernel>(
    kernel: K,
    row: u32,
    id: u32,
    flags: u32,
    forward: bool,
) -> K::End {
    if kernel.ether_type() != F::ETHER_TYPE {
        return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::BadCommand);
    }
    let mut packet = match F::parse::<K, ETHERNET_LEN>(kernel) {
        Ok(packet) => packet,
        Err(reason) => return drop_frame::<K, ETHERNET_LEN>(kernel, row, reason),
    };
    if let Err(reason) = packet.parse_transport::<K, ETHERNET_LEN>(kernel) {
        return drop_packet(kernel, row, reason, packet.segments());
    }
    if forward {
        match lookup::guest_flow(kernel.maps(), id, &packet) {
            Some(flow) => send_to_world::<F, K, true>(kernel, row, flags, &packet, flow),
            None => drop_packet(kernel, row, DropReason::NoFlow, packet.segments()),
        }
    } else {
        match lookup::world_flow(kernel.maps(), &packet) {
            Some(flow) if flow.slot.vm() == id => {
                send_to_guest::<F, K, ETHERNET_LEN, true>(kernel, &packet, flow)
            }
            _ => drop_packet(kernel, row, DropReason::NoFlow, packet.segments()),
        }
    }
}

#[inline(always)]
fn set_macs<K: Kernel>(kernel: K, macs: Macs) -> bool {
    match kernel.header::<Ethernet>(0) {
        Some(ethernet) => {
            // SAFETY: `header` checked the bounds.
            unsafe { (*ethernet).macs = macs };
            true
        }
        None => false,
    }
}
