//! A virtio device without a function of its own, for tests.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{
    snapshot::{DeviceState, Model, Progress},
    virtio::{ActivateError, Activation, EnabledQueue, VirtioDevice},
};

/// Virtio device for tests. It panics when the transport breaks the contract of [`VirtioDevice`].
pub struct Device {
    sizes: Vec<u16>,
    features: u64,
    witness: Witness,
}

/// Shared view of a [`Device`]. A test inspects the device through it, and acts as the device's
/// threads.
#[derive(Clone, Default)]
pub struct Witness(Arc<Mutex<Seen>>);

/// State of a [`Device`].
#[derive(Default)]
pub struct Seen {
    /// Activation that is in effect; `None` while the device is stopped.
    pub activation: Option<Activation>,
    /// Number of activations that succeeded.
    pub activations: u64,
    /// Number of resets so far.
    pub resets: u64,
    /// If set, the next activation, or enabling of a queue, fails.
    pub refuse: bool,
    /// Whether the device rests.
    pub rests: bool,
    /// Device-specific configuration space; all bytes are read-write.
    pub config: [u8; 16],
}

impl Witness {
    /// Locks the state of the device.
    pub fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device {
    /// Returns a device with these queue sizes and features, and the view of its state.
    pub fn new(sizes: &[u16], features: u64) -> (Self, Witness) {
        let witness = Witness::default();
        (
            Self {
                sizes: sizes.to_vec(),
                features,
                witness: witness.clone(),
            },
            witness,
        )
    }

    fn refuse(seen: &mut Seen) -> Result<(), ActivateError> {
        if std::mem::take(&mut seen.refuse) {
            let what = "the test wants it";
            return Err(ActivateError::Host {
                what,
                source: std::io::ErrorKind::Other.into(),
            });
        }
        Ok(())
    }
}

impl VirtioDevice for Device {
    fn device_id(&self) -> u16 {
        1
    }

    fn pci_class(&self) -> u32 {
        0x02_00_00
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.sizes
    }

    fn features(&self) -> u64 {
        self.features
    }

    /// Refuses bit 1 without bit 0.
    fn accepts(&self, features: u64) -> bool {
        features & 0b11 != 0b10
    }

    fn read_config(&self, offset: usize, into: &mut [u8]) {
        let seen = self.witness.seen();
        for (at, byte) in (offset..).zip(into) {
            *byte = seen.config.get(at).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, offset: usize, bytes: &[u8]) {
        let config = &mut self.witness.seen().config;
        for (to, byte) in config.iter_mut().skip(offset).zip(bytes) {
            *to = *byte;
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut seen = self.witness.seen();
        assert!(
            seen.activation.is_none(),
            "activated once more without a reset"
        );
        Self::refuse(&mut seen)?;
        for EnabledQueue { index, queue, .. } in &activation.queues {
            use virtio_queue::QueueT;
            assert!(usize::from(*index) < self.sizes.len());
            assert!(
                queue.is_valid(&*activation.memory),
                "queue {index} is not valid"
            );
        }
        seen.activations += 1;
        seen.activation = Some(activation);
        Ok(())
    }

    fn reset(&mut self) {
        let mut seen = self.witness.seen();
        assert!(seen.activation.take().is_some(), "reset while stopped");
        seen.rests = false;
        seen.resets += 1;
    }

    fn suspend(&mut self) -> DeviceState {
        use virtio_queue::QueueT;
        let mut seen = self.witness.seen();
        assert!(!seen.rests, "suspended twice");
        seen.rests = true;
        let active = seen.activation.as_ref().expect("suspended while stopped");
        let progress = active.queues.iter().map(|queue| Progress {
            queue: queue.index,
            next_available: queue.queue.next_avail(),
            next_used: queue.queue.next_used(),
            taken: queue.taken.clone(),
        });
        DeviceState {
            queues: progress.collect(),
            model: Model::Plain,
        }
    }

    fn resume(&mut self) {
        let mut seen = self.witness.seen();
        assert!(
            std::mem::take(&mut seen.rests),
            "resumed without a suspension"
        );
    }

    fn reset_queue(&mut self, index: u16) {
        let mut seen = self.witness.seen();
        let activation = seen
            .activation
            .as_mut()
            .expect("a queue of a stopped device was reset");
        let at = activation
            .queues
            .iter()
            .position(|queue| queue.index == index);
        activation
            .queues
            .remove(at.expect("a queue that is not served was reset"));
    }

    fn enable_queue(&mut self, queue: EnabledQueue) -> Result<(), ActivateError> {
        let mut seen = self.witness.seen();
        Self::refuse(&mut seen)?;
        let activation = seen
            .activation
            .as_mut()
            .expect("a queue of a stopped device was enabled");
        let is_there = activation
            .queues
            .iter()
            .any(|there| there.index == queue.index);
        assert!(!is_there, "queue {} was enabled twice", queue.index);
        activation.queues.push(queue);
        Ok(())
    }
}
