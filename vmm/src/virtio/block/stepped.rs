//! The disk without its threads, one turn at a time. It is for fuzz targets: the same input always
//! has the same effect.
use std::{sync::Arc, time::Duration};

use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;

use super::{
    DiskConfig, DiskCounters, DiskError,
    device::{id, offered},
    direct::Alignment,
    file::Image,
    file_io::{self, Method},
    request::Target,
    tried,
    worker::{Requests, Serving, Worker},
};
use crate::virtio::{
    Activation, NeedsReset, Signals,
    look::Patience,
    mailbox::mailbox,
    pieces::Translation,
    ring::{Broken, Ring},
};

/// Disk whose queues are served by the caller. Operations are carried out one after the other, by
/// preadv(2), pwritev(2) and fallocate(2).
pub struct Stepped {
    image: Arc<Image>,
    counters: Arc<DiskCounters>,
    workers: Vec<Worker>,
    active: Option<Active>,
}

struct Active {
    memory: Translation,
    signals: Arc<dyn Signals>,
    write_through: bool,
    /// A ring for each worker; `None`: the queue is not enabled, or the driver broke it.
    rings: Vec<Option<Ring>>,
}

impl Stepped {
    /// Returns the disk "disk0". Its rate is not limited.
    ///
    /// # Errors
    /// The file can't be a disk, or the host refuses an eventfd.
    pub fn new(config: DiskConfig, counters: Arc<DiskCounters>) -> Result<Stepped, DiskError> {
        let queues = config.queues;
        Stepped::of(Image::new(config)?, queues, Method::Vectored, counters)
    }

    /// As [`Stepped::new`], of a file that refuses what is not aligned: memory, and places and lengths.
    ///
    /// # Errors
    /// As [`Stepped::new`], or the alignment is no power of two, or too large.
    pub fn aligned(
        config: DiskConfig,
        counters: Arc<DiskCounters>,
        [memory, block]: [u32; 2],
    ) -> Result<Stepped, DiskError> {
        let queues = config.queues;
        let image = Image::aligned(config, Some(Alignment::new(memory, block)?))?;
        Stepped::of(image, queues, Method::Strict, counters)
    }

    fn of(
        image: Image,
        queues: u16,
        method: Method,
        counters: Arc<DiskCounters>,
    ) -> Result<Stepped, DiskError> {
        let image = Arc::new(image);
        let worker = |_| {
            let (_, inbox) = mailbox().map_err(tried("make an eventfd"))?;
            Ok(Worker {
                inbox,
                image: image.clone(),
                io: file_io::new(method, &image).map_err(tried("begin"))?,
                id: id(0),
                counters: counters.clone(),
                limiter: None,
                patience: Patience::new(Duration::ZERO),
                requests: Requests::of(&image).map_err(tried("make buffers"))?,
            })
        };
        Ok(Stepped {
            workers: (0..queues).map(worker).collect::<Result<_, DiskError>>()?,
            image,
            counters,
            active: None,
        })
    }

    /// Returns the offered features.
    pub fn features(&self) -> u64 {
        offered(&self.image, self.workers.len())
    }

    /// Begins to serve these queues, in place of those before.
    ///
    /// # Errors
    /// The rings of a queue are invalid.
    pub fn activate(&mut self, activation: Activation) -> Result<(), NeedsReset> {
        self.reset();
        let memory = Translation::new(activation.memory);
        let mut rings: Vec<_> = self.workers.iter().map(|_| None).collect();
        for queue in &activation.queues {
            let mut ring = Ring::of(queue, activation.features, &memory)?;
            ring.quiet();
            *rings.get_mut(usize::from(queue.index)).ok_or(NeedsReset)? = Some(ring);
        }
        let driver_flushes = activation.features & 1 << VIRTIO_BLK_F_FLUSH != 0;
        self.active = Some(Active {
            memory,
            signals: activation.signals,
            write_through: self.image.is_write_through(driver_flushes),
            rings,
        });
        Ok(())
    }

    /// Takes the next request of a queue and carries it out. Returns whether there was one.
    ///
    /// # Errors
    /// The driver broke the ring. The queue is not served any more.
    pub fn turn(&mut self, queue: u16) -> Result<bool, NeedsReset> {
        self.serve(queue, |worker, serving| Ok(worker.turn(serving)?.0))
    }

    /// Takes the next request of a queue, begins it, and pauses before its end. Returns whether there
    /// was one. If a part of it is left to do it waits as the first, to be begun anew.
    ///
    /// # Errors
    /// As [`Stepped::turn`].
    pub fn pause(&mut self, queue: u16) -> Result<bool, NeedsReset> {
        self.serve(queue, |worker, serving| {
            let (taken, _) = worker.take(serving)?;
            worker.settle(serving);
            Ok(taken)
        })
    }

    fn serve(
        &mut self,
        queue: u16,
        step: impl FnOnce(&mut Worker, &mut Serving) -> Result<bool, Broken>,
    ) -> Result<bool, NeedsReset> {
        let index = usize::from(queue);
        let (Some(active), Some(worker)) = (&mut self.active, self.workers.get_mut(index)) else {
            return Ok(false);
        };
        let Some(ring) = active.rings[index].take() else {
            return Ok(false);
        };
        let id = worker.id;
        let mut serving = Serving {
            ring,
            memory: &active.memory,
            queue,
            signals: &*active.signals,
            target: Target {
                image: &self.image,
                id: &id,
                write_through: active.write_through,
                counters: &self.counters,
            },
        };
        match step(worker, &mut serving) {
            Ok(worked) => {
                active.rings[index] = Some(serving.ring);
                Ok(worked)
            }
            Err(broken) => {
                worker.abandon();
                Err(broken.into())
            }
        }
    }

    /// Returns the number of requests that were taken and not answered.
    pub fn under_way(&self) -> usize {
        let workers = self.workers.iter();
        workers.map(|worker| worker.requests.under_way()).sum()
    }

    /// Serves no more.
    pub fn reset(&mut self) {
        self.workers.iter_mut().for_each(Worker::abandon);
        self.active = None;
    }
}
