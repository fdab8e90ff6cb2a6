//! Arrays of the datapath in this process's memory.
use std::{
    marker::PhantomData,
    os::fd::{AsFd, AsRawFd},
};

use aya::{Ebpf, maps::Map};

/// An array map that is mapped into the test's memory.
pub(crate) struct Mapped<T> {
    start: *mut T,
    stride: usize,
    bytes: usize,
    marker: PhantomData<T>,
}

// SAFETY: memory that is not bound to a thread.
unsafe impl<T> Send for Mapped<T> {}

impl<T> Mapped<T> {
    pub(crate) fn of(ebpf: &Ebpf, name: &str) -> Self {
        let Some(Map::Array(data)) = ebpf.map(name) else {
            panic!("{name} is no array");
        };
        let info = data.info().expect("map info");
        let stride = (info.value_size() as usize).next_multiple_of(8);
        assert_eq!(info.value_size() as usize, size_of::<T>(), "{name}");
        let bytes = (stride * info.max_entries() as usize).next_multiple_of(4096);
        // SAFETY: a fresh shared mapping.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                data.fd().as_fd().as_raw_fd(),
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED, "mmap of {name}");
        Self {
            start: start.cast(),
            stride,
            bytes,
            marker: PhantomData,
        }
    }

    pub(crate) fn at(&self, index: u32) -> *mut T {
        let offset = index as usize * self.stride;
        assert!(offset < self.bytes);
        self.start.wrapping_byte_add(offset)
    }

    /// Makes all elements zero.
    pub(crate) fn clear(&self) {
        // SAFETY: the whole mapping; zeroes are values of what is mapped.
        unsafe { self.start.cast::<u8>().write_bytes(0, self.bytes) };
    }

    /// A copy of an element.
    pub(crate) fn get(&self, index: u32) -> T {
        // SAFETY: in bounds; the programs run on this thread only.
        unsafe { self.at(index).read_volatile() }
    }

    pub(crate) fn set(&self, index: u32, value: T) {
        // SAFETY: as above.
        unsafe { self.at(index).write_volatile(value) }
    }

    pub(crate) fn change(&self, index: u32, change: impl FnOnce(&mut T)) {
        let mut value = self.get(index);
        change(&mut value);
        self.set(index, value);
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: mapped in `of`.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}
