//! From a tuple to its flow: copy, then check.
//!
//! A hash element is recycled under a running program, so what `FLOWS` answers may be another
//! flow's by now. The reference is read by one load, and the slot is believed only when its
//! generation and its tuple are the ones asked for: everything else is a miss.
use super::{Maps, packet::Packet};
use crate::{FlowRef, SlotRef, Tuple, cell::load32};

/// A flow that was found.
#[derive(Clone, Copy)]
pub(super) struct Flow {
    pub(super) slot: SlotRef,
    /// The slot's index.
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

/// The flow of what a VM sent.
#[inline(always)]
pub(super) fn guest_flow<M: Maps>(maps: M, vm: u32, packet: &Packet) -> Option<Flow> {
    let tuple = Tuple {
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
    };
    let flow = flow_of(maps, &tuple)?;
    (flow.slot.guest_tuple() == tuple).then_some(flow)
}

/// The flow of what the world sent.
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

/// The flow with exactly this tuple on the world's link.
#[inline(always)]
pub(super) fn world_flow_by<M: Maps>(maps: M, tuple: &Tuple) -> Option<SlotRef> {
    let slot = flow_of(maps, tuple)?.slot;
    (slot.world_tuple() == *tuple).then_some(slot)
}

/// Whether a live flow has this tuple on its guest's link.
#[inline(always)]
pub fn is_guest_flow<M: Maps>(maps: M, tuple: &Tuple) -> bool {
    flow_of(maps, tuple).is_some_and(|flow| flow.slot.guest_tuple() == *tuple)
}
