//! Puts a kernel into the guest's memory, with what its first instructions expect to find.
//!
//! Theory of operation. What the file is decides the protocol:
//!
//! | file | entry | handed over |
//! | --- | --- | --- |
//! | bzImage | its 64-bit entry: 512 bytes into the loaded code | `boot_params` in RSI |
//! | ELF with a Xen PHYS32_ENTRY note (PVH) | the note's address, 32-bit, no paging | `hvm_start_info` in EBX |
//! | other ELF (vmlinux) | `e_entry`, 64-bit | `boot_params` in RSI |
//!
//! All that is handed over lies in low RAM at the addresses of [`crate::layout`]; kernels go to
//! 1 MiB and above, an initrd as high as the kernel can take it. Both forms of hand-over name the
//! RSDP at [`crate::layout::RSDP`]: [`crate::acpi::write`] has to put one there.
//!
//! A file may be anything: what does not fit is an error that says so.
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

/// Longest command line for an ELF kernel, in bytes without the NUL: what Linux takes on x86. A
/// bzImage says its own limit.
pub const MAX_COMMAND_LINE: usize = 2047;

/// What to boot.
#[derive(Debug)]
pub struct BootSource {
    /// The kernel.
    pub kernel: Kernel,
    /// An initial RAM disk, handed on as it is.
    pub initrd: Option<File>,
    /// The kernel's command line, without a NUL.
    pub cmdline: String,
}

/// Where a kernel image comes from.
#[derive(Debug)]
pub enum Kernel {
    /// A regular file: bzImage or ELF.
    File(File),
    /// An image that is part of this program.
    Bytes(&'static [u8]),
}

/// In which state the first CPU enters the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// 64-bit mode, first 4 GiB mapped to themselves, `boot_params` in RSI.
    Linux64,
    /// 32-bit protected mode without paging, `hvm_start_info` in EBX.
    Pvh,
}

/// A kernel that lies ready in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Its first instruction.
    pub entry: GuestAddress,
    /// How it is entered.
    pub protocol: Protocol,
    /// The structure handed over.
    pub boot_info: GuestAddress,
    /// The RAM the kernel takes, with what it unpacks itself to.
    pub kernel: Window,
    /// Where the initrd is.
    pub initrd: Option<Window>,
}

/// What a loader found out about a kernel that it has put into memory.
struct Placed {
    entry: u64,
    protocol: Protocol,
    /// RAM that is taken, unpacked kernel included.
    taken: Window,
    /// The last address that an initrd may use.
    initrd_last: u64,
    max_command_line: usize,
    /// bzImage: its own header, to be handed back in `boot_params`.
    header: Option<linux_loader::bootparam::setup_header>,
}

/// Loads kernel, initrd and command line into `memory`, which is all zeroes, and writes what the
/// kernel is handed.
pub fn load(memory: &GuestMemory, source: &BootSource) -> Result<Loaded, BootError> {
    let image = match &source.kernel {
        Kernel::File(file) => Image::of_file(file)?,
        Kernel::Bytes(bytes) => Image::of_bytes(bytes),
    };
    load_image(memory, &image, source.initrd.as_ref(), &source.cmdline)
}

/// [`load`] for an image in memory, for instance one that a fuzzer made.
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
