//! Rewrite of a packet: address, port or ICMP query id, TTL or hop limit, and checksums.
//!
//! # Checksums
//! A frame's L4 checksum is full, partial (`NEEDS_CSUM`: the field holds the pseudo-header's sum
//! and the sending device completes it) or complete (the receiving device summed the payload). A
//! program cannot see which. `bpf_l4_csum_replace` updates each correctly if its flags say whether
//! the word is part of the pseudo-header: the address is, the port is not. ICMPv6 has a
//! pseudo-header, ICMP has none.
//!
//! Where a checksum is complete, the helper also updates the sum of the whole packet, which an IPv6
//! address does not change: it is not undone in a header checksum, as an IPv4 address is. Nothing
//! reads that sum after a redirect: neither a TAP nor a device that sends (Linux 6.16 has a flag for
//! it, which older kernels refuse).
//!
//! # Place of a guest's checksum
//! With a partial checksum the guest also chooses the place where the kernel later stores it, and
//! the kernel checks only a lower bound. If the place were in the IP header, the store would change
//! the translated addresses after the rewrite. So a partial checksum from a guest must lie where
//! its protocol has it, or after. The field shows whether it is partial: replacing a word outside
//! the pseudo-header leaves it unchanged. No helper returns the place, so it is read from the
//! kernel's own struct. (`bpf_skb_change_tail` refuses to cut the place off on some kernels, not on
//! others.)
use super::{
    Kernel, Refused,
    family::Family,
    packet::{ETHERNET_LEN, Macs, Packet},
};
use crate::{Direction, DropReason, Protocol};

/// Flags of `bpf_l4_csum_replace` (include/uapi/linux/bpf.h). Its lowest four bits are the length
/// of the replaced word, bytes; 0 if the new word is a difference of sums, and the old one 0.
pub mod checksum_flags {
    /// The word is part of the pseudo-header.
    pub const PSEUDO_HDR: u64 = 1 << 4;
    /// A checksum of zero means that there is none (UDP).
    pub const MARK_MANGLED_0: u64 = 1 << 5;
}

/// The values that a rewrite puts into a packet.
#[derive(Clone, Copy, Debug)]
pub struct Rewrite<F: Family> {
    /// [`Direction::Tx`] replaces the source, [`Direction::Rx`] the destination.
    pub(super) direction: Direction,
    /// New address, in network order.
    pub(super) address: F::Address,
    /// New port or ICMP query id, host order.
    pub(super) port: u16,
    /// New MAC addresses; `None` if the kernel is to resolve them.
    pub(super) macs: Option<Macs>,
}

/// Rewrites a frame that has an Ethernet header.
///
/// # Errors
/// The drop reason. The frame may be half rewritten then, and must be dropped.
#[inline(always)]
pub(super) fn rewrite<K: Kernel, F: Family>(
    kernel: K,
    packet: &Packet<F>,
    to: &Rewrite<F>,
) -> Result<(), DropReason> {
    let from_guest = matches!(to.direction, Direction::Tx);
    let (old_address, old_port) = if from_guest {
        (packet.source, packet.source_port)
    } else {
        (packet.destination, packet.destination_port)
    };
    let l4_offset = ETHERNET_LEN + F::IP_LEN;
    let (checksum_offset, flags) = match F::protocol(packet.protocol) {
        Some(Protocol::Tcp) => (l4_offset + 16, 0),
        Some(Protocol::Udp) => (l4_offset + 6, checksum_flags::MARK_MANGLED_0),
        Some(Protocol::Icmp | Protocol::Icmpv6) => (l4_offset + 2, 0),
        None => return Err(DropReason::IpProtocol),
    };
    if from_guest {
        let ambiguous = packet.checksum == 0 && packet.is_udp();
        if ambiguous || same_sum(old_port, to.port) {
            check_place_by_probe(kernel, packet, checksum_offset)?;
        }
        replace_port(kernel, checksum_offset, old_port, to.port, flags)?;
        if !ambiguous && !same_sum(old_port, to.port) {
            let now = checksum_at(kernel, checksum_offset)?;
            if now == packet.checksum {
                check_place(kernel, packet, checksum_offset)?;
            }
        }
    } else {
        replace_port(kernel, checksum_offset, old_port, to.port, flags)?;
    }
    if F::ICMP_HAS_PSEUDO_HEADER || !packet.is_icmp() {
        F::replace_address(kernel, checksum_offset, old_address, to.address, flags)?;
    }
    F::write(kernel, packet, to)
}

#[inline(always)]
fn replace_port<K: Kernel>(
    kernel: K,
    offset: usize,
    old: u16,
    new: u16,
    flags: u64,
) -> Result<(), Refused> {
    kernel.l4_checksum_replace(
        offset,
        u32::from(old.to_be()),
        u32::from(new.to_be()),
        flags | 2,
    )
}

/// Whether two words are equal in one's complement, so that replacing one by the other changes no
/// checksum.
#[inline(always)]
fn same_sum(a: u16, b: u16) -> bool {
    a == b || (a == 0 && b == 0xffff) || (a == 0xffff && b == 0)
}

#[inline(always)]
fn checksum_at<K: Kernel>(kernel: K, offset: usize) -> Result<u16, DropReason> {
    let field = kernel
        .header::<u16>(offset)
        .ok_or(DropReason::KernelRefused)?;
    // SAFETY: `header` checked the bounds.
    Ok(unsafe { *field })
}

/// Checks that a partial checksum does not lie before its protocol's place.
///
/// # Errors
/// `Malformed` if it does, or if the packet cannot have a partial checksum.
#[inline(always)]
fn check_place<K: Kernel, F: Family>(
    kernel: K,
    packet: &Packet<F>,
    offset: usize,
) -> Result<(), DropReason> {
    // ICMP has no pseudo-header, so its checksum is never partial; zero in UDP means no checksum.
    if packet.is_icmp() && !F::ICMP_HAS_PSEUDO_HEADER
        || (packet.is_udp() && packet.checksum == 0)
        || kernel.partial_checksum_place()? < offset as i32
    {
        return Err(DropReason::Malformed);
    }
    Ok(())
}

/// As [`check_place`], for packets whose rewrite does not show whether the checksum is partial: it
/// replaces a word as a probe first.
#[cold]
#[inline(always)]
fn check_place_by_probe<K: Kernel, F: Family>(
    kernel: K,
    packet: &Packet<F>,
    offset: usize,
) -> Result<(), DropReason> {
    kernel.l4_checksum_replace(offset, 0, 1, 2)?;
    let field = kernel
        .header::<u16>(offset)
        .ok_or(DropReason::KernelRefused)?;
    // SAFETY: `header` checked the bounds.
    let now = unsafe { *field };
    if now == packet.checksum {
        return check_place(kernel, packet, offset);
    }
    // SAFETY: as above.
    unsafe { *field = packet.checksum };
    Ok(())
}
