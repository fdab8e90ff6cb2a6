//! PCI: configuration space, BARs, MSI-X, and a root that dispatches accesses.
mod device;

pub use device::PciDevice;
