//! Rings of first packets: the way of most packets that open a flow to the engine.
//!
//! # Theory of operation
//! Each row of `OWNERS` has a ring of [`RING_LEN`] places in the map `FIRST_PACKETS`. A program that
//! would redirect a guest's short first packet to the engine port copies it into a place instead, and
//! frees the frame. The engine reads it there without a system call, in the form of a frame of the
//! port, and writes it back by the port as ever.
//!
//! Places are numbered without end; number `n` is place `n % RING_LEN`. A program claims the next
//! number by compare-and-swap in [`crate::maps::Owner::ring_tail`], while fewer than [`RING_LEN`] are claimed beyond
//! [`crate::maps::Owner::ring_head`], up to which the engine has read. It fills the place in, and then publishes it
//! by storing `n + 1` in [`FirstPacket::number`]. So an engine's successor goes on at `ring_head`.
//!
//! **Sleep.** Nothing wakes an engine that waits for its port. So the ring is used only while
//! [`crate::maps::Owner::ring_open`] is set, which the engine clears before it sleeps; it then looks once more. A
//! program that published a packet looks once more too: if the ring was closed meanwhile, it sends the
//! frame itself to the port, as a bare wake-up ([`crate::portframe::PortFlags::WAKE`]). Both have a full
//! barrier between their store and their look.
//!
//! **Order.** What does not fit goes by the port: long packets, GSO frames, a full ring. A packet must
//! not overtake an earlier one of its flow on the other way. (Fragments are no first packets: they go by
//! the port, are not counted, and may be overtaken.) The programs count first packets that go by the port, and the engine those that it has read there ([`crate::maps::Owner::port_handed`]); while the counts
//! differ the ring is not used. And what the engine reads from the port it puts behind what the ring has
//! at that time; for a place that is claimed and not published it waits some microseconds.
use core::sync::atomic::{AtomicU64, Ordering::Acquire};

use crate::{PortHeader, handle::handle};

/// Places of one ring.
pub const RING_LEN: u32 = 512;
/// Length of the `virtio_net_hdr` in front of a frame of the port, bytes.
pub const VNET_LEN: usize = 10;
/// Longest frame in a place with its Ethernet header, bytes.
pub const MOST_ETHERNET_LEN: u32 = (FRAME_LEN - VNET_LEN) as u32;
/// Room for a frame of the port, bytes.
const FRAME_LEN: usize = 234;

/// One element of `FIRST_PACKETS`: a place of a ring.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct FirstPacket {
    /// The packet's number plus 1, once all else is written.
    pub number: u64,
    /// Time at which it was handed over, ns.
    pub at_ns: u64,
    /// Length of the frame, bytes; 0 if the packet could not be copied, and went by the port.
    pub len: u16,
    /// Explicit padding, always zero.
    pub pad: [u8; 4],
    /// The frame as on the port: `virtio_net_hdr`, [`PortHeader`], EtherType, packet.
    pub frame: [u8; FRAME_LEN],
}

const _: () = assert!(size_of::<FirstPacket>() == 256);
const _: () = assert!(core::mem::offset_of!(FirstPacket, frame) == 22);
const _: () = assert!(VNET_LEN + PortHeader::LEN < FRAME_LEN);
const _: () = assert!(RING_LEN.is_power_of_two());

/// Index in `FIRST_PACKETS` of a number's place, in the ring of a row of `OWNERS`.
#[inline(always)]
pub const fn place(owner_row: u32, number: u64) -> u32 {
    owner_row * RING_LEN + (number as u32 & (RING_LEN - 1))
}

handle! {
    /// Handle to a place of a ring.
    FirstPacketRef(FirstPacket);
    atomic {
        /// The packet's number plus 1, once all else is written.
        number: AtomicU64,
    }
    constant {}
}

impl FirstPacketRef {
    /// Whether the packet with this number is there.
    pub fn has(&self, number: u64) -> bool {
        self.number().load(Acquire) == number.wrapping_add(1)
    }

    /// Copies the frame of the packet with this number to the start of `buffer`. Returns its length,
    /// bytes, and the time at which it was handed over, ns; `None` if the packet is not there yet, or
    /// the buffer is shorter. The length is 0 if the packet went by the port.
    pub fn read(&self, number: u64, buffer: &mut [u8]) -> Option<(usize, u64)> {
        if !self.has(number) {
            return None;
        }
        // SAFETY: a live element. No program changes what is published before the engine has moved
        // `ring_head`; but another engine can write to the map, so any bytes may be there at any time.
        // Each number is read once, the length is bounded below, and any bytes are a frame.
        let (len, at_ns, frame) = unsafe {
            let len = (&raw const (*self.0).len).read_volatile();
            let at_ns = (&raw const (*self.0).at_ns).read_volatile();
            (len, at_ns, (&raw const (*self.0).frame).cast::<u8>())
        };
        let len = usize::from(len).min(FRAME_LEN);
        let buffer = buffer.get_mut(..len)?;
        // SAFETY: `len` bytes of each, and the buffer is no part of the map. Bytes that somebody changes
        // meanwhile are copied as they were or as they are.
        unsafe { frame.copy_to_nonoverlapping(buffer.as_mut_ptr(), len) };
        Some((len, at_ns))
    }
}

/// Number of packets that were claimed and not read, by [`crate::maps::Owner::ring_tail`] and [`crate::maps::Owner::ring_head`].
#[inline(always)]
pub const fn claimed(tail: u64, head: u64) -> u64 {
    tail.wrapping_sub(head)
}

#[cfg(test)]
#[path = "first_packet_test.rs"]
mod tests;
