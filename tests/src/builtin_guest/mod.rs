//! Runs of the built-in guest, under `slipgate run`, under QEMU with QEMU's own networks, and under
//! other VMMs. The guest prints its measurements as JSON lines on its console.

mod disk_image;
mod firecracker;
mod other_vmms;
mod output;
mod qemu;
mod socket_network;
mod under_slipgate;

use std::{env, path::PathBuf, time::Duration};

pub use disk_image::{check_disk_image, check_room_in_memory, disk_image, disk_image_in_memory};
pub use firecracker::{Firecracker, FirecrackerSnapshot, JAILER, jailer, run_jailed};
pub use other_vmms::OtherVmm;
pub use output::GuestOutput;
pub use qemu::{Accelerator, Device, Network, Qemu};
pub use socket_network::{Passage, SocketNetwork};
pub use under_slipgate::SlipgateRun;

use crate::{
    error::{Error, Result},
    netns::NetNs,
};

/// Guest to boot, and the namespace of its VMM.
#[derive(Clone, Debug)]
pub struct Boot<'a> {
    /// Namespace in which the VMM runs.
    pub namespace: &'a NetNs,
    /// Workloads of the guest, on its command line.
    pub command_line: &'a str,
    /// Number of virtual CPUs, and of queue pairs.
    pub cpus: u8,
    /// Memory of the guest, MiB.
    pub memory_mib: u32,
    /// Time after which it is ended.
    pub timeout: Duration,
}

impl<'a> Boot<'a> {
    /// Two CPUs, 128 MiB and a minute.
    pub fn new(namespace: &'a NetNs, command_line: &'a str) -> Self {
        Boot {
            namespace,
            command_line,
            cpus: 2,
            memory_mib: 128,
            timeout: Duration::from_secs(60),
        }
    }
}

/// Returns the path of the guest's image: `$SLIPGATE_GUEST_DIR/slipgate-guest`, or that in the
/// workspace's target directory.
///
/// # Errors
/// The file does not exist.
pub fn image() -> Result<PathBuf> {
    let built = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/guest");
    let folder = env::var_os("SLIPGATE_GUEST_DIR").map_or_else(|| built.into(), PathBuf::from);
    let image = folder.join("slipgate-guest");
    match image.is_file() {
        true => Ok(image),
        false => Err(Error::Missing(format!(
            "there is no guest at {}: run `cargo xtask build`, or set SLIPGATE_GUEST_DIR",
            image.display()
        ))),
    }
}
