//! Fragments from the world, for both families: how the flow or forward of a first one is found, and
//! what becomes of one whose datagram is a guest's.
//!
//! A first fragment decides nothing alone. It shows to which VM's engine its datagram goes, which
//! judges the whole.
use super::{
    Kernel, Maps as _,
    drops::{NOBODY, drop_packet},
    family::Family,
    fragment_table::{HOSTS, STRANGER},
    handover::hand_over,
    lookup,
    packet::L4,
    uplink_ingress::target_of,
};
use crate::{
    DropReason, Handover, Protocol, Tuple, Verdict, cell::load32, portframe::PortFlags,
    segment::Segments, tcp::Flags, vm::VmFlags,
};

/// Part of a TCP header behind its sequence number.
const TCP_TAIL: usize = 8;

/// Row of the VM that has a live flow by this uplink for a first fragment, or for a packet with IP
/// options; `NOBODY` if there is no flow, [`HOSTS`] if it is one of another uplink: another's network
/// could guess its tuple, to inject packets. `number` is the protocol's, and `at` the offset of its
/// header in the frame; the packet ends at offset `end`. What is behind that is padding of the link.
#[inline(always)]
pub(super) fn flow_row<F: Family, K: Kernel>(
    kernel: K,
    (source, destination): (F::Address, F::Address),
    number: u8,
    (at, end): (usize, usize),
) -> u32 {
    let Some(protocol) = F::protocol(number) else {
        return NOBODY;
    };
    let mut l4 = L4 {
        ports: [0; 2],
        rest: [0; 2],
    };
    if at + size_of::<L4>() > end || !kernel.load(at, &mut l4) {
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
    if load32(slot.verdict()) == Verdict::Free as u32 || kernel.maps().vm(row, slot.vm()).is_none()
    {
        return NOBODY;
    }
    if kernel.arrived_by(load32(slot.uplink_ifindex())) {
        row
    } else {
        HOSTS
    }
}

/// Row of the VM to which a first fragment is forwarded, with [`STRANGER`]; `NOBODY` if it is to no
/// forward, or cannot be of a packet that opens a flow. Arguments as for [`flow_row`].
#[inline(always)]
pub(super) fn forward_row<F: Family, K: Kernel>(
    kernel: K,
    ends: (F::Address, F::Address),
    number: u8,
    at: usize,
    end: usize,
) -> u32 {
    let protocol = match F::protocol(number) {
        Some(protocol) if !protocol.is_icmp() => protocol,
        _ => return NOBODY,
    };
    let mut l4 = L4 {
        ports: [0; 2],
        rest: [0; 2],
    };
    if at + size_of::<L4>() > end {
        return NOBODY;
    }
    // Flags that are not here are in a later fragment: the whole shows them. They are looked at first,
    // so that nothing but the ports is kept for later: Linux 6.1 has no more stack.
    let has_flags = at + TCP_TAIL + size_of::<L4>() <= end;
    if matches!(protocol, Protocol::Tcp) && has_flags && kernel.load(at + TCP_TAIL, &mut l4) {
        let [_, flags] = { l4.rest }[0].to_ne_bytes();
        if !Flags::open(flags) {
            return NOBODY;
        }
    }
    if !kernel.load(at, &mut l4) {
        return NOBODY;
    }
    let ports = l4.ports;
    let port = u16::from_be(ports[1]);
    let Some(target) = target_of::<F, K>(kernel, ends, port, number) else {
        return NOBODY;
    };
    match kernel.maps().vm(target.vm_row, target.vm) {
        Some(_) => target.vm_row | STRANGER,
        None => NOBODY,
    }
}

/// Hands a fragment over to the engine of the VM whose its datagram is
/// ([`super::fragment_table::whose`]), unless the VM is frozen.
#[inline(always)]
pub(super) fn hand_over_of<F: Family, K: Kernel, const L2: usize>(
    kernel: K,
    whose: u32,
    segments: Segments,
) -> K::End {
    let row = row_in(whose);
    let mut flags = PortFlags::FROM_UPLINK;
    if whose & STRANGER != 0 {
        flags |= PortFlags::STRANGER;
    }
    let vm = kernel.maps().vm_row(row);
    if vm.is_some_and(|vm| load32(vm.flags()) & VmFlags::FROZEN != 0) {
        return drop_packet(kernel, row, DropReason::Frozen, segments);
    }
    hand_over::<F, K, L2>(kernel, row, Handover::Fragment, flags)
}

/// The VM's row of a datagram that is a guest's.
#[inline(always)]
pub(super) fn row_in(whose: u32) -> u32 {
    whose & (STRANGER - 1)
}
