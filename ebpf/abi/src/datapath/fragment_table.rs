//! Whose datagram the later fragments are: they have no ports.
//!
//! A small table in which a datagram's place follows from its header (RFC 791: source, destination,
//! protocol, identification). Another one with the same place pushes it out, whereupon its later
//! fragments are the host's, uncounted. Nothing is admitted by it. Several CPUs may write a place
//! at once: what comes of that is a datagram that nobody looks for, or one with the other's row,
//! whose later fragments are counted there. They are dropped once in any case.
use super::{Kernel, Maps, NOBODY};

/// Places; a power of two.
pub const PLACES: usize = 1_024;
/// How long a datagram's fragments may take, ns: as long as Linux would wait for them
/// (`net.ipv4.ipfrag_time`).
const LIFETIME_NS: u64 = 30_000_000_000;

/// A datagram, in network order.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Datagram {
    pub(super) source: u32,
    pub(super) destination: u32,
    pub(super) id: u16,
    pub(super) protocol: u16,
}

/// A place: whose it is. All zero: nobody's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Fragment {
    datagram: Datagram,
    /// The VM's row.
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

/// Says whose the datagram is of which the first fragment came; `NOBODY`: not a flow's.
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

/// The row of the VM whose datagram it is, if its first fragment was a flow's; else `NOBODY`.
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
