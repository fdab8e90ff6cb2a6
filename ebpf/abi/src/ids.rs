//! Identifiers of what the maps hold, as types for userspace.
//!
//! Each wraps one integer, so that a VM's id, its row and an interface's index can't be taken for
//! each other. The fields of map structs stay integers: `bpftool` prints a wrapper as a nested
//! struct. Accessors beside these structs ([`crate::TapEntry::id`] and the like) return the types.
//! None of these types crosses the kernel/user line.
use core::fmt;

use crate::maps::{MAX_VMS, SLOTS_PER_CHUNK};

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

            /// Wraps the integer.
            #[inline(always)]
            pub const fn new(word: $Word) -> Self {
                Self(word)
            }

            /// The integer, as it stands in a map.
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
    /// A VM's id: given out once, starting at 1, and never reused.
    VmId(u32),
    /// The id in a free row.
    NONE = 0
}

id! {
    /// A VM's row in `VMS`, `DROPS`, `COUNTERS` and `RATES`. Rows are reused.
    VmRow(u16),
    /// The row of what no VM can be blamed for.
    NOBODY = 0
}

id! {
    /// Index of a flow's slot in `SLOTS`, and of its element in `SEQUENCES`.
    SlotIndex(u32)
}

id! {
    /// Index of a rule's element in `RULES`.
    RuleIndex(u32)
}

id! {
    /// Index of a network interface. It means nothing outside its network namespace.
    IfIndex(u32),
    /// No interface.
    NONE = 0
}

impl VmId {
    /// Whether this is a VM's: not [`VmId::NONE`].
    #[inline(always)]
    pub const fn is_some(self) -> bool {
        self.0 != 0
    }
}

impl VmRow {
    /// The rows that VMs can have: all but [`VmRow::NOBODY`].
    pub fn all() -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator {
        (1..MAX_VMS as u16).map(Self)
    }

    /// The row that a word of a map names; `None` where there is no such row.
    pub const fn from_word(word: u32) -> Option<Self> {
        if word < MAX_VMS {
            Some(Self(word as u16))
        } else {
            None
        }
    }

    /// The row as a word, as some maps have it.
    #[inline(always)]
    pub const fn word(self) -> u32 {
        self.0 as u32
    }
}

const _: () = assert!(MAX_VMS <= u16::MAX as u32);

impl SlotIndex {
    /// The chunk of slots that it lies in.
    #[inline(always)]
    pub const fn chunk(self) -> u32 {
        self.0 / SLOTS_PER_CHUNK
    }
}

impl IfIndex {
    /// Whether this is an interface's: not [`IfIndex::NONE`].
    #[inline(always)]
    pub const fn is_some(self) -> bool {
        self.0 != 0
    }
}

#[cfg(test)]
#[path = "ids_test.rs"]
mod tests;
