//! What drivers of virtio devices have in common.
use std::sync::atomic::{AtomicU64, Ordering};

use slipgate_vmm::virtio::Signals;

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
