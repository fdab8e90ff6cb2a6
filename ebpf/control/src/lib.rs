//! Control of the kernel side: loads the BPF programs, pins them and their maps, attaches them,
//! makes devices, and follows links, routes and neighbours. Packets do not pass through this crate.

pub mod attach;
mod bpf;
mod bpf_log;
pub mod btf;
pub mod device;
mod error;
mod fingerprint;
pub mod guest_tap;
pub mod host;
pub mod layout;
pub mod load;
mod lock;
pub mod maps;
pub mod netlink;
pub mod object;
pub mod owner;
pub mod paths;
pub mod pins;
pub mod probe;
pub mod serve;
pub mod tap;
pub mod users;
pub mod vm;
mod vm_rows;

pub use attach::{Hook, Program, XdpMode};
pub use bpf_log::BpfLog;
pub use error::{Error, Result};
pub use load::{Datapath, LoadOptions};
pub use maps::{ReadOnlyMaps, SharedMaps};
pub use netlink::{Network, NetworkWatch, NextHops};
pub use owner::Owner;
pub use paths::Paths;
pub use users::Users;

#[cfg(test)]
mod testing;
