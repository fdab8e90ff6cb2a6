//! Table that attributes later fragments, which have no ports, to the VM of the first fragment.
//!
//! The table is small. A datagram's header determines its entry (RFC 791: source, destination,
//! protocol, identification). A datagram with the same entry replaces it; the later fragments of
//! the replaced one go to the host, uncounted. The table admits nothing. Several CPUs may write an
//! entry at once. The entry then holds a datagram that does not exist, or one with the other's row,
//! whose later fragments are counted there. They are dropped once in any case.
use super::{Kernel, Maps, NOBODY};

/// Number of entries, a power of two.
pub const PLACES: usize = 1_024;
/// Longest time between the fragments of a datagram, ns: as long as Linux would wait for them
/// (`net.ipv4.ipfrag_time`).
const LIFETIME_NS: u64 = 30_000_000_000;

/// Identity of a datagram, in network order.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Datagram {
    pub(super) source: u32,
    pub(super) destination: u32,
    pub(super) id: u16,
    pub(super) protocol: u16,
}

/// Entry of the table: a datagram and the VM that it belongs to. All zero if unused.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Fragment {
    datagram: Datagram,
    /// Row in `VMS` of the VM.
    row: u32,
    first_seen_ns: u64,
}

#[inline(always)]
fn place<M: Maps>(maps: M, datagram: &Datagram) -> Option<*mut Fragment> {
    let mut mixed = datagram.source ^ datagram.destination.rotate_left(16);
    mixed ^= u32::from(datagram.id) << 16 | u32::from(datagram.protocol);
    // Knuth's multiplier: the upper bits depend on all.
    let place = mixed.wrapping_mul(0x9e37_79b1) >> 22;
    maps.fragment(place)
}

/// Records the VM's row for a datagram whose first fragment came. With `NOBODY`, which means that
/// the fragment has no flow, it removes the datagram's entry.
#[inline(always)]
pub(super) fn remember<K: Kernel>(kernel: K, datagram: &Datagram, row: u32) {
    let Some(place) = place(kernel.maps(), datagram) else {
        return;
    };
    // SAFETY: an array's element never moves; any bits are valid.
    unsafe {
        if row != NOBODY {
            place.write(Fragment {
                datagram: *datagram,
                row,
                first_seen_ns: kernel.coarse_now_ns(),
            });
        } else if (*place).datagram == *datagram {
            (*place).first_seen_ns = 0;
        }
    }
}

/// Row of the VM that the datagram belongs to; `NOBODY` if its first fragment had no flow or is not
/// recorded.
#[inline(always)]
pub(super) fn row_of<K: Kernel>(kernel: K, datagram: &Datagram) -> u32 {
    let Some(place) = place(kernel.maps(), datagram) else {
        return NOBODY;
    };
    // SAFETY: as above.
    let (of, row, seen_ns) = unsafe { ((*place).datagram, (*place).row, (*place).first_seen_ns) };
    let age_ns = kernel.coarse_now_ns().wrapping_sub(seen_ns);
    if seen_ns != 0 && age_ns < LIFETIME_NS && of == *datagram {
        row
    } else {
        NOBODY
    }
}

const _: () = assert!(PLACES == 1 << 10);
