//! Interface between a virtio transport and a device.
use std::sync::Arc;

use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use crate::{
    GuestMemory,
    snapshot::{DeviceState, Model},
};

/// A virtio device behind some transport.
///
/// Life cycle: the driver negotiates features and configures queues. At DRIVER_OK the transport
/// calls [`VirtioDevice::activate`] with the enabled queues. On a write of 0 to the status it calls
/// [`VirtioDevice::reset`], after which the device may be activated again. While the machine is
/// paused, an active device is suspended: [`VirtioDevice::suspend`] is followed by
/// [`VirtioDevice::resume`] or [`VirtioDevice::reset`].
pub trait VirtioDevice: Send {
    /// Returns the virtio device id (section 5): 1 is a network card, 4 an entropy source.
    fn device_id(&self) -> u16;
    /// Returns the PCI class code, 24 bits.
    fn pci_class(&self) -> u32;
    /// Returns the largest size of each queue. The slice's length is the number of queues.
    fn queue_sizes(&self) -> &[u16];
    /// Returns the offered feature bits of the device and of the ring (EVENT_IDX, INDIRECT_DESC,
    /// RING_RESET). The transport adds VERSION_1, and refuses drivers that don't accept it.
    fn features(&self) -> u64;
    /// Returns whether the driver may select this subset of the offered features, for example
    /// because all features that one depends on are in it. If not, FEATURES_OK does not stay set.
    fn accepts(&self, _features: u64) -> bool {
        true
    }
    /// Reads the device-specific configuration. Bytes beyond its end read as zeroes.
    fn read_config(&self, offset: usize, into: &mut [u8]);
    /// Writes the device-specific configuration. Read-only fields are left unchanged.
    fn write_config(&mut self, offset: usize, bytes: &[u8]);
    /// Starts to serve. The transport has checked the queues: sizes and addresses are valid. Called
    /// only when the device is stopped.
    ///
    /// # Errors
    /// The device can't serve these queues, or the host refuses a resource. The device is still
    /// stopped then.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;
    /// Stops. When it returns, no thread of the device touches the guest's memory or its queues,
    /// nor calls the [`Signals`]. Called once after each activation that succeeded.
    fn reset(&mut self);
    /// Rests: when it returns, no thread of the device touches the guest's memory or its queues, and
    /// no request is under way. Connections with the host stay. Returns what a snapshot says of the
    /// device; queues that it can't serve any more are not among its queues. Called only while the
    /// device is active.
    fn suspend(&mut self) -> DeviceState;
    /// Returns why a driver that knows a device in this state can't go on with this one; `None`: it
    /// can. The transport has looked at features and queues.
    fn mismatch(&self, _state: &DeviceState) -> Option<String> {
        None
    }
    /// Goes on where [`VirtioDevice::suspend`] left it.
    fn resume(&mut self);
    /// Returns whether another process signals the driver for its queues, by [`Signals::line`].
    fn is_signalled_by_others(&self) -> bool {
        false
    }
    /// The driver has given a queue another vector while the device is active.
    fn vector_changed(&mut self, _index: u16) {}
    /// Stops one queue as [`VirtioDevice::reset`] stops all. Called only if VIRTIO_F_RING_RESET is
    /// offered, and for a queue that is served.
    fn reset_queue(&mut self, _index: u16) {}
    /// Serves a stopped queue again. The transport has checked its rings. Called only if
    /// VIRTIO_F_RING_RESET is offered.
    ///
    /// # Errors
    /// The device can't serve the queue.
    fn enable_queue(&mut self, queue: EnabledQueue) -> Result<(), ActivateError> {
        let why = "the device does not know how to reset one queue";
        Err(ActivateError::Queues {
            enabled: usize::from(queue.index) + 1,
            why,
        })
    }
}

/// Resources of an active device, valid from DRIVER_OK to its reset.
pub struct Activation {
    /// Memory of the guest.
    pub memory: Arc<GuestMemory>,
    /// Negotiated features, a subset of the offered ones.
    pub features: u64,
    /// Queues that the driver enabled, in order of their index.
    pub queues: Vec<EnabledQueue>,
    /// Signals to the driver.
    pub signals: Arc<dyn Signals>,
    /// State of the saved device; `None` for a device that a driver activates.
    pub restored: Option<Model>,
}

/// Queue that the driver enabled.
pub struct EnabledQueue {
    /// Index of the queue.
    pub index: u16,
    /// Rings of the queue, ready for use. EVENT_IDX is set if it was negotiated.
    pub queue: Queue,
    /// Eventfd that is signalled when the driver notifies the queue. It is non-blocking, and may
    /// have been signalled before.
    pub kick: EventFd,
    /// Chains that the device had taken and not given back when it was saved, by their first
    /// descriptors. It takes them again before others.
    pub taken: Vec<u16>,
}

/// Signals of a device to its driver. Any thread may call them, without a lock. Each call is one
/// eventfd write at most.
pub trait Signals: Send + Sync {
    /// Interrupts for a queue that has used buffers.
    fn queue(&self, index: u16);
    /// Returns the eventfd that interrupts for a queue, for another process to signal; `None`: the
    /// driver wants no interrupts for it, or there is no such eventfd.
    fn line(&self, _index: u16) -> Option<&EventFd> {
        None
    }
    /// Interrupts for a change of the configuration, and increments the configuration generation.
    fn config(&self);
    /// Sets DEVICE_NEEDS_RESET and interrupts for it: the driver violated the protocol.
    fn needs_reset(&self);
}

/// Error of a device that is served without its threads: the driver broke a ring.
#[cfg(any(test, feature = "fake"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeedsReset;

#[cfg(any(test, feature = "fake"))]
impl From<super::ring::Broken> for NeedsReset {
    fn from(_: super::ring::Broken) -> NeedsReset {
        NeedsReset
    }
}

/// Reason why a device could not be activated.
#[derive(Debug, thiserror::Error)]
pub enum ActivateError {
    /// The driver enabled a set of queues with which the device can't work.
    #[error("the driver enabled {enabled} queues, of which the device can't make a whole: {why}")]
    Queues {
        /// Number of enabled queues.
        enabled: usize,
        /// Reason as text, for the log.
        why: &'static str,
    },
    /// The host refused a thread, an eventfd or another resource.
    #[error("{what}")]
    Host {
        /// Operation that was tried.
        what: &'static str,
        /// Error from the host.
        source: std::io::Error,
    },
}
