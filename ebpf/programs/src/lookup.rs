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

#[inline(always)]
fn slot_of(tuple: &Tuple) -> Option<SlotRef> {
    let entry = FLOWS.get_ptr(tuple)?;
    // SAFETY: `FlowRef` has the word's size and alignment; the element is never unmapped while a
    // program runs, and any word in it is checked by the caller.
    let FlowRef {
        slot: index,
        generation,
    } = unsafe { core::mem::transmute::<u64, FlowRef>(entry.cast::<u64>().read_volatile()) };
    let slot = maps::slot(index)?;
    (load32(slot.generation()) == generation).then_some(slot)
}

/// The flow of what a VM sent.
#[inline(always)]
pub(crate) fn guest_flow(vm: u32, packet: &Packet) -> Option<SlotRef> {
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
    let slot = slot_of(&tuple)?;
    (slot.guest_tuple() == tuple).then_some(slot)
}

/// The flow of what the world sent.
#[inline(always)]
pub(crate) fn world_flow(packet: &Packet) -> Option<SlotRef> {
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
    let slot = slot_of(&tuple)?;
    (slot.world_tuple() == tuple).then_some(slot)
}

/// The flow with exactly this tuple on the world's link.
#[inline(always)]
pub(crate) fn world_flow_by(tuple: &Tuple) -> Option<SlotRef> {
    let slot = slot_of(tuple)?;
    (slot.world_tuple() == *tuple).then_some(slot)
}

/// Whether a live flow has this tuple on its guest's link.
#[inline(always)]
pub(crate) fn is_guest_flow(tuple: &Tuple) -> bool {
    slot_of(tuple).is_some_and(|slot| slot.guest_tuple() == *tuple)
}
