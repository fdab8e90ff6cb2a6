//! Shape of each map: the definitions of `abi::maps` in the kernel's terms.

use std::{fmt, mem::size_of};

use slipgate_abi::{
    Addresses6, DropCounters, EarlyFragment, EarlyTag, FirstPacket, FlowRef, ForwardKey,
    ForwardKey6, ForwardTarget, NameKey, NameValue, NextHop, RateLimits, Sequences, Slot, TapEntry,
    Tuple, Tuple6, Vm, Vm6, VmCounters, early_fragment,
    first_packet::RING_LEN,
    forward::{DenyKey, DenyKey6},
    maps,
};

pub use crate::bpf::{Kind, Shape};

/// Number of maps that processes share.
pub const MAPS: usize = 24;

/// Sizes with which the maps are made. The maps have them ever after: a process that joins takes
/// theirs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// Number of flow slots.
    pub slots: u32,
    /// Number of VMs, all processes together.
    pub vms: u32,
    /// Number of elements of `RULES`, all processes together.
    pub rules: u32,
}

impl Sizes {
    /// This many slots, and the default for the rest.
    pub const fn of_slots(slots: u32) -> Self {
        Self {
            slots,
            vms: maps::DEFAULT_VMS,
            rules: maps::DEFAULT_RULES,
        }
    }

    /// Reads the sizes from the numbers of entries that maps have. What no process makes is
    /// brought into the limits, so that it is refused by its shape.
    pub(crate) fn read<E>(entries: impl Fn(MapName) -> Result<u32, E>) -> Result<Self, E> {
        let rows = entries(MapName::Vms)?;
        Ok(Self {
            slots: entries(MapName::Slots)?,
            vms: rows.saturating_sub(1).clamp(1, maps::MOST_VMS),
            rules: entries(MapName::Rules)?.clamp(1, maps::MOST_RULES),
        })
    }
}

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
    Flows6,
    Addresses6,
    Vms6,
    Forwards6,
    FirstPackets,
    EarlyFragments,
    EarlyTags,
    Deny6,
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
        Self::Flows6,
        Self::Addresses6,
        Self::Vms6,
        Self::Forwards6,
        Self::FirstPackets,
        Self::EarlyFragments,
        Self::EarlyTags,
        Self::Deny6,
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
            Self::Flows6 => "FLOWS6",
            Self::Addresses6 => "ADDRESSES6",
            Self::Vms6 => "VMS6",
            Self::Forwards6 => "FORWARDS6",
            Self::FirstPackets => "FIRST_PACKETS",
            Self::EarlyFragments => "EARLY_FRAGMENTS",
            Self::EarlyTags => "EARLY_TAGS",
            Self::Deny6 => "DENY6",
        }
    }

    /// Returns the shape that the map must have with these sizes.
    pub const fn shape(self, sizes: Sizes) -> Shape {
        const U32: u32 = size_of::<u32>() as u32;
        let Sizes { slots, .. } = sizes;
        let rows = sizes.vms.saturating_add(1);
        match self {
            Self::Meta => Shape::array(size_of::<maps::Meta>(), 1),
            Self::Flows => Shape {
                kind: Kind::HASH,
                key: size_of::<Tuple>() as u32,
                value: size_of::<FlowRef>() as u32,
                entries: slots.saturating_mul(maps::TUPLES_PER_SLOT),
            },
            Self::Slots => Shape::array(size_of::<Slot>(), slots),
            Self::Chunks => Shape::array(size_of::<u32>(), maps::MAX_CHUNKS),
            Self::Owners => Shape::array(size_of::<maps::Owner>(), maps::MAX_OWNERS),
            Self::Vms => Shape::array(size_of::<Vm>(), rows),
            Self::Taps => Shape {
                kind: Kind::HASH,
                key: U32,
                value: size_of::<TapEntry>() as u32,
                entries: rows,
            },
            Self::Drops => Shape::array(size_of::<DropCounters>(), rows),
            Self::Counters => Shape::array(size_of::<VmCounters>(), rows),
            Self::NextHops => Shape::array(size_of::<NextHop>(), maps::MAX_NEXT_HOPS),
            Self::Forwards => Shape {
                kind: Kind::HASH,
                key: size_of::<ForwardKey>() as u32,
                value: size_of::<ForwardTarget>() as u32,
                entries: maps::MAX_FORWARDS,
            },
            Self::Deny => Shape {
                kind: Kind::TRIE,
                // The kernel's key has a prefix length before the data.
                key: U32 + size_of::<DenyKey>() as u32,
                value: U32,
                entries: maps::MAX_DENY,
            },
            Self::Deny6 => Shape {
                kind: Kind::TRIE,
                key: U32 + size_of::<DenyKey6>() as u32,
                value: U32,
                entries: maps::MAX_DENY,
            },
            Self::Rules => Shape::array(size_of::<maps::RuleElement>(), sizes.rules),
            Self::Rates => Shape::array(size_of::<RateLimits>(), rows),
            Self::Names => Shape {
                kind: Kind::GROWING_HASH,
                key: size_of::<NameKey>() as u32,
                value: size_of::<NameValue>() as u32,
                entries: maps::MAX_NAMES,
            },
            Self::Sequences => Shape::array(size_of::<Sequences>(), slots),
            Self::Flows6 => Shape {
                kind: Kind::HASH,
                key: size_of::<Tuple6>() as u32,
                value: size_of::<FlowRef>() as u32,
                entries: slots.saturating_mul(maps::TUPLES_PER_SLOT),
            },
            Self::Addresses6 => Shape::array(size_of::<Addresses6>(), slots),
            Self::Vms6 => Shape::array(size_of::<Vm6>(), rows),
            Self::FirstPackets => {
                Shape::array(size_of::<FirstPacket>(), maps::MAX_OWNERS * RING_LEN)
            }
            Self::EarlyFragments => {
                Shape::array(size_of::<EarlyFragment>(), early_fragment::PLACES)
            }
            Self::EarlyTags => Shape::array(size_of::<EarlyTag>(), early_fragment::PLACES),
            Self::Forwards6 => Shape {
                kind: Kind::HASH,
                key: size_of::<ForwardKey6>() as u32,
                value: size_of::<ForwardTarget>() as u32,
                entries: maps::MAX_FORWARDS,
            },
        }
    }
}

impl Shape {
    const fn array(value: usize, entries: u32) -> Self {
        Self {
            kind: Kind::MAPPED_ARRAY,
            key: size_of::<u32>() as u32,
            value: value as u32,
            entries,
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::MAPPED_ARRAY => f.write_str("a mappable array")?,
            Kind::HASH => f.write_str("a hash")?,
            Kind::GROWING_HASH => f.write_str("a hash that is not preallocated")?,
            Kind::TRIE => f.write_str("an LPM trie")?,
            Kind { number, flags } => {
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
