//! The ioeventfds of a device's queues. They exist while the device is active and its BAR is
//! decoded, at the BAR's address. Without one, a notification exits to the VMM, which signals the
//! queue's eventfd.
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::{
    counters::{TransportCounters, count},
    layout::NOTIFY_MULTIPLIER,
    lifecycle::QueueState,
};
use crate::interrupt::Doorbells;

/// Doorbells of a device's queues.
pub(super) struct Bells {
    fabric: Arc<dyn Doorbells>,
    counters: Arc<TransportCounters>,
    /// Guest physical address of the first queue's notification register; `None` without doorbells.
    base: Option<u64>,
    connected: Vec<bool>,
}

impl Bells {
    pub(super) fn new(
        fabric: Arc<dyn Doorbells>,
        counters: Arc<TransportCounters>,
        queues: usize,
    ) -> Self {
        Self {
            fabric,
            counters,
            base: None,
            connected: vec![false; queues],
        }
    }

    /// Moves all doorbells to `base`, or removes them.
    pub(super) fn follow(&mut self, base: Option<u64>, queues: &[QueueState]) {
        if base == self.base {
            return;
        }
        for (index, (queue, connected)) in (0..).zip(queues.iter().zip(&mut self.connected)) {
            if let (true, Some(old)) = (*connected, self.base) {
                self.fabric.disconnect(address(old, index), &queue.kick);
            }
            *connected = base.is_some_and(|base| connect(&*self.fabric, base, index, &queue.kick));
            if base.is_some() && !*connected {
                count(&self.counters.doorbells_failed);
            }
        }
        self.base = base;
    }
}

fn address(base: u64, index: u64) -> u64 {
    base + index * NOTIFY_MULTIPLIER
}

fn connect(fabric: &dyn Doorbells, base: u64, index: u64, kick: &EventFd) -> bool {
    fabric.connect(address(base, index), kick).is_ok()
}
