//! What the transport asks of a device, and what it hands one that the driver brought up.
use std::sync::Arc;

use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use crate::GuestMemory;

/// A virtio device behind some transport.
///
/// The life of one: the driver negotiates and sets queues up; at DRIVER_OK the transport calls
/// [`VirtioDevice::activate`] with the queues that are enabled; on a write of 0 to the status,
/// [`VirtioDevice::reset`], after which it may be activated again.
pub trait VirtioDevice: Send {
    /// The virtio device id (section 5): 1 is a network card, 4 an entropy source.
    fn device_id(&self) -> u16;
    /// The PCI class code, 24 bits.
    fn pci_class(&self) -> u32;
    /// The largest size of each queue. Its length is the number of queues.
    fn queue_sizes(&self) -> &[u16];
    /// The device's own feature bits and the ring's (EVENT_IDX, INDIRECT_DESC, RING_RESET). The
    /// transport adds VERSION_1, and refuses drivers that don't take it.
    fn features(&self) -> u64;
    /// Whether the driver may have this subset of the offered features, for example because what one
    /// feature needs is there. If not, FEATURES_OK does not stay set.
    fn accepts(&self, _features: u64) -> bool {
        true
    }
    /// Reads the device-specific configuration; beyond its end there are zeroes.
    fn read_config(&self, offset: usize, into: &mut [u8]);
    /// Writes the device-specific configuration; what is read-only is left alone.
    fn write_config(&mut self, offset: usize, bytes: &[u8]);
    /// Starts to serve. The queues were checked by the transport: sizes and addresses are valid.
    /// Called only when the device is stopped; after an error it must still be.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;
    /// Stops. When it returns, no thread of the device touches the guest's memory or its queues, nor
    /// calls the [`Signals`]. Called only after an activation that succeeded, and once for each.
    fn reset(&mut self);
    /// Stops one queue, as [`VirtioDevice::reset`] does all. Only if VIRTIO_F_RING_RESET is offered;
    /// called for a queue that is served.
    fn reset_queue(&mut self, _index: u16) {}
    /// Serves a queue again that was stopped, its rings checked. Only if VIRTIO_F_RING_RESET is
    /// offered.
    fn enable_queue(&mut self, queue: EnabledQueue) -> Result<(), ActivateError> {
        let why = "the device does not know how to reset one queue";
        Err(ActivateError::Queues {
            enabled: usize::from(queue.index) + 1,
            why,
        })
    }
}

/// What a device works with from DRIVER_OK to its reset.
pub struct Activation {
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// What was negotiated; a subset of what was offered.
    pub features: u64,
    /// The queues that the driver enabled, in order of their index.
    pub queues: Vec<EnabledQueue>,
    /// How to reach the driver.
    pub signals: Arc<dyn Signals>,
}

/// A queue that the driver enabled.
pub struct EnabledQueue {
    /// Its number.
    pub index: u16,
    /// Its rings, ready; EVENT_IDX is set in it if negotiated.
    pub queue: Queue,
    /// Signalled when the driver notifies the queue; does not block. May have been signalled before.
    pub kick: EventFd,
}

/// How a device reaches its driver. Callable from any thread, without a lock; each call is an
/// eventfd's write at most.
pub trait Signals: Send + Sync {
    /// Interrupts for a queue: something was used.
    fn queue(&self, index: u16);
    /// Interrupts for a change of the configuration; counts the generation up.
    fn config(&self);
    /// Sets DEVICE_NEEDS_RESET and interrupts for it: the driver broke the protocol.
    fn needs_reset(&self);
}

/// Why a device could not start to serve.
#[derive(Debug, thiserror::Error)]
pub enum ActivateError {
    /// The driver enabled a set of queues that makes no device.
    #[error("the driver enabled {enabled} queues, of which the device can't make a whole: {why}")]
    Queues {
        /// How many.
        enabled: usize,
        /// What is missing.
        why: &'static str,
    },
    /// A thread, an eventfd or an epoll could not be had.
    #[error("{what}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// What the host said.
        source: std::io::Error,
    },
}
