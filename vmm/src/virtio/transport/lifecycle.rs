//! Life cycle of a device from power-on to DRIVER_OK and back: features, queues, activation, reset.
//!
//! # Theory of operation
//! The device is either stopped or active. It becomes active in one place, at DRIVER_OK, when bus
//! mastering is on, every enabled queue is valid and the device accepts them. It becomes stopped in
//! one place, [`Lifecycle::stop`]: for a write of 0 to the status, a function level reset, a
//! clearing of the bus master bit, or the end of the machine. So activations and resets of the
//! device alternate, whatever the driver does. Nothing that a driver writes in between reaches the
//! device's queues: an enabled queue's registers don't change, and the device has copies.
//!
//! While the machine is paused, an active device is suspended. A device that was saved while it was
//! active is restored as suspended: its activation is prepared, and made when the machine goes on.
mod saved;

use std::sync::{Arc, atomic::Ordering::AcqRel};

use virtio_bindings::{
    virtio_config::{VIRTIO_F_RING_RESET, VIRTIO_F_VERSION_1},
    virtio_ring::VIRTIO_RING_F_EVENT_IDX,
};
use vmm_sys_util::eventfd::EventFd;

use super::{
    counters::{TransportCounters, count},
    queue::QueueRegisters,
    signals::Shared,
    status,
};
use crate::{
    GuestMemory,
    snapshot::DeviceState,
    virtio::{ActivateError, Activation, EnabledQueue, Signals, VirtioDevice},
};

/// The device, and the state that a driver negotiates with it.
pub(super) struct Lifecycle {
    pub(super) device: Box<dyn VirtioDevice>,
    memory: Arc<GuestMemory>,
    pub(super) shared: Arc<Shared>,
    pub(super) counters: Arc<TransportCounters>,
    /// Features that are offered.
    offered: u64,
    /// Features that the driver selects; from FEATURES_OK on, the negotiated features.
    pub(super) wanted: u64,
    pub(super) queues: Vec<QueueState>,
    active: bool,
    /// State that the device gave when it was suspended.
    suspended: Option<DeviceState>,
    /// Activation of a device that was restored, until the machine goes on.
    restored: Option<Box<Activation>>,
}

/// Registers of a queue, and its state that the driver does not see.
pub(super) struct QueueState {
    pub(super) registers: QueueRegisters,
    service: Service,
    /// Eventfd that is signalled for each notification.
    pub(super) kick: EventFd,
}

/// Whether the device serves a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    /// Not served before the device's next activation.
    Never,
    Served,
    /// Was served, and was reset on its own. It may be enabled again.
    Reset,
}

impl Lifecycle {
    pub(super) fn new(
        device: Box<dyn VirtioDevice>,
        memory: Arc<GuestMemory>,
        shared: Arc<Shared>,
        counters: Arc<TransportCounters>,
        kicks: Vec<EventFd>,
    ) -> Self {
        let offered = device.features() | 1 << VIRTIO_F_VERSION_1;
        let queue = |(size, kick): (&u16, EventFd)| QueueState {
            registers: QueueRegisters::new(*size),
            service: Service::Never,
            kick,
        };
        let queues = device.queue_sizes().iter().zip(kicks).map(queue).collect();
        Self {
            device,
            memory,
            shared,
            counters,
            offered,
            wanted: 0,
            queues,
            active: false,
            suspended: None,
            restored: None,
        }
    }

    pub(super) fn is_active(&self) -> bool {
        self.active
    }

    pub(super) fn offered(&self) -> u64 {
        self.offered
    }

    fn has(&self, bit: u32) -> bool {
        self.shared.status() & status::FEATURES_OK != 0 && self.wanted >> bit & 1 != 0
    }

    /// Sets the features that the driver selects. They can be changed until FEATURES_OK is set.
    pub(super) fn want(&mut self, window: u32, bits: u32) {
        let settled = self.shared.status() & status::FEATURES_OK != 0;
        match (window, settled) {
            (0, false) => self.wanted = self.wanted & !0xffff_ffff | u64::from(bits),
            (1, false) => self.wanted = self.wanted & 0xffff_ffff | u64::from(bits) << 32,
            // Drivers write zeroes for the features after the 64th.
            (_, false) if bits == 0 => {}
            _ => count(&self.counters.writes_ignored),
        }
    }

    pub(super) fn write_status(&mut self, written: u8, bus_master: bool) {
        if written == 0 {
            self.reset();
            return;
        }
        let (steps, skipped) = status::steps(self.shared.status(), written);
        if skipped {
            count(&self.counters.status_refused);
        }
        for step in steps {
            if step == status::FEATURES_OK && !self.features_agree() {
                count(&self.counters.features_refused);
                break;
            }
            self.shared.status.fetch_or(step, AcqRel);
            if step == status::DRIVER_OK {
                self.activate(bus_master);
            }
        }
        self.shared
            .status
            .fetch_or(written & status::FAILED, AcqRel);
    }

    fn features_agree(&self) -> bool {
        let offered = self.wanted & !self.offered == 0;
        offered && self.wanted >> VIRTIO_F_VERSION_1 & 1 != 0 && self.device.accepts(self.wanted)
    }

    fn activate(&mut self, bus_master: bool) {
        if !bus_master {
            // A device that may not do DMA could not answer the driver.
            count(&self.counters.activations_failed);
            self.shared.needs_reset();
            return;
        }
        let enabled = (0..)
            .zip(&self.queues)
            .filter(|(_, queue)| queue.registers.enabled);
        let Some(queues) = enabled.map(|(index, _)| self.ready(index)).collect() else {
            self.shared.needs_reset();
            return;
        };
        let activation = Activation {
            memory: self.memory.clone(),
            features: self.wanted,
            queues,
            signals: self.shared.clone(),
            restored: None,
        };
        if let Err(error) = self.device.activate(activation) {
            return self.refused(&error);
        }
        self.is_served();
    }

    fn is_served(&mut self) {
        self.active = true;
        count(&self.counters.activations);
        for queue in &mut self.queues {
            if queue.registers.enabled {
                queue.service = Service::Served;
            }
        }
    }

    fn refused(&self, error: &ActivateError) {
        tracing::debug!(%error, device = self.device.device_id(), "the device needs a reset");
        count(&self.counters.activations_failed);
        self.shared.needs_reset();
    }

    /// Returns a queue to hand to the device; `None`, counted, if the queue is invalid.
    fn ready(&self, index: u16) -> Option<EnabledQueue> {
        let state = &self.queues[usize::from(index)];
        let queue = match state
            .registers
            .build(&self.memory, self.has(VIRTIO_RING_F_EVENT_IDX))
        {
            Ok(queue) => queue,
            Err(error) => {
                tracing::debug!(%error, index, "the driver enabled a queue that can't be");
                count(&self.counters.bad_queues);
                return None;
            }
        };
        match state.kick.try_clone() {
            Ok(kick) => Some(EnabledQueue {
                index,
                queue,
                kick,
                taken: Vec::new(),
            }),
            Err(source) => {
                let what = "the notification eventfd can't be duplicated";
                tracing::debug!(error = %ActivateError::Host { what, source }, index);
                count(&self.counters.activations_failed);
                None
            }
        }
    }

    /// Handles a write to queue_msix_vector.
    pub(super) fn set_queue_vector(&mut self, index: u16, vector: u16) {
        let before = self.shared.queue_vector(index);
        self.shared.set_queue_vector(index, vector);
        if self.active && self.shared.queue_vector(index) != before {
            self.device.vector_changed(index);
        }
    }

    /// Handles a write of 1 to queue_enable.
    pub(super) fn enable_queue(&mut self, index: u16) {
        let Some(state) = self.queues.get_mut(usize::from(index)) else {
            return count(&self.counters.writes_ignored);
        };
        if state.registers.enabled {
            return;
        }
        if self.shared.status() & status::DRIVER_OK == 0 {
            state.registers.enabled = true;
        } else if state.service == Service::Reset {
            state.registers.enabled = true;
            state.service = Service::Never;
            let Some(queue) = self.ready(index) else {
                self.shared.needs_reset();
                return;
            };
            match self.device.enable_queue(queue) {
                Ok(()) => self.queues[usize::from(index)].service = Service::Served,
                Err(error) => self.refused(&error),
            }
        } else {
            // A queue that was not enabled at DRIVER_OK can't be enabled after it.
            count(&self.counters.writes_ignored);
        }
    }

    /// Handles a write of 1 to queue_reset (section 2.6.1). The reset is complete when this
    /// returns, so queue_reset and queue_enable both read as 0 then.
    pub(super) fn reset_queue(&mut self, index: u16) {
        let allowed = self.has(VIRTIO_F_RING_RESET);
        let queue = self.queues.get_mut(usize::from(index));
        let served = queue.filter(|queue| queue.service == Service::Served);
        let (true, Some(state)) = (allowed, served) else {
            return count(&self.counters.writes_ignored);
        };
        state.registers = QueueRegisters::new(state.registers.max_size);
        state.service = Service::Reset;
        self.device.reset_queue(index);
    }

    /// Stops the device if it is active.
    pub(super) fn stop(&mut self) {
        self.suspended = None;
        self.restored = None;
        if self.active {
            self.active = false;
            for queue in &mut self.queues {
                queue.service = Service::Never;
            }
            self.device.reset();
        }
    }

    /// Restores everything but MSI-X to the state at power-on.
    pub(super) fn reset(&mut self) {
        self.stop();
        count(&self.counters.resets);
        for queue in &mut self.queues {
            queue.registers = QueueRegisters::new(queue.registers.max_size);
            queue.service = Service::Never;
        }
        self.wanted = 0;
        self.shared.reset();
    }
}

impl Drop for Lifecycle {
    fn drop(&mut self) {
        self.stop();
    }
}
