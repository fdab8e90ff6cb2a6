//! Table that attributes later fragments, which have no ports, to the VM of the first fragment.
//!
//! The table is small, and each family has its own. A datagram's header determines its entry (RFC
//! 791: source, destination, protocol, identification; RFC 8200: the same without the protocol). A
//! datagram of a guest with the same entry replaces it; what then comes of the replaced one goes to the
//! host, uncounted, or to nobody. A datagram of the host's own takes no entry from a guest's: it is in the table
//! only so that no copies of its later fragments are kept ([`super::early_fragments`]). The table admits
//! nothing. Several CPUs may write an entry at once. The entry then holds
//! a datagram that does not exist, or one with the other's row, whose later fragments are counted
//! there. They are dropped once in any case.
use super::{Kernel, Maps, NOBODY};
use crate::{Ip4, Ip6};

/// Number of entries, a power of two.
pub const PLACES: usize = 1_024;
/// In the place of a row: the datagram is the host's own.
pub(super) const HOSTS: u32 = u32::MAX;
/// Bit beside a row: the datagram is of no flow, but to a forward or to a prefix of the VM.
pub(super) const STRANGER: u32 = 1 << 16;

/// Identity of a datagram of a family.
pub(super) trait Name: Copy {
    /// Longest time between the fragments of a datagram, ns: as long as Linux would wait for them
    /// (`net.ipv4.ipfrag_time`, `net.ipv6.ip6frag_time`).
    const LIFETIME_NS: u64;

    /// Hash of the identity.
    fn hash(self) -> u32;
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

/// Entry of a table: a datagram and whom it belongs to. All zero if unused.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Entry<N> {
    datagram: N,
    /// Row in `VMS` of the VM, with [`STRANGER`] or without; or [`HOSTS`].
    whose: u32,
    first_seen_ns: u64,
    /// Ifindex of the link by which the first fragment came.
    ifindex: u32,
    /// Explicit padding, always zero.
    pad: u32,
}

/// Entry of IPv4's table.
pub type Fragment = Entry<Datagram>;
/// Entry of IPv6's table.
pub type Fragment6 = Entry<Datagram6>;

impl Datagram {
    /// A datagram by the fields of its header. The identification is in host order.
    pub const fn new(source: Ip4, destination: Ip4, id: u16, protocol: u8) -> Self {
        Self {
            source: source.to_wire(),
            destination: destination.to_wire(),
            id: id.to_be(),
            protocol: protocol as u16,
        }
    }

    /// Hash of the datagram, as in its [`crate::early_fragment::tag`].
    pub fn hash(&self) -> u32 {
        Name::hash(*self)
    }
}

impl Datagram6 {
    /// A datagram by the fields of its headers. The identification is in host order.
    pub const fn new(source: Ip6, destination: Ip6, id: u32) -> Self {
        Self {
            source,
            destination,
            id: id.to_be(),
        }
    }

    /// Hash of the datagram, as in its [`crate::early_fragment::tag`].
    pub fn hash(&self) -> u32 {
        Name::hash(*self)
    }
}

/// Hash of what was mixed into a word. Knuth's multiplier: the upper bits depend on all.
#[inline(always)]
fn spread(mixed: u32) -> u32 {
    mixed.wrapping_mul(0x9e37_79b1)
}

/// Index of the entry for a hash.
#[inline(always)]
fn index(hash: u32) -> u32 {
    hash >> 22
}

impl Name for Datagram {
    const LIFETIME_NS: u64 = 30_000_000_000;

    #[inline(always)]
    fn hash(self) -> u32 {
        let mut mixed = self.source ^ self.destination.rotate_left(16);
        mixed ^= u32::from(self.id) << 16 | u32::from(self.protocol);
        spread(mixed)
    }

    #[inline(always)]
    fn place<M: Maps>(self, maps: M) -> Option<*mut Fragment> {
        maps.fragment(index(Name::hash(self)))
    }

    #[inline(always)]
    fn is(&self, other: &Self) -> bool {
        self == other
    }
}

impl Name for Datagram6 {
    const LIFETIME_NS: u64 = 60_000_000_000;

    #[inline(always)]
    fn hash(self) -> u32 {
        let [a, b, c, d] = self.source.to_words();
        let [.., last] = self.destination.to_words();
        let mixed = a ^ b.rotate_left(8) ^ c.rotate_left(16) ^ d.rotate_left(24);
        spread(mixed ^ last ^ self.id)
    }

    #[inline(always)]
    fn place<M: Maps>(self, maps: M) -> Option<*mut Fragment6> {
        maps.fragment6(index(Name::hash(self)))
    }

    #[inline(always)]
    fn is(&self, other: &Self) -> bool {
        self.source.is(other.source)
            && self.destination.is(other.destination)
            && self.id == other.id
    }
}

/// Whether a datagram is a guest's, by [`whose`].
#[inline(always)]
pub(super) fn is_guests(whose: u32) -> bool {
    whose != NOBODY && whose != HOSTS
}

/// Records whose a datagram is, whose first fragment came: a VM's row, with [`STRANGER`] or without.
/// `NOBODY` means that it is the host's own; it takes the datagram's entry, and no other guest's. A
/// stranger's takes none of a flow's.
#[inline(always)]
pub(super) fn remember<K: Kernel, N: Name>(kernel: K, datagram: &N, whose: u32) {
    let Some(place) = datagram.place(kernel.maps()) else {
        return;
    };
    let now_ns = kernel.coarse_now_ns();
    let whose = if whose == NOBODY { HOSTS } else { whose };
    // SAFETY: an array's element never moves; any bits are valid.
    unsafe {
        let others = (*place).whose;
        let is_kept = others != HOSTS
            && (whose == HOSTS || whose & STRANGER != 0 && others & STRANGER == 0)
            && is_fresh::<N>((*place).first_seen_ns, now_ns)
            && !((*place).datagram.is(datagram) && (*place).ifindex == kernel.ifindex());
        if !is_kept {
            // One by one: a whole entry would take the stack that Linux 6.1 does not have.
            (*place).datagram = *datagram;
            (*place).whose = whose;
            (*place).first_seen_ns = now_ns;
            (*place).ifindex = kernel.ifindex();
        }
    }
}

/// Returns whose a datagram is: a VM's row, with [`STRANGER`] or without, or [`HOSTS`]; `NOBODY` if its
/// first fragment did not come by this link, or is not recorded.
#[inline(always)]
pub(super) fn whose<K: Kernel, N: Name>(kernel: K, datagram: &N) -> u32 {
    let Some(place) = datagram.place(kernel.maps()) else {
        return NOBODY;
    };
    // SAFETY: as above.
    let (of, whose, seen_ns, ifindex) = unsafe {
        (
            (*place).datagram,
            (*place).whose,
            (*place).first_seen_ns,
            (*place).ifindex,
        )
    };
    if is_fresh::<N>(seen_ns, kernel.coarse_now_ns())
        && of.is(datagram)
        && ifindex == kernel.ifindex()
    {
        whose
    } else {
        NOBODY
    }
}

#[inline(always)]
fn is_fresh<N: Name>(seen_ns: u64, now_ns: u64) -> bool {
    seen_ns != 0 && now_ns.wrapping_sub(seen_ns) < N::LIFETIME_NS
}

const _: () = assert!(PLACES == 1 << 10);
