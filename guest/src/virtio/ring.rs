//! The driver's side of a split virtqueue (virtio 1.2, 2.7).
//!
//! # Theory of operation
//! A buffer is offered as a chain of descriptors (or one, pointing to an indirect table of them):
//! its head's number goes into the available ring. [`Ring::publish`] shows all that was offered
//! since to the device at once; [`Ring::wants_kick`] says whether the device asked to be told.
//! The device returns heads in the used ring, in any order; the driver then either frees the chain
//! ([`Ring::release`]) or offers it as it is again ([`Ring::offer_again`]).
//!
//! With EVENT_IDX each side says at which index of the other it wants to be told; without, there is
//! a flag. Either way "say so, then look again" needs a full barrier between the two.
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use super::dma::Dma;

/// The ring's feature bits.
pub mod feature {
    /// Indirect descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Indices at which to notify and interrupt.
    pub const EVENT_IDX: u64 = 1 << 29;
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// In the available ring's flags.
const NO_INTERRUPT: u16 = 1;
/// In the used ring's flags.
const NO_NOTIFY: u16 = 1;
/// Descriptors of an indirect table.
const TABLE: usize = 16;

/// A piece of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The device's address of it.
    pub address: u64,
    /// Its length in bytes.
    pub length: u32,
    /// The device writes it; otherwise it reads it. Those that it reads come first.
    pub device_writes: bool,
}

/// A buffer that the device returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The chain's head.
    pub head: u16,
    /// How many bytes the device wrote into it.
    pub written: u32,
}

/// A split virtqueue.
pub struct Ring {
    memory: Dma,
    tables: Option<Dma>,
    size: u16,
    event_idx: bool,
    free: Vec<u16>,
    /// Descriptors of the chain that starts here; for what is in flight.
    lengths: Vec<u16>,
    offered: u16,
    kicked: u16,
    seen: u16,
    available: usize,
    used: usize,
}

impl Ring {
    /// A ring of `size` (a power of two up to 32768) for a device with these features.
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

    /// How many descriptors there are.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The device's addresses of descriptors, available ring and used ring.
    pub fn addresses(&self) -> [u64; 3] {
        [
            self.memory.address(0),
            self.memory.address(self.available),
            self.memory.address(self.used),
        ]
    }

    /// Descriptors that are free.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Offers a buffer as a chain of descriptors. None: there is no room, or it has no segments.
    pub fn offer(&mut self, segments: &[Segment]) -> Option<u16> {
        if segments.is_empty() || segments.len() > self.free.len() {
            return None;
        }
        let heads = self.free.split_off(self.free.len() - segments.len());
        // The last one popped is the chain's first.
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

    /// Offers a buffer in one descriptor. None: there is no room. No allocation.
    pub fn offer_one(&mut self, segment: Segment) -> Option<u16> {
        let head = self.free.pop()?;
        self.describe(usize::from(head), &segment, None);
        self.lengths[usize::from(head)] = 1;
        self.offer_again(head);
        Some(head)
    }

    /// Offers a buffer of up to 16 segments through an indirect table. None: there is no room, or
    /// the feature was not negotiated.
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

    /// Offers a chain as it is, after the device returned it.
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

    /// Shows the device what was offered.
    pub fn publish(&mut self) {
        self.half(self.available + 2)
            .store(self.offered, Ordering::Release);
    }

    /// Publishes, and says whether the device wants to be told.
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

    /// Whether the device has returned something.
    pub fn has_used(&self) -> bool {
        self.half(self.used + 2).load(Ordering::Acquire) != self.seen
    }

    /// The device's index of what it returned, modulo 2^16.
    pub fn used_index(&self) -> u16 {
        self.half(self.used + 2).load(Ordering::Acquire)
    }

    /// Our index of what was published, modulo 2^16.
    pub fn published_index(&self) -> u16 {
        self.half(self.available + 2).load(Ordering::Relaxed)
    }

    /// Takes what the device returned next, if it is a buffer that it had.
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

    /// Asks for an interrupt at the next buffer returned. False: there is one already.
    pub fn arm(&mut self) -> bool {
        self.arm_after(0)
    }

    /// Asks for an interrupt once `more` buffers more than the next one have been returned; without
    /// EVENT_IDX, at the next. False: there is one already.
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

    /// Asks for no interrupt, as far as that can be asked for.
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

/// Whether an index that went from `old` to `new` passed `event` (virtio 1.2, 2.7.10.1).
fn crosses(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn write_descriptor(at: *mut u8, segment: &Segment, flags: u16, next: Option<u16>) {
    let flags = flags
        | if segment.device_writes { WRITE } else { 0 }
        | if next.is_some() { NEXT } else { 0 };
    let rest =
        u64::from(segment.length) | u64::from(flags) << 32 | u64::from(next.unwrap_or(0)) << 48;
    // SAFETY: a descriptor of this ring, aligned to 16; the device looks at it after `publish`.
    unsafe {
        AtomicU64::from_ptr(at.cast()).store(segment.address, Ordering::Relaxed);
        AtomicU64::from_ptr(at.wrapping_add(8).cast()).store(rest, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[path = "ring_test.rs"]
mod tests;
