//! The world's side: next hops, whose L2 headers the programs write themselves.
use core::sync::atomic::AtomicU32;

use crate::Ip4;

/// One element of `NEXT_HOPS`. Element 0 stays free: it means "let the kernel resolve the
/// neighbour" (`bpf_redirect_neigh`), which is right but the dearest part of the program.
///
/// A writer clears `valid`, writes, then sets `valid`; a program that finds it clear falls back
/// to `bpf_redirect_neigh` by `Slot::uplink_ifindex`.
#[repr(C, align(32))]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NextHop {
    /// 1: the fields below may be used.
    pub valid: u32,
    /// The uplink.
    pub ifindex: u32,
    /// Largest L3 packet that may leave by it, bytes.
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
    /// Zero.
    pub pad: [u8; 28],
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

// SAFETY: `valid` and `owner` are reached by atomics, the rest is guarded by `valid`.
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

    /// Whether the other fields may be used.
    #[inline(always)]
    pub fn valid(&self) -> &AtomicU32 {
        // SAFETY: `new` promised a valid element; both sides use atomics on this field.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0).valid) }
    }

    /// Owner's row + 1; 0: free.
    #[inline(always)]
    pub fn owner(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0).owner) }
    }
}
