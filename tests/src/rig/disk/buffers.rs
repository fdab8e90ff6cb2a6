//! Memory that O_DIRECT takes: blocks that begin at multiples of their length.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    ptr::NonNull,
};

use super::blocks::DISK_BLOCK_BYTES;

/// Buffers of a block each.
pub(super) struct Buffers {
    start: NonNull<u8>,
    count: usize,
}

impl Buffers {
    /// Makes this many, at least one.
    pub(super) fn new(count: usize) -> Self {
        let count = count.max(1);
        let layout = layout(count);
        // SAFETY: the layout is of at least one block, so not of zero bytes.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Self { start, count }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The bytes of one.
    ///
    /// # Panics
    /// There is none of this number.
    pub(super) fn of(&mut self, number: usize) -> &mut [u8] {
        assert!(number < self.count, "buffer {number} of {}", self.count);
        // SAFETY: the block lies within the allocation, was made of zeroes, and is borrowed as `self` is.
        unsafe {
            let block = self.start.as_ptr().add(number * DISK_BLOCK_BYTES);
            std::slice::from_raw_parts_mut(block, DISK_BLOCK_BYTES)
        }
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and dropped once.
        unsafe { dealloc(self.start.as_ptr(), layout(self.count)) };
    }
}

fn layout(count: usize) -> Layout {
    Layout::from_size_align(count * DISK_BLOCK_BYTES, DISK_BLOCK_BYTES)
        .expect("some dozen blocks are below the address space")
}
