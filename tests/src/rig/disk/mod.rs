//! A disk under a stock Linux: random requests of 4 KiB by Debian's own kernel and virtio-blk driver,
//! under `slipgate run` and under QEMU.
//!
//! ```text
//!  DiskWork     what the guest does: cases, and for how long each
//!  its init     slipgate-rig-init, which finds the work in /disk-work: work.rs, aio.rs
//!  DiskLine     what it says on its console
//!  DiskVmm      boots it by a VMM, and takes the VMM's CPU time while it works
//!  DiskRig      an emulated machine around that, for a host whose KVM boots no Linux
//! ```

mod aio;
mod blocks;
mod buffers;
mod case;
mod lines;
mod machine;
mod vmm;
mod work;

pub use blocks::{
    DISK_BLOCK_BYTES, count_marked_blocks, fill_disk_block, is_disk_block, make_disk_of_blocks,
};
pub use case::DiskCase;
pub use lines::{DiskFigures, DiskLine};
pub use machine::{DISK_RIG, DiskRig, DiskRigPlan, DiskRigResult};
pub use vmm::{DiskMeasured, DiskStand, DiskVmm};
pub use work::DiskWork;

use super::{Initramfs, Kernel};
use crate::error::Result;

/// A file that, if it is there, has the guest's [`DiskWork`] as JSON: then the init of the rig's machines
/// does that and nothing else.
pub const DISK_WORK: &str = "/disk-work";
/// The guest's disk, as Linux names it.
pub const DISK_DEVICE: &str = "/dev/vda";

const MODULES: [&str; 2] = ["virtio_pci", "virtio_blk"];

/// Makes the initramfs of the guest: `init` is the program `slipgate-rig-init`.
///
/// # Errors
/// The program, one of its libraries or a module of the kernel can't be read.
pub fn disk_guest_initramfs(
    init: &std::path::Path,
    kernel: &Kernel,
    work: &DiskWork,
) -> Result<Vec<u8>> {
    let mut initramfs = Initramfs::new(init)?;
    initramfs.modules(kernel, &MODULES)?;
    initramfs.file(DISK_WORK, work.to_text().as_bytes());
    Ok(initramfs.finish())
}
