//! Errors of loading a kernel.
use std::io;

use thiserror::Error;

/// Name of the initrd in a [`BootError`].
pub(super) const INITRD: &str = "the initrd";

/// Reason why kernel, initrd or command line can't be used.
#[derive(Debug, Error)]
pub enum BootError {
    /// The kernel image is neither an ELF file nor a bzImage.
    #[error(
        "the kernel image is neither an ELF file nor a bzImage: give vmlinux, bzImage (a \
         distribution's /boot/vmlinuz-*) or an ELF with a PVH note, unpacked"
    )]
    UnknownFormat,
    /// The ELF file is a program or library of an operating system.
    #[error(
        "this ELF file is no kernel but a program or library of an operating system: it has no PVH \
         note, and an interpreter or a place below {:#x}. Give vmlinux, bzImage (a distribution's \
         /boot/vmlinuz-*) or an ELF with a PVH note",
        crate::layout::KERNEL_MIN
    )]
    UserProgram,
    /// Reading a file failed.
    #[error("reading {what}")]
    Read {
        /// File and part that was read.
        what: &'static str,
        /// Error from the system.
        source: io::Error,
    },
    /// The kernel or initrd is not a regular file, so it has no length.
    #[error("{what} is not a regular file")]
    NotAFile {
        /// File that was given: kernel or initrd.
        what: &'static str,
    },
    /// The kernel image ends before one of its parts does.
    #[error(
        "the kernel image is cut off: {what} ends at byte {end}, the file has {size}; copy it \
         again"
    )]
    Truncated {
        /// Part that is incomplete.
        what: &'static str,
        /// Offset in the file at which the part would end.
        end: u64,
        /// Length of the file in bytes.
        size: u64,
    },
    /// The ELF file is not an x86-64 executable of a known form.
    #[error("the ELF kernel image has {what}; an x86-64 executable is needed")]
    Elf {
        /// Property that is not supported.
        what: &'static str,
    },
    /// The bzImage can't be entered in 64-bit mode.
    #[error("the bzImage {what}; x86-64 Linux 3.8 or later is needed")]
    BzImage {
        /// Property that is not supported.
        what: &'static str,
    },
    /// A part of the kernel does not fit the RAM below the hole.
    #[error(
        "the kernel needs memory at {start:#x}, {size:#x} bytes; it may use {:#x} to {end:#x}: \
         give more memory, or another kernel",
        crate::layout::KERNEL_MIN
    )]
    KernelPlace {
        /// Guest address of the part.
        start: u64,
        /// Length of the part, bytes.
        size: u64,
        /// End of the usable RAM below the hole.
        end: u64,
    },
    /// The entry address is outside the loaded segments.
    #[error("the kernel's {which} entry {entry:#x} is not in any part of it that is loaded")]
    Entry {
        /// Kind of the entry: PVH or ELF.
        which: &'static str,
        /// Guest address of the entry.
        entry: u64,
    },
    /// The initrd does not fit between the kernel and its limit.
    #[error(
        "the initrd has {bytes} bytes, but only {room} are free between the kernel and {limit:#x}: \
         give more memory, or a smaller initrd"
    )]
    InitrdSize {
        /// Length of the initrd, bytes.
        bytes: u64,
        /// Space between kernel and limit, bytes.
        room: u64,
        /// End of the addresses that the kernel can use for an initrd.
        limit: u64,
    },
    /// The initrd is an empty file.
    #[error("the initrd is empty: give another, or none")]
    InitrdEmpty,
    /// The command line is too long.
    #[error("the command line has {bytes} bytes; this kernel takes {limit}: shorten it")]
    CommandLineLength {
        /// Length of the command line, bytes.
        bytes: usize,
        /// Longest command line that the kernel takes, bytes without the NUL.
        limit: usize,
    },
    /// The command line contains a NUL character.
    #[error("the command line contains a NUL character: remove it")]
    CommandLineNul,
    /// Writing to guest memory failed: the memory is too small.
    #[error("writing {what} to guest memory, which may be too little: give the machine more")]
    Write {
        /// Structure or file that was written.
        what: &'static str,
        /// Error that vm-memory returned.
        source: vm_memory::GuestMemoryError,
    },
}

/// Part of a [`BootSource`](super::BootSource) that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootInput {
    /// Image of the kernel.
    Kernel,
    /// The initial RAM disk.
    Initrd,
    /// The kernel's command line.
    CommandLine,
}

impl BootError {
    /// Returns the input that the error is about. `None` means the machine's memory.
    pub fn about(&self) -> Option<BootInput> {
        match self {
            Self::UnknownFormat
            | Self::UserProgram
            | Self::Truncated { .. }
            | Self::Elf { .. }
            | Self::BzImage { .. }
            | Self::KernelPlace { .. }
            | Self::Entry { .. } => Some(BootInput::Kernel),
            Self::Read { what, .. } | Self::NotAFile { what } if *what == INITRD => {
                Some(BootInput::Initrd)
            }
            Self::Read { .. } | Self::NotAFile { .. } => Some(BootInput::Kernel),
            Self::InitrdSize { .. } | Self::InitrdEmpty => Some(BootInput::Initrd),
            Self::CommandLineLength { .. } | Self::CommandLineNul => Some(BootInput::CommandLine),
            Self::Write { .. } => None,
        }
    }

    pub(super) fn write(what: &'static str, source: vm_memory::GuestMemoryError) -> Self {
        Self::Write { what, source }
    }
}
