//! The ioeventfds of a device's queues: there while the device is active and its BAR is decoded, at
//! the place where the BAR is. Without one, a notification exits to the VMM and is signalled there.
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::{
    counters::{TransportCounters, count},
    layout::NOTIFY_MULTIPLIER,
    lifecycle::QueueState,
};
use crate::interrupt::Doorbells;

/// Which address rings each queue's bell now.
pub(super) struct Bells {
    fabric: Arc<dyn Doorbells>,
    counters: Arc<TransportCounters>,
    /// Guest physical address of the first queue's notification, as last followed.
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

    /// Moves all bells to `base`, or takes them away.
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
