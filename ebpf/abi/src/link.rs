//! Next hops towards the world, whose L2 headers the programs write themselves.
use core::sync::atomic::AtomicU32;
#[cfg(not(target_arch = "bpf"))]
use core::sync::atomic::{
    Ordering::{AcqRel, Acquire, Relaxed, Release},
    fence,
};

#[cfg(not(target_arch = "bpf"))]
use core::net::IpAddr;

#[cfg(not(target_arch = "bpf"))]
use crate::IfIndex;
use crate::{Ip4, Ip6, cell::load32, handle::handle};

/// One element of `NEXT_HOPS`. Index 0 means that the kernel resolves the neighbour
/// (`bpf_redirect_neigh`), which is correct but the most expensive part of the program.
///
/// # Reading during a write
/// The fields take several words, and nothing blocks a reader. [`NextHop::sequence`] tells whether
/// they are consistent: it is odd while the fields may be used and even while they may not, and
/// only grows, so that no value repeats (until it wraps, after 2³¹ changes). A writer makes it even
/// ([`NextHopRef::withdraw`]), writes the fields, and makes it odd ([`NextHopRef::publish`]). That
/// fails if another writer has withdrawn them meanwhile: engine and broker both write. A reader
/// uses the fields if it finds the same odd number before and after it read them
/// ([`NextHopRef::read`]). Otherwise it falls back to `bpf_redirect_neigh` by
/// `Slot::uplink_ifindex`.
///
/// A flag instead of a number would not suffice: if an element is written twice during one read,
/// the reader finds the flag set both times.
#[repr(C, align(32))]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NextHop {
    /// Sequence number of the fields below: odd if they may be used. Each change increases it.
    pub sequence: u32,
    /// Ifindex of the uplink.
    pub ifindex: u32,
    /// Largest L3 packet that may leave by this next hop, bytes: the uplink's MTU, or `route_mtu`
    /// if that is less.
    pub mtu: u32,
    /// [`NextHopFlags`] bits of the element.
    pub flags: u32,
    /// MAC of the neighbour. Zero if the uplink has no L2 header.
    pub neighbour_mac: [u8; 6],
    /// MAC of the uplink.
    pub uplink_mac: [u8; 6],
    /// IPv4 address of the neighbour: the router, or the destination itself if it is on link. Zero
    /// with [`NextHopFlags::IPV6`].
    pub neighbour: Ip4,
    /// Row in `OWNERS`, plus 1, of the process that updates the element; 0 if it is free.
    pub owner: u32,
    /// MTU of the routes that use this next hop, bytes; 0 if they set none. The element was claimed
    /// for this value, as for `ifindex` and `neighbour`.
    pub route_mtu: u32,
    /// IPv6 address of the neighbour with [`NextHopFlags::IPV6`], else zero.
    pub neighbour6: Ip6,
    /// Explicit padding, always zero.
    pub pad: [u8; 8],
}

const _: () = assert!(size_of::<NextHop>() == 64);

/// Names of the bits in [`NextHop::flags`].
#[derive(Debug)]
pub struct NextHopFlags;

impl NextHopFlags {
    /// The uplink has no L2 header (tun, WireGuard).
    pub const NO_L2: u32 = 1;
    /// The neighbour's address is one of IPv6.
    pub const IPV6: u32 = 2;
}

handle! {
    /// Handle to a live element of `NEXT_HOPS`. The fields that are not accessed by atomics are
    /// guarded by `sequence`.
    NextHopRef(NextHop);
    atomic {
        /// Sequence number: odd while the other fields may be used; see [`NextHop`].
        sequence: AtomicU32,
        /// Row in `OWNERS`, plus 1; 0 if the element is free.
        owner: AtomicU32,
    }
    constant {}
}

impl NextHopRef {
    /// MTU of the routes that use this next hop, bytes; 0 if they set none. It does not change
    /// while a slot refers to the element, even while the other fields may not be used.
    #[inline(always)]
    pub fn route_mtu(self) -> u32 {
        // SAFETY: `new` promised a valid element; a word, which does not tear.
        unsafe { (&raw const (*self.0).route_mtu).read_volatile() }
    }

    /// Uplink and neighbour for which the element was claimed; the neighbour is unspecified where the
    /// uplink has none. Only the process that claimed it may ask: for others it may change meanwhile.
    #[cfg(not(target_arch = "bpf"))]
    pub fn claim(self) -> (IfIndex, IpAddr) {
        // SAFETY: `new` promised a valid element; whole words, which do not tear.
        let (ifindex, flags, four, six) = unsafe {
            (
                (&raw const (*self.0).ifindex).read_volatile(),
                (&raw const (*self.0).flags).read_volatile(),
                (&raw const (*self.0).neighbour).read_volatile(),
                (&raw const (*self.0).neighbour6).read_volatile(),
            )
        };
        let neighbour = match flags & NextHopFlags::IPV6 {
            0 => four.into(),
            _ => six.into(),
        };
        (IfIndex::new(ifindex), neighbour)
    }

    /// Result of `fields`, which reads the element by volatile loads of whole words; `None` if the
    /// fields may not be used, or were written meanwhile.
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
}

/// Whether the fields may be used at this sequence number.
#[inline(always)]
pub const fn is_usable(sequence: u32) -> bool {
    sequence & 1 == 1
}

/// Orders the loads before it before those after it. Programs read by volatile loads, which the
/// compiler keeps in order. x86 processors keep loads in order as well; on others it takes a fence.
#[inline(always)]
fn in_order() {
    #[cfg(not(target_arch = "bpf"))]
    core::sync::atomic::fence(core::sync::atomic::Ordering::Acquire);
}

/// Writing, which only userspace does.
#[cfg(not(target_arch = "bpf"))]
impl NextHopRef {
    /// Takes the fields out of use at any sequence number. Returns the new, even number.
    pub fn withdraw(&self) -> u32 {
        let even = |sequence: u32| Some(next_even(sequence));
        let before = self.sequence().fetch_update(AcqRel, Acquire, even);
        let now = next_even(before.unwrap_or_else(|unchanged| unchanged));
        // Later writes must not become visible before the withdrawal.
        fence(Release);
        now
    }

    /// Takes the fields out of use if the sequence number is still `seen`. Returns the new, even
    /// number; `None` if another writer has withdrawn them.
    pub fn withdraw_from(&self, seen: u32) -> Option<u32> {
        let now = next_even(seen);
        let swapped = self.sequence().compare_exchange(seen, now, AcqRel, Relaxed);
        fence(Release);
        swapped.ok().map(|_| now)
    }

    /// Puts the written fields into use, unless another writer has withdrawn them since the number
    /// was `withdrawn`. Returns whether they are in use.
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
