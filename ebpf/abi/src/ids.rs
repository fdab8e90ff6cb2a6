//! Identifiers and indexes of map elements, as types for userspace.
//!
//! Each wraps one integer, so that a VM's id, its row and an interface's index cannot be confused.
//! The fields of map structs stay integers, because `bpftool` prints a wrapper as a nested struct.
//! Accessors of these structs ([`crate::TapEntry::id`] and the like) return the types. None of
//! these types appears in a map.
use core::fmt;

use crate::maps::{MOST_VMS, SLOTS_PER_CHUNK};

/// Defines an identifier: a wrapper of one integer that compares, hashes and prints as the integer.
macro_rules! id {
    (
        $(#[$doc:meta])* $Id:ident($Word:ty)
        $(, $(#[$zero_doc:meta])* $ZERO:ident = 0)?
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "serde", serde(transparent))]
        pub struct $Id($Word);

        impl $Id {
            $(
                $(#[$zero_doc])*
                pub const $ZERO: Self = Self(0);
            )?

            /// Wraps the integer as the identifier.
            #[inline(always)]
            pub const fn new(word: $Word) -> Self {
                Self(word)
            }

            /// The integer, as maps store it.
            #[inline(always)]
            pub const fn get(self) -> $Word {
                self.0
            }
        }

        impl fmt::Display for $Id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $Id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($Id), "({})"), self.0)
            }
        }

        impl From<$Id> for $Word {
            fn from(id: $Id) -> Self {
                id.0
            }
        }
    };
}

id! {
    /// Id of a VM. Ids start at 1 and are never reused.
    VmId(u32),
    /// Id stored in a free row.
    NONE = 0
}

id! {
    /// Row of a VM in `VMS`, `DROPS`, `COUNTERS` and `RATES`. Rows are reused.
    VmRow(u16),
    /// Row that counts packets which cannot be attributed to a VM.
    NOBODY = 0
}

id! {
    /// Index of a flow in `SLOTS` and in `SEQUENCES`.
    SlotIndex(u32)
}

id! {
    /// Index of a rule in `RULES`.
    RuleIndex(u32)
}

id! {
    /// Index of a network interface, valid in its network namespace only.
    IfIndex(u32),
    /// Value that stands for no interface.
    NONE = 0
}

impl VmId {
    /// Whether this is the id of a VM: not [`VmId::NONE`].
    #[inline(always)]
    pub const fn is_some(self) -> bool {
        self.0 != 0
    }
}

impl VmRow {
    /// The rows of this many VMs: every row except [`VmRow::NOBODY`]. Above [`MOST_VMS`] there are
    /// none.
    pub fn of(vms: u32) -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator + Clone {
        let last = if vms < MOST_VMS { vms } else { MOST_VMS } as u16;
        (0..last).map(|before| Self(before + 1))
    }

    /// The row with this number; `None` if no map has as many rows.
    pub const fn from_word(word: u32) -> Option<Self> {
        if word <= MOST_VMS {
            Some(Self(word as u16))
        } else {
            None
        }
    }

    /// The row as a 32-bit word, as some maps store it.
    #[inline(always)]
    pub const fn word(self) -> u32 {
        self.0 as u32
    }
}

const _: () = assert!(MOST_VMS <= u16::MAX as u32);

impl SlotIndex {
    /// Index of the chunk that contains the slot.
    #[inline(always)]
    pub const fn chunk(self) -> u32 {
        self.0 / SLOTS_PER_CHUNK
    }

    /// Position of the slot in its chunk.
    #[inline(always)]
    pub const fn position(self) -> usize {
        (self.0 % SLOTS_PER_CHUNK) as usize
    }

    /// First slot of a chunk.
    pub const fn of_chunk(chunk: u32) -> Self {
        Self(chunk * SLOTS_PER_CHUNK)
    }
}

impl RuleIndex {
    /// The rule `n` elements behind this one.
    pub const fn nth(self, n: u32) -> Self {
        Self(self.0.saturating_add(n))
    }

    /// How many elements the rule is behind `first`; `None` if it precedes it.
    pub const fn offset_from(self, first: Self) -> Option<u32> {
        self.0.checked_sub(first.0)
    }
}

impl IfIndex {
    /// Whether this is the index of an interface: not [`IfIndex::NONE`].
    #[inline(always)]
    pub const fn is_some(self) -> bool {
        self.0 != 0
    }
}

#[cfg(test)]
#[path = "ids_test.rs"]
mod tests;
