//! Shape of each map: the definitions of `abi::maps` in the kernel's terms.

use std::{fmt, io, mem::size_of, os::fd::BorrowedFd};

use aya_obj::generated::bpf_map_type;
use slipgate_abi::{
    DropCounters, FlowRef, ForwardKey, ForwardTarget, NameKey, NameValue, NextHop, RateLimits,
    Sequences, Slot, TapEntry, Tuple, Vm, VmCounters, forward::DenyKey, maps,
};

use crate::bpf;

/// Number of maps.
pub const MAPS: usize = 16;

/// The maps, in the order in which descriptors are passed. The number indexes [`MapName::ALL`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "documented in slipgate_abi::maps")]
pub enum MapName {
    Meta,
    Flows,
    Slots,
    Chunks,
    Owners,
    Vms,
    Taps,
    Drops,
    Counters,
    NextHops,
    Forwards,
    Deny,
    Rules,
    Rates,
    Names,
    Sequences,
}

impl MapName {
    /// Every map, in the order of descriptors.
    pub const ALL: [Self; MAPS] = [
        Self::Meta,
        Self::Flows,
        Self::Slots,
        Self::Chunks,
        Self::Owners,
        Self::Vms,
        Self::Taps,
        Self::Drops,
        Self::Counters,
        Self::NextHops,
        Self::Forwards,
        Self::Deny,
        Self::Rules,
        Self::Rates,
        Self::Names,
        Self::Sequences,
    ];

    /// Returns the map's name in the object, which is also its pin's.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Meta => "META",
            Self::Flows => "FLOWS",
            Self::Slots => "SLOTS",
            Self::Chunks => "CHUNKS",
            Self::Owners => "OWNERS",
            Self::Vms => "VMS",
            Self::Taps => "TAPS",
            Self::Drops => "DROPS",
            Self::Counters => "COUNTERS",
            Self::NextHops => "NEXT_HOPS",
            Self::Forwards => "FORWARDS",
            Self::Deny => "DENY",
            Self::Rules => "RULES",
            Self::Rates => "RATES",
            Self::Names => "NAMES",
            Self::Sequences => "SEQUENCES",
        }
    }

    /// Returns the shape that the map must have with `slots` slots.
    pub const fn shape(self, slots: u32) -> Shape {
        const U32: u32 = size_of::<u32>() as u32;
        match self {
            Self::Meta => Shape::array(size_of::<maps::Meta>(), 1),
            Self::Flows => Shape {
                kind: Kind::Hash,
                key: size_of::<Tuple>() as u32,
                value: size_of::<FlowRef>() as u32,
                entries: slots.saturating_mul(maps::TUPLES_PER_SLOT),
            },
            Self::Slots => Shape::array(size_of::<Slot>(), slots),
            Self::Chunks => Shape::array(size_of::<u32>(), maps::MAX_CHUNKS),
            Self::Owners => Shape::array(size_of::<maps::Owner>(), maps::MAX_OWNERS),
            Self::Vms => Shape::array(size_of::<Vm>(), maps::MAX_VMS),
            Self::Taps => Shape {
                kind: Kind::Hash,
                key: U32,
                value: size_of::<TapEntry>() as u32,
                entries: maps::MAX_VMS,
            },
            Self::Drops => Shape::array(size_of::<DropCounters>(), maps::MAX_VMS),
            Self::Counters => Shape::array(size_of::<VmCounters>(), maps::MAX_VMS),
            Self::NextHops => Shape::array(size_of::<NextHop>(), maps::MAX_NEXT_HOPS),
            Self::Forwards => Shape {
                kind: Kind::Hash,
                key: size_of::<ForwardKey>() as u32,
                value: size_of::<ForwardTarget>() as u32,
                entries: maps::MAX_FORWARDS,
            },
            Self::Deny => Shape {
                kind: Kind::Trie,
                // The kernel's key has a prefix length before the data.
                key: U32 + size_of::<DenyKey>() as u32,
                value: U32,
                entries: maps::MAX_DENY,
            },
            Self::Rules => Shape::array(size_of::<maps::RuleElement>(), maps::MAX_RULES),
            Self::Rates => Shape::array(size_of::<RateLimits>(), maps::MAX_VMS),
            Self::Names => Shape {
                kind: Kind::GrowingHash,
                key: size_of::<NameKey>() as u32,
                value: size_of::<NameValue>() as u32,
                entries: maps::MAX_NAMES,
            },
            Self::Sequences => Shape::array(size_of::<Sequences>(), slots),
        }
    }
}

/// Kind of a map: its type and flags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Array that can be mapped: `BPF_MAP_TYPE_ARRAY` with `BPF_F_MMAPABLE`.
    MappedArray,
    /// Preallocated hash: `BPF_MAP_TYPE_HASH`.
    Hash,
    /// Hash that allocates on demand: `BPF_MAP_TYPE_HASH` with `BPF_F_NO_PREALLOC`.
    GrowingHash,
    /// Longest-prefix-match trie: `BPF_MAP_TYPE_LPM_TRIE`.
    Trie,
    /// Any other map type, or one of these with other flags.
    Other {
        /// Number of the type, `bpf_map_type`.
        number: u32,
        /// Flags of the map, `BPF_F_*`.
        flags: u32,
    },
}

const BPF_F_NO_PREALLOC: u32 = 1 << 0;
const BPF_F_MMAPABLE: u32 = 1 << 10;

impl Kind {
    /// Type and flags of the kind, as the kernel reports them.
    pub(crate) const MAPPED_ARRAY: (u32, u32) =
        (bpf_map_type::BPF_MAP_TYPE_ARRAY as u32, BPF_F_MMAPABLE);
    pub(crate) const HASH: (u32, u32) = (bpf_map_type::BPF_MAP_TYPE_HASH as u32, 0);
    pub(crate) const GROWING_HASH: (u32, u32) =
        (bpf_map_type::BPF_MAP_TYPE_HASH as u32, BPF_F_NO_PREALLOC);
    pub(crate) const TRIE: (u32, u32) = (
        bpf_map_type::BPF_MAP_TYPE_LPM_TRIE as u32,
        BPF_F_NO_PREALLOC,
    );

    fn of(number: u32, flags: u32) -> Self {
        match (number, flags) {
            Self::MAPPED_ARRAY => Self::MappedArray,
            Self::HASH => Self::Hash,
            Self::GROWING_HASH => Self::GrowingHash,
            Self::TRIE => Self::Trie,
            (number, flags) => Self::Other { number, flags },
        }
    }
}

/// Shape of a map: the properties that must be equal for the programs to use the map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Type and flags of the map.
    pub kind: Kind,
    /// Size of a key, bytes.
    pub key: u32,
    /// Size of a value, bytes.
    pub value: u32,
    /// Maximum number of entries (`max_entries`).
    pub entries: u32,
}

impl Shape {
    const fn array(value: usize, entries: u32) -> Self {
        Self {
            kind: Kind::MappedArray,
            key: size_of::<u32>() as u32,
            value: value as u32,
            entries,
        }
    }

    /// Returns the shape of an open map.
    pub(crate) fn of(map: BorrowedFd<'_>) -> io::Result<Self> {
        let info = bpf::map_info(map)?;
        // The kernel reports the open mode as part of the flags.
        let access = (1 << 3) | (1 << 4);
        Ok(Self {
            kind: Kind::of(info.type_, info.map_flags & !access),
            key: info.key_size,
            value: info.value_size,
            entries: info.max_entries,
        })
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::MappedArray => f.write_str("a mappable array")?,
            Kind::Hash => f.write_str("a hash")?,
            Kind::GrowingHash => f.write_str("a hash that is not preallocated")?,
            Kind::Trie => f.write_str("an LPM trie")?,
            Kind::Other { number, flags } => {
                write!(f, "a map of type {number} with flags {flags:#x}")?;
            }
        }
        write!(
            f,
            " of {} entries, key {} bytes, value {} bytes",
            self.entries, self.key, self.value
        )
    }
}
