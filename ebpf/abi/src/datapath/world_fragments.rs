//! Fragments from the world, for both families: how the flow of a first one is found, and what
//! becomes of one whose datagram has a flow.
use super::{
    Kernel, Maps as _,
    drops::{NOBODY, drop_packet},
    family::Family,
    handover::hand_over,
    lookup,
    packet::L4,
};
use crate::{
    DropReason, Handover, Protocol, Tuple, Verdict, cell::load32, portframe::PortFlags,
    segment::Segments, vm::VmFlags,
};

/// Row of the VM that has a live flow by this uplink for a first fragment, or for a packet with IP
/// options; `NOBODY` if there is no such flow. `number` is the protocol's, and `at` the offset of its
/// header in the frame.
#[inline(always)]
pub(super) fn flow_row<F: Family, K: Kernel>(
    kernel: K,
    (source, destination): (F::Address, F::Address),
    number: u8,
    at: usize,
) -> u32 {
    let Some(protocol) = F::protocol(number) else {
        return NOBODY;
    };
    let mut l4 = L4 {
        ports: [0; 2],
        rest: [0; 2],
    };
    if !kernel.load(at, &mut l4) {
        return NOBODY;
    }
    let (ports, rest) = (l4.ports, l4.rest);
    let (local_port, remote_port) = match protocol {
        Protocol::Icmp | Protocol::Icmpv6 if ports[0].to_ne_bytes()[0] != F::ECHO_REPLY => {
            return NOBODY;
        }
        Protocol::Icmp | Protocol::Icmpv6 => (u16::from_be(rest[0]), 0),
        Protocol::Tcp | Protocol::Udp => (u16::from_be(ports[1]), u16::from_be(ports[0])),
    };
    let tuple = F::tuple(
        Tuple::WORLD,
        (destination, local_port),
        (source, remote_port),
        number,
    );
    let Some(slot) = lookup::world_flow_by::<_, F>(kernel.maps(), &tuple) else {
        return NOBODY;
    };
    let row = slot.vm_row();
    let live = load32(slot.verdict()) != Verdict::Free as u32
        && kernel.arrived_by(load32(slot.uplink_ifindex()));
    if live && kernel.maps().vm(row, slot.vm()).is_some() {
        row
    } else {
        NOBODY
    }
}

/// Hands a fragment of a VM's flow over to the engine, unless the VM is frozen.
#[inline(always)]
pub(super) fn hand_over_of<F: Family, K: Kernel, const L2: usize>(
    kernel: K,
    row: u32,
    segments: Segments,
) -> K::End {
    let vm = kernel.maps().vm_row(row);
    if vm.is_some_and(|vm| load32(vm.flags()) & VmFlags::FROZEN != 0) {
        return drop_packet(kernel, row, DropReason::Frozen, segments);
    }
    hand_over::<F, K, L2>(kernel, row, Handover::Fragment, PortFlags::FROM_UPLINK)
}
