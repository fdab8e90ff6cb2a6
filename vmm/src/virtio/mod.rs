//! Virtio devices (OASIS virtio 1.2), and their transport over PCI.
pub mod balloon;
pub mod block;
mod device;
mod look;
mod mailbox;
pub mod net;
mod pieces;
pub mod rate;
mod restricted_ring;
mod ring;
pub mod rng;
pub mod transport;
pub mod vsock;

#[cfg(any(test, feature = "fake"))]
pub use device::NeedsReset;
pub use device::{ActivateError, Activation, EnabledQueue, Signals, VirtioDevice};

#[cfg(test)]
mod hostile_driver_test;
