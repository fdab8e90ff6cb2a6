//! Stand-ins for KVM, for a device and for a guest's driver, for tests and fuzz targets.
mod device;
mod driver;
mod fabric;
pub mod hostile;

pub use device::{Device, Witness};
pub use driver::Driver;
pub use fabric::Fabric;
