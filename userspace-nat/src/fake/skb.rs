//! The in-memory kernel as the programs see it: its tables, its clock and its devices.
use std::{cell::RefCell, collections::HashMap, hash::Hash, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{
    Addresses6Ref, DropReason, EarlyFragmentRef, EarlyTagRef, FirstPacketRef, FlowRef, ForwardKey,
    ForwardKey6, ForwardTarget, Ip4, Ip6, NextHopRef, OwnerRef, SequencesRef, SlotIndex, SlotRef,
    TapEntry, Tuple, Tuple6, Vm6Ref, VmRef,
    datapath::{
        self,
        fragment_table::{Fragment, Fragment6, PLACES},
    },
    early_fragment::{CLAIMS, PLACES as EARLY_PLACES, taken},
    first_packet::RING_LEN,
    maps::{MAX_NEXT_HOPS, MAX_OWNERS},
    rate::RateRef,
    segment::Segments,
};

use super::{Kernel, VMS};
use crate::software::Environment;

// SAFETY: references point into allocations that live as long as the kernel.
unsafe impl datapath::Maps for &Kernel {
    fn tap(self, ifindex: u32) -> Option<TapEntry> {
        self.taps.get(&ifindex).copied()
    }

    fn vm_row(self, row: u32) -> Option<VmRef> {
        (row <= VMS).then(|| Kernel::vm(self, row as u16))
    }

    fn owner(self, row: u32) -> Option<OwnerRef> {
        (row < MAX_OWNERS).then(|| Kernel::owner_row(self, row))
    }

    fn first_packet(self, index: u32) -> Option<FirstPacketRef> {
        (index < MAX_OWNERS * RING_LEN).then(|| Kernel::first_packet(self, index))
    }

    fn early_claim(self, index: u32) -> Option<EarlyTagRef> {
        (index < CLAIMS).then(|| Kernel::early_claim(self, index))
    }

    fn early_tag(self, place: u32) -> Option<EarlyTagRef> {
        (place < EARLY_PLACES).then(|| Kernel::early_tag(self, place))
    }

    fn early_fragment(self, place: u32) -> Option<EarlyFragmentRef> {
        (place < EARLY_PLACES).then(|| Kernel::early_fragment(self, place))
    }

    fn rates(self, row: u32) -> Option<RateRef> {
        (row <= VMS).then(|| Kernel::rates(self, row as u16))
    }

    fn flow(self, tuple: &Tuple) -> Option<FlowRef> {
        self.flows.get(tuple).copied()
    }

    fn insert_flow(self, tuple: &Tuple, flow: FlowRef) -> bool {
        let world = self.slot(flow.index()).world_tuple();
        let is_world = tuple.scope == Tuple::WORLD;
        self.order(&self.flows, &self.ordered, (*tuple, flow), world, is_world)
    }

    fn delete_flow(self, tuple: &Tuple) {
        self.ordered.borrow_mut().retain(|(t, _)| t != tuple);
    }

    fn vm6(self, row: u32) -> Option<Vm6Ref> {
        (row <= VMS).then(|| Kernel::vm6(self, row as u16))
    }

    fn flow6(self, tuple: &Tuple6) -> Option<FlowRef> {
        self.flows6.get(tuple).copied()
    }

    fn insert_flow6(self, tuple: &Tuple6, flow: FlowRef) -> bool {
        let (slot, addresses) = (self.slot(flow.index()), self.addresses6(flow.index()));
        let world = addresses.world_tuple(slot);
        let is_world = tuple.scope == Tuple::WORLD;
        self.order(
            &self.flows6,
            &self.ordered6,
            (*tuple, flow),
            world,
            is_world,
        )
    }

    fn delete_flow6(self, tuple: &Tuple6) {
        self.ordered6.borrow_mut().retain(|(t, _)| t != tuple);
    }

    fn addresses6(self, slot: u32) -> Option<Addresses6Ref> {
        ((slot as usize) < self.addresses6.len())
            .then(|| Kernel::addresses6(self, SlotIndex::new(slot)))
    }

    fn slot(self, index: u32) -> Option<SlotRef> {
        ((index as usize) < self.slots.len()).then(|| Kernel::slot(self, SlotIndex::new(index)))
    }

    fn sequences(self, slot: u32) -> Option<SequencesRef> {
        ((slot as usize) < self.sequences.len())
            .then(|| Kernel::sequences(self, SlotIndex::new(slot)))
    }

    fn next_hop(self, index: u32) -> Option<NextHopRef> {
        // SAFETY: in bounds; the allocation lives as long as the kernel.
        (index < MAX_NEXT_HOPS)
            .then(|| unsafe { NextHopRef::new(self.next_hops.at(index as usize)) })
    }

    fn forward(self, key: &ForwardKey) -> Option<ForwardTarget> {
        let found = self.forwards.get(&(key.host, key.port, key.protocol));
        found.map(target)
    }

    fn forward6(self, key: &ForwardKey6) -> Option<ForwardTarget> {
        let found = self.forwards6.get(&(key.host, key.port, key.protocol));
        found.map(target)
    }

    fn fragment(self, place: u32) -> Option<*mut Fragment> {
        (self.sees_fragments() && (place as usize) < PLACES)
            .then(|| self.fragments.at(place as usize))
    }

    fn fragment6(self, place: u32) -> Option<*mut Fragment6> {
        (self.sees_fragments() && (place as usize) < PLACES)
            .then(|| self.fragments6.at(place as usize))
    }
}

/// A forward as the programs see it: no more of it matters to them than whose it is.
fn target(&(row, vm): &(u16, u32)) -> ForwardTarget {
    ForwardTarget {
        vm,
        vm_row: row.into(),
        guest_port: 0,
        pad: [0; 6],
    }
}

impl Kernel {
    /// Whether a look at the tables of fragments finds what is there.
    fn sees_fragments(&self) -> bool {
        let left = self.faults.unseen_fragments.get();
        self.faults.unseen_fragments.set(left.saturating_sub(1));
        if left == 0 && self.faults.takes_early.take() {
            for place in 0..EARLY_PLACES {
                let tag = self.early_tag(place);
                let word = tag.word().load(Relaxed);
                tag.word().store(taken(word), Relaxed);
            }
        }
        left == 0
    }

    /// Inserts an entry of a running program; `world` is the tuple that goes first.
    fn order<T: Copy + Eq + Hash>(
        &self,
        flows: &HashMap<T, FlowRef>,
        ordered: &RefCell<Vec<(T, FlowRef)>>,
        (tuple, flow): (T, FlowRef),
        world: T,
        is_world: bool,
    ) -> bool {
        let mut ordered = ordered.borrow_mut();
        let fails = self.faults.order_fails.get();
        self.faults.order_fails.set(fails.saturating_sub(1));
        let capacity = self.faults.map_capacity;
        let is_full = capacity != 0 && flows.len() + ordered.len() >= capacity;
        let is_taken = flows.contains_key(&tuple) || ordered.iter().any(|(t, _)| *t == tuple);
        if fails > 0 || is_full || is_taken {
            return false;
        }
        assert!(
            is_world || ordered.contains(&(world, flow)),
            "the guest's packets would go out before the answers are known: the host would reset them"
        );
        ordered.push((tuple, flow));
        true
    }
}

impl<'k> Environment for &'k Kernel {
    type Maps = &'k Kernel;

    fn maps(self) -> &'k Kernel {
        self
    }

    fn mtu_of(self, _ifindex: u32) -> Option<u32> {
        Some(self.device_mtu)
    }

    fn is_routed_on(self, destination: Ip4) -> bool {
        self.routed_on.contains(&destination)
    }

    fn is_routed_on6(self, destination: Ip6) -> bool {
        self.routed_on6.contains(&destination)
    }

    fn now_ns(self) -> u64 {
        if self.faults.sleeps_meanwhile.take() {
            self.owner_row(0).ring_open().store(0, Relaxed);
        }
        self.now_ns
    }

    fn count_drop(self, row: u32, reason: DropReason, segments: Segments) {
        if row <= VMS {
            self.stats(row as u16).dropped(reason, segments);
        }
    }
}
