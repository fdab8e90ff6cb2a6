//! Receive half: frames in the buffers into which the device wrote them.
use alloc::vec::Vec;
use core::{
    mem::{self, ManuallyDrop},
    ops::Range,
};

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

/// Least length of a receive buffer, bytes.
const BUFFER: usize = 4096;
/// Bytes that any frame fits with its header (virtio 1.2, 5.1.6.3.1). Firecracker delivers nothing
/// while fewer are offered in all buffers together.
pub(crate) const LARGEST: usize = 65_562;
/// Largest number of buffers that take a whole large frame each.
const LARGE_BUFFERS: u16 = 64;

/// Returns the number of receive buffers of a queue, and the length of each in bytes.
///
/// Buffers that can't be merged take the largest frame each. They are fewer than the queue could
/// hold, because 256 of them would take 16 MiB.
fn buffers(size: u16, features: u64) -> (u16, usize) {
    let is_large = features & feature::MRG_RXBUF == 0
        && features & (feature::GUEST_TSO4 | feature::GUEST_TSO6) != 0;
    let (number, least) = match is_large {
        true => (size.min(LARGE_BUFFERS), LARGEST),
        false => (size, LARGEST.div_ceil(size.into()).max(BUFFER)),
    };
    (number, least.next_multiple_of(128))
}

pub(super) struct Receive<R> {
    pub(super) ring: ManuallyDrop<Ring>,
    doorbell: Doorbell<R>,
    memory: ManuallyDrop<Dma>,
    number: u16,
    /// Length of a buffer, bytes.
    length: usize,
    /// Adjacent buffers of the frame that was handed out last.
    lent: Range<u16>,
    /// Copy of a frame whose buffers are not adjacent.
    merged: Vec<u8>,
    mergeable: bool,
    /// True if the driver must check checksums that no one has checked.
    check: bool,
    pub(super) counters: NicCounters,
}

impl<R: Registers> Receive<R> {
    pub(super) fn new(ring: Ring, doorbell: Doorbell<R>, features: u64) -> Self {
        let (number, length) = buffers(ring.size(), features);
        Receive {
            memory: ManuallyDrop::new(Dma::new(usize::from(number) * length)),
            number,
            length,
            ring: ManuallyDrop::new(ring),
            doorbell,
            lent: 0..0,
            merged: Vec::with_capacity(FRAME_MOST),
            mergeable: features & feature::MRG_RXBUF != 0,
            check: features & feature::GUEST_CSUM != 0,
            counters: NicCounters::default(),
        }
    }

    /// Offers every buffer. Called once, on a fresh ring.
    pub(super) fn offer_all(&mut self) {
        for buffer in 0..usize::from(self.number) {
            let head = self.ring.offer_one(Segment {
                address: self.memory.address(buffer * self.length),
                length: self.length as u32,
                device_writes: true,
            });
            // A fresh ring hands its descriptors out in order: head and buffer have the same
            // number.
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
        for head in mem::take(&mut self.lent) {
            self.ring.offer_again(head);
        }
    }

    /// Returns the next intact frame.
    pub(super) fn next(&mut self) -> Option<&[u8]> {
        loop {
            self.give_back();
            let first = self.ring.take_used()?;
            let start = usize::from(first.head) * self.length;
            let written = (first.written as usize).min(self.length);
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
            self.lent = first.head..first.head + 1;
            let length = match self.gather(usize::from(buffers), written) {
                Some(bytes) => bytes - header::BYTES,
                None => {
                    self.counters.rx_dropped += 1;
                    continue;
                }
            };
            self.counters.rx_merged += u64::from(buffers > 1);
            if self.check && !vouched && !header::is_intact(self.frame(start, length)) {
                self.counters.rx_dropped += 1;
                continue;
            }
            self.counters.rx_frames += 1;
            self.counters.rx_bytes += length as u64;
            self.counters.rx_checksum_offloaded += u64::from(vouched);
            return Some(self.frame(start, length));
        }
    }

    /// Returns the frame that [`Receive::gather`] has collected.
    fn frame(&self, start: usize, length: usize) -> &[u8] {
        if self.merged.is_empty() {
            // SAFETY: the device has returned the buffers; they are offered again after the frame
            // was read.
            unsafe { self.memory.bytes(start + header::BYTES, length) }
        } else {
            &self.merged
        }
    }

    /// Takes the other buffers of a frame, whose first is lent and holds `written` bytes. They are
    /// lent too if each is adjacent to the one before and that is full, as with a device that takes
    /// them in the order of the ring; otherwise all are copied. Returns the bytes of frame and
    /// header; `None` if the frame is too long, or the device returned fewer buffers than the
    /// header says.
    fn gather(&mut self, buffers: usize, written: usize) -> Option<usize> {
        let start = usize::from(self.lent.start) * self.length;
        let mut bytes = written;
        self.merged.clear();
        for _ in 1..buffers {
            let used = self.ring.take_used()?;
            let written = (used.written as usize).min(self.length);
            if self.merged.is_empty() {
                if used.head == self.lent.end && bytes == self.lent.len() * self.length {
                    self.lent.end += 1;
                    bytes += written;
                    continue;
                }
                self.copy(start + header::BYTES, bytes - header::BYTES);
                self.give_back();
            }
            self.copy(usize::from(used.head) * self.length, written);
            self.ring.offer_again(used.head);
            bytes += written;
        }
        (bytes <= header::BYTES + FRAME_MOST).then_some(bytes)
    }

    /// Appends bytes of the buffers to the copy, unless the frame is too long.
    fn copy(&mut self, at: usize, length: usize) {
        if self.merged.len() + length <= FRAME_MOST {
            // SAFETY: the device has returned the buffer.
            self.merged
                .extend_from_slice(unsafe { self.memory.bytes(at, length) });
        }
    }
}
