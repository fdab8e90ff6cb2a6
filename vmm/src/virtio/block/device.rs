//! The device: features, configuration space, and the commands to its thread.
use std::{
    io,
    sync::{Arc, Mutex, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use virtio_bindings::{
    virtio_blk::{
        VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
        VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
    },
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};

use super::{
    DiskConfig, DiskCounters, DiskError, MAX_QUEUES, MAX_RANGE_BYTES, MAX_SEGMENT_BYTES,
    MAX_SEGMENTS, QUEUE_SIZE, SECTOR_BYTES,
    file::Image,
    file_io::{self, Method},
    request::ID_BYTES,
    tried,
    worker::{Command, Requests, Start, Worker},
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
        rate::{Limiter, RateConfig},
        ring::Ring,
    },
};

/// Bytes of `struct virtio_blk_config` up to those of write-zeroes (virtio 1.2, section 5.2.4).
const CONFIG_BYTES: usize = 60;
/// Longest look for the next request. A guest that waits for each answer takes some 10 to 50 µs until
/// it asks again. For one that takes longer a look costs more CPU time than the wakeup it spares.
const LONGEST_LOOK: Duration = Duration::from_micros(50);

/// The virtio block device.
pub struct Disk {
    /// A thread for each queue.
    workers: Vec<QueueThread>,
    queue_sizes: Vec<u16>,
    image: Arc<Image>,
}

/// A queue's thread, and the way to it.
struct QueueThread {
    mailbox: Mailbox<Command>,
    thread: Option<JoinHandle<()>>,
}

impl Disk {
    /// Starts the threads of the disk's queues, each of which calls `threads` first. `number`: the
    /// disk's place among the machine's, for the name that a guest can ask for.
    ///
    /// # Errors
    /// The file can't be a disk, the number of queues is impossible, or the host refuses a thread or
    /// an eventfd.
    pub fn new(
        number: usize,
        config: DiskConfig,
        threads: &ThreadSetup,
        counters: Arc<DiskCounters>,
    ) -> Result<Disk, DiskError> {
        let (queues, rate) = (config.queues, config.rate);
        let image = Image::new(config)?;
        let patience = || Patience::new(LONGEST_LOOK);
        let how = (Method::Auto, &patience as _);
        Disk::with(number, image, (queues, rate), threads, counters, how)
    }

    fn with(
        number: usize,
        image: Image,
        (queues, rate): (u16, RateConfig),
        threads: &ThreadSetup,
        counters: Arc<DiskCounters>,
        (method, patience): (Method, &dyn Fn() -> Patience),
    ) -> Result<Disk, DiskError> {
        if !(1..=MAX_QUEUES).contains(&queues) {
            return Err(DiskError::Queues(queues));
        }
        let image = Arc::new(image);
        let limiter =
            Limiter::new(rate, Instant::now()).map(|limiter| Arc::new(Mutex::new(limiter)));
        let mut workers = Vec::new();
        for queue in 0..queues {
            let (mailbox, inbox) = mailbox().map_err(tried("make an eventfd"))?;
            let io = file_io::new(method, &image).map_err(tried("make an io_uring"))?;
            let worker = Worker {
                inbox,
                image: image.clone(),
                io,
                id: id(number),
                counters: counters.clone(),
                limiter: limiter.clone(),
                patience: patience(),
                requests: Requests::of(&image).map_err(tried("make buffers"))?,
            };
            let name = format!("disk{number}-{queue}");
            let thread = thread::spawn(&name, ThreadKind::Disk, threads, || worker.run());
            workers.push(QueueThread {
                mailbox,
                thread: Some(thread.map_err(tried("start a thread of the disk"))?),
            });
        }
        Ok(Disk {
            workers,
            queue_sizes: vec![QUEUE_SIZE; usize::from(queues)],
            image,
        })
    }

    /// Sends a command to each thread, and waits until all have carried it out.
    fn tell(&self, command: impl Fn() -> Command) {
        for worker in &self.workers {
            worker.mailbox.send(command());
        }
    }
}

/// Returns the features that a disk of so many queues offers.
pub(super) fn offered(image: &Image, queues: usize) -> u64 {
    let mut bits = vec![
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_RING_F_INDIRECT_DESC,
    ];
    if image.offers_flush() {
        bits.push(VIRTIO_BLK_F_FLUSH);
    }
    match image.is_read_only() {
        true => bits.push(VIRTIO_BLK_F_RO),
        false => bits.extend([VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES]),
    }
    if queues > 1 {
        bits.push(VIRTIO_BLK_F_MQ);
    }
    bits.iter().fold(0, |all, bit| all | 1 << bit)
}

/// Returns the name of a disk that a guest can ask for.
pub(super) fn id(number: usize) -> [u8; ID_BYTES] {
    let mut id = [0; ID_BYTES];
    id.iter_mut()
        .zip(format!("disk{number}").bytes())
        .for_each(|(to, from)| *to = from);
    id
}

impl Drop for QueueThread {
    fn drop(&mut self) {
        self.mailbox.send(Command::Exit);
        if let Some(thread) = self.thread.take() {
            // A panic of the device's thread must not panic this one.
            let _ = thread.join();
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
        &self.queue_sizes
    }

    fn features(&self) -> u64 {
        offered(&self.image, self.workers.len())
    }

    fn read_config(&self, offset: usize, into: &mut [u8]) {
        let mut config = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| config[at..][..bytes.len()].copy_from_slice(bytes);
        put(0, &self.image.sectors().to_le_bytes());
        put(8, &MAX_SEGMENT_BYTES.to_le_bytes());
        put(12, &MAX_SEGMENTS.to_le_bytes());
        put(20, &(self.image.block() as u32).to_le_bytes());
        put(34, &(self.workers.len() as u16).to_le_bytes());
        // Most sectors and ranges of a discard, its alignment, those of zeroes, and that zeroes may
        // give their place back.
        let sectors = (MAX_RANGE_BYTES / SECTOR_BYTES) as u32;
        let block = (self.image.block() / SECTOR_BYTES) as u32;
        for (at, number) in [(36, sectors), (40, 1), (44, block), (48, sectors), (52, 1)] {
            put(at, &number.to_le_bytes());
        }
        put(56, &[1]);
        let there = config.get(offset..).unwrap_or_default();
        let bytes = there.iter().chain(std::iter::repeat(&0));
        into.iter_mut()
            .zip(bytes)
            .for_each(|(to, from)| *to = *from);
    }

    fn write_config(&mut self, _offset: usize, _bytes: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            features,
            queues,
            signals,
            ..
        } = activation;
        let enabled = queues.len();
        let unusable = |why| ActivateError::Queues { enabled, why };
        if queues.is_empty() {
            return Err(unusable("a disk has one at least"));
        }
        // Checks only: the threads make rings of their own.
        let checked = Translation::new(memory.clone());
        for queue in &queues {
            if usize::from(queue.index) >= self.workers.len() {
                return Err(unusable("the disk has fewer"));
            }
            Ring::new(&queue.queue, features, &checked)
                .map_err(|_| unusable("a ring lies outside the guest's memory"))?;
        }
        let driver_flushes = features & 1 << VIRTIO_BLK_F_FLUSH != 0;
        for queue in queues {
            let worker = &self.workers[usize::from(queue.index)];
            let start = Command::Start(Box::new(Start {
                memory: memory.clone(),
                features,
                queue,
                signals: signals.clone(),
                write_through: self.image.is_write_through(driver_flushes),
            }));
            if !worker.mailbox.send(start) {
                self.tell(|| Command::Stop);
                return Err(ActivateError::Host {
                    what: "starting to serve a disk",
                    source: io::Error::other("a thread of the disk has ended"),
                });
            }
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.tell(|| Command::Stop);
    }

    fn suspend(&mut self) -> DeviceState {
        let (to, progress) = mpsc::channel();
        self.tell(|| Command::Suspend(to.clone()));
        let block_bytes = self.image.block() as u32;
        DeviceState {
            queues: progress.try_iter().collect(),
            model: match block_bytes > SECTOR_BYTES as u32 {
                true => Model::Disk { block_bytes },
                false => Model::Plain,
            },
        }
    }

    fn mismatch(&self, state: &DeviceState) -> Option<String> {
        let known = match state.model {
            Model::Disk { block_bytes } => block_bytes.into(),
            _ => SECTOR_BYTES,
        };
        let block = self.image.block();
        (block > known).then(|| {
            format!(
                "its driver knows a disk with blocks of {known} bytes, and direct transfers of this \
                 file take {block}: give one with such blocks, or another cache mode"
            )
        })
    }

    fn resume(&mut self) {
        self.tell(|| Command::Resume);
    }
}

#[cfg(test)]
#[path = "device_test.rs"]
mod tests;
