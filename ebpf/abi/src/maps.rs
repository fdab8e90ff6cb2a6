//! Names, sizes and bookkeeping of the maps. A map is pinned under its own name.
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
//! | `DENY6` | LPM trie | [`crate::forward::DenyKey6`] → u32, the rule |
//! | `RULES` | array, mmapable | rule → [`RuleElement`] (userspace only) |
//! | `RATES` | array, mmapable | VM row → [`crate::rate::RateLimits`] |
//! | `SEQUENCES` | array, mmapable | slot → [`crate::Sequences`] |
//! | `FLOWS6` | hash, preallocated | [`crate::Tuple6`] → [`crate::FlowRef`] |
//! | `ADDRESSES6` | array, mmapable | slot → [`crate::Addresses6`] |
//! | `VMS6` | array, mmapable | VM row → [`crate::Vm6`] |
//! | `FORWARDS6` | hash | [`crate::ForwardKey6`] → [`crate::ForwardTarget`] |
//! | `FIRST_PACKETS` | array, mmapable | place of a ring → [`crate::FirstPacket`] |
//! | `EARLY_FRAGMENTS` | array, mmapable | place → [`crate::EarlyFragment`] |
//! | `EARLY_TAGS` | array, mmapable | place → [`crate::EarlyTag`] |
//! | `NAMES` | hash | [`crate::names::NameKey`] → [`crate::names::NameValue`] (userspace only) |
//!
//! [`crate::datapath::Program6`] names the elements of a program array, `PROGRAMS6`, which is pinned
//! beside the maps and is no map of flows: no process but the loader has its descriptor. Nor has any that of
//! `EARLY_CLAIMS`, an array of [`crate::EarlyTag`]: programs alone use it.
//!
//! Processes claim shared elements by compare-and-swap in a mapped array, or by
//! `BPF_NOEXIST` in a hash. There are no events: a slot's bits are the only record. Scanning the
//! mapped slots finds every end without a system call.

use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::{handle::handle, timeout::SLOT_REST_NS};

/// Number of flow slots by default: 8 MiB of slots, 4 MiB of sequence
/// numbers, 4 MiB of IPv6 addresses, and hashes of 12 MiB for IPv4 and 15 MiB for IPv6.
pub const DEFAULT_SLOTS: u32 = 65_536;
/// Entries of `FLOWS`, and of `FLOWS6`, per slot: one for each of the flow's two links.
pub const TUPLES_PER_SLOT: u32 = 2;
/// Number of slots in a chunk, the unit in which a process claims slots.
pub const SLOTS_PER_CHUNK: u32 = 1_024;
/// Number of elements of `CHUNKS`, and so the most chunks there can be.
pub const MAX_CHUNKS: u32 = 4_096;
/// Number of VMs by default. `VMS`, `VMS6`, `DROPS`, `COUNTERS` and `RATES` have a row for each, and row 0,
/// which belongs to none. The maps' own sizes hold: whoever joins maps takes theirs.
pub const DEFAULT_VMS: u32 = 4_096;
/// The most VMs that maps can be made for: a row's number has 16 bits.
pub const MOST_VMS: u32 = u16::MAX as u32;
/// Rows of `OWNERS`: the number of processes that can share the maps.
pub const MAX_OWNERS: u32 = 64;
/// Elements of `NEXT_HOPS`. Element 0 is never used.
pub const MAX_NEXT_HOPS: u32 = 1_024;
/// Maximum number of entries in `FORWARDS`, and of those in `FORWARDS6`.
pub const MAX_FORWARDS: u32 = 16_384;
/// Maximum number of entries in `DENY`, and in `DENY6`.
pub const MAX_DENY: u32 = 262_144;
/// Maximum number of entries in `NAMES`.
pub const MAX_NAMES: u32 = 65_536;
/// Number of elements of `RULES` by default. All lines of a deny file are one rule.
pub const DEFAULT_RULES: u32 = 4_096;
/// The most elements that `RULES` can be made with.
pub const MOST_RULES: u32 = 262_144;

/// One element of `CHUNKS`, changed by compare-and-swap: the owner of a chunk of slots, or the time
/// since which it has none. 0 if the chunk never had an owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk(pub u32);

impl Chunk {
    /// Bits with the owner's row, plus 1; 0 if the chunk has no owner.
    const OWNER: u32 = 0x7f;
    /// Bit that marks a chunk that an owner gave back; the bits above hold the second.
    const GIVEN_BACK: u32 = 0x80;
    const SECONDS: u32 = u32::MAX >> 8;
    const SECOND: u64 = 1_000_000_000;

    /// A chunk that belongs to the owner in this row.
    pub const fn of(owner_row: u32) -> Self {
        Self((owner_row + 1) & Self::OWNER)
    }

    /// A chunk given back at this time, `CLOCK_MONOTONIC` ns.
    pub const fn free_since(now_ns: u64) -> Self {
        let seconds = (now_ns / Self::SECOND) as u32 & Self::SECONDS;
        Self(seconds << 8 | Self::GIVEN_BACK)
    }

    /// Row of the owner; `None` if the chunk has none.
    pub const fn owner(self) -> Option<u32> {
        (self.0 & Self::OWNER).checked_sub(1)
    }

    /// Whether the chunk's slots may be used at once: it had no owner for longer than a slot rests.
    /// The time wraps about every half year; a chunk that has been free for exactly that long rests
    /// once more.
    pub const fn has_rested(self, now_ns: u64) -> bool {
        let now = Self::free_since(now_ns).0 >> 8;
        let seconds = now.wrapping_sub(self.0 >> 8) & Self::SECONDS;
        // By whole seconds, two may be little more than one.
        self.0 == 0 || self.owner().is_none() && seconds as u64 * Self::SECOND > SLOT_REST_NS
    }
}

const _: () = assert!(MAX_OWNERS <= Chunk::OWNER);

/// Whether an owner that holds `held` chunks may claim another. The last quarter of the chunks is
/// kept for owners that hold few: half of it for an owner that holds none; of the other half, each
/// owner may claim up to an equal share. `chunks` and `free` are the number of all chunks and of
/// those without owner. `owners` is the number of owners, including this one; a share is kept for
/// one more.
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

/// Value of the only element of `META`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Meta {
    /// [`crate::ABI_VERSION`] of the process that made the maps; 0 while they are being made.
    pub abi_version: u32,
    /// Number of elements of `SLOTS`.
    pub slots: u32,
    /// VM id to assign next, taken by atomic increment. Starts at 1.
    pub next_vm_id: u32,
    /// Random number drawn when the maps are made. Slot indexes and generations are unique within
    /// one instance.
    pub instance: u32,
}

/// One element of `OWNERS`: a process that serves VMs. It holds a lock on a file named by its row
/// for its whole life; a row whose lock is free may be adopted.
///
/// `share` and `common` divide the queue of the process's engine port, in each direction. A VM may
/// always have `share` frames queued, and more, up to its credits, while fewer than `common` frames
/// of all VMs are queued. So the queue has room for the shares of all VMs at any time, and what no VM
/// uses of it is anybody's.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// Number of processes that have taken the row: each increments it by one.
    pub epoch: u32,
    /// Process id of the broker.
    pub pid: u32,
    /// Ifindex of the engine port.
    pub port_ifindex: u32,
    /// Number of frames that each VM may have queued for the engine whatever others have.
    pub share: u32,
    /// Number of queued frames of all VMs from which on each VM has its share only.
    pub common: u32,
    /// Explicit padding, always zero.
    pub pad: u32,

    /// Sum of [`crate::Vm::handed_over`] over the process's VMs, those that are gone included.
    pub handed_over: u64,
    /// Number of those frames that the engine received or knows to be lost.
    pub taken_in: u64,
    /// As `handed_over`, for frames from the world.
    pub world_handed_over: u64,
    /// As `taken_in`, for frames from the world.
    pub world_taken_in: u64,
    /// Explicit padding, always zero.
    pub pad_end: [u8; 8],

    /// Number of the next first packet in the process's ring ([`crate::first_packet`]). The programs
    /// count it.
    pub ring_tail: u64,
    /// Number of first packets that were redirected to the engine port. The programs count it.
    pub port_handed: u64,
    /// 1 while the ring is to be used, else 0. The engine stores it.
    pub ring_open: u32,
    /// Explicit padding, always zero.
    pub pad_ring: [u8; 44],

    /// Number of the first packet that the engine reads next. The engine stores it.
    pub ring_head: u64,
    /// Number of `port_handed` that the engine received or knows to be lost. The engine stores it; it
    /// never exceeds `port_handed`.
    pub port_taken: u64,
    /// Explicit padding, always zero.
    pub pad_engine: [u8; 48],
}

// A line that both sides change, one that the programs change, and one of the engine's.
const _: () = assert!(size_of::<Owner>() == 192);
const _: () = assert!(core::mem::offset_of!(Owner, ring_tail) == 64);
const _: () = assert!(core::mem::offset_of!(Owner, ring_head) == 128);

impl Default for Owner {
    fn default() -> Self {
        // SAFETY: integers and bytes.
        unsafe { core::mem::zeroed() }
    }
}

handle! {
    /// Handle to a row of `OWNERS`.
    OwnerRef(Owner);
    atomic {
        /// Number of frames that each VM may have queued whatever others have.
        share: AtomicU32,
        /// Number of queued frames from which on each VM has its share only.
        common: AtomicU32,
        /// The guests' frames redirected to the engine port, in credits.
        handed_over: AtomicU64,
        /// The guests' frames that the engine received or knows to be lost, in credits.
        taken_in: AtomicU64,
        /// The world's frames redirected to the engine port, in credits.
        world_handed_over: AtomicU64,
        /// The world's frames that the engine received or knows to be lost, in credits.
        world_taken_in: AtomicU64,
        /// Number of the next first packet in the ring.
        ring_tail: AtomicU64,
        /// First packets that were redirected to the engine port.
        port_handed: AtomicU64,
        /// Whether the ring is to be used.
        ring_open: AtomicU32,
        /// Number of the first packet that the engine reads next.
        ring_head: AtomicU64,
        /// First packets that the engine received by its port, or knows to be lost.
        port_taken: AtomicU64,
    }
    constant {}
}

impl OwnerRef {
    /// Counters of frames handed over and of frames taken in, of all VMs: of the world's frames if
    /// `from_world`, else of the guests'.
    #[inline(always)]
    pub fn under_way(&self, from_world: bool) -> (&AtomicU64, &AtomicU64) {
        if from_world {
            (self.world_handed_over(), self.world_taken_in())
        } else {
            (self.handed_over(), self.taken_in())
        }
    }
}

/// One element of `RULES`. The digests identify the rule; the text is for display.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RuleElement {
    /// Digest of the rule's meaning, the same in every policy.
    pub meaning: [u8; 16],
    /// Digest of the rule's meaning, policy and full text. Zero if the element is free.
    pub whole: [u8; 16],
    /// [`RuleFlags`] bits of the rule.
    pub flags: u32,
    /// Explicit padding, always zero.
    pub pad: u32,
    /// Text of the rule as the user wrote it: UTF-8, zero-padded, cut at 128 bytes.
    pub text: [u8; 128],
}

/// Names of the bits in [`RuleElement::flags`].
pub struct RuleFlags;

impl RuleFlags {
    /// The rule belongs to a policy that admits everything, so that a policy for the VM can be
    /// learned.
    pub const LEARNING: u32 = 1;
}

const _: () = assert!(size_of::<RuleElement>() == 168);

impl RuleElement {
    /// Value of a free element.
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
