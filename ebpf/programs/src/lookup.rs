//! From a tuple to its flow: copy, then check.
//!
//! A hash element is recycled under a running program, so what `FLOWS` answers may be another
//! flow's by now. The reference is read by one load, and the slot is believed only when its
//! generation and its tuple are the ones asked for: everything else is a miss.
use slipgate_abi::{FlowRef, SlotRef, Tuple, cell::load32};

use crate::{
    maps::{self, FLOWS},
    packet::Packet,
};

/// A flow that was found.
#[derive(Clone, Copy)]
pub(crate) struct Flow {
    pub(crate) slot: SlotRef,
    /// The slot's index.
    pub(crate) index: u32,
}

#[inline(always)]
fn flow_of(tuple: &Tuple) -> Option<Flow> {
    let entry = FLOWS.get_ptr(tuple)?;
    // SAFETY: `FlowRef` has the word's size and alignment; the element is never unmapped while a
    // program runs, and any word in it is checked by the caller.
    let FlowRef {
        slot: index,
        generation,
    } = unsafe { core::mem::transmute::<u64, FlowRef>(entry.cast::<u64>().read_volatile()) };
    let slot = maps::slot(index)?;
    (load32(slot.generation()) == generation).then_some(Flow { slot, index })
}

/// The flow of what a VM sent.
#[inline(always)]
pub(crate) fn guest_flow(vm: u32, packet: &Packet) -> Option<Flow> {
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
    let flow = flow_of(&tuple)?;
    (flow.slot.guest_tuple() == tuple).then_some(flow)
}

/// The flow of what the world sent.
#[inline(always)]
pub(crate) fn world_flow(packet: &Packet) -> Option<Flow> {
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
    let flow = flow_of(&tuple)?;
    (flow.slot.world_tuple() == tuple).then_some(flow)
}

/// The flow with exactly this tuple on the world's link.
#[inline(always)]
pub(crate) fn world_flow_by(tuple: &Tuple) -> Option<SlotRef> {
    let slot = flow_of(tuple)?.slot;
    (slot.world_tuple() == *tuple).then_some(slot)
}

/// Whether a live flow has this tuple on its guest's link.
#[inline(always)]
pub(crate) fn is_guest_flow(tuple: &Tuple) -> bool {
    flow_of(tuple).is_some_and(|flow| flow.slot.guest_tuple() == *tuple)
}
