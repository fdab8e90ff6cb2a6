//! Look-up of a flow by its tuple: copy the reference, then check the slot.
//!
//! A hash element may be recycled under a running program, so an entry of `FLOWS` may belong to
//! another flow by the time it is read. The reference is read by one load, and the slot is used
//! only if its generation and its tuple match: everything else is a miss.
use super::{Maps, packet::Packet};
use crate::{FlowRef, SlotRef, Tuple, cell::load32};

/// A flow found in `FLOWS`.
#[derive(Clone, Copy)]
pub(super) struct Flow {
    pub(super) slot: SlotRef,
    /// Index of the slot in `SLOTS`.
    pub(super) index: u32,
}

#[inline(always)]
fn flow_of<M: Maps>(maps: M, tuple: &Tuple) -> Option<Flow> {
    let FlowRef {
        slot: index,
        generation,
    } = maps.flow(tuple)?;
    let slot = maps.slot(index)?;
    (load32(slot.generation()) == generation).then_some(Flow { slot, index })
}

/// Tuple of a packet from a VM on the guest's link.
#[inline(always)]
pub(super) fn guest_tuple(vm: u32, packet: &Packet) -> Tuple {
    Tuple {
        scope: vm,
        local: packet.source,
        remote: packet.destination,
        local_port: packet.source_port,
        remote_port: if packet.is_icmp() {
            0
        } else {
            packet.destination_port
        },
        protocol: packet.protocol,
        pad: [0; 3],
    }
}

/// The flow of a packet from a VM; `None` if it has none.
#[inline(always)]
pub(super) fn guest_flow<M: Maps>(maps: M, vm: u32, packet: &Packet) -> Option<Flow> {
    let tuple = guest_tuple(vm, packet);
    let flow = flow_of(maps, &tuple)?;
    (flow.slot.guest_tuple() == tuple).then_some(flow)
}

/// The flow of a packet from the world; `None` if it has none.
#[inline(always)]
pub(super) fn world_flow<M: Maps>(maps: M, packet: &Packet) -> Option<Flow> {
    let tuple = Tuple {
        scope: Tuple::WORLD,
        local: packet.destination,
        remote: packet.source,
        local_port: packet.destination_port,
        remote_port: if packet.is_icmp() {
            0
        } else {
            packet.source_port
        },
        protocol: packet.protocol,
        pad: [0; 3],
    };
    let flow = flow_of(maps, &tuple)?;
    (flow.slot.world_tuple() == tuple).then_some(flow)
}

/// The flow with exactly this tuple on the world's link; `None` if there is none.
#[inline(always)]
pub(super) fn world_flow_by<M: Maps>(maps: M, tuple: &Tuple) -> Option<SlotRef> {
    let slot = flow_of(maps, tuple)?.slot;
    (slot.world_tuple() == *tuple).then_some(slot)
}

/// Whether a live flow has this tuple on the guest's link.
#[inline(always)]
pub fn is_guest_flow<M: Maps>(maps: M, tuple: &Tuple) -> bool {
    flow_of(maps, tuple).is_some_and(|flow| flow.slot.guest_tuple() == *tuple)
}
