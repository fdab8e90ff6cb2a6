//! A kernel image as a sequence of bytes, from a file or from this program's own data.
use std::{
    fs::File,
    io::{Seek, SeekFrom},
    os::unix::fs::FileExt,
};

use vm_memory::{ByteValued, Bytes, GuestAddress};

use super::BootError;
use crate::{GuestMemory, layout, layout::Window, memory};

/// Kernel image of known length.
pub(super) struct Image<'a> {
    from: From<'a>,
    size: u64,
}

enum From<'a> {
    File(&'a File),
    Bytes(&'a [u8]),
}

/// Returns the length of a regular file in bytes.
pub(super) fn file_size(file: &File, what: &'static str) -> Result<u64, BootError> {
    let metadata = file
        .metadata()
        .map_err(|source| BootError::Read { what, source })?;
    if !metadata.is_file() {
        return Err(BootError::NotAFile { what });
    }
    Ok(metadata.len())
}

impl<'a> Image<'a> {
    pub(super) fn of_file(file: &'a File) -> Result<Self, BootError> {
        Ok(Self {
            size: file_size(file, "the kernel")?,
            from: From::File(file),
        })
    }

    pub(super) fn of_bytes(bytes: &'a [u8]) -> Self {
        Self {
            size: bytes.len() as u64,
            from: From::Bytes(bytes),
        }
    }

    /// Returns the length in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Fills `into` from `offset`. `what` names the part in errors.
    pub(super) fn read_at(
        &self,
        offset: u64,
        into: &mut [u8],
        what: &'static str,
    ) -> Result<(), BootError> {
        self.check(offset, into.len() as u64, what)?;
        match &self.from {
            From::File(file) => file
                .read_exact_at(into, offset)
                .map_err(|source| BootError::Read { what, source })?,
            From::Bytes(bytes) => {
                into.copy_from_slice(&bytes[offset as usize..offset as usize + into.len()]);
            }
        }
        Ok(())
    }

    /// Reads a structure at `offset`. `what` names it in errors.
    pub(super) fn read<T: ByteValued + Default>(
        &self,
        offset: u64,
        what: &'static str,
    ) -> Result<T, BootError> {
        let mut value = T::default();
        self.read_at(offset, value.as_mut_slice(), what)?;
        Ok(value)
    }

    /// Copies `size` bytes at `offset` of the image to guest `address`. `what` names the part in
    /// errors.
    pub(super) fn copy_to(
        &self,
        memory: &GuestMemory,
        address: u64,
        offset: u64,
        size: u64,
        what: &'static str,
    ) -> Result<(), BootError> {
        self.check(offset, size, what)?;
        let address = GuestAddress(address);
        match &self.from {
            From::File(file) => copy_file(memory, address, file, offset, size, what),
            From::Bytes(bytes) => memory
                .write_slice(&bytes[offset as usize..(offset + size) as usize], address)
                .map_err(|e| BootError::write(what, e)),
        }
    }

    fn check(&self, offset: u64, size: u64, what: &'static str) -> Result<(), BootError> {
        let end = offset.saturating_add(size);
        if end > self.size {
            return Err(BootError::Truncated {
                what,
                end,
                size: self.size,
            });
        }
        Ok(())
    }
}

/// Copies `size` bytes at `offset` of a file to guest `address`. `what` names the part in errors.
pub(super) fn copy_file(
    memory: &GuestMemory,
    address: GuestAddress,
    mut file: &File,
    offset: u64,
    size: u64,
    what: &'static str,
) -> Result<(), BootError> {
    file.seek(SeekFrom::Start(offset))
        .map_err(|source| BootError::Read { what, source })?;
    memory
        .read_exact_volatile_from(address, &mut file, size as usize)
        .map_err(|e| BootError::write(what, e))
}

/// Checks that a part of the kernel lies wholly in RAM between 1 MiB and the hole, and returns it
/// as a window.
pub(super) fn check_place(
    memory: &GuestMemory,
    start: u64,
    size: u64,
) -> Result<Window, BootError> {
    let end = memory::low_end(memory);
    let fits = start >= layout::KERNEL_MIN && start.checked_add(size).is_some_and(|e| e <= end);
    if !fits {
        return Err(BootError::KernelPlace { start, size, end });
    }
    Ok(Window { start, size })
}
