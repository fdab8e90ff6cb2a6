//! The device: features, configuration space, and the commands to its thread.
use std::{
    io,
    sync::{Arc, mpsc},
    thread::JoinHandle,
};

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::{
    BalloonConfig, BalloonCounters, BalloonError, DEFLATE, INFLATE, QUEUE_SIZE, Target,
    worker::{Command, Worker},
};
use crate::{
    ThreadKind, ThreadSetup,
    snapshot::{DeviceState, Model},
    thread,
    virtio::{
        ActivateError, Activation, VirtioDevice,
        mailbox::{Mailbox, mailbox},
        pieces::Translation,
        ring::Ring,
    },
};

/// Those for pages given, pages taken back, statistics, hints, and reports; the third and fourth
/// are there only for the number of the fifth.
const QUEUE_SIZES: &[u16] = &[QUEUE_SIZE; 5];
/// VIRTIO_BALLOON_F_DEFLATE_ON_OOM: the guest may take pages back before it runs out of memory.
const F_DEFLATE_ON_OOM: u32 = 2;
/// VIRTIO_BALLOON_F_REPORTING: the guest reports free memory.
const F_REPORTING: u32 = 5;
/// `struct virtio_balloon_config` as far as the offered features have it: pages wanted, and pages
/// given, which the driver writes.
const CONFIG_BYTES: usize = 8;
const ACTUAL_AT: usize = 4;

/// The virtio memory balloon.
pub struct Balloon {
    mailbox: Mailbox<Command>,
    worker: Option<JoinHandle<()>>,
    target: Target,
}

impl Balloon {
    /// Starts the balloon's thread, which calls `threads` first.
    ///
    /// # Errors
    /// The host refuses the thread or an eventfd.
    pub fn new(
        config: BalloonConfig,
        threads: &ThreadSetup,
        counters: Arc<BalloonCounters>,
    ) -> Result<Balloon, BalloonError> {
        let tried = |what| move |source| BalloonError::Host { what, source };
        let (mailbox, inbox) = mailbox().map_err(tried("make an eventfd"))?;
        let target = Target::new(config.target_bytes, counters.clone());
        let target = target.map_err(tried("make an eventfd"))?;
        let worker = Worker {
            inbox,
            target: target.clone(),
            counters,
        };
        let thread = thread::spawn("balloon", ThreadKind::Balloon, threads, || worker.run());
        Ok(Balloon {
            mailbox,
            worker: Some(thread.map_err(tried("start the balloon's thread"))?),
            target,
        })
    }

    /// Returns what sets the number of pages that the guest is asked for.
    pub(crate) fn target(&self) -> Target {
        self.target.clone()
    }

    fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut config = [0; CONFIG_BYTES];
        config[..ACTUAL_AT].copy_from_slice(&self.target.wanted().to_le_bytes());
        config[ACTUAL_AT..].copy_from_slice(&self.target.actual().to_le_bytes());
        config
    }
}

impl Drop for Balloon {
    fn drop(&mut self) {
        self.mailbox.send(Command::Exit);
        if let Some(worker) = self.worker.take() {
            // A panic of the device's thread must not panic this one.
            let _ = worker.join();
        }
    }
}

impl VirtioDevice for Balloon {
    fn device_id(&self) -> u16 {
        5
    }

    fn pci_class(&self) -> u32 {
        // Unassigned: PCI has no class for balloons.
        0xff_00_00
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        let bits = [
            F_DEFLATE_ON_OOM,
            F_REPORTING,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
        ];
        bits.iter().fold(0, |all, bit| all | 1 << bit)
    }

    fn read_config(&self, offset: usize, into: &mut [u8]) {
        let config = self.config();
        let there = config.get(offset..).unwrap_or_default();
        let bytes = there.iter().chain(std::iter::repeat(&0));
        into.iter_mut()
            .zip(bytes)
            .for_each(|(to, from)| *to = *from);
    }

    fn write_config(&mut self, offset: usize, bytes: &[u8]) {
        let mut actual = self.target.actual().to_le_bytes();
        for (at, byte) in bytes.iter().enumerate() {
            let field = offset
                .checked_add(at)
                .and_then(|at| at.checked_sub(ACTUAL_AT));
            if let Some(to) = field.and_then(|at| actual.get_mut(at)) {
                *to = *byte;
            }
        }
        self.target.set_actual(u32::from_le_bytes(actual));
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let unusable = |why| ActivateError::Queues {
            enabled: activation.queues.len(),
            why,
        };
        let is_there = |index| activation.queues.iter().any(|queue| queue.index == index);
        if !is_there(INFLATE) || !is_there(DEFLATE) {
            return Err(unusable("a balloon needs its first two"));
        }
        // Checks only: the thread makes rings of its own.
        let memory = Translation::new(activation.memory.clone());
        for queue in &activation.queues {
            Ring::new(&queue.queue, activation.features, &memory)
                .map_err(|_| unusable("a ring lies outside the guest's memory"))?;
        }
        if let Some(Model::Balloon { target, actual }) = activation.restored {
            self.target.restore(target, actual);
        }
        match self.mailbox.send(Command::Start(Box::new(activation))) {
            true => Ok(()),
            false => Err(ActivateError::Host {
                what: "starting to serve the balloon",
                source: io::Error::other("the balloon's thread has ended"),
            }),
        }
    }

    fn reset(&mut self) {
        self.mailbox.send(Command::Stop);
        // The next driver begins with none.
        self.target.set_actual(0);
    }

    fn suspend(&mut self) -> DeviceState {
        let (to, saved) = mpsc::channel();
        self.mailbox.send(Command::Suspend(to));
        DeviceState {
            queues: saved.try_recv().unwrap_or_default(),
            model: Model::Balloon {
                target: self.target.wanted(),
                actual: self.target.actual(),
            },
        }
    }

    fn resume(&mut self) {
        self.mailbox.send(Command::Resume);
    }
}

#[cfg(test)]
#[path = "device_test.rs"]
mod tests;
