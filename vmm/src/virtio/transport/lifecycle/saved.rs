//! The life cycle of a device while the machine is paused, and from one machine to another.
use std::sync::atomic::Ordering::AcqRel;

use virtio_queue::QueueT as _;

use super::{
    super::{queue::QueueRegisters, status},
    Lifecycle,
};
use crate::{
    snapshot::{Progress, QueueState, SnapshotError, TransportState},
    virtio::{Activation, EnabledQueue},
};

impl Lifecycle {
    /// Suspends the device, if it is active.
    pub(in super::super) fn suspend(&mut self) {
        if self.active && self.suspended.is_none() {
            self.suspended = Some(self.device.suspend());
        }
    }

    /// Has a suspended device go on, or activates one that was restored.
    pub(in super::super) fn resume(&mut self) {
        if self.suspended.take().is_some() {
            self.device.resume();
        }
        if let Some(activation) = self.restored.take() {
            match self.device.activate(*activation) {
                Ok(()) => {
                    self.is_served();
                    self.kick_all();
                }
                Err(error) => self.refused(&error),
            }
        }
    }

    /// Has the device look at each of its queues: a notification of the driver may have been under way
    /// when it was saved.
    fn kick_all(&self) {
        for queue in self.queues.iter().filter(|queue| queue.registers.enabled) {
            // One whose counter is full is looked at anyway.
            let _ = queue.kick.write(1);
        }
    }

    /// Fills in what a snapshot says of a device that is suspended or stopped.
    pub(in super::super) fn save(&self, state: &mut TransportState) {
        state.features = self.wanted;
        state.status = self.shared.status();
        state.generation = self.shared.generation();
        state.isr = self.shared.isr();
        state.config_vector = self.shared.config_vector();
        let queues = (0..).zip(&self.queues);
        state.queues = queues
            .map(|(index, queue)| QueueState {
                size: queue.registers.size,
                enabled: queue.registers.enabled,
                vector: self.shared.queue_vector(index),
                rings: [
                    queue.registers.descriptors,
                    queue.registers.driver,
                    queue.registers.device,
                ],
            })
            .collect();
        // One that needs a reset is stopped in the snapshot.
        let serves = state.status & status::NEEDS_RESET == 0;
        state.device = self.suspended.clone().filter(|_| serves);
    }

    /// Sets the state of a snapshot; the device does not serve before [`Lifecycle::resume`].
    ///
    /// # Errors
    /// The device does not offer the features that were negotiated, or the state makes no sense.
    pub(in super::super) fn restore(
        &mut self,
        state: &TransportState,
        bus_master: bool,
    ) -> Result<(), SnapshotError> {
        let id = self.device.device_id();
        let mismatch = |why: String| SnapshotError::Mismatch(format!("virtio device {id}: {why}"));
        if state.queues.len() != self.queues.len() {
            let (found, wanted) = (state.queues.len(), self.queues.len());
            return Err(mismatch(format!("{found} queues in the place of {wanted}")));
        }
        if !status::is_possible(state.status) {
            return Err(mismatch(format!(
                "no driver comes to the status {:#x}",
                state.status
            )));
        }
        self.wanted = state.features;
        if state.status & status::FEATURES_OK != 0 && !self.features_agree() {
            let lacks = self.wanted & !self.offered;
            return Err(mismatch(format!(
                "its driver uses the features {lacks:#x}, which are not offered here"
            )));
        }
        if let Some(why) = (state.device.as_ref()).and_then(|it| self.device.mismatch(it)) {
            return Err(mismatch(why));
        }
        self.shared
            .restore(state.status, state.generation, state.isr);
        self.shared.set_config_vector(state.config_vector);
        for (index, (queue, saved)) in (0..).zip(self.queues.iter_mut().zip(&state.queues)) {
            let [descriptors, driver, device] = saved.rings;
            queue.registers = QueueRegisters {
                size: saved.size,
                enabled: saved.enabled,
                descriptors,
                driver,
                device,
                ..QueueRegisters::new(queue.registers.max_size)
            };
            self.shared.set_queue_vector(index, saved.vector);
        }
        let is_running = state.status & status::DRIVER_OK != 0;
        match &state.device {
            Some(device) if is_running && bus_master => {
                let enabled = (0..)
                    .zip(&self.queues)
                    .filter(|(_, queue)| queue.registers.enabled);
                let queues = enabled.map(|(index, _)| {
                    let progress = device.queues.iter().find(|queue| queue.queue == index);
                    match progress {
                        Some(progress) => self.ready_again(progress),
                        // The device has no use for it.
                        None => self.ready(index),
                    }
                });
                let queues: Option<Vec<_>> = queues.collect();
                let queues = queues.ok_or_else(|| mismatch("queues that can't be".into()))?;
                self.restored = Some(Box::new(Activation {
                    memory: self.memory.clone(),
                    features: self.wanted,
                    queues,
                    signals: self.shared.clone(),
                    restored: Some(device.model.clone()),
                }));
            }
            Some(_) => return Err(mismatch("it serves without a driver".into())),
            None if is_running => {
                self.shared.status.fetch_or(status::NEEDS_RESET, AcqRel);
            }
            None => {}
        }
        Ok(())
    }

    /// Returns a queue to hand to the device, which goes on where it was.
    fn ready_again(&self, progress: &Progress) -> Option<EnabledQueue> {
        let mut ready = self.ready(progress.queue)?;
        let size = ready.queue.size();
        let all_there = progress.taken.iter().all(|head| *head < size);
        if progress.taken.len() > usize::from(size) || !all_there {
            return None;
        }
        ready.queue.set_next_avail(progress.next_available);
        ready.queue.set_next_used(progress.next_used);
        ready.taken = progress.taken.clone();
        Some(ready)
    }
}
