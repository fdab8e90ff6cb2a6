//! The world's side: next hops, whose L2 headers the programs write themselves.
use core::sync::atomic::AtomicU32;
#[cfg(not(target_arch = "bpf"))]
use core::sync::atomic::{
    Ordering::{AcqRel, Acquire, Relaxed, Release},
    fence,
};

use crate::{Ip4, cell::load32};

/// One element of `NEXT_HOPS`. Element 0 stays free: it means "let the kernel resolve the
/// neighbour" (`bpf_redirect_neigh`), which is right but the dearest part of the program.
///
/// # Reading while somebody writes
/// The fields are many words, and a reader is stopped by nobody. So [`NextHop::sequence`] counts:
/// it is odd while the fields may be used and even while they may not, and only grows, so that no
/// value comes twice (but for a wrap, 2³¹ changes later). A writer makes it even
/// ([`NextHopRef::withdraw`]), writes, and makes it odd ([`NextHopRef::publish`]), which fails when
/// somebody else has withdrawn it meanwhile: engine and broker both write. A reader believes what it
/// read when it finds the same odd number before and after ([`NextHopRef::read`]), and otherwise
/// falls back to `bpf_redirect_neigh` by `Slot::uplink_ifindex`.
///
/// A flag in the place of the number would not do: an element that is written twice while a reader
/// is at it shows the flag set at both looks.
#[repr(C, align(32))]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NextHop {
    /// Odd: the fields below may be used. Each change of them is another number.
    pub sequence: u32,
    /// The uplink.
    pub ifindex: u32,
    /// Largest L3 packet that may leave by it, bytes: the uplink's, or `route_mtu` where that is less.
    pub mtu: u32,
    /// [`NextHopFlags`] bits.
    pub flags: u32,
    /// The neighbour's MAC. Zero on an uplink without L2 header.
    pub neighbour_mac: [u8; 6],
    /// The uplink's own MAC.
    pub uplink_mac: [u8; 6],
    /// The neighbour's address: the router's, or the destination's own when on link.
    pub neighbour: Ip4,
    /// Row in `OWNERS` + 1 of the process that keeps it fresh; 0: free.
    pub owner: u32,
    /// The MTU of the routes that lead by it, bytes; 0: they have none of their own. What it was
    /// claimed for, like `ifindex` and `neighbour`.
    pub route_mtu: u32,
    /// Zero.
    pub pad: [u8; 24],
}

const _: () = assert!(size_of::<NextHop>() == 64);

/// Bits of [`NextHop::flags`].
#[derive(Debug)]
pub struct NextHopFlags;

impl NextHopFlags {
    /// The uplink has no L2 header (tun, WireGuard).
    pub const NO_L2: u32 = 1;
}

/// A live next hop.
#[derive(Clone, Copy, Debug)]
pub struct NextHopRef(*mut NextHop);

// SAFETY: `sequence` and `owner` are reached by atomics, the rest is guarded by `sequence`.
unsafe impl Send for NextHopRef {}
// SAFETY: as above.
unsafe impl Sync for NextHopRef {}

impl NextHopRef {
    /// # Safety
    /// `hop` points to an element of `NEXT_HOPS` and stays mapped as long as the result is used.
    #[inline(always)]
    pub const unsafe fn new(hop: *mut NextHop) -> Self {
        Self(hop)
    }

    /// The element itself.
    #[inline(always)]
    pub const fn as_ptr(self) -> *mut NextHop {
        self.0
    }

    /// Odd while the other fields may be used; see [`NextHop`].
    #[inline(always)]
    pub fn sequence(&self) -> &AtomicU32 {
        // SAFETY: `new` promised a valid element; both sides use atomics on this field.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0).sequence) }
    }

    /// The MTU of the routes that lead by it, 0: none. It stays while a slot names the element, also
    /// while the fields may not be used.
    #[inline(always)]
    pub fn route_mtu(self) -> u32 {
        // SAFETY: `new` promised a valid element; a word, which does not tear.
        unsafe { (&raw const (*self.0).route_mtu).read_volatile() }
    }

    /// What `fields` reads of the element, by volatile loads of whole words; `None` when nothing may
    /// be used, or it was written meanwhile.
    #[inline(always)]
    pub fn read<T>(&self, fields: impl FnOnce(*const NextHop) -> T) -> Option<T> {
        let before = load32(self.sequence());
        if !is_usable(before) {
            return None;
        }
        in_order();
        let read = fields(self.0);
        in_order();
        (load32(self.sequence()) == before).then_some(read)
    }

    /// Owner's row + 1; 0: free.
    #[inline(always)]
    pub fn owner(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0).owner) }
    }
}

/// Whether the fields may be used at that sequence number.
#[inline(always)]
pub const fn is_usable(sequence: u32) -> bool {
    sequence & 1 == 1
}

/// Keeps the loads before it before those behind it. Programs read by volatile loads, which stay in
/// order; that the processor keeps them so is x86's promise, and elsewhere a fence's.
#[inline(always)]
fn in_order() {
    #[cfg(not(target_arch = "bpf"))]
    core::sync::atomic::fence(core::sync::atomic::Ordering::Acquire);
}

/// Writing; no program does.
#[cfg(not(target_arch = "bpf"))]
impl NextHopRef {
    /// Takes the fields out of use, whatever the sequence number; the new, even one.
    pub fn withdraw(&self) -> u32 {
        let even = |sequence: u32| Some(next_even(sequence));
        let before = self.sequence().fetch_update(AcqRel, Acquire, even);
        let now = next_even(before.unwrap_or_else(|unchanged| unchanged));
        // What is written next is not seen before.
        fence(Release);
        now
    }

    /// The same, if the sequence number is still `seen`; `None`: somebody else has withdrawn them.
    pub fn withdraw_from(&self, seen: u32) -> Option<u32> {
        let now = next_even(seen);
        let swapped = self.sequence().compare_exchange(seen, now, AcqRel, Relaxed);
        fence(Release);
        swapped.ok().map(|_| now)
    }

    /// Puts the fields, which are written, into use: if nobody has withdrawn them since they were at
    /// `withdrawn`. Whether that is so.
    pub fn publish(&self, withdrawn: u32) -> bool {
        let odd = withdrawn.wrapping_add(1);
        self.sequence()
            .compare_exchange(withdrawn, odd, Release, Relaxed)
            .is_ok()
    }
}

#[cfg(not(target_arch = "bpf"))]
const fn next_even(sequence: u32) -> u32 {
    (sequence | 1).wrapping_add(1)
}

#[cfg(test)]
#[path = "link_test.rs"]
mod tests;
