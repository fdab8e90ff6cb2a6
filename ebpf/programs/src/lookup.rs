//! Access of the datapath to the BPF maps.
use aya_ebpf::{bindings::BPF_NOEXIST, btf_maps::Array, macros::btf_map};
use slipgate_abi::{
    Addresses6Ref, EarlyFragmentRef, EarlyTagRef, FirstPacketRef, FlowRef, ForwardKey, ForwardKey6,
    ForwardTarget, NextHopRef, OwnerRef, SequencesRef, SlotRef, TapEntry, Tuple, Tuple6, Vm6Ref,
    VmRef,
    datapath::{
        Maps,
        fragment_table::{Fragment, Fragment6, PLACES},
    },
    rate::RateRef,
};

use crate::maps::{
    ADDRESSES6, EARLY_CLAIMS, EARLY_FRAGMENTS, EARLY_TAGS, FIRST_PACKETS, FLOWS, FLOWS6, FORWARDS,
    FORWARDS6, NEXT_HOPS, OWNERS, RATES, SEQUENCES, SLOTS, TAPS, VMS, VMS6,
};

/// Fragment tables of both families. They are not pinned, because their contents are valid for
/// seconds only.
#[btf_map]
static PIECES: Array<Fragment, PLACES> = Array::new();
#[btf_map]
static PIECES6: Array<Fragment6, PLACES> = Array::new();

/// Access to the BPF maps of this object.
#[derive(Clone, Copy)]
pub(crate) struct BpfMaps;

// SAFETY: an array's element never moves and lives as long as the program runs; the verifier checks
// each access.
unsafe impl Maps for BpfMaps {
    #[inline(always)]
    fn tap(self, ifindex: u32) -> Option<TapEntry> {
        // SAFETY: never unmapped while a program runs; integers have no invalid values.
        TAPS.get_ptr(ifindex).map(|tap| unsafe { *tap })
    }

    #[inline(always)]
    fn vm_row(self, row: u32) -> Option<VmRef> {
        // SAFETY: an element of VMS.
        VMS.get_ptr_mut(row).map(|vm| unsafe { VmRef::new(vm) })
    }

    #[inline(always)]
    fn owner(self, row: u32) -> Option<OwnerRef> {
        // SAFETY: an element of OWNERS.
        OWNERS
            .get_ptr_mut(row)
            .map(|owner| unsafe { OwnerRef::new(owner) })
    }

    #[inline(always)]
    fn first_packet(self, index: u32) -> Option<FirstPacketRef> {
        // SAFETY: an element of FIRST_PACKETS.
        FIRST_PACKETS
            .get_ptr_mut(index)
            .map(|packet| unsafe { FirstPacketRef::new(packet) })
    }

    #[inline(always)]
    fn early_claim(self, index: u32) -> Option<EarlyTagRef> {
        // SAFETY: an element of EARLY_CLAIMS.
        EARLY_CLAIMS
            .get_ptr_mut(index)
            .map(|claim| unsafe { EarlyTagRef::new(claim) })
    }

    #[inline(always)]
    fn early_tag(self, place: u32) -> Option<EarlyTagRef> {
        // SAFETY: an element of EARLY_TAGS.
        EARLY_TAGS
            .get_ptr_mut(place)
            .map(|tag| unsafe { EarlyTagRef::new(tag) })
    }

    #[inline(always)]
    fn early_fragment(self, place: u32) -> Option<EarlyFragmentRef> {
        // SAFETY: an element of EARLY_FRAGMENTS.
        EARLY_FRAGMENTS
            .get_ptr_mut(place)
            .map(|copy| unsafe { EarlyFragmentRef::new(copy) })
    }

    #[inline(always)]
    fn rates(self, row: u32) -> Option<RateRef> {
        let limits = RATES.get_ptr_mut(row);
        // SAFETY: an element of RATES.
        limits.map(|limits| unsafe { RateRef::new(limits) })
    }

    #[inline(always)]
    fn flow(self, tuple: &Tuple) -> Option<FlowRef> {
        let entry = FLOWS.get_ptr(tuple)?;
        // SAFETY: `FlowRef` has the word's size and alignment; the element is never unmapped while a
        // program runs, and any word in it is checked by the caller.
        Some(unsafe { core::mem::transmute::<u64, FlowRef>(entry.cast::<u64>().read_volatile()) })
    }

    #[inline(always)]
    fn insert_flow(self, tuple: &Tuple, flow: FlowRef) -> bool {
        FLOWS.insert(tuple, &flow, BPF_NOEXIST.into()).is_ok()
    }

    #[inline(always)]
    fn delete_flow(self, tuple: &Tuple) {
        // A tuple that can't be deleted leads to a free slot: a miss, swept at the next adoption.
        let _ = FLOWS.remove(tuple);
    }

    #[inline(always)]
    fn vm6(self, row: u32) -> Option<Vm6Ref> {
        // SAFETY: an element of VMS6.
        VMS6.get_ptr_mut(row).map(|vm| unsafe { Vm6Ref::new(vm) })
    }

    #[inline(always)]
    fn flow6(self, tuple: &Tuple6) -> Option<FlowRef> {
        let entry = FLOWS6.get_ptr(tuple)?;
        // SAFETY: as in `flow`.
        Some(unsafe { core::mem::transmute::<u64, FlowRef>(entry.cast::<u64>().read_volatile()) })
    }

    #[inline(always)]
    fn insert_flow6(self, tuple: &Tuple6, flow: FlowRef) -> bool {
        FLOWS6.insert(tuple, &flow, BPF_NOEXIST.into()).is_ok()
    }

    #[inline(always)]
    fn delete_flow6(self, tuple: &Tuple6) {
        // As in `delete_flow`.
        let _ = FLOWS6.remove(tuple);
    }

    #[inline(always)]
    fn addresses6(self, slot: u32) -> Option<Addresses6Ref> {
        // SAFETY: an element of ADDRESSES6.
        ADDRESSES6
            .get_ptr_mut(slot)
            .map(|element| unsafe { Addresses6Ref::new(element) })
    }

    #[inline(always)]
    fn slot(self, index: u32) -> Option<SlotRef> {
        // SAFETY: an element of SLOTS.
        SLOTS
            .get_ptr_mut(index)
            .map(|slot| unsafe { SlotRef::new(slot) })
    }

    #[inline(always)]
    fn sequences(self, slot: u32) -> Option<SequencesRef> {
        // SAFETY: an element of SEQUENCES.
        SEQUENCES
            .get_ptr_mut(slot)
            .map(|element| unsafe { SequencesRef::new(element) })
    }

    #[inline(always)]
    fn next_hop(self, index: u32) -> Option<NextHopRef> {
        // SAFETY: an element of NEXT_HOPS.
        NEXT_HOPS
            .get_ptr_mut(index)
            .map(|hop| unsafe { NextHopRef::new(hop) })
    }

    #[inline(always)]
    fn forward(self, key: &ForwardKey) -> Option<ForwardTarget> {
        // SAFETY: as in `tap`.
        FORWARDS.get_ptr(key).map(|target| unsafe { *target })
    }

    #[inline(always)]
    fn forward6(self, key: &ForwardKey6) -> Option<ForwardTarget> {
        // SAFETY: as in `tap`.
        FORWARDS6.get_ptr(key).map(|target| unsafe { *target })
    }

    #[inline(always)]
    fn fragment(self, place: u32) -> Option<*mut Fragment> {
        PIECES.get_ptr_mut(place)
    }

    #[inline(always)]
    fn fragment6(self, place: u32) -> Option<*mut Fragment6> {
        PIECES6.get_ptr_mut(place)
    }
}
