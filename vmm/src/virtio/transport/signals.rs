//! State that vCPUs and the device's threads share: the status, the vectors' numbers, the ISR byte.
//! All of it is atomic; no thread of the device ever takes the function's lock.
use std::sync::{
    Arc,
    atomic::{
        AtomicU8, AtomicU16,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
};

use vmm_sys_util::eventfd::EventFd;

use super::{counters::TransportCounters, counters::count, status};
use crate::{pci::Vectors, virtio::Signals};

/// Vector number for no vector, VIRTIO_MSI_NO_VECTOR (section 4.1.5.1.2).
pub(super) const NO_VECTOR: u16 = 0xffff;

/// ISR status: a queue was used.
pub(super) const ISR_QUEUE: u8 = 1;
/// ISR status: the configuration changed.
pub(super) const ISR_CONFIG: u8 = 2;

/// Shared state of one device.
pub(super) struct Shared {
    pub(super) status: AtomicU8,
    generation: AtomicU8,
    isr: AtomicU8,
    config_vector: AtomicU16,
    queue_vectors: Box<[AtomicU16]>,
    vectors: Arc<Vectors>,
    counters: Arc<TransportCounters>,
}

impl Shared {
    pub(super) fn new(
        queues: usize,
        vectors: Arc<Vectors>,
        counters: Arc<TransportCounters>,
    ) -> Self {
        Self {
            status: AtomicU8::new(0),
            generation: AtomicU8::new(0),
            isr: AtomicU8::new(0),
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            vectors,
            counters,
        }
    }

    pub(super) fn status(&self) -> u8 {
        self.status.load(Acquire)
    }

    pub(super) fn generation(&self) -> u8 {
        self.generation.load(Acquire)
    }

    /// Reads the ISR status, which clears it.
    pub(super) fn take_isr(&self) -> u8 {
        self.isr.swap(0, AcqRel)
    }

    pub(super) fn config_vector(&self) -> u16 {
        self.config_vector.load(Relaxed)
    }

    /// Sets the vector for configuration changes. A vector that does not exist becomes NO_VECTOR,
    /// which the driver sees when it reads the register back.
    pub(super) fn set_config_vector(&self, vector: u16) {
        self.config_vector.store(self.existing(vector), Release);
    }

    pub(super) fn queue_vector(&self, queue: u16) -> u16 {
        let vector = self.queue_vectors.get(usize::from(queue));
        vector.map_or(NO_VECTOR, |vector| vector.load(Relaxed))
    }

    pub(super) fn set_queue_vector(&self, queue: u16, vector: u16) {
        if let Some(of_queue) = self.queue_vectors.get(usize::from(queue)) {
            of_queue.store(self.existing(vector), Release);
        }
    }

    fn existing(&self, vector: u16) -> u16 {
        if usize::from(vector) < self.vectors.count() {
            vector
        } else {
            NO_VECTOR
        }
    }

    /// Returns the ISR status, without clearing it.
    pub(super) fn isr(&self) -> u8 {
        self.isr.load(Acquire)
    }

    /// Sets status, configuration generation and ISR status, those of a snapshot. No thread signals.
    pub(super) fn restore(&self, status: u8, generation: u8, isr: u8) {
        self.status.store(status, Release);
        self.generation.store(generation, Release);
        self.isr.store(isr, Release);
    }

    /// Signals each vector in use once: an interrupt may have been under way when the machine was
    /// saved.
    pub(super) fn signal_all(&self) {
        for vector in self.queue_vectors.iter().chain([&self.config_vector]) {
            self.vectors.signal(vector.load(Acquire));
        }
    }

    /// Restores the state at power-on. The device is stopped, so no thread signals.
    pub(super) fn reset(&self) {
        self.config_vector.store(NO_VECTOR, Release);
        for vector in &self.queue_vectors {
            vector.store(NO_VECTOR, Release);
        }
        self.isr.store(0, Release);
        self.status.store(0, Release);
    }

    fn set_isr(&self, bit: u8) {
        // With MSI-X no driver reads the ISR status. It is read before it is written, so that
        // queues don't contend for the cache line.
        if self.isr.load(Relaxed) & bit == 0 {
            self.isr.fetch_or(bit, AcqRel);
        }
    }
}

impl Signals for Shared {
    fn line(&self, index: u16) -> Option<&EventFd> {
        self.vectors.line(self.queue_vector(index))
    }

    fn queue(&self, index: u16) {
        self.set_isr(ISR_QUEUE);
        if let Some(vector) = self.queue_vectors.get(usize::from(index)) {
            // NO_VECTOR is no vector that exists.
            self.vectors.signal(vector.load(Acquire));
        }
    }

    fn config(&self) {
        self.generation.fetch_add(1, AcqRel);
        self.set_isr(ISR_CONFIG);
        self.vectors.signal(self.config_vector.load(Acquire));
    }

    fn needs_reset(&self) {
        let before = self.status.fetch_or(status::NEEDS_RESET, AcqRel);
        if before & status::NEEDS_RESET == 0 {
            count(&self.counters.needs_reset);
            if before & status::DRIVER_OK != 0 {
                self.config();
            }
        }
    }
}
