//! The driver's side of a split virtqueue (virtio 1.2, 2.7).
//!
//! # Theory of operation
//! A buffer is offered as a chain of descriptors (or one, pointing to an indirect table of them):
//! the number of the chain's head goes into the available ring. [`Ring::publish`] makes all offers
//! since the last call visible to the device at once; [`Ring::wants_kick`] returns whether the
//! device wants a notification. The device returns heads in the used ring, in any order. The driver
//! then either frees the chain ([`Ring::release`]) or offers it again unchanged
//! ([`Ring::offer_again`]).
//!
//! With EVENT_IDX each side writes the index of the other at which it wants a notification;
//! without, there is a flag. In both cases "write it, then check again" needs a full barrier
//! between the two.
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use super::dma::Dma;

/// Feature bits of the ring.
pub mod feature {
    /// Indirect descriptors are allowed.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Notifications and interrupts are requested by index.
    pub const EVENT_IDX: u64 = 1 << 29;
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Flag in the available ring.
const NO_INTERRUPT: u16 = 1;
/// Flag in the used ring.
const NO_NOTIFY: u16 = 1;
/// Number of descriptors of an indirect table.
const TABLE: usize = 16;

/// Segment of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Address of the segment for the device.
    pub address: u64,
    /// Length of the segment, bytes.
    pub length: u32,
    /// True if the device writes it, false if it reads it. Segments that it reads come first.
    pub device_writes: bool,
}

/// Buffer that the device returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Head of the buffer's chain.
    pub head: u16,
    /// Number of bytes that the device wrote into it.
    pub written: u32,
}

/// Split virtqueue, driver side.
pub struct Ring {
    memory: Dma,
    tables: Option<Dma>,
    size: u16,
    event_idx: bool,
    free: Vec<u16>,
    /// Number of descriptors of the chain that starts here; 0 if it is not in flight.
    lengths: Vec<u16>,
    offered: u16,
    kicked: u16,
    seen: u16,
    available: usize,
    used: usize,
}

impl Ring {
    /// Returns a ring of `size` (a power of two up to 32768) for a device with these features.
    pub fn new(size: u16, features: u64) -> Self {
        assert!(
            size.is_power_of_two() && size <= 1 << 15,
            "a ring of {size}"
        );
        let length = usize::from(size);
        let available = length * 16;
        let used = (available + 6 + 2 * length).next_multiple_of(4);
        let tables = features & feature::INDIRECT_DESC != 0;
        Ring {
            memory: Dma::new(used + 6 + 8 * length),
            tables: tables.then(|| Dma::new(length * TABLE * 16)),
            size,
            event_idx: features & feature::EVENT_IDX != 0,
            free: (0..size).rev().collect(),
            lengths: alloc::vec![0; length],
            offered: 0,
            kicked: 0,
            seen: 0,
            available,
            used,
        }
    }

    /// Returns the number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns the device's addresses of descriptors, available ring and used ring.
    pub fn addresses(&self) -> [u64; 3] {
        [
            self.memory.address(0),
            self.memory.address(self.available),
            self.memory.address(self.used),
        ]
    }

    /// Returns the number of free descriptors.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Offers a buffer as a chain of descriptors. Returns the chain's head; `None` if there is no
    /// room, or it has no segments.
    pub fn offer(&mut self, segments: &[Segment]) -> Option<u16> {
        if segments.is_empty() || segments.len() > self.free.len() {
            return None;
        }
        let heads = self.free.split_off(self.free.len() - segments.len());
        // The last free descriptor becomes the chain's first.
        for (at, segment) in segments.iter().enumerate() {
            let index = heads[heads.len() - 1 - at];
            let next = (at + 1 < segments.len()).then(|| heads[heads.len() - 2 - at]);
            self.describe(usize::from(index), segment, next);
        }
        let head = heads[heads.len() - 1];
        self.lengths[usize::from(head)] = segments.len() as u16;
        self.offer_again(head);
        Some(head)
    }

    /// Offers a buffer in one descriptor, without an allocation. Returns its head; `None` if there
    /// is no room.
    pub fn offer_one(&mut self, segment: Segment) -> Option<u16> {
        let head = self.free.pop()?;
        self.describe(usize::from(head), &segment, None);
        self.lengths[usize::from(head)] = 1;
        self.offer_again(head);
        Some(head)
    }

    /// Offers a buffer of up to 16 segments through an indirect table. Returns its head; `None` if
    /// there is no room, or the feature was not negotiated.
    pub fn offer_indirect(&mut self, segments: &[Segment]) -> Option<u16> {
        if segments.is_empty() || segments.len() > TABLE || self.tables.is_none() {
            return None;
        }
        let head = self.free.pop()?;
        let start = usize::from(head) * TABLE;
        for (at, segment) in segments.iter().enumerate() {
            let next = (at + 1 < segments.len()).then_some(at as u16 + 1);
            let tables = self.tables.as_ref()?;
            write_descriptor(tables.pointer((start + at) * 16), segment, 0, next);
        }
        let table = Segment {
            address: self.tables.as_ref()?.address(start * 16),
            length: segments.len() as u32 * 16,
            device_writes: false,
        };
        write_descriptor(
            self.memory.pointer(usize::from(head) * 16),
            &table,
            INDIRECT,
            None,
        );
        self.lengths[usize::from(head)] = 1;
        self.offer_again(head);
        Some(head)
    }

    fn describe(&self, index: usize, segment: &Segment, next: Option<u16>) {
        write_descriptor(self.memory.pointer(index * 16), segment, 0, next);
    }

    /// Offers a chain unchanged, after the device returned it.
    pub fn offer_again(&mut self, head: u16) {
        let slot = usize::from(self.offered % self.size);
        self.half(self.available + 4 + 2 * slot)
            .store(head, Ordering::Relaxed);
        self.offered = self.offered.wrapping_add(1);
    }

    /// Frees a chain that the device returned.
    pub fn release(&mut self, head: u16) {
        let mut index = head;
        for _ in 0..self.lengths[usize::from(head)] {
            self.free.push(index);
            index = self
                .half(usize::from(index) * 16 + 14)
                .load(Ordering::Relaxed)
                % self.size;
        }
        self.lengths[usize::from(head)] = 0;
    }

    /// Makes the offered chains visible to the device.
    pub fn publish(&mut self) {
        self.half(self.available + 2)
            .store(self.offered, Ordering::Release);
    }

    /// Publishes, and returns whether the device wants a notification.
    pub fn wants_kick(&mut self) -> bool {
        if self.offered == self.kicked {
            return false;
        }
        self.publish();
        fence(Ordering::SeqCst);
        let (old, new) = (self.kicked, self.offered);
        self.kicked = new;
        if self.event_idx {
            let event = self
                .half(self.used + 4 + 8 * usize::from(self.size))
                .load(Ordering::Relaxed);
            crosses(event, old, new)
        } else {
            self.half(self.used).load(Ordering::Relaxed) & NO_NOTIFY == 0
        }
    }

    /// Returns whether the device has returned a buffer.
    pub fn has_used(&self) -> bool {
        self.half(self.used + 2).load(Ordering::Acquire) != self.seen
    }

    /// Returns the device's index of returned buffers, modulo 2^16.
    pub fn used_index(&self) -> u16 {
        self.half(self.used + 2).load(Ordering::Acquire)
    }

    /// Returns the driver's index of published buffers, modulo 2^16.
    pub fn published_index(&self) -> u16 {
        self.half(self.available + 2).load(Ordering::Relaxed)
    }

    /// Takes the next returned buffer. Heads that the device did not have are skipped.
    pub fn take_used(&mut self) -> Option<Used> {
        while self.has_used() {
            let entry = self.used + 4 + 8 * usize::from(self.seen % self.size);
            let (head, written) = (self.word(entry), self.word(entry + 4));
            let (head, written) = (
                head.load(Ordering::Relaxed),
                written.load(Ordering::Relaxed),
            );
            self.seen = self.seen.wrapping_add(1);
            if self
                .lengths
                .get(head as usize)
                .is_some_and(|length| *length != 0)
            {
                return Some(Used {
                    head: head as u16,
                    written,
                });
            }
        }
        None
    }

    /// Asks for an interrupt at the next returned buffer. Returns false if there is one already.
    pub fn arm(&mut self) -> bool {
        self.arm_after(0)
    }

    /// Asks for an interrupt once `more` buffers more than the next one have been returned; without
    /// EVENT_IDX, at the next. Returns false if a buffer has been returned already.
    pub fn arm_after(&mut self, more: u16) -> bool {
        if self.event_idx {
            let event = self.half(self.available + 4 + 2 * usize::from(self.size));
            event.store(self.seen.wrapping_add(more), Ordering::Relaxed);
        } else {
            self.half(self.available).store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        !self.has_used()
    }

    /// Asks for no interrupts, as far as the ring allows.
    pub fn disarm(&mut self) {
        if self.event_idx {
            // The index furthest ahead.
            let event = self.half(self.available + 4 + 2 * usize::from(self.size));
            event.store(self.seen.wrapping_sub(1), Ordering::Relaxed);
        } else {
            self.half(self.available)
                .store(NO_INTERRUPT, Ordering::Relaxed);
        }
    }

    fn half(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: inside the ring's memory, aligned; shared with the device by atomics only.
        unsafe { AtomicU16::from_ptr(self.memory.pointer(offset).cast()) }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.memory.pointer(offset).cast()) }
    }
}

/// Returns whether an index that went from `old` to `new` passed `event` (virtio 1.2, 2.7.10.1).
fn crosses(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn write_descriptor(at: *mut u8, segment: &Segment, flags: u16, next: Option<u16>) {
    let flags = flags
        | if segment.device_writes { WRITE } else { 0 }
        | if next.is_some() { NEXT } else { 0 };
    let rest =
        u64::from(segment.length) | u64::from(flags) << 32 | u64::from(next.unwrap_or(0)) << 48;
    // SAFETY: a descriptor of this ring, aligned to 16; the device reads it after `publish`.
    unsafe {
        AtomicU64::from_ptr(at.cast()).store(segment.address, Ordering::Relaxed);
        AtomicU64::from_ptr(at.wrapping_add(8).cast()).store(rest, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[path = "ring_test.rs"]
mod tests;
