//! KVM: the VM with its in-kernel interrupt controllers, the routes from eventfds to MSIs, and
//! the eventfds behind guest addresses.
mod doorbells;
mod error;
mod msr_filter;
mod routes;
mod state;
mod vm;

pub(crate) use doorbells::KvmDoorbells;
pub use error::KvmError;
pub(crate) use routes::GsiRoutes;
pub(crate) use state::{restore, save};
pub use vm::{Checked, check};
pub(crate) use vm::{create, open};

#[cfg(test)]
mod fabric_test;
