//! What stands in for KVM, for a device and for a guest's driver, in tests and fuzz targets.
mod device;
mod driver;
mod fabric;
pub mod hostile;

pub use device::{Device, Witness};
pub use driver::Driver;
pub use fabric::Fabric;
