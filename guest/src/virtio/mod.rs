//! The virtio driver: memory that a device reads and writes, split rings, the modern PCI transport,
//! the network card, the disk, the socket device and the balloon (virtio 1.2).
pub mod balloon;
pub mod block;
pub mod dma;
pub mod net;
pub mod ring;
pub mod transport;
pub mod vsock;

/// Device that lacks something the driver needs, or that behaves wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device has no such capability, vector, queue or feature.
    #[error("the device has no {0}")]
    Missing(&'static str),
    /// The device did not accept the driver's features.
    #[error("the device refused the features {0:#x}")]
    Features(u64),
    /// The device did not complete its reset.
    #[error("the device did not finish its reset")]
    Reset,
    /// The device refused a control command.
    #[error("the device refused control command {class}/{command}")]
    Refused {
        /// Class of the command.
        class: u8,
        /// Number of the command in its class.
        command: u8,
    },
    /// The device did not answer in time.
    #[error("the device did not answer: {0}")]
    Silent(&'static str),
}
