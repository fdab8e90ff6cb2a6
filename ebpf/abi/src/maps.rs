//! Names, sizes and bookkeeping of the maps. A map's name is also its pin's.
//!
//! | map | kind | key → value |
//! | --- | --- | --- |
//! | `META` | array, mmapable | 0 → [`Meta`] |
//! | `FLOWS` | hash, preallocated | [`crate::Tuple`] → [`crate::FlowRef`] |
//! | `SLOTS` | array, mmapable | slot → [`crate::Slot`] |
//! | `CHUNKS` | array, mmapable | chunk of [`SLOTS_PER_CHUNK`] slots → [`Chunk`] |
//! | `OWNERS` | array, mmapable | row → [`Owner`] |
//! | `VMS` | array, mmapable | row → [`crate::Vm`] |
//! | `TAPS` | hash | ifindex → [`crate::TapEntry`] |
//! | `DROPS` | array, mmapable | VM row → [`crate::DropCounters`] |
//! | `COUNTERS` | array, mmapable | VM row → [`crate::VmCounters`] (userspace only) |
//! | `NEXT_HOPS` | array, mmapable | index → [`crate::NextHop`] |
//! | `FORWARDS` | hash | [`crate::ForwardKey`] → [`crate::ForwardTarget`] |
//! | `DENY` | LPM trie | [`crate::forward::DenyKey`] → u32, the rule |
//! | `RULES` | array, mmapable | rule → [`RuleElement`] (userspace only) |
//! | `RATES` | array, mmapable | VM row → [`crate::rate::RateLimits`] |
//! | `SEQUENCES` | array, mmapable | slot → [`crate::Sequences`] |
//! | `NAMES` | hash | [`crate::names::NameKey`] → [`crate::names::NameValue`] (userspace only) |
//!
//! Everything that several processes share is claimed by compare-and-swap in a mapped array, or by
//! `BPF_NOEXIST` in a hash. There are no events: a slot's bits are the truth, and scanning the
//! mapped slots finds every end without a system call.

use crate::timeout::SLOT_REST_NS;

/// Flow slots unless told otherwise: 8 MiB of slots, 4 MiB of sequence numbers, 12 MiB of hash.
pub const DEFAULT_SLOTS: u32 = 65_536;
/// Entries of `FLOWS` per slot: one per link.
pub const TUPLES_PER_SLOT: u32 = 2;
/// Slots are claimed by a process in chunks of this many.
pub const SLOTS_PER_CHUNK: u32 = 1_024;
/// Most chunks there can be (`CHUNKS` has this many elements).
pub const MAX_CHUNKS: u32 = 4_096;
/// Rows of `VMS`, `DROPS`, `COUNTERS`; row 0 is nobody's.
pub const MAX_VMS: u32 = 1_024;
/// Processes that can share the maps.
pub const MAX_OWNERS: u32 = 64;
/// Elements of `NEXT_HOPS`; element 0 is nobody's.
pub const MAX_NEXT_HOPS: u32 = 1_024;
/// Entries of `FORWARDS`.
pub const MAX_FORWARDS: u32 = 16_384;
/// Entries of `DENY`.
pub const MAX_DENY: u32 = 262_144;
/// Entries of `NAMES`.
pub const MAX_NAMES: u32 = 65_536;
/// Elements of `RULES`; all lines of a deny file are one rule.
pub const MAX_RULES: u32 = 4_096;

/// One element of `CHUNKS`, changed by compare-and-swap: whose a chunk of slots is, or since when
/// it is nobody's. 0: nobody ever had it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk(pub u32);

impl Chunk {
    /// The owner's row + 1; 0: nobody's.
    const OWNER: u32 = 0x7f;
    /// Somebody had it, and gave it back at the second above.
    const GIVEN_BACK: u32 = 0x80;
    const SECONDS: u32 = u32::MAX >> 8;
    const SECOND: u64 = 1_000_000_000;

    /// Of the owner in this row.
    pub const fn of(owner_row: u32) -> Self {
        Self((owner_row + 1) & Self::OWNER)
    }

    /// Given back at this time.
    pub const fn free_since(now_ns: u64) -> Self {
        let seconds = (now_ns / Self::SECOND) as u32 & Self::SECONDS;
        Self(seconds << 8 | Self::GIVEN_BACK)
    }

    /// Whose it is.
    pub const fn owner(self) -> Option<u32> {
        (self.0 & Self::OWNER).checked_sub(1)
    }

    /// Whether its slots may be used at once: nobody had it for longer than a slot rests. Once in
    /// half a year one that has rested for that long is taken for one that has not, and rests again.
    pub const fn has_rested(self, now_ns: u64) -> bool {
        let now = Self::free_since(now_ns).0 >> 8;
        let seconds = now.wrapping_sub(self.0 >> 8) & Self::SECONDS;
        // By whole seconds, two may be little more than one.
        self.0 == 0 || self.owner().is_none() && seconds as u64 * Self::SECOND > SLOT_REST_NS
    }
}

const _: () = assert!(MAX_OWNERS <= Chunk::OWNER);

/// Whether an owner may claim another chunk. The last quarter is kept for those that have little:
/// half of it for who has none, of the other half each may take what brings it up to an equal part.
/// `owners`: how many there are, itself among them; one more may always come.
pub const fn may_claim_chunk(chunks: u32, free: u32, held: u32, owners: u32) -> bool {
    let kept = chunks / 4;
    let least_free = if held == 0 {
        0
    } else if held < kept / (owners + 1) {
        kept / 2
    } else {
        kept
    };
    free > least_free
}

/// The one element of `META`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Meta {
    /// [`crate::ABI_VERSION`] of whoever made the maps; 0: just made.
    pub abi_version: u32,
    /// Elements of `SLOTS`.
    pub slots: u32,
    /// The next VM id to give out, by atomic increment. Starts at 1.
    pub next_vm_id: u32,
    /// Random, drawn when the maps are made: what slots and generations are unique within.
    pub instance: u32,
}

/// One element of `OWNERS`: a process that serves VMs. It holds a lock on a file of its row's
/// number for as long as it lives; a row whose lock is free may be adopted.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Owner {
    /// Raised by one by each process that takes the row.
    pub epoch: u32,
    /// Process id of the broker.
    pub pid: u32,
    /// The engine port.
    pub port_ifindex: u32,
    /// Zero.
    pub pad: u32,
}

/// One element of `RULES`. What it is told by are the digests; the text is for people.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RuleElement {
    /// Digest of what the rule means, whichever policy it is of.
    pub meaning: [u8; 16],
    /// Digest of all of it: its meaning, its policy, and its whole text. Zero: the element is free.
    pub whole: [u8; 16],
    /// [`RuleFlags`].
    pub flags: u32,
    /// Zero.
    pub pad: u32,
    /// As the user wrote it: UTF-8, zero-padded, cut at 128 bytes.
    pub text: [u8; 128],
}

/// Bits of [`RuleElement::flags`].
pub struct RuleFlags;

impl RuleFlags {
    /// Of a policy by which a VM is open so that its own can be learnt.
    pub const LEARNING: u32 = 1;
}

const _: () = assert!(size_of::<RuleElement>() == 168);

impl RuleElement {
    /// A free one.
    pub const FREE: Self = Self {
        meaning: [0; 16],
        whole: [0; 16],
        flags: 0,
        pad: 0,
        text: [0; 128],
    };
}

#[cfg(test)]
#[path = "maps_test.rs"]
mod tests;
