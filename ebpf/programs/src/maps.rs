//! The maps; see [`slipgate_abi::maps`] for what each holds. A map's name is also its pin's.
use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, HashMap, LpmTrie},
    macros::btf_map,
};
use slipgate_abi::{
    DropCounters, FlowRef, ForwardKey, ForwardTarget, NameKey, NameValue, NextHop, NextHopRef,
    RateLimits, Sequences, SequencesRef, Slot, SlotRef, TapEntry, Tuple, Vm, VmCounters, VmRef,
    cell::load32,
    forward::DenyKey,
    maps::{
        DEFAULT_SLOTS, MAX_CHUNKS, MAX_DENY, MAX_FORWARDS, MAX_NAMES, MAX_NEXT_HOPS, MAX_OWNERS,
        MAX_RULES, MAX_VMS, Meta, Owner, RuleElement, TUPLES_PER_SLOT,
    },
};

/// Userspace changes these in place and reads them without a system call.
const MAPPED: usize = BPF_F_MMAPABLE as usize;

type Mapped<T, const N: usize> = Array<T, N, MAPPED>;

#[btf_map]
pub(crate) static META: Mapped<Meta, 1> = Array::new();
// The loader sets the size of FLOWS, SLOTS and SEQUENCES.
#[btf_map]
pub(crate) static FLOWS: HashMap<Tuple, FlowRef, { (DEFAULT_SLOTS * TUPLES_PER_SLOT) as usize }> =
    HashMap::new();
#[btf_map]
pub(crate) static SLOTS: Mapped<Slot, { DEFAULT_SLOTS as usize }> = Array::new();
#[btf_map]
pub(crate) static SEQUENCES: Mapped<Sequences, { DEFAULT_SLOTS as usize }> = Array::new();
#[btf_map]
pub(crate) static CHUNKS: Mapped<u32, { MAX_CHUNKS as usize }> = Array::new();
#[btf_map]
pub(crate) static OWNERS: Mapped<Owner, { MAX_OWNERS as usize }> = Array::new();
#[btf_map]
pub(crate) static VMS: Mapped<Vm, { MAX_VMS as usize }> = Array::new();
#[btf_map]
pub(crate) static TAPS: HashMap<u32, TapEntry, { MAX_VMS as usize }> = HashMap::new();
#[btf_map]
pub(crate) static DROPS: Mapped<DropCounters, { MAX_VMS as usize }> = Array::new();
#[btf_map]
pub(crate) static COUNTERS: Mapped<VmCounters, { MAX_VMS as usize }> = Array::new();
#[btf_map]
pub(crate) static NEXT_HOPS: Mapped<NextHop, { MAX_NEXT_HOPS as usize }> = Array::new();
#[btf_map]
pub(crate) static FORWARDS: HashMap<ForwardKey, ForwardTarget, { MAX_FORWARDS as usize }> =
    HashMap::new();
#[btf_map]
pub(crate) static DENY: LpmTrie<DenyKey, u32, { MAX_DENY as usize }> = LpmTrie::new();
#[btf_map]
pub(crate) static RULES: Mapped<RuleElement, { MAX_RULES as usize }> = Array::new();
#[btf_map]
pub(crate) static RATES: Mapped<RateLimits, { MAX_VMS as usize }> = Array::new();
#[btf_map]
pub(crate) static NAMES: HashMap<
    NameKey,
    NameValue,
    { MAX_NAMES as usize },
    { BPF_F_NO_PREALLOC as usize },
> = HashMap::new();

/// A slot by its index.
#[inline(always)]
pub(crate) fn slot(index: u32) -> Option<SlotRef> {
    // SAFETY: an array's element never moves; the verifier checks each access.
    SLOTS
        .get_ptr_mut(index)
        .map(|slot| unsafe { SlotRef::new(slot) })
}

/// Where a slot's connection stands in sequence space.
#[inline(always)]
pub(crate) fn sequences(slot: u32) -> Option<SequencesRef> {
    // SAFETY: as above.
    SEQUENCES
        .get_ptr_mut(slot)
        .map(|element| unsafe { SequencesRef::new(element) })
}

/// The row, if it still is this VM's.
#[inline(always)]
pub(crate) fn vm(row: u32, id: u32) -> Option<VmRef> {
    let vm = vm_row(row)?;
    (id != 0 && load32(vm.id()) == id).then_some(vm)
}

/// The row, whoever's it is.
#[inline(always)]
pub(crate) fn vm_row(row: u32) -> Option<VmRef> {
    // SAFETY: as in `slot`.
    VMS.get_ptr_mut(row).map(|vm| unsafe { VmRef::new(vm) })
}

/// A next hop by its index.
#[inline(always)]
pub(crate) fn next_hop(index: u32) -> Option<NextHopRef> {
    // SAFETY: as in `slot`.
    NEXT_HOPS
        .get_ptr_mut(index)
        .map(|hop| unsafe { NextHopRef::new(hop) })
}
