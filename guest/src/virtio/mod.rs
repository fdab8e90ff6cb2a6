//! The virtio driver: memory that a device reads and writes, split rings, the modern PCI transport,
//! and the network card (virtio 1.2).
pub mod dma;
pub mod net;
pub mod ring;
pub mod transport;

/// What a device lacks, or does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// A capability, a vector, a queue that there must be.
    #[error("the device has no {0}")]
    Missing(&'static str),
    /// It did not accept our features.
    #[error("the device refused the features {0:#x}")]
    Features(u64),
    /// It did not come out of its reset.
    #[error("the device did not finish its reset")]
    Reset,
    /// A control command was not acknowledged.
    #[error("the device refused control command {class}/{command}")]
    Refused {
        /// The command's class.
        class: u8,
        /// The command.
        command: u8,
    },
    /// It did not answer in time.
    #[error("the device did not answer: {0}")]
    Silent(&'static str),
}
