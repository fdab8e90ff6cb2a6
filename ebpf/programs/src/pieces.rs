//! Whose datagram the later fragments are: they have no ports.
//!
//! A small table in which a datagram's place follows from its header (RFC 791: source, destination,
//! protocol, identification). Another one with the same place pushes it out, whereupon its later
//! fragments are the host's, uncounted. Nothing is admitted by it. Several CPUs may write a place
//! at once: what comes of that is a datagram that nobody looks for, or one with the other's row,
//! whose later fragments are counted there. They are dropped once in any case.
use aya_ebpf::{btf_maps::Array, helpers::generated::bpf_ktime_get_coarse_ns, macros::btf_map};

use crate::drops::NOBODY;

/// Places; a power of two.
const PLACES: usize = 1_024;
/// How long a datagram's fragments may take, ns: as long as Linux would wait for them
/// (`net.ipv4.ipfrag_time`).
const LIFETIME_NS: u64 = 30_000_000_000;

/// A datagram, in network order.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Datagram {
    pub(crate) source: u32,
    pub(crate) destination: u32,
    pub(crate) id: u16,
    pub(crate) protocol: u16,
}

/// A place: whose it is. All zero: nobody's.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    datagram: Datagram,
    /// The VM's row.
    row: u32,
    first_seen_ns: u64,
}

#[btf_map]
static PIECES: Array<Piece, PLACES> = Array::new();

#[inline(always)]
fn place(datagram: &Datagram) -> Option<*mut Piece> {
    let mut mixed = datagram.source ^ datagram.destination.rotate_left(16);
    mixed ^= u32::from(datagram.id) << 16 | u32::from(datagram.protocol);
    // Knuth's multiplier: the upper bits depend on all.
    let place = mixed.wrapping_mul(0x9e37_79b1) >> 22;
    PIECES.get_ptr_mut(place)
}

/// Says whose the datagram is of which the first fragment came; `NOBODY`: not a flow's.
#[inline(always)]
pub(crate) fn remember(datagram: &Datagram, row: u32) {
    let Some(place) = place(datagram) else { return };
    // SAFETY: an array's element never moves; any bits are valid.
    unsafe {
        if row != NOBODY {
            place.write(Piece {
                datagram: *datagram,
                row,
                first_seen_ns: bpf_ktime_get_coarse_ns(),
            });
        } else if (*place).datagram == *datagram {
            (*place).first_seen_ns = 0;
        }
    }
}

/// The row of the VM whose datagram it is, if its first fragment was a flow's; else `NOBODY`.
#[inline(always)]
pub(crate) fn row_of(datagram: &Datagram) -> u32 {
    let Some(place) = place(datagram) else {
        return NOBODY;
    };
    // SAFETY: as above.
    let (of, row, seen_ns) = unsafe { ((*place).datagram, (*place).row, (*place).first_seen_ns) };
    // SAFETY: no arguments.
    let age_ns = unsafe { bpf_ktime_get_coarse_ns() }.wrapping_sub(seen_ns);
    if seen_ns != 0 && age_ns < LIFETIME_NS && of == *datagram {
        row
    } else {
        NOBODY
    }
}

const _: () = assert!(PLACES == 1 << 10);
