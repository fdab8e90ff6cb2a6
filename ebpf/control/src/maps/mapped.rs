//! A `BPF_F_MMAPABLE` array, mapped: read and changed without system calls, by both sides.

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
};

/// The elements of a mapped array of `T`.
#[derive(Debug)]
pub(crate) struct Mapped<T> {
    base: NonNull<u8>,
    elements: u32,
    element: PhantomData<*mut T>,
}

// SAFETY: it only computes addresses; whoever reads or writes there answers for how.
unsafe impl<T> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Mapped<T> {}

/// Whether the memory may be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Protection {
    Read,
    ReadWrite,
}

impl<T> Mapped<T> {
    /// The kernel rounds each element up to eight bytes.
    const STRIDE: usize = size_of::<T>().next_multiple_of(8);

    /// Maps all of `map`, whose shape was checked to be an array of `elements` of `T`.
    pub(crate) fn new(
        map: BorrowedFd<'_>,
        elements: u32,
        protection: Protection,
    ) -> io::Result<Self> {
        let prot = match protection {
            Protection::Read => libc::PROT_READ,
            Protection::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::bytes(elements),
                prot,
                libc::MAP_SHARED,
                map.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            base,
            elements,
            element: PhantomData,
        })
    }

    const fn bytes(elements: u32) -> usize {
        elements as usize * Self::STRIDE
    }

    pub(crate) const fn elements(&self) -> u32 {
        self.elements
    }

    /// The element's address.
    pub(crate) fn at(&self, index: u32) -> Option<*mut T> {
        (index < self.elements).then(|| {
            // SAFETY: within the mapping, as just checked.
            unsafe {
                self.base
                    .as_ptr()
                    .add(index as usize * Self::STRIDE)
                    .cast::<T>()
            }
        })
    }

    /// Takes the mapping down.
    ///
    /// # Safety
    /// No address in it is used any more.
    pub(crate) unsafe fn unmap(&self) {
        // SAFETY: mapped with this length in `new`; the caller's promise for the rest. It can't
        // fail with the arguments that made it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), Self::bytes(self.elements)) };
    }
}
