//! Memory that a device reads and writes. Its address for the device is its virtual address,
//! because the guest runs with an identity mapping.
use alloc::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use core::{ptr::NonNull, slice};

const ALIGN: usize = 4096;

/// Zeroed memory, aligned to a page.
pub struct Dma {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory.
unsafe impl Send for Dma {}

impl Dma {
    /// Allocates `bytes` (> 0) from the heap. Panics if the heap has not so much.
    pub fn new(bytes: usize) -> Self {
        let layout = layout(bytes);
        Self::allocate(layout).unwrap_or_else(|| handle_alloc_error(layout))
    }

    /// Allocates `bytes` (> 0) from the heap. `None`: it has not so much in one piece.
    pub fn try_new(bytes: usize) -> Option<Self> {
        Self::allocate(layout(bytes))
    }

    fn allocate(layout: Layout) -> Option<Self> {
        // SAFETY: the layout has a length.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Dma { start, layout })
    }

    /// Returns the device's address of the byte at `offset`.
    pub fn address(&self, offset: usize) -> u64 {
        debug_assert!(offset < self.layout.size());
        self.start.as_ptr().wrapping_add(offset).expose_provenance() as u64
    }

    /// Returns a pointer to the byte at `offset`.
    pub fn pointer(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.layout.size());
        self.start.as_ptr().wrapping_add(offset)
    }

    /// Returns `length` bytes from `offset` on. Panics beyond the end.
    ///
    /// # Safety
    /// The device must not write there meanwhile.
    pub unsafe fn bytes(&self, offset: usize, length: usize) -> &[u8] {
        assert!(offset <= self.layout.size() && length <= self.layout.size() - offset);
        // SAFETY: inside, initialised; the rest is the caller's promise.
        unsafe { slice::from_raw_parts(self.start.as_ptr().add(offset), length) }
    }

    /// Returns `length` writable bytes from `offset` on. Panics beyond the end.
    ///
    /// # Safety
    /// The device must not access them meanwhile.
    pub unsafe fn bytes_mut(&mut self, offset: usize, length: usize) -> &mut [u8] {
        assert!(offset <= self.layout.size() && length <= self.layout.size() - offset);
        // SAFETY: inside, initialised; the rest is the caller's promise.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr().add(offset), length) }
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), ALIGN).expect("a length below 2^63")
}

impl Drop for Dma {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
