//! The device: features, configuration space, and the commands to its thread.
use std::{
    io,
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use virtio_bindings::{
    virtio_blk::{
        VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_SIZE_MAX,
    },
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};

use super::{
    DiskConfig, DiskCounters, DiskError, MAX_SEGMENT_BYTES, MAX_SEGMENTS, QUEUE_SIZE, SECTOR_BYTES,
    file::Image,
    request::ID_BYTES,
    tried,
    worker::{Command, Worker},
};
use crate::{
    ThreadKind, ThreadSetup,
    snapshot::{DeviceState, Model},
    thread,
    virtio::{
        ActivateError, Activation, VirtioDevice,
        look::Patience,
        mailbox::{Mailbox, mailbox},
        pieces::Translation,
        rate::Limiter,
        ring::Ring,
    },
};

const QUEUE_SIZES: &[u16] = &[QUEUE_SIZE];
/// Bytes of `struct virtio_blk_config` that belong to the offered features.
const CONFIG_BYTES: usize = 24;
/// Longest look for the next request. A guest that waits for each answer takes some 10 to 50 µs until
/// it asks again. For one that takes longer a look costs more CPU time than the wakeup it spares.
const LONGEST_LOOK: Duration = Duration::from_micros(50);

/// The virtio block device.
pub struct Disk {
    mailbox: Mailbox<Command>,
    worker: Option<JoinHandle<()>>,
    image: Arc<Image>,
}

impl Disk {
    /// Starts the disk's thread, which calls `threads` first. `number`: the disk's place among the
    /// machine's, for the name that a guest can ask for.
    ///
    /// # Errors
    /// The file can't be a disk, or the host refuses the thread or an eventfd.
    pub fn new(
        number: usize,
        config: DiskConfig,
        threads: &ThreadSetup,
        counters: Arc<DiskCounters>,
    ) -> Result<Disk, DiskError> {
        let patience = Patience::new(LONGEST_LOOK);
        Disk::with_patience(number, config, threads, counters, patience)
    }

    fn with_patience(
        number: usize,
        config: DiskConfig,
        threads: &ThreadSetup,
        counters: Arc<DiskCounters>,
        patience: Patience,
    ) -> Result<Disk, DiskError> {
        let rate = config.rate;
        let image = Arc::new(Image::new(config)?);
        let (mailbox, inbox) = mailbox().map_err(tried("make an eventfd"))?;
        let name = format!("disk{number}");
        let mut id = [0; ID_BYTES];
        id.iter_mut()
            .zip(name.bytes())
            .for_each(|(to, from)| *to = from);
        let worker = Worker {
            inbox,
            image: image.clone(),
            id,
            counters,
            limiter: Limiter::new(rate, Instant::now()),
            patience,
        };
        let thread = thread::spawn(&name, ThreadKind::Disk, threads, || worker.run());
        Ok(Disk {
            mailbox,
            worker: Some(thread.map_err(tried("start the disk's thread"))?),
            image,
        })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.mailbox.send(Command::Exit);
        if let Some(worker) = self.worker.take() {
            // A panic of the device's thread must not panic this one.
            let _ = worker.join();
        }
    }
}

impl VirtioDevice for Disk {
    fn device_id(&self) -> u16 {
        2
    }

    fn pci_class(&self) -> u32 {
        // A SCSI controller: what other VMMs say of their virtio disks.
        0x01_00_00
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        let mut bits = vec![
            VIRTIO_BLK_F_SIZE_MAX,
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
        ];
        if self.image.is_read_only() {
            bits.push(VIRTIO_BLK_F_RO);
        }
        bits.iter().fold(0, |all, bit| all | 1 << bit)
    }

    fn read_config(&self, offset: usize, into: &mut [u8]) {
        let mut config = [0; CONFIG_BYTES];
        config[..8].copy_from_slice(&self.image.sectors().to_le_bytes());
        config[8..12].copy_from_slice(&MAX_SEGMENT_BYTES.to_le_bytes());
        config[12..16].copy_from_slice(&MAX_SEGMENTS.to_le_bytes());
        config[20..24].copy_from_slice(&(SECTOR_BYTES as u32).to_le_bytes());
        let there = config.get(offset..).unwrap_or_default();
        let bytes = there.iter().chain(std::iter::repeat(&0));
        into.iter_mut()
            .zip(bytes)
            .for_each(|(to, from)| *to = *from);
    }

    fn write_config(&mut self, _offset: usize, _bytes: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let unusable = |why| ActivateError::Queues {
            enabled: activation.queues.len(),
            why,
        };
        let [queue] = activation.queues.as_slice() else {
            return Err(unusable("a disk has one"));
        };
        // Checks only: the thread makes a ring of its own.
        let memory = Translation::new(activation.memory.clone());
        Ring::new(&queue.queue, activation.features, &memory)
            .map_err(|_| unusable("a ring lies outside the guest's memory"))?;
        match self.mailbox.send(Command::Start(Box::new(activation))) {
            true => Ok(()),
            false => Err(ActivateError::Host {
                what: "starting to serve a disk",
                source: io::Error::other("the disk's thread has ended"),
            }),
        }
    }

    fn reset(&mut self) {
        self.mailbox.send(Command::Stop);
    }

    fn suspend(&mut self) -> DeviceState {
        let (to, progress) = mpsc::channel();
        self.mailbox.send(Command::Suspend(to));
        DeviceState {
            queues: progress.try_iter().collect(),
            model: Model::Plain,
        }
    }

    fn resume(&mut self) {
        self.mailbox.send(Command::Resume);
    }
}

#[cfg(test)]
#[path = "device_test.rs"]
mod tests;
