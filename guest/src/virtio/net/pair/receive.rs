//! The receiving half: frames where the device wrote them.
use alloc::{vec, vec::Vec};
use core::mem::ManuallyDrop;

use super::{
    super::{
        super::{
            dma::Dma,
            ring::{Ring, Segment},
            transport::Doorbell,
        },
        feature, header,
    },
    FRAME_MOST,
};
use crate::{pci::Registers, platform::NicCounters};

/// A buffer's bytes.
const BUFFER: usize = 4096;

pub(super) struct Receive<R> {
    pub(super) ring: ManuallyDrop<Ring>,
    doorbell: Doorbell<R>,
    memory: ManuallyDrop<Dma>,
    /// The chain whose frame was handed out last.
    lent: Option<u16>,
    merged: Vec<u8>,
    mergeable: bool,
    /// Checksums that nobody vouches for are ours to check.
    check: bool,
    pub(super) counters: NicCounters,
}

impl<R: Registers> Receive<R> {
    pub(super) fn new(ring: Ring, doorbell: Doorbell<R>, features: u64) -> Self {
        Receive {
            memory: ManuallyDrop::new(Dma::new(usize::from(ring.size()) * BUFFER)),
            ring: ManuallyDrop::new(ring),
            doorbell,
            lent: None,
            merged: vec![0; FRAME_MOST + BUFFER],
            mergeable: features & feature::MRG_RXBUF != 0,
            check: features & feature::GUEST_CSUM != 0,
            counters: NicCounters::default(),
        }
    }

    /// Offers every buffer. Once, on a fresh ring.
    pub(super) fn offer_all(&mut self) {
        let Receive { ring, memory, .. } = self;
        for buffer in 0..usize::from(ring.size()) {
            let head = ring.offer_one(Segment {
                address: memory.address(buffer * BUFFER),
                length: BUFFER as u32,
                device_writes: true,
            });
            // A fresh ring hands its descriptors out in order: head and buffer have one number.
            debug_assert_eq!(head, Some(buffer as u16));
        }
    }

    pub(super) fn kick(&mut self) {
        if self.ring.wants_kick() {
            self.counters.kicks += 1;
            self.doorbell.ring();
        }
    }

    pub(super) fn give_back(&mut self) {
        if let Some(head) = self.lent.take() {
            self.ring.offer_again(head);
        }
    }

    /// The next good frame.
    pub(super) fn next(&mut self) -> Option<&[u8]> {
        loop {
            self.give_back();
            let first = self.ring.take_used()?;
            let start = usize::from(first.head) * BUFFER;
            let written = (first.written as usize).min(BUFFER);
            if written < header::BYTES {
                self.counters.rx_dropped += 1;
                self.ring.offer_again(first.head);
                continue;
            }
            // SAFETY: the device has returned the buffer.
            let bytes = unsafe { self.memory.bytes(start, written) };
            let buffers = if self.mergeable {
                header::buffers(bytes).max(1)
            } else {
                1
            };
            let vouched = header::vouched(bytes);
            let mut length = written - header::BYTES;
            if buffers == 1 {
                self.lent = Some(first.head);
            } else {
                self.merged[..length].copy_from_slice(&bytes[header::BYTES..]);
                self.ring.offer_again(first.head);
                match self.append(usize::from(buffers) - 1, length) {
                    Some(whole) => length = whole,
                    None => {
                        self.counters.rx_dropped += 1;
                        continue;
                    }
                }
                self.counters.rx_merged += 1;
            }
            // SAFETY: as above; it is offered again after the frame was looked at.
            let bytes = unsafe {
                self.memory
                    .bytes(start + header::BYTES, written - header::BYTES)
            };
            let frame = if buffers == 1 {
                bytes
            } else {
                &self.merged[..length]
            };
            if self.check && !vouched && !header::is_intact(frame) {
                self.counters.rx_dropped += 1;
                continue;
            }
            self.counters.rx_frames += 1;
            self.counters.rx_bytes += length as u64;
            self.counters.rx_checksum_offloaded += u64::from(vouched);
            // Looked up again, since a loop may not lend what an earlier round borrowed.
            return Some(match buffers {
                // SAFETY: as above.
                1 => unsafe { self.memory.bytes(start + header::BYTES, length) },
                _ => &self.merged[..length],
            });
        }
    }

    /// Appends a frame's further buffers to the `length` bytes that are there. None: too long, or
    /// the device returned fewer than it said.
    fn append(&mut self, buffers: usize, length: usize) -> Option<usize> {
        let mut end = length;
        let mut whole = true;
        for _ in 0..buffers {
            let used = self.ring.take_used()?;
            let written = (used.written as usize).min(BUFFER);
            whole &= end + written <= FRAME_MOST;
            if whole {
                // SAFETY: the device has returned the buffer.
                let bytes = unsafe { self.memory.bytes(usize::from(used.head) * BUFFER, written) };
                self.merged[end..end + written].copy_from_slice(bytes);
                end += written;
            }
            self.ring.offer_again(used.head);
        }
        whole.then_some(end)
    }
}
