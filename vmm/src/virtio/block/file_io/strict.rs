//! Refuses what is not aligned, on any file system, as the kernel does where it transfers directly.
use std::{io, os::fd::RawFd, sync::Arc};

use super::{super::file::Image, Action, FileIo, Operation, vectored::Vectored};

/// [`Vectored`], for a file that has an alignment.
pub(super) struct Strict {
    image: Arc<Image>,
    inner: Vectored,
    /// Operations that were refused, and not yet asked for.
    refused: Vec<u16>,
}

impl Strict {
    pub(super) fn new(image: Arc<Image>) -> Strict {
        Strict {
            inner: Vectored::new(image.clone()),
            image,
            refused: Vec::new(),
        }
    }

    fn refuses(&self, operation: &Operation) -> bool {
        let (Some(alignment), Action::Read { pieces, count } | Action::Write { pieces, count, .. }) =
            (self.image.alignment(), operation.action)
        else {
            return false;
        };
        // SAFETY: the caller of `push` keeps them.
        let pieces = unsafe { std::slice::from_raw_parts(pieces, count as usize) };
        let [memory, block] = alignment.both();
        let is_aligned = |it: usize, to: u32| it.is_multiple_of(to as usize);
        !is_aligned(operation.offset as usize, block)
            || pieces.iter().any(|piece| {
                !is_aligned(piece.iov_base as usize, memory) || !is_aligned(piece.iov_len, block)
            })
    }
}

impl FileIo for Strict {
    fn begin(&mut self) -> io::Result<()> {
        self.inner.begin()
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }

    fn descriptor(&self) -> Option<RawFd> {
        self.inner.descriptor()
    }

    unsafe fn push(&mut self, id: u16, operation: &Operation) {
        if self.refuses(operation) {
            self.refused.push(id);
        } else {
            // SAFETY: as the caller promises.
            unsafe { self.inner.push(id, operation) }
        }
    }

    fn submit(&mut self) {
        self.inner.submit();
    }

    fn has_result(&mut self) -> bool {
        !self.refused.is_empty() || self.inner.has_result()
    }

    fn result(&mut self) -> Option<(u16, i32)> {
        let refused = self.refused.pop().map(|id| (id, -libc::EINVAL));
        refused.or_else(|| self.inner.result())
    }

    fn wait(&mut self) {
        self.inner.wait();
    }
}
