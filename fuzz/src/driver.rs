//! What drivers of virtio devices have in common.
use std::sync::atomic::{AtomicU64, Ordering};

use slipgate_vmm::virtio::{EnabledQueue, Signals};
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Counts a device's interrupts.
pub(crate) struct Interrupts(pub(crate) AtomicU64);

impl Signals for Interrupts {
    fn queue(&self, _index: u16) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn config(&self) {}
    fn needs_reset(&self) {}
}

/// Returns a descriptor as it is in a table (virtio 1.2, section 2.7.5).
pub(crate) fn descriptor(address: u64, bytes: u32, flags: u8, next: u16) -> [u8; 16] {
    let descriptor = u128::from(address)
        | u128::from(bytes) << 64
        | u128::from(flags) << 96
        | u128::from(next) << 112;
    descriptor.to_le_bytes()
}

/// Returns a queue whose descriptors, available ring and used ring are at these addresses.
pub(crate) fn queue(
    index: u16,
    size: u16,
    [descriptors, available, used]: [u64; 3],
) -> EnabledQueue {
    let mut queue = Queue::new(size).expect("a queue");
    queue.set_desc_table_address(Some(descriptors as u32), Some(0));
    queue.set_avail_ring_address(Some(available as u32), Some(0));
    queue.set_used_ring_address(Some(used as u32), Some(0));
    queue.set_ready(true);
    EnabledQueue {
        index,
        queue,
        kick: EventFd::new(EFD_NONBLOCK).expect("an eventfd"),
        taken: Vec::new(),
    }
}

/// Where rings of up to 64 entries are, one queue behind another: addresses of a queue's.
pub(crate) mod rings {
    /// Address of a queue's table of descriptors.
    pub(crate) fn descriptors(queue: u16) -> u64 {
        u64::from(queue) * 0x1000
    }

    /// Address of a queue's available ring.
    pub(crate) fn available(queue: u16) -> u64 {
        descriptors(queue) + 0x400
    }

    /// Address of a queue's used ring.
    pub(crate) fn used(queue: u16) -> u64 {
        descriptors(queue) + 0x800
    }
}
