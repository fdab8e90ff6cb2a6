//! Copies a guest's first packet into the engine's ring ([`crate::first_packet`]).
use core::sync::atomic::Ordering::{AcqRel, Relaxed, SeqCst};

use super::{
    Kernel, Maps as _, PartialChecksum, Refused,
    family::Family,
    packet::{ETHERNET_LEN, Macs},
};
use crate::{
    FirstPacketRef, OwnerRef, PortHeader,
    cell::{load32, load64},
    first_packet::{MOST_ETHERNET_LEN, RING_LEN, VNET_LEN, claimed, place},
};

/// What became of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Queued {
    /// It is in the ring.
    Yes,
    /// It is in the ring, and the engine has to be woken.
    Asleep,
    /// It has to go by the port.
    No,
}

/// Longest packet that a place takes, bytes.
const MOST_L3_LEN: u32 = MOST_ETHERNET_LEN - ETHERNET_LEN as u32;
const _: () = assert!(MOST_L3_LEN <= 0xff);

/// Most tries to claim a number: each failed one is another CPU's success.
const TRIES: u32 = 8;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`.
const NEEDS_CSUM: u8 = 1;

/// Queues the packet in the ring of the engine in this row of `OWNERS`, if it fits there. The frame
/// has an Ethernet header and is left as it is.
#[inline(always)]
pub(super) fn queue<F: Family, K: Kernel>(
    kernel: K,
    owner: OwnerRef,
    owner_row: u32,
    header: PortHeader,
) -> Queued {
    if load32(owner.ring_open()) == 0
        || kernel.gso_size() != 0
        || load64(owner.port_handed()) != load64(owner.port_taken())
    {
        return Queued::No;
    }
    let l3_len = kernel.frame_len().wrapping_sub(ETHERNET_LEN as u32);
    if l3_len > MOST_L3_LEN {
        return Queued::No;
    }
    let Ok(checksum) = checksum_of::<F, K>(kernel) else {
        return Queued::No;
    };
    let Some(number) = claim(owner) else {
        return Queued::No;
    };
    // Each row of `OWNERS` has its ring.
    let Some(packet) = kernel.maps().first_packet(place(owner_row, number)) else {
        return Queued::No;
    };
    let is_copied = fill(kernel, packet, header, checksum, l3_len);
    // What was written is seen before the number; and the number before this looks at `ring_open`.
    packet.number().swap(number.wrapping_add(1), SeqCst);
    if !is_copied {
        return Queued::No;
    }
    if load32(owner.ring_open()) == 0 {
        return Queued::Asleep;
    }
    Queued::Yes
}

/// Claims the next number; `None` if the ring is full.
#[inline(always)]
fn claim(owner: OwnerRef) -> Option<u64> {
    let mut tail = load64(owner.ring_tail());
    for _ in 0..TRIES {
        if claimed(tail, load64(owner.ring_head())) >= u64::from(RING_LEN) {
            return None;
        }
        let next = tail.wrapping_add(1);
        match owner
            .ring_tail()
            .compare_exchange(tail, next, AcqRel, Relaxed)
        {
            Ok(_) => return Some(tail),
            Err(others) => tail = others,
        }
    }
    None
}

/// Fills a claimed place in. Returns whether the packet is whole.
#[inline(always)]
fn fill<K: Kernel>(
    kernel: K,
    packet: FirstPacketRef,
    header: PortHeader,
    checksum: Option<PartialChecksum>,
    l3_len: u32,
) -> bool {
    const { assert!(VNET_LEN == 10) };
    let at_ns = kernel.coarse_now_ns();
    let packet = packet.as_ptr();
    let mut vnet = [0_u16; VNET_LEN / 2];
    if let Some(checksum) = checksum {
        vnet[0] = u16::from_ne_bytes([NEEDS_CSUM, 0]);
        vnet[3] = checksum.start;
        vnet[4] = checksum.offset;
    }
    // SAFETY: the place is this run's until it is published. Its frame begins at an even address, and
    // has room for both headers and for `len` bytes.
    unsafe {
        let frame = (&raw mut (*packet).frame).cast::<u8>();
        frame.cast::<[u16; VNET_LEN / 2]>().write(vnet);
        let macs = core::mem::transmute::<[u8; PortHeader::LEN], Macs>(header.encode());
        frame.add(VNET_LEN).cast::<Macs>().write(macs);
        let rest = frame.add(VNET_LEN + PortHeader::LEN);
        (*packet).at_ns = at_ns;
        // By way of the place, so that the compiler does not know it, and leaves the verifier what it
        // has to see: a byte, checked, and more than nothing behind the MAC addresses.
        let at = &raw mut (*packet).len;
        at.write_volatile(l3_len as u16);
        let l3_len = u32::from(at.read_volatile()) & 0xff;
        let len = l3_len + (ETHERNET_LEN - PortHeader::LEN) as u32;
        let is_copied = l3_len <= MOST_L3_LEN && kernel.copy(PortHeader::LEN, rest, len);
        (*packet).len = match is_copied {
            true => (VNET_LEN + PortHeader::LEN) as u16 + len as u16,
            false => 0,
        };
        is_copied
    }
}

/// Partial checksum of a packet, if it has one.
///
/// # Errors
/// If it is none of a transport protocol's, so that only the kernel's frame tells it.
#[inline(always)]
fn checksum_of<F: Family, K: Kernel>(kernel: K) -> Result<Option<PartialChecksum>, Refused> {
    /// Offsets of the checksum in the headers of ICMPv6, UDP and TCP.
    const OFFSETS: [u16; 3] = [2, 6, 16];
    let Some(checksum) = kernel.partial_checksum()? else {
        return Ok(None);
    };
    let is_known = usize::from(checksum.start) == ETHERNET_LEN + F::IP_LEN
        && OFFSETS.contains(&checksum.offset);
    if is_known {
        Ok(Some(checksum))
    } else {
        Err(Refused)
    }
}

#[cfg(test)]
#[path = "first_packets_test.rs"]
mod tests;
