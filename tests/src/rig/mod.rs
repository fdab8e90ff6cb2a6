//! Other kernels: QEMU boots one of Debian's, without hardware virtualisation, on an initramfs made
//! here, and a program of ours is its init.
//!
//! ```text
//!  Kernel      one that `cargo xtask setup` unpacked, and its modules in the order they load
//!  Initramfs   programs with the libraries they need, files, folders: uncompressed cpio
//!  Client      an initramfs that is a Linux client: Debian's busybox, and a script as its init
//!  DiskRig     a machine in which a stock Linux has a disk, by slipgate and by QEMU
//!  Machine     QEMU under TCG: console to one file, the report to another, a status at the end
//! ```
//!
//! What runs inside says lines on the second serial port ([`REPORT_DEVICE`]) and ends the machine
//! through [`EXIT_PORT`]. A kernel that panics ends it too: reboot is off.

mod audit;
mod client;
mod cpio;
mod devices;
mod disk;
mod initramfs;
mod kernel;
mod machine;
mod moved;
mod nested;
mod root_disk;
mod saved;

pub use audit::forbidden_calls;
pub use client::{Client, ClientReport, ClientServers};
pub use cpio::Archive;
pub use devices::{DEVICE_MODULES, DEVICE_TESTS};
pub use disk::{
    DISK_BLOCK_BYTES, DISK_DEVICE, DISK_RIG, DISK_WORK, DiskCase, DiskFigures, DiskLine,
    DiskMeasured, DiskRig, DiskRigPlan, DiskRigResult, DiskStand, DiskVmm, DiskWork,
    count_marked_blocks, disk_guest_initramfs, fill_disk_block, is_disk_block, make_disk_of_blocks,
};
pub use initramfs::{Initramfs, MODULES, on_path};
pub use kernel::{Kernel, Module};
pub use machine::QEMU;
pub(crate) use machine::wait;
pub use machine::{Ended, Hardware, Machine};
pub use moved::{MOVED_PLAN, Move, MoveStep, moved_plan};
pub use nested::{
    NESTED, NESTED_CPU_MODEL, NESTED_CPUS, NESTED_FIRMWARE, NESTED_MODULES, NESTED_ORDER,
    NESTED_OUTER, NestedEnd, NestedRun, NestedTraces, NestedVmm, judge,
};
pub use root_disk::{NESTED_DISK, ROOT_WITNESS, debian_userland, root_disk, root_initramfs};
pub use saved::{
    SAVED, SAVED_ECHO_PORT, SAVED_FREE, SAVED_ORDER_AT, SAVED_OVER, SavedCount, saved_initramfs,
};

/// The serial port that the report is written to.
pub const REPORT_DEVICE: &str = "/dev/ttyS1";
/// The I/O port of QEMU's `isa-debug-exit`: a byte n written to it ends QEMU with status 2n + 1.
pub const EXIT_PORT: u16 = 0xf4;
/// Value written to the exit port on success. Not 0, because QEMU exits with 1 on errors of its
/// own.
pub const WELL: u8 = 0x10;
/// Value written to the exit port on failure.
pub const FAILED: u8 = 0x11;

/// A file that, if it is there, has the command to run instead of the checks.
pub const COMMAND: &str = "/command";

#[cfg(test)]
mod tests;
