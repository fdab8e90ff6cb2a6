//! The in-memory kernel as the programs see it: its tables, its clock and its devices.
use slipgate_abi::{
    DropReason, FlowRef, ForwardKey, ForwardTarget, Ip4, NextHopRef, OwnerRef, SequencesRef,
    SlotIndex, SlotRef, TapEntry, Tuple, VmRef,
    datapath::{
        self,
        fragment_table::{Fragment, PLACES},
    },
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

    fn rates(self, row: u32) -> Option<RateRef> {
        (row <= VMS).then(|| Kernel::rates(self, row as u16))
    }

    fn flow(self, tuple: &Tuple) -> Option<FlowRef> {
        self.flows.get(tuple).copied()
    }

    fn insert_flow(self, tuple: &Tuple, flow: FlowRef) -> bool {
        let mut ordered = self.ordered.borrow_mut();
        let fails = self.faults.order_fails.get();
        self.faults.order_fails.set(fails.saturating_sub(1));
        let capacity = self.faults.map_capacity;
        let is_full = capacity != 0 && self.flows.len() + ordered.len() >= capacity;
        let is_taken = self.flows.contains_key(tuple) || ordered.iter().any(|(t, _)| t == tuple);
        if fails > 0 || is_full || is_taken {
            return false;
        }
        let world = self.slot(flow.index()).world_tuple();
        assert!(
            tuple.scope == Tuple::WORLD || ordered.contains(&(world, flow)),
            "the guest's packets would go out before the answers are known: the host would reset them"
        );
        ordered.push((*tuple, flow));
        true
    }

    fn delete_flow(self, tuple: &Tuple) {
        self.ordered.borrow_mut().retain(|(t, _)| t != tuple);
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
        let (row, id) = *self.forwards.get(&(key.host, key.port, key.protocol))?;
        Some(ForwardTarget {
            vm: id,
            vm_row: row.into(),
            guest_port: 0,
            pad: [0; 6],
        })
    }

    fn fragment(self, place: u32) -> Option<*mut Fragment> {
        ((place as usize) < PLACES).then(|| self.fragments.at(place as usize))
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

    fn now_ns(self) -> u64 {
        self.now_ns
    }

    fn count_drop(self, row: u32, reason: DropReason, segments: Segments) {
        if row <= VMS {
            self.stats(row as u16).dropped(reason, segments);
        }
    }
}
