//! Why a kernel can't be booted.
use std::io;

use thiserror::Error;

/// What a [`BootError`] calls the initrd.
pub(super) const INITRD: &str = "the initrd";

/// What was wrong with kernel, initrd or command line.
#[derive(Debug, Error)]
pub enum BootError {
    /// Neither of the formats.
    #[error(
        "the kernel image is neither an ELF file nor a bzImage: give vmlinux, bzImage (a \
         distribution's /boot/vmlinuz-*) or an ELF with a PVH note, unpacked"
    )]
    UnknownFormat,
    /// An ELF file that an operating system runs.
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
        /// Kernel or initrd, and which part of it.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Not a file that has a length.
    #[error("{what} is not a regular file")]
    NotAFile {
        /// Kernel or initrd.
        what: &'static str,
    },
    /// The file ends too early.
    #[error(
        "the kernel image is cut off: {what} ends at byte {end}, the file has {size}; copy it \
         again"
    )]
    Truncated {
        /// The part that is incomplete.
        what: &'static str,
        /// Where it would end.
        end: u64,
        /// Length of the file in bytes.
        size: u64,
    },
    /// An ELF file of another kind.
    #[error("the ELF kernel image has {what}; an x86-64 executable is needed")]
    Elf {
        /// What is wrong.
        what: &'static str,
    },
    /// A bzImage that can't be entered in 64-bit mode.
    #[error("the bzImage {what}; x86-64 Linux 3.8 or later is needed")]
    BzImage {
        /// What is wrong.
        what: &'static str,
    },
    /// A part of the kernel does not fit the RAM below the hole.
    #[error(
        "the kernel needs memory at {start:#x}, {size:#x} bytes; it may use {:#x} to {end:#x}: \
         give more memory, or another kernel",
        crate::layout::KERNEL_MIN
    )]
    KernelPlace {
        /// Guest address.
        start: u64,
        /// Bytes.
        size: u64,
        /// Where usable RAM ends.
        end: u64,
    },
    /// The entry is outside what was loaded.
    #[error("the kernel's {which} entry {entry:#x} is not in any part of it that is loaded")]
    Entry {
        /// PVH or ELF.
        which: &'static str,
        /// Guest address.
        entry: u64,
    },
    /// The initrd does not fit.
    #[error(
        "the initrd has {bytes} bytes, but only {room} are free between the kernel and {limit:#x}: \
         give more memory, or a smaller initrd"
    )]
    InitrdSize {
        /// Length of the file.
        bytes: u64,
        /// Bytes that would fit.
        room: u64,
        /// The end of what the kernel can use for an initrd.
        limit: u64,
    },
    /// The initrd is an empty file.
    #[error("the initrd is empty: give another, or none")]
    InitrdEmpty,
    /// The command line is too long.
    #[error("the command line has {bytes} bytes; this kernel takes {limit}: shorten it")]
    CommandLineLength {
        /// Its length.
        bytes: usize,
        /// The kernel's limit, without the NUL.
        limit: usize,
    },
    /// The command line can't be handed over.
    #[error("the command line contains a NUL character: remove it")]
    CommandLineNul,
    /// The guest's memory took no write: too little memory.
    #[error("writing {what} to guest memory, which may be too little: give the machine more")]
    Write {
        /// What was written.
        what: &'static str,
        /// What vm-memory said.
        source: vm_memory::GuestMemoryError,
    },
}

/// What of a [`BootSource`](super::BootSource) an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootInput {
    /// The kernel.
    Kernel,
    /// The initrd.
    Initrd,
    /// The command line.
    CommandLine,
}

impl BootError {
    /// What it is about; `None`: about the machine.
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
