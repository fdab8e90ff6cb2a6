//! Insertion of a flow's tuples, on the engine's order with the flow's first packet.
//!
//! The engine has decided, filled the slot and given the order ([`OrderState`]). This saves it two
//! system calls. The order of insertion is the engine's own: the world's tuple first, so that the
//! answer to the first packet finds its flow, and the verdict last.
use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::{
    Maps,
    family::Family,
    lookup::{Flow, guest_tuple},
    packet::Packet,
};
use crate::{
    FlowRef, SlotRef, Verdict,
    cell::{load32, store32},
    portframe::Order,
    slot::OrderState,
};

/// Carries out an order. Returns the flow, which is open now; `None` if there is no such order, the
/// packet is not of the flow, or a tuple can't be inserted. No tuple of the flow is left then.
#[inline(always)]
pub(super) fn open<M: Maps, F: Family>(
    maps: M,
    vm: u32,
    order: Order,
    packet: &Packet<F>,
) -> Option<Flow<F>> {
    let slot = maps.slot(order.slot)?;
    let generation = load32(slot.generation());
    let is_given = order.is_of(generation) && load32(slot.verdict()) == Verdict::Free as u32;
    if !is_given || !exchange(slot, OrderState::GIVEN, OrderState::TAKEN) {
        return None;
    }
    let beside = F::beside(maps, slot, order.slot);
    let reference = FlowRef {
        slot: order.slot,
        generation,
    };
    let inserted = beside.filter(|beside| {
        F::is_same(&F::guest_tuple(slot, *beside), &guest_tuple(vm, packet))
            && insert::<M, F>(maps, slot, *beside, reference)
    });
    let Some(beside) = inserted else {
        store32(slot.order(), OrderState::FAILED);
        return None;
    };
    store32(slot.order(), OrderState::NONE);
    // What the verdict vouches for was written before, by the engine and in this run.
    store32(slot.verdict(), Verdict::Fast as u32);
    Some(Flow {
        slot,
        index: order.slot,
        beside,
    })
}

/// Inserts both tuples of a slot, or none.
#[inline(always)]
fn insert<M: Maps, F: Family>(
    maps: M,
    slot: SlotRef,
    beside: F::Beside,
    reference: FlowRef,
) -> bool {
    let world = F::world_tuple(slot, beside);
    if !F::insert(maps, &world, reference) {
        return false;
    }
    if !F::insert(maps, &F::guest_tuple(slot, beside), reference) {
        F::delete(maps, &world);
        return false;
    }
    true
}

/// Changes the state of a slot's order, if it is `from`.
#[inline(always)]
fn exchange(slot: SlotRef, from: u32, to: u32) -> bool {
    let changed = slot.order().compare_exchange(from, to, Acquire, Relaxed);
    changed.is_ok()
}
