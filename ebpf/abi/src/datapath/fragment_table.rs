//! Table that attributes later fragments, which have no ports, to the VM of the first fragment.
//!
//! The table is small, and each family has its own. A datagram's header determines its entry (RFC
//! 791: source, destination, protocol, identification; RFC 8200: the same without the protocol). A
//! datagram with the same entry replaces it; the later fragments of the replaced one go to the host,
//! uncounted. The table admits nothing. Several CPUs may write an entry at once. The entry then holds
//! a datagram that does not exist, or one with the other's row, whose later fragments are counted
//! there. They are dropped once in any case.
use super::{Kernel, Maps, NOBODY};
use crate::Ip6;

/// Number of entries, a power of two.
pub const PLACES: usize = 1_024;
/// Longest time between the fragments of a datagram, ns: as long as Linux would wait for them
/// (`net.ipv4.ipfrag_time`).
const LIFETIME_NS: u64 = 30_000_000_000;

/// Identity of a datagram of a family.
pub(super) trait Name: Copy {
    /// Entry for such a datagram in its family's table.
    fn place<M: Maps>(self, maps: M) -> Option<*mut Entry<Self>>;
    /// Whether two are the same.
    fn is(&self, other: &Self) -> bool;
}

/// Identity of an IPv4 datagram, in network order.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram {
    pub(super) source: u32,
    pub(super) destination: u32,
    pub(super) id: u16,
    pub(super) protocol: u16,
}

/// Identity of an IPv6 datagram.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram6 {
    pub(super) source: Ip6,
    pub(super) destination: Ip6,
    /// Identification, in network order.
    pub(super) id: u32,
}

/// Entry of a table: a datagram and the VM that it belongs to. All zero if unused.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Entry<N> {
    datagram: N,
    /// Row in `VMS` of the VM.
    row: u32,
    first_seen_ns: u64,
}

/// Entry of IPv4's table.
pub type Fragment = Entry<Datagram>;
/// Entry of IPv6's table.
pub type Fragment6 = Entry<Datagram6>;

/// Index of the entry for what was mixed into a word. Knuth's multiplier: the upper bits depend on
/// all.
#[inline(always)]
fn index(mixed: u32) -> u32 {
    mixed.wrapping_mul(0x9e37_79b1) >> 22
}

impl Name for Datagram {
    #[inline(always)]
    fn place<M: Maps>(self, maps: M) -> Option<*mut Fragment> {
        let mut mixed = self.source ^ self.destination.rotate_left(16);
        mixed ^= u32::from(self.id) << 16 | u32::from(self.protocol);
        maps.fragment(index(mixed))
    }

    #[inline(always)]
    fn is(&self, other: &Self) -> bool {
        self == other
    }
}

impl Name for Datagram6 {
    #[inline(always)]
    fn place<M: Maps>(self, maps: M) -> Option<*mut Fragment6> {
        let [a, b, c, d] = self.source.to_words();
        let [.., last] = self.destination.to_words();
        let mixed = a ^ b.rotate_left(8) ^ c.rotate_left(16) ^ d.rotate_left(24);
        maps.fragment6(index(mixed ^ last ^ self.id))
    }

    #[inline(always)]
    fn is(&self, other: &Self) -> bool {
        self.source.is(other.source)
            && self.destination.is(other.destination)
            && self.id == other.id
    }
}

/// Records the VM's row for a datagram whose first fragment came. With `NOBODY`, which means that
/// the fragment has no flow, it removes the datagram's entry.
#[inline(always)]
pub(super) fn remember<K: Kernel, N: Name>(kernel: K, datagram: &N, row: u32) {
    let Some(place) = datagram.place(kernel.maps()) else {
        return;
    };
    // SAFETY: an array's element never moves; any bits are valid.
    unsafe {
        if row != NOBODY {
            place.write(Entry {
                datagram: *datagram,
                row,
                first_seen_ns: kernel.coarse_now_ns(),
            });
        } else if (*place).datagram.is(datagram) {
            (*place).first_seen_ns = 0;
        }
    }
}

/// Row of the VM that the datagram belongs to; `NOBODY` if its first fragment had no flow or is not
/// recorded.
#[inline(always)]
pub(super) fn row_of<K: Kernel, N: Name>(kernel: K, datagram: &N) -> u32 {
    let Some(place) = datagram.place(kernel.maps()) else {
        return NOBODY;
    };
    // SAFETY: as above.
    let (of, row, seen_ns) = unsafe { ((*place).datagram, (*place).row, (*place).first_seen_ns) };
    let age_ns = kernel.coarse_now_ns().wrapping_sub(seen_ns);
    if seen_ns != 0 && age_ns < LIFETIME_NS && of.is(datagram) {
        row
    } else {
        NOBODY
    }
}

const _: () = assert!(PLACES == 1 << 10);
