//! Store of early fragments: later fragments of the world that came before the first one of their
//! datagram, so that nobody can tell whose they are.
//!
//! # Theory of operation
//! The program leaves such a fragment to the host, whose it may be, and keeps a copy in the map
//! `EARLY_FRAGMENTS`. When a first fragment shows that a datagram is a guest's, the guest's engine takes
//! the copies of that datagram and reassembles them with the rest. Copies that nobody takes are
//! overwritten. They are counted nowhere: the packets were the host's.
//!
//! The store is one ring of [`PLACES`] copies for all datagrams, so the oldest one makes room. No engine
//! is woken for a copy, and no VM's credits are used, so a flood costs the world's other early
//! fragments their places and nothing else.
//!
//! Copies are numbered without end; number `n` is place `n % PLACES` of the maps. `EARLY_CLAIMS` has the
//! next number, and for each place the number that has it. A program claims the place by
//! compare-and-swap ([`claim`]), marks its tag in `EARLY_TAGS`, fills the copy in, publishes it by a
//! [`tag`] with a hash of the datagram, and releases the place ([`filled`]). A run that stalls between may
//! find the place claimed by a later number, or one that stalls in it has its place passed over by others
//! ([`may_claim`]): no copy is written by two, and the fragment of who gives up is not kept. An engine
//! finds copies by their tags, reads those with its datagram's hash, and takes one that is of its datagram
//! by compare-and-swap ([`taken`]): if the tag is still the same, what was read is one packet.
//!
//! **Engines are not trusted.** They can write to copies and tags, and so change, hide and forge those that
//! are there. They have no descriptor of `EARLY_CLAIMS`, by which alone a program decides where it may
//! write, and which is pinned for loaders. So no engine stops the store: whatever one leaves in a tag, the
//! next copy takes its place.
//!
//! **One link.** All fragments of a datagram come by one link: another's network could guess its name, to
//! inject data. The fragment table compares the links of those that come in order. A copy has its link,
//! and a fragment that is handed over too ([`crate::portframe::link`]), for the engine to compare.
//!
//! **First and later fragments at once.** The program that handles a first fragment writes the fragment
//! table, and then hands the fragment over. A program that has published a copy looks at that table
//! again. So either the engine finds the copy, or the program finds the datagram in the table; then it
//! withdraws the copy and hands its fragment over, unless an engine has taken the copy.
use core::sync::atomic::AtomicU64;
#[cfg(not(target_arch = "bpf"))]
use core::sync::atomic::{Ordering::SeqCst, fence};

use crate::handle::handle;

/// Copies in the store, a power of two.
pub const PLACES: u32 = 1_024;
/// Name of the map with the claims, which no engine has.
pub const EARLY_CLAIMS: &str = "EARLY_CLAIMS";
/// Elements of `EARLY_CLAIMS`: one for each place, and the number of the next copy.
pub const CLAIMS: u32 = PLACES + 1;
/// Longest packet that is kept, bytes.
pub const MOST_L3_LEN: usize = 2_048;

/// One element of `EARLY_FRAGMENTS`: a copy.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EarlyFragment {
    /// Time at which the fragment came, ns.
    pub at_ns: u64,
    /// Length of the packet, bytes.
    pub len: u16,
    /// Explicit padding, always zero.
    pub pad: [u8; 2],
    /// Ifindex of the link by which the fragment came.
    pub ifindex: u32,
    /// The packet, from its IP header on.
    pub l3: [u8; MOST_L3_LEN],
}

/// How the fragment of a copy came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Came {
    /// Length of the packet, bytes.
    pub len: usize,
    /// Time, ns.
    pub at_ns: u64,
    /// Ifindex of the link.
    pub ifindex: u32,
}

/// One element of `EARLY_TAGS` or `EARLY_CLAIMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EarlyTag {
    /// In `EARLY_TAGS`: the copy's [`tag`], [`claim`] or [`taken`]; 0: there was none. In `EARLY_CLAIMS`: the
    /// place's [`claim`] or [`filled`]; behind the places the number of the next copy.
    pub word: u64,
}

const _: () = assert!(size_of::<EarlyFragment>() == 2_064);
const _: () = assert!(PLACES.is_power_of_two());

/// Place of a number.
#[inline(always)]
pub const fn place(number: u64) -> u32 {
    number as u32 & (PLACES - 1)
}

/// Tag of a copy, by the hash of its datagram and its number. It is not 0.
#[inline(always)]
pub const fn tag(hash: u32, number: u64) -> u64 {
    ((hash | 1) as u64) << 32 | number as u32 as u64
}

/// The copy of this number is being filled in.
#[inline(always)]
pub const fn claim(number: u64) -> u64 {
    2 << 32 | number as u32 as u64
}

/// In the place of a tag: the copy of this number was taken, or could not be filled in.
#[inline(always)]
pub const fn taken(number: u64) -> u64 {
    4 << 32 | number as u32 as u64
}

/// In the place of a claim: nobody fills in the copy of this number any more.
#[inline(always)]
pub const fn filled(number: u64) -> u64 {
    taken(number)
}

/// Whether the copy of this number may be filled in where `before` is the place's claim: nobody fills in
/// another one, and no later one was there.
#[inline(always)]
pub const fn may_claim(before: u64, number: u64) -> bool {
    let ahead = (number as u32).wrapping_sub(before as u32) as i32;
    before == 0 || before >> 32 != 2 && ahead > 0
}

/// Whether a tag is of a datagram with this hash.
#[inline(always)]
pub const fn has_hash(tag: u64, hash: u32) -> bool {
    (tag >> 32) as u32 == hash | 1
}

handle! {
    /// Handle to a copy.
    EarlyFragmentRef(EarlyFragment);
    atomic {}
    constant {}
}

handle! {
    /// Handle to an element of `EARLY_TAGS` or `EARLY_CLAIMS`.
    EarlyTagRef(EarlyTag);
    atomic {
        /// What [`EarlyTag::word`] is.
        word: AtomicU64,
    }
    constant {}
}

#[cfg(not(target_arch = "bpf"))]
impl EarlyFragmentRef {
    /// Copies the packet to the start of `buffer`. Returns how it came; `None` if the buffer is shorter.
    /// The caller takes the copy by its tag behind this, or has read nothing.
    pub fn read(&self, buffer: &mut [u8]) -> Option<Came> {
        // SAFETY: a live element. A program may overwrite it, and another engine can write to the map, so
        // any bytes may be there at any time. Each number is read once, the length is bounded below, and
        // any bytes are a packet.
        let (len, at_ns, ifindex, l3) = unsafe {
            let len = (&raw const (*self.0).len).read_volatile();
            let at_ns = (&raw const (*self.0).at_ns).read_volatile();
            let ifindex = (&raw const (*self.0).ifindex).read_volatile();
            (len, at_ns, ifindex, (&raw const (*self.0).l3).cast::<u8>())
        };
        let len = usize::from(len).min(MOST_L3_LEN);
        let buffer = buffer.get_mut(..len)?;
        // SAFETY: `len` bytes of each, and the buffer is no part of the map. Bytes that somebody changes
        // meanwhile are copied as they were or as they are.
        unsafe { l3.copy_to_nonoverlapping(buffer.as_mut_ptr(), len) };
        fence(SeqCst);
        Some(Came {
            len,
            at_ns,
            ifindex,
        })
    }
}

#[cfg(test)]
#[path = "early_fragment_test.rs"]
mod tests;
