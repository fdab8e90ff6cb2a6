//! Placement of the initrd: as high as the kernel accepts, so that the kernel has room to
//! decompress itself.
use std::fs::File;

use vm_memory::GuestAddress;

use super::{
    BootError, Placed,
    error::INITRD,
    image::{copy_file, file_size},
};
use crate::{
    GuestMemory,
    layout::{PAGE_SIZE, Window},
    memory,
};

pub(super) fn load(
    memory: &GuestMemory,
    file: &File,
    kernel: &Placed,
) -> Result<Window, BootError> {
    let size = file_size(file, INITRD)?;
    let place = place(
        size,
        kernel.taken,
        kernel.initrd_last,
        memory::low_end(memory),
    )?;
    copy_file(memory, GuestAddress(place.start), file, 0, size, INITRD)?;
    Ok(place)
}

/// Returns the highest whole pages that hold `size` bytes, above the kernel, below `low_end` and no
/// higher than `last`.
pub(super) fn place(
    size: u64,
    kernel: Window,
    last: u64,
    low_end: u64,
) -> Result<Window, BootError> {
    if size == 0 {
        return Err(BootError::InitrdEmpty);
    }
    let limit = last.saturating_add(1).min(low_end) & !(PAGE_SIZE - 1);
    let room = limit.saturating_sub(kernel.end().next_multiple_of(PAGE_SIZE));
    if size > room {
        return Err(BootError::InitrdSize {
            bytes: size,
            room,
            limit,
        });
    }
    Ok(Window {
        start: (limit - size) & !(PAGE_SIZE - 1),
        size,
    })
}
