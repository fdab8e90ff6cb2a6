//! Shape of each map: the definitions of `abi::maps` in the kernel's terms.

use std::{fmt, mem::size_of};

use slipgate_abi::{
    Addresses6, DropCounters, FlowRef, ForwardKey, ForwardTarget, NameKey, NameValue, NextHop,
    RateLimits, Sequences, Slot, TapEntry, Tuple, Tuple6, Vm, Vm6, VmCounters, forward::DenyKey,
    maps,
};

pub use crate::bpf::{Kind, Shape};

/// Number of maps.
pub const MAPS: usize = 19;

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
        }
    }

    /// Returns the shape that the map must have with `slots` slots.
    pub const fn shape(self, slots: u32) -> Shape {
        const U32: u32 = size_of::<u32>() as u32;
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
            Self::Vms => Shape::array(size_of::<Vm>(), maps::MAX_VMS),
            Self::Taps => Shape {
                kind: Kind::HASH,
                key: U32,
                value: size_of::<TapEntry>() as u32,
                entries: maps::MAX_VMS,
            },
            Self::Drops => Shape::array(size_of::<DropCounters>(), maps::MAX_VMS),
            Self::Counters => Shape::array(size_of::<VmCounters>(), maps::MAX_VMS),
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
            Self::Rules => Shape::array(size_of::<maps::RuleElement>(), maps::MAX_RULES),
            Self::Rates => Shape::array(size_of::<RateLimits>(), maps::MAX_VMS),
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
            Self::Vms6 => Shape::array(size_of::<Vm6>(), maps::MAX_VMS),
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
