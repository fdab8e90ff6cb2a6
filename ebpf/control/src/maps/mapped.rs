//! Mapped `BPF_F_MMAPABLE` arrays: programs and processes read and change them without system
//! calls.

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

// SAFETY: it only computes addresses; the code that reads or writes there states its own reasons.
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
    /// Distance of two elements, bytes: the kernel rounds each up to eight bytes.
    const STRIDE: usize = size_of::<T>().next_multiple_of(8);

    /// Maps all of `map`, which has been checked to be an array of `elements` of `T`.
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
        // A fork would copy the entry of each page, a quarter of a million for a million slots, for a
        // child that only calls exec. Where it is refused, forks are slower and nothing else.
        // SAFETY: of the mapping just made; children of fork(2) do not use it.
        unsafe { libc::madvise(base, Self::bytes(elements), libc::MADV_DONTFORK) };
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

    /// Returns the address of an element; `None` beyond the last.
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

    /// Removes the mapping.
    ///
    /// # Safety
    /// No address in it is used any more.
    pub(crate) unsafe fn unmap(&self) {
        // SAFETY: mapped with this length in `new`; the caller's promise for the rest. It can't
        // fail with the arguments that made it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), Self::bytes(self.elements)) };
    }
}

#[cfg(test)]
#[path = "mapped_test.rs"]
mod tests;
