//! Loads a kernel into guest memory, with the structures that its first instructions need.
//!
//! Theory of operation. The file's format decides the boot protocol:
//!
//! | file | entry | handed over |
//! | --- | --- | --- |
//! | bzImage | its 64-bit entry: 512 bytes into the loaded code | `boot_params` in RSI |
//! | ELF with a Xen PHYS32_ENTRY note (PVH) | the note's address, 32-bit, no paging | `hvm_start_info` in EBX |
//! | other ELF (vmlinux) | `e_entry`, 64-bit | `boot_params` in RSI |
//!
//! The structures handed over lie in low RAM at the addresses of [`crate::layout`]. Kernels go to 1
//! MiB and above, an initrd as high as the kernel accepts. Both protocols hand over the address of
//! the RSDP, [`crate::layout::RSDP`]: [`crate::acpi::write`] must put one there.
//!
//! A file may contain anything: an invalid one is refused with an error.
//! Sources: Linux, Documentation/arch/x86/boot.rst; Xen, docs/misc/pvh.pandoc and
//! public/arch-x86/hvm/start_info.h.
mod bzimage;
mod elf;
mod error;
mod image;
mod initrd;
mod linux;
mod memory_map;
mod pvh;
pub mod registers;

use std::fs::File;

use vm_memory::{Bytes, GuestAddress};

use crate::{
    GuestMemory,
    layout::{self, Window},
    memory,
};
pub use error::{BootError, BootInput};
use image::Image;
pub use memory_map::{MemoryKind, memory_map};

/// Longest command line for an ELF kernel, in bytes without the NUL: the limit of Linux on x86. A
/// bzImage states its own limit.
pub const MAX_COMMAND_LINE: usize = 2047;

/// Kernel, initrd and command line of a machine.
#[derive(Debug)]
pub struct BootSource {
    /// Image of the kernel.
    pub kernel: Kernel,
    /// Initial RAM disk, loaded unchanged.
    pub initrd: Option<File>,
    /// Command line of the kernel, without a NUL.
    pub cmdline: String,
}

/// Source of a kernel image.
#[derive(Debug)]
pub enum Kernel {
    /// Regular file: bzImage or ELF.
    File(File),
    /// Image that is part of this program.
    Bytes(&'static [u8]),
}

/// State of the first CPU at the kernel's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// 64-bit mode, first 4 GiB mapped to themselves, `boot_params` in RSI.
    Linux64,
    /// 32-bit protected mode without paging, `hvm_start_info` in EBX.
    Pvh,
}

/// Kernel that has been loaded into guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Address of the kernel's first instruction.
    pub entry: GuestAddress,
    /// State in which the first CPU enters the kernel.
    pub protocol: Protocol,
    /// Address of `boot_params` or `hvm_start_info`.
    pub boot_info: GuestAddress,
    /// RAM that the kernel occupies, including the space it decompresses itself into.
    pub kernel: Window,
    /// Address range of the initrd; `None` without one.
    pub initrd: Option<Window>,
}

/// Result of a format's loader: where the kernel lies, and its limits.
struct Placed {
    entry: u64,
    protocol: Protocol,
    /// RAM that the kernel occupies, including the space it decompresses itself into.
    taken: Window,
    /// Last address that an initrd may use.
    initrd_last: u64,
    max_command_line: usize,
    /// Setup header of a bzImage, which is copied to `boot_params`.
    header: Option<linux_loader::bootparam::setup_header>,
}

/// Loads kernel, initrd and command line into `memory`, and writes the structures that the kernel
/// needs. The memory must be all zeroes.
///
/// # Errors
/// A file can't be read, is no supported kernel, or does not fit the memory.
pub fn load(memory: &GuestMemory, source: &BootSource) -> Result<Loaded, BootError> {
    let image = match &source.kernel {
        Kernel::File(file) => Image::of_file(file)?,
        Kernel::Bytes(bytes) => Image::of_bytes(bytes),
    };
    load_image(memory, &image, source.initrd.as_ref(), &source.cmdline)
}

/// Does what [`load`] does for an image in memory, for instance one from a fuzzer.
///
/// # Errors
/// As [`load`].
pub fn load_bytes(
    memory: &GuestMemory,
    kernel: &[u8],
    initrd: Option<&File>,
    cmdline: &str,
) -> Result<Loaded, BootError> {
    load_image(memory, &Image::of_bytes(kernel), initrd, cmdline)
}

fn load_image(
    memory: &GuestMemory,
    image: &Image<'_>,
    initrd: Option<&File>,
    cmdline: &str,
) -> Result<Loaded, BootError> {
    let placed = if elf::is_elf(image) {
        elf::load(memory, image)?
    } else if bzimage::is_bzimage(image) {
        bzimage::load(memory, image)?
    } else {
        return Err(BootError::UnknownFormat);
    };
    write_command_line(memory, cmdline, placed.max_command_line)?;
    let initrd = initrd
        .map(|file| initrd::load(memory, file, &placed))
        .transpose()?;
    registers::write_gdt(memory, placed.protocol)?;
    let map = memory_map(memory::total_bytes(memory));
    let boot_info = match placed.protocol {
        Protocol::Linux64 => linux::write(memory, &placed, initrd, cmdline.len(), &map)?,
        Protocol::Pvh => pvh::write(memory, initrd, &map)?,
    };
    Ok(Loaded {
        entry: GuestAddress(placed.entry),
        protocol: placed.protocol,
        boot_info,
        kernel: placed.taken,
        initrd,
    })
}

fn write_command_line(memory: &GuestMemory, line: &str, limit: usize) -> Result<(), BootError> {
    let limit = limit.min(layout::COMMAND_LINE.size as usize - 1);
    if line.len() > limit {
        return Err(BootError::CommandLineLength {
            bytes: line.len(),
            limit,
        });
    }
    if line.contains('\0') {
        return Err(BootError::CommandLineNul);
    }
    let mut bytes = line.as_bytes().to_vec();
    bytes.push(0);
    memory
        .write_slice(&bytes, GuestAddress(layout::COMMAND_LINE.start))
        .map_err(|e| BootError::write("the command line", e))
}

#[cfg(test)]
mod tests;
