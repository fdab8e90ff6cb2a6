//! The maps for the programs' functions where no kernel runs them.
use slipgate_abi::{
    Addresses6Ref, EarlyFragmentRef, EarlyTagRef, FirstPacketRef, FlowRef, ForwardKey, ForwardKey6,
    ForwardTarget, NextHopRef, OwnerRef, SequencesRef, SlotIndex, SlotRef, TapEntry, Tuple, Tuple6,
    Vm6Ref, VmRef, VmRow,
    datapath::{
        self,
        fragment_table::{Fragment, Fragment6},
    },
    rate::RateRef,
};

use super::{Insert, SharedMaps};

// SAFETY: the arrays stay mapped as long as the process lives.
unsafe impl datapath::Maps for &SharedMaps {
    fn tap(self, ifindex: u32) -> Option<TapEntry> {
        self.taps.get(&ifindex).ok().flatten()
    }

    fn vm_row(self, row: u32) -> Option<VmRef> {
        // SAFETY: an element of VMS; the mapping is never taken down.
        Some(unsafe { VmRef::new(self.memory.vms.at(row)?) })
    }

    fn owner(self, row: u32) -> Option<OwnerRef> {
        self.owner_ref(row)
    }

    /// The port of such an engine is a call away: no ring is open.
    fn first_packet(self, _index: u32) -> Option<FirstPacketRef> {
        None
    }

    /// The host's sockets receive whole packets.
    fn early_claim(self, _index: u32) -> Option<EarlyTagRef> {
        None
    }

    fn early_tag(self, _place: u32) -> Option<EarlyTagRef> {
        None
    }

    fn early_fragment(self, _place: u32) -> Option<EarlyFragmentRef> {
        None
    }

    fn rates(self, row: u32) -> Option<RateRef> {
        self.rate_limits(VmRow::from_word(row)?)
    }

    fn flow(self, tuple: &Tuple) -> Option<FlowRef> {
        self.flows.get(tuple).ok().flatten()
    }

    fn insert_flow(self, tuple: &Tuple, flow: FlowRef) -> bool {
        self.flows.insert(tuple, &flow, Insert::New).is_ok()
    }

    fn delete_flow(self, tuple: &Tuple) {
        // A tuple that can't be deleted leads to a free slot: a miss.
        let _ = self.flows.remove(tuple);
    }

    fn vm6(self, row: u32) -> Option<Vm6Ref> {
        SharedMaps::vm6(self, VmRow::from_word(row)?)
    }

    fn flow6(self, tuple: &Tuple6) -> Option<FlowRef> {
        self.flows6.get(tuple).ok().flatten()
    }

    fn insert_flow6(self, tuple: &Tuple6, flow: FlowRef) -> bool {
        self.flows6.insert(tuple, &flow, Insert::New).is_ok()
    }

    fn delete_flow6(self, tuple: &Tuple6) {
        // As in `delete_flow`.
        let _ = self.flows6.remove(tuple);
    }

    fn addresses6(self, slot: u32) -> Option<Addresses6Ref> {
        SharedMaps::addresses6(self, SlotIndex::new(slot))
    }

    fn slot(self, index: u32) -> Option<SlotRef> {
        SharedMaps::slot(self, SlotIndex::new(index))
    }

    fn sequences(self, slot: u32) -> Option<SequencesRef> {
        SharedMaps::sequences(self, SlotIndex::new(slot))
    }

    fn next_hop(self, index: u32) -> Option<NextHopRef> {
        SharedMaps::next_hop(self, index)
    }

    fn forward(self, key: &ForwardKey) -> Option<ForwardTarget> {
        self.forwards.get(key).ok().flatten()
    }

    fn forward6(self, key: &ForwardKey6) -> Option<ForwardTarget> {
        self.forwards6.get(key).ok().flatten()
    }

    /// As above.
    fn fragment(self, _place: u32) -> Option<*mut Fragment> {
        None
    }

    fn fragment6(self, _place: u32) -> Option<*mut Fragment6> {
        None
    }
}
