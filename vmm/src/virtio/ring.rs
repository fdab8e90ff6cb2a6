//! The device's side of a split virtqueue (virtio 1.2 section 2.7).
//!
//! The driver puts descriptor chains on the available ring. [`Ring::next`] takes them one by one
//! and [`Ring::walk`] iterates over their buffers. [`Ring::push_used`] gives them back, in any
//! order. The driver sees them only when [`Ring::publish`] stores the used index, once for a batch;
//! its result is whether the driver wants an interrupt.
//!
//! The driver can write all of the rings at any time. Each descriptor is read once; indices and
//! lengths are checked after the read. An invalid one is [`Broken`]: nothing more is done with the
//! queue.
use std::{
    collections::VecDeque,
    sync::atomic::{AtomicU16, Ordering, fence},
};

use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT,
    VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY,
};
use virtio_queue::{Queue, QueueT};

use super::{EnabledQueue, pieces::Translation};
use crate::snapshot::Progress;

const DESCRIPTOR_BYTES: u32 = 16;

/// Violation of the protocol by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Broken {
    #[error("more chains are available than the queue has entries")]
    IndexJump,
    #[error("a descriptor's number lies outside its table")]
    Index,
    #[error("a chain is longer than the queue: it loops")]
    Loop,
    #[error("a buffer or table lies outside the guest's memory")]
    Address,
    #[error("a buffer that the device writes where one that it reads belongs, or the reverse")]
    Direction,
    #[error("an indirect table where none may be, or of no whole number of descriptors")]
    Indirect,
    #[error("a buffer too small for a header")]
    Header,
    #[error("no room for a request's status")]
    Status,
    #[error("the rings lie outside the guest's memory")]
    Rings,
}

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Buffer {
    pub(super) guest: u64,
    pub(super) bytes: u32,
    /// True if the device writes the buffer, false if it reads it.
    pub(super) writable: bool,
}

/// Result of publishing the used index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Published {
    /// No chain was given back since the last time.
    Nothing,
    /// The driver wants no interrupt.
    Quiet,
    /// The driver wants an interrupt.
    Interrupt,
}

/// Device side of a virtqueue.
#[derive(Debug)]
pub(super) struct Ring {
    descriptors: *const u128,
    available: *mut u16,
    used: *mut u16,
    size: u16,
    event_idx: bool,
    indirect: bool,
    next_available: u16,
    next_used: u16,
    published: u16,
    /// Chains that were taken before a snapshot, which come first. Empty but then.
    again: VecDeque<u16>,
}

impl Ring {
    /// Takes over a queue that the driver enabled, with the chains that were taken before a
    /// snapshot. Otherwise as [`Ring::new`].
    ///
    /// # Errors
    /// As [`Ring::new`].
    pub(super) fn of(
        queue: &EnabledQueue,
        features: u64,
        memory: &Translation,
    ) -> Result<Ring, Broken> {
        let mut ring = Ring::new(&queue.queue, features, memory)?;
        ring.again.extend(&queue.taken);
        Ok(ring)
    }

    /// Takes over a queue that the transport has set up, with the negotiated `features`. The
    /// translation must outlive the ring.
    ///
    /// # Errors
    /// The rings lie outside the guest's memory, are not aligned, or have an invalid size.
    pub(super) fn new(queue: &Queue, features: u64, memory: &Translation) -> Result<Ring, Broken> {
        let size = queue.size();
        let entries = u64::from(size);
        let at = |guest: u64, bytes: u64, alignment: u64| {
            let host = memory.host(guest, bytes).ok_or(Broken::Rings)?;
            let aligned = (host.addr() as u64).is_multiple_of(alignment);
            aligned.then_some(host).ok_or(Broken::Rings)
        };
        if !size.is_power_of_two() {
            return Err(Broken::Rings);
        }
        Ok(Ring {
            descriptors: at(queue.desc_table(), 16 * entries, 16)?.cast(),
            available: at(queue.avail_ring(), 6 + 2 * entries, 2)?.cast(),
            used: at(queue.used_ring(), 6 + 8 * entries, 4)?.cast(),
            size,
            event_idx: features & 1 << VIRTIO_RING_F_EVENT_IDX != 0,
            indirect: features & 1 << VIRTIO_RING_F_INDIRECT_DESC != 0,
            next_available: queue.next_avail(),
            next_used: queue.next_used(),
            published: queue.next_used(),
            again: VecDeque::new(),
        })
    }

    /// Returns how far the device has come. `taken`: the chains that were taken and not given back,
    /// in order.
    pub(super) fn progress(&self, queue: u16, taken: impl IntoIterator<Item = u16>) -> Progress {
        let again = self.again.iter().copied();
        Progress {
            queue,
            next_available: self.next_available,
            next_used: self.next_used,
            taken: taken.into_iter().chain(again).collect(),
        }
    }

    /// Returns the number of entries of the queue.
    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Returns the number of available chains that were not taken yet.
    ///
    /// # Errors
    /// The available index is impossible.
    pub(super) fn waiting(&self) -> Result<u16, Broken> {
        let waiting = self.available_index().wrapping_sub(self.next_available);
        if waiting > self.size {
            return Err(Broken::IndexJump);
        }
        let again = u16::try_from(self.again.len()).unwrap_or(u16::MAX);
        Ok(waiting.saturating_add(again))
    }

    /// Takes the next chain. Returns the number of its first descriptor; `None` if no chain is
    /// available.
    ///
    /// # Errors
    /// The available index is impossible.
    pub(super) fn next(&mut self) -> Result<Option<u16>, Broken> {
        if self.waiting()? == 0 {
            return Ok(None);
        }
        if let Some(head) = self.again.pop_front() {
            return Ok(Some(head));
        }
        let entry = usize::from(self.next_available & (self.size - 1));
        // SAFETY: within the available ring, which `new` checked.
        let head = unsafe { self.available.add(2 + entry).read_volatile() };
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(u16::from_le(head)))
    }

    /// Has [`Ring::next`] give a chain once more that was taken and not given back.
    pub(super) fn take_again(&mut self, head: u16) {
        self.again.push_back(head);
    }

    /// Calls `buffer` for each buffer of a chain, in order.
    ///
    /// # Errors
    /// The chain is invalid, or `buffer` fails.
    pub(super) fn walk(
        &self,
        head: u16,
        memory: &Translation,
        mut buffer: impl FnMut(Buffer) -> Result<(), Broken>,
    ) -> Result<(), Broken> {
        let mut table = self.descriptors;
        let mut entries = u32::from(self.size);
        let mut index = u32::from(head);
        let mut nested = false;
        for _ in 0..self.size {
            if index >= entries {
                return Err(Broken::Index);
            }
            // SAFETY: within the table, which is mapped: `new` checked the ring's, `indirect`
            // others.
            let mut descriptor = Descriptor(unsafe { load(table.wrapping_add(index as usize)) });
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                if nested || !self.indirect || descriptor.has(VRING_DESC_F_NEXT) {
                    return Err(Broken::Indirect);
                }
                (table, entries) = indirect(descriptor, memory)?;
                nested = true;
                // SAFETY: as above; the table is not empty.
                descriptor = Descriptor(unsafe { load(table) });
                if descriptor.has(VRING_DESC_F_INDIRECT) {
                    return Err(Broken::Indirect);
                }
            }
            buffer(Buffer {
                guest: descriptor.address(),
                bytes: descriptor.bytes(),
                writable: descriptor.has(VRING_DESC_F_WRITE),
            })?;
            if !descriptor.has(VRING_DESC_F_NEXT) {
                return Ok(());
            }
            index = u32::from(descriptor.next());
        }
        Err(Broken::Loop)
    }

    /// Gives a chain back, with `bytes` of it written. The driver does not see it before `publish`.
    pub(super) fn push_used(&mut self, head: u16, bytes: u32) {
        let entry = usize::from(self.next_used & (self.size - 1));
        // SAFETY: within the used ring, which `new` checked and found aligned to 4.
        unsafe {
            let element = self.used.add(2 + 4 * entry).cast::<u32>();
            element.write_volatile(u32::from(head).to_le());
            element.add(1).write_volatile(bytes.to_le());
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Makes all chains that were given back visible to the driver.
    pub(super) fn publish(&mut self) -> Published {
        let (old, new) = (self.published, self.next_used);
        if old == new {
            return Published::Nothing;
        }
        // SAFETY: the used ring's index; see `atomic`.
        unsafe { atomic(self.used, 1) }.store(new.to_le(), Ordering::Release);
        self.published = new;
        // The driver must see the index before its wish for an interrupt is read.
        fence(Ordering::SeqCst);
        let wanted = if self.event_idx {
            // SAFETY: used_event, behind the available ring.
            let event = unsafe { atomic(self.available, 2 + usize::from(self.size)) };
            let event = u16::from_le(event.load(Ordering::Relaxed));
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            // SAFETY: the available ring's flags.
            let flags = unsafe { atomic(self.available, 0) }.load(Ordering::Relaxed);
            u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0
        };
        if wanted {
            Published::Interrupt
        } else {
            Published::Quiet
        }
    }

    /// Asks the driver not to notify, because the ring is polled. With EVENT_IDX there is nothing
    /// to do: avail_event is behind the index already.
    pub(super) fn quiet(&mut self) {
        if !self.event_idx {
            let flags = (VRING_USED_F_NO_NOTIFY as u16).to_le();
            // SAFETY: the used ring's flags.
            unsafe { atomic(self.used, 0) }.store(flags, Ordering::Relaxed);
        }
    }

    /// Asks the driver to notify when it adds a chain. Returns `true` when one is available
    /// already.
    ///
    /// # Errors
    /// The available index is impossible.
    pub(super) fn listen(&mut self) -> Result<bool, Broken> {
        if self.event_idx {
            // SAFETY: avail_event, behind the used ring.
            let event = unsafe { atomic(self.used, 2 + 4 * usize::from(self.size)) };
            event.store(self.next_available.to_le(), Ordering::Relaxed);
        } else {
            // SAFETY: the used ring's flags.
            unsafe { atomic(self.used, 0) }.store(0, Ordering::Relaxed);
        }
        // The driver must see the request before the available index is read once more.
        fence(Ordering::SeqCst);
        Ok(self.waiting()? > 0)
    }

    fn available_index(&self) -> u16 {
        // SAFETY: the available ring's index; what it makes available is read after it.
        u16::from_le(unsafe { atomic(self.available, 1) }.load(Ordering::Acquire))
    }
}

/// Returns a 16-bit word of a ring.
///
/// # Safety
/// `at` is within the ring; the memory stays mapped while the reference is used.
unsafe fn atomic<'a>(ring: *mut u16, at: usize) -> &'a AtomicU16 {
    // SAFETY: mapped, and aligned as the ring is.
    unsafe { AtomicU16::from_ptr(ring.add(at)) }
}

/// Checks a descriptor that refers to an indirect table. Returns the table's address and number of
/// entries.
fn indirect(descriptor: Descriptor, memory: &Translation) -> Result<(*const u128, u32), Broken> {
    let bytes = descriptor.bytes();
    if bytes == 0 || !bytes.is_multiple_of(DESCRIPTOR_BYTES) {
        return Err(Broken::Indirect);
    }
    let host = memory
        .host(descriptor.address(), u64::from(bytes))
        .ok_or(Broken::Address)?;
    Ok((host.cast_const().cast(), bytes / DESCRIPTOR_BYTES))
}

/// Reads a descriptor once.
///
/// # Safety
/// It lies in mapped memory.
unsafe fn load(at: *const u128) -> u128 {
    if at.is_aligned() {
        // SAFETY: mapped and aligned.
        u128::from_le(unsafe { at.read_volatile() })
    } else {
        // SAFETY: mapped.
        u128::from_le_bytes(unsafe { at.cast::<[u8; 16]>().read_volatile() })
    }
}

/// A `struct virtq_desc`, as read.
#[derive(Clone, Copy)]
struct Descriptor(u128);

impl Descriptor {
    fn address(self) -> u64 {
        self.0 as u64
    }

    fn bytes(self) -> u32 {
        (self.0 >> 64) as u32
    }

    fn has(self, flag: u32) -> bool {
        (self.0 >> 96) as u32 & flag != 0
    }

    fn next(self) -> u16 {
        (self.0 >> 112) as u16
    }
}

#[cfg(test)]
#[path = "ring_test.rs"]
mod tests;
