//! The device: features, configuration space, and the commands to its thread.
use std::{
    io,
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::epoll::Epoll;

use super::{
    GUEST_CIDS, QUEUE_SIZE, RX, TX, VsockConfig, VsockCounters, VsockError,
    requests::ANSWERED_WITHIN,
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

/// The queues for the guest's packets, for those of the host, and for events.
const QUEUE_SIZES: &[u16] = &[QUEUE_SIZE, QUEUE_SIZE, QUEUE_SIZE];
/// Feature bit VIRTIO_VSOCK_F_STREAM: the device has stream sockets.
const F_STREAM: u32 = 0;

/// The virtio socket device.
pub struct Vsock {
    mailbox: Mailbox<Command>,
    worker: Option<JoinHandle<()>>,
    cid: u32,
}

impl Vsock {
    /// Starts the device's thread, which calls `threads` first.
    ///
    /// # Errors
    /// The address is reserved, or the host refuses the thread or a descriptor.
    pub fn new(
        config: VsockConfig,
        threads: &ThreadSetup,
        counters: Arc<VsockCounters>,
    ) -> Result<Vsock, VsockError> {
        Self::with(config, threads, counters, ANSWERED_WITHIN)
    }

    /// `answered_within`: time for the connector to answer a request.
    fn with(
        config: VsockConfig,
        threads: &ThreadSetup,
        counters: Arc<VsockCounters>,
        answered_within: Duration,
    ) -> Result<Vsock, VsockError> {
        let VsockConfig {
            cid,
            listener,
            connector,
        } = config;
        if !GUEST_CIDS.contains(&cid) {
            return Err(VsockError::Cid(cid));
        }
        let tried = |what| move |source| VsockError::Host { what, source };
        let (mailbox, inbox) = mailbox().map_err(tried("make an eventfd"))?;
        let worker = Worker {
            cid,
            inbox,
            listener,
            connector,
            answered_within,
            epoll: Epoll::new().map_err(tried("make an epoll"))?,
            counters,
        };
        let thread = thread::spawn("vsock", ThreadKind::Vsock, threads, || worker.run());
        Ok(Vsock {
            mailbox,
            worker: Some(thread.map_err(tried("start the vsock device's thread"))?),
            cid,
        })
    }
}

impl Drop for Vsock {
    fn drop(&mut self) {
        self.mailbox.send(Command::Exit);
        if let Some(worker) = self.worker.take() {
            // A panic of the device's thread must not panic this one.
            let _ = worker.join();
        }
    }
}

impl VirtioDevice for Vsock {
    fn device_id(&self) -> u16 {
        19
    }

    fn pci_class(&self) -> u32 {
        // A communication controller of another kind.
        0x07_80_00
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        let bits = [
            F_STREAM,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
        ];
        bits.iter().fold(0, |all, bit| all | 1 << bit)
    }

    fn read_config(&self, offset: usize, into: &mut [u8]) {
        let config = u64::from(self.cid).to_le_bytes();
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
        // Checks only: the thread makes rings of its own.
        let memory = Translation::new(activation.memory.clone());
        for index in [RX, TX] {
            let mut queues = activation.queues.iter();
            let queue = queues
                .find(|queue| queue.index == index)
                .ok_or_else(|| unusable("a vsock device needs its first two"))?;
            Ring::new(&queue.queue, activation.features, &memory)
                .map_err(|_| unusable("a ring lies outside the guest's memory"))?;
        }
        match self.mailbox.send(Command::Start(Box::new(activation))) {
            true => Ok(()),
            false => Err(ActivateError::Host {
                what: "starting to serve vsock",
                source: io::Error::other("the device's thread has ended"),
            }),
        }
    }

    fn reset(&mut self) {
        self.mailbox.send(Command::Stop);
    }

    fn suspend(&mut self) -> DeviceState {
        let (to, saved) = mpsc::channel();
        self.mailbox.send(Command::Suspend(to));
        let (queues, next_port) = saved.try_recv().unwrap_or_default();
        DeviceState {
            queues,
            model: Model::Vsock { next_port },
        }
    }

    fn resume(&mut self) {
        self.mailbox.send(Command::Resume);
    }
}

#[cfg(test)]
#[path = "device_test.rs"]
mod tests;
