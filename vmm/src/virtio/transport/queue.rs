//! Registers with which the driver describes a queue, and their checks.
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use crate::GuestMemory;

/// Registers of one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct QueueRegisters {
    /// Largest size that the device supports.
    pub(super) max_size: u16,
    pub(super) size: u16,
    pub(super) enabled: bool,
    /// Guest address of the descriptor table.
    pub(super) descriptors: u64,
    /// Guest address of the available ring.
    pub(super) driver: u64,
    /// Guest address of the used ring.
    pub(super) device: u64,
}

/// Reason why a queue is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum QueueError {
    #[error("the size {0} is not a power of two up to what the device offered")]
    Size(u16),
    #[error("the {ring} at {address:#x} is not aligned to {alignment} bytes")]
    Alignment {
        ring: &'static str,
        address: u64,
        alignment: u64,
    },
    #[error("the {ring} at {address:#x}, {len} bytes, is not inside the guest's memory")]
    Outside {
        ring: &'static str,
        address: u64,
        len: u64,
    },
}

impl QueueRegisters {
    /// Returns the registers' values after a reset.
    pub(super) fn new(max_size: u16) -> Self {
        Self {
            max_size,
            size: max_size,
            ..Self::default()
        }
    }

    /// Returns the queue, if it is valid and inside `memory` (section 2.7: alignment and length of
    /// each part).
    ///
    /// # Errors
    /// The size, an alignment or an address is invalid.
    pub(super) fn build(&self, memory: &GuestMemory, event_idx: bool) -> Result<Queue, QueueError> {
        let bad_size = |_| QueueError::Size(self.size);
        let mut queue = Queue::new(self.max_size).map_err(bad_size)?;
        queue.try_set_size(self.size).map_err(bad_size)?;
        let entries = u64::from(self.size);
        // The rings end with two bytes of event index, whether negotiated or not.
        let parts = [
            ("descriptor table", self.descriptors, 16, 16 * entries),
            ("available ring", self.driver, 2, 6 + 2 * entries),
            ("used ring", self.device, 4, 6 + 8 * entries),
        ];
        for (ring, address, alignment, len) in parts {
            if address % alignment != 0 {
                return Err(QueueError::Alignment {
                    ring,
                    address,
                    alignment,
                });
            }
            let fits = usize::try_from(len)
                .is_ok_and(|len| memory.check_range(GuestAddress(address), len));
            if address.checked_add(len).is_none() || !fits {
                return Err(QueueError::Outside { ring, address, len });
            }
        }
        let halves = |address: u64| (Some(address as u32), Some((address >> 32) as u32));
        let (low, high) = halves(self.descriptors);
        queue.set_desc_table_address(low, high);
        let (low, high) = halves(self.driver);
        queue.set_avail_ring_address(low, high);
        let (low, high) = halves(self.device);
        queue.set_used_ring_address(low, high);
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        Ok(queue)
    }
}

#[cfg(test)]
#[path = "queue_test.rs"]
mod tests;
