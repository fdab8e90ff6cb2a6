//! Look-up of a flow by its tuple: copy the reference, then check the slot.
//!
//! A hash element may be recycled under a running program, so an entry may belong to
//! another flow by the time it is read. The reference is read by one load, and the slot is used
//! only if its generation and its tuple match: everything else is a miss.
use super::{Maps, family::Family, ipv4::V4, ipv6::V6, packet::Packet};
use crate::{FlowRef, SlotRef, Tuple, Tuple6, cell::load32};

/// A flow found in its family's table.
#[derive(Clone, Copy)]
pub(super) struct Flow<F: Family> {
    pub(super) slot: SlotRef,
    /// Index of the slot in `SLOTS`.
    pub(super) index: u32,
    /// The flow's state outside its slot.
    pub(super) beside: F::Beside,
}

#[inline(always)]
fn flow_of<M: Maps, F: Family>(maps: M, tuple: &F::Tuple) -> Option<Flow<F>> {
    let FlowRef {
        slot: index,
        generation,
    } = F::entry(maps, tuple)?;
    let slot = maps.slot(index)?;
    if load32(slot.generation()) != generation {
        return None;
    }
    let beside = F::beside(maps, slot, index)?;
    Some(Flow {
        slot,
        index,
        beside,
    })
}

/// Port of the peer in a tuple; an echo has none.
#[inline(always)]
fn remote_port<F: Family>(packet: &Packet<F>, port: u16) -> u16 {
    if packet.is_icmp() { 0 } else { port }
}

/// Tuple of a packet from a VM on the guest's link.
#[inline(always)]
pub(super) fn guest_tuple<F: Family>(vm: u32, packet: &Packet<F>) -> F::Tuple {
    F::tuple(
        vm,
        (packet.source, packet.source_port),
        (
            packet.destination,
            remote_port(packet, packet.destination_port),
        ),
        packet.protocol,
    )
}

/// The flow of a packet from a VM; `None` if it has none.
#[inline(always)]
pub(super) fn guest_flow<M: Maps, F: Family>(
    maps: M,
    vm: u32,
    packet: &Packet<F>,
) -> Option<Flow<F>> {
    let tuple = guest_tuple(vm, packet);
    let flow = flow_of::<M, F>(maps, &tuple)?;
    F::is_same(&F::guest_tuple(flow.slot, flow.beside), &tuple).then_some(flow)
}

/// The flow of a packet from the world; `None` if it has none.
#[inline(always)]
pub(super) fn world_flow<M: Maps, F: Family>(maps: M, packet: &Packet<F>) -> Option<Flow<F>> {
    let tuple = F::tuple(
        Tuple::WORLD,
        (packet.destination, packet.destination_port),
        (packet.source, remote_port(packet, packet.source_port)),
        packet.protocol,
    );
    let flow = flow_of::<M, F>(maps, &tuple)?;
    F::is_same(&F::world_tuple(flow.slot, flow.beside), &tuple).then_some(flow)
}

/// The flow with exactly this tuple on the world's link; `None` if there is none.
#[inline(always)]
pub(super) fn world_flow_by<M: Maps, F: Family>(maps: M, tuple: &F::Tuple) -> Option<SlotRef> {
    let flow = flow_of::<M, F>(maps, tuple)?;
    F::is_same(&F::world_tuple(flow.slot, flow.beside), tuple).then_some(flow.slot)
}

/// Whether a live flow has this tuple on the guest's link.
#[inline(always)]
pub fn is_guest_flow<M: Maps>(maps: M, tuple: &Tuple) -> bool {
    flow_of::<M, V4>(maps, tuple).is_some_and(|flow| flow.slot.guest_tuple() == *tuple)
}

/// The same of IPv6.
#[inline(always)]
pub fn is_guest_flow6<M: Maps>(maps: M, tuple: &Tuple6) -> bool {
    flow_of::<M, V6>(maps, tuple)
        .is_some_and(|flow| V6::is_same(&V6::guest_tuple(flow.slot, flow.beside), tuple))
}
