//! PCI: configuration space, BARs, MSI-X, and a root that dispatches accesses.
//!
//! One bus, one function per device, memory BARs only. Configuration is reached by the ports
//! 0xCF8/0xCFC (PCI Local Bus 3.0 section 3.2.2.3.2) and by ECAM (PCI Express 5.0 section 7.2.2).
//!
//! Every access here was chosen by the guest. Three rules make it harmless:
//! - registers are bytes with a mask of writable bits, so an access of any width at any offset is
//!   defined, and changes only writable bits;
//! - [`Root`] forwards an address to a function only inside the windows that the machine gave to
//!   PCI, so that a BAR over RAM, over an interrupt controller or outside all windows has no
//!   effect;
//! - where BARs overlap, the function with the lowest number answers.
pub mod config;
mod device;
mod host_bridge;
pub mod msix;
mod root;
mod vectors;

pub use device::{Paused, PciDevice, Window};
pub use root::{PciError, Root, Windows};
pub use vectors::Vectors;
