//! A stock Linux that is saved and restored: in a machine that QEMU emulates, `slipgate run` boots it
//! with a disk and a balloon, it is saved while it counts, killed, and restored.
use super::{Client, Initramfs, Kernel};
use crate::error::Result;

/// A folder that, if it is there, has a kernel and an initramfs to boot, save and restore instead of
/// the checks.
pub const SAVED: &str = "/saved";
/// Byte of the disk at which the guest looks for an order.
pub const SAVED_ORDER_AT: u64 = 8 * 512;
/// What the host writes there for the guest to free the memory that it has used.
pub const SAVED_FREE: &[u8] = b"free";
/// What the host writes there for the guest to end.
pub const SAVED_OVER: &[u8] = b"over";
/// Port of the server that sends back what the guest says.
pub const SAVED_ECHO_PORT: u16 = 7;

const SCRIPT: &str = include_str!("saved_init.sh");
/// A network card, a disk, a source of random numbers and a balloon on PCI; and what asks the CPU what
/// it is.
const MODULES: [&str; 6] = [
    "virtio_pci",
    "virtio_net",
    "virtio_blk",
    "virtio_rng",
    "virtio_balloon",
    "cpuid",
];

/// Makes the initramfs of the guest, which counts and takes pages of the client's servers.
///
/// # Errors
/// A file can't be read.
pub fn saved_initramfs(client: &Client, kernel: &Kernel) -> Result<Vec<u8>> {
    let mut initramfs = Initramfs::of_a_guest(SCRIPT)?;
    initramfs.modules(kernel, &MODULES)?;
    let plan = format!("{}ECHO_PORT='{SAVED_ECHO_PORT}'\n", client.plan());
    initramfs.file("/plan", plan.as_bytes());
    Ok(initramfs.finish())
}

/// What the guest prints of each number.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedCount {
    /// The number, in its memory and on its disk.
    pub number: u32,
    /// Time since its boot, as its own clock has it, seconds.
    pub uptime: f64,
    /// `live` if the number came back by the connection; `ended` if that has ended.
    pub connection: String,
}

impl SavedCount {
    /// Reads a line of the console; `None` if it is another one.
    pub fn read(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [
            "counting",
            number,
            "uptime",
            uptime,
            "connection",
            connection,
        ] = words[..]
        else {
            return None;
        };
        Some(SavedCount {
            number: number.parse().ok()?,
            uptime: uptime.parse().ok()?,
            connection: connection.to_owned(),
        })
    }
}

#[cfg(test)]
#[path = "saved_test.rs"]
mod tests;
