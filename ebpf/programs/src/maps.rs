//! Definitions of the maps; [`slipgate_abi::maps`] describes their contents. A map is pinned under
//! its own name.
use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, HashMap, LpmTrie, ProgramArray},
    macros::btf_map,
};
use slipgate_abi::{
    Addresses6, DropCounters, EarlyFragment, EarlyTag, FirstPacket, FlowRef, ForwardKey,
    ForwardKey6, ForwardTarget, NameKey, NameValue, NextHop, RateLimits, Sequences, Slot, TapEntry,
    Tuple, Tuple6, Vm, Vm6, VmCounters,
    datapath::Program6,
    early_fragment::{CLAIMS, PLACES},
    first_packet::RING_LEN,
    forward::{DenyKey, DenyKey6},
    maps::{
        DEFAULT_RULES, DEFAULT_SLOTS, DEFAULT_VMS, MAX_CHUNKS, MAX_DENY, MAX_FORWARDS, MAX_NAMES,
        MAX_NEXT_HOPS, MAX_OWNERS, Meta, Owner, RuleElement, TUPLES_PER_SLOT,
    },
};

/// Flags of maps that userspace changes in place and reads without a system call.
const MAPPED: usize = BPF_F_MMAPABLE as usize;

/// Programs for IPv6, to which the others pass packets on. The loader puts them there.
#[btf_map]
pub(crate) static PROGRAMS6: ProgramArray<{ Program6::ALL.len() }> = ProgramArray::new();
/// Rows of the VMs' maps by default: row 0 belongs to none.
const ROWS: usize = DEFAULT_VMS as usize + 1;

type Mapped<T, const N: usize> = Array<T, N, MAPPED>;

#[btf_map]
pub(crate) static META: Mapped<Meta, 1> = Array::new();
// The loader sets the sizes: of FLOWS, FLOWS6, SLOTS, ADDRESSES6 and SEQUENCES by the number of slots,
// of the VMs' maps and of RULES by those of VMs and rules.
#[btf_map]
pub(crate) static FLOWS: HashMap<Tuple, FlowRef, { (DEFAULT_SLOTS * TUPLES_PER_SLOT) as usize }> =
    HashMap::new();
#[btf_map]
pub(crate) static FLOWS6: HashMap<Tuple6, FlowRef, { (DEFAULT_SLOTS * TUPLES_PER_SLOT) as usize }> =
    HashMap::new();
#[btf_map]
pub(crate) static ADDRESSES6: Mapped<Addresses6, { DEFAULT_SLOTS as usize }> = Array::new();
#[btf_map]
pub(crate) static VMS6: Mapped<Vm6, ROWS> = Array::new();
#[btf_map]
pub(crate) static SLOTS: Mapped<Slot, { DEFAULT_SLOTS as usize }> = Array::new();
#[btf_map]
pub(crate) static SEQUENCES: Mapped<Sequences, { DEFAULT_SLOTS as usize }> = Array::new();
#[btf_map]
pub(crate) static CHUNKS: Mapped<u32, { MAX_CHUNKS as usize }> = Array::new();
#[btf_map]
pub(crate) static OWNERS: Mapped<Owner, { MAX_OWNERS as usize }> = Array::new();
#[btf_map]
pub(crate) static FIRST_PACKETS: Mapped<FirstPacket, { (MAX_OWNERS * RING_LEN) as usize }> =
    Array::new();
#[btf_map]
pub(crate) static EARLY_FRAGMENTS: Mapped<EarlyFragment, { PLACES as usize }> = Array::new();
#[btf_map]
pub(crate) static EARLY_TAGS: Mapped<EarlyTag, { PLACES as usize }> = Array::new();
/// Of the programs alone: an engine could stop the store.
#[btf_map]
pub(crate) static EARLY_CLAIMS: Mapped<EarlyTag, { CLAIMS as usize }> = Array::new();
#[btf_map]
pub(crate) static VMS: Mapped<Vm, { ROWS }> = Array::new();
#[btf_map]
pub(crate) static TAPS: HashMap<u32, TapEntry, { ROWS }> = HashMap::new();
#[btf_map]
pub(crate) static DROPS: Mapped<DropCounters, { ROWS }> = Array::new();
#[btf_map]
pub(crate) static COUNTERS: Mapped<VmCounters, { ROWS }> = Array::new();
#[btf_map]
pub(crate) static NEXT_HOPS: Mapped<NextHop, { MAX_NEXT_HOPS as usize }> = Array::new();
#[btf_map]
pub(crate) static FORWARDS: HashMap<ForwardKey, ForwardTarget, { MAX_FORWARDS as usize }> =
    HashMap::new();
#[btf_map]
pub(crate) static FORWARDS6: HashMap<ForwardKey6, ForwardTarget, { MAX_FORWARDS as usize }> =
    HashMap::new();
#[btf_map]
pub(crate) static DENY: LpmTrie<DenyKey, u32, { MAX_DENY as usize }> = LpmTrie::new();
#[btf_map]
pub(crate) static DENY6: LpmTrie<DenyKey6, u32, { MAX_DENY as usize }> = LpmTrie::new();
#[btf_map]
pub(crate) static RULES: Mapped<RuleElement, { DEFAULT_RULES as usize }> = Array::new();
#[btf_map]
pub(crate) static RATES: Mapped<RateLimits, { ROWS }> = Array::new();
#[btf_map]
pub(crate) static NAMES: HashMap<
    NameKey,
    NameValue,
    { MAX_NAMES as usize },
    { BPF_F_NO_PREALLOC as usize },
> = HashMap::new();
