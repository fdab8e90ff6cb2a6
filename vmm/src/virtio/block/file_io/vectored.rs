//! One system call for each operation, which waits until it has ended: for hosts that don't allow
//! io_uring.
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
};

use super::{super::file::Image, Action, FileIo, Operation};

pub(super) struct Vectored {
    image: Arc<Image>,
    results: VecDeque<(u16, i32)>,
}

impl Vectored {
    pub(super) fn new(image: Arc<Image>) -> Vectored {
        Vectored {
            image,
            results: VecDeque::new(),
        }
    }
}

impl FileIo for Vectored {
    fn begin(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// An answer is not to wait for the next operation.
    fn batch(&self) -> usize {
        1
    }

    fn descriptor(&self) -> Option<RawFd> {
        None
    }

    unsafe fn push(&mut self, id: u16, operation: &Operation) {
        // SAFETY: as the caller promises.
        let result = unsafe { carry_out(self.image.file.as_raw_fd(), operation) };
        self.results.push_back((id, result));
    }

    fn submit(&mut self) {}

    fn has_result(&mut self) -> bool {
        !self.results.is_empty()
    }

    fn result(&mut self) -> Option<(u16, i32)> {
        self.results.pop_front()
    }

    fn wait(&mut self) {}
}

/// Carries out an operation. Returns its result.
///
/// # Safety
/// As of [`FileIo::push`].
pub(super) unsafe fn carry_out(fd: RawFd, operation: &Operation) -> i32 {
    let Ok(offset) = i64::try_from(operation.offset) else {
        return -libc::EINVAL;
    };
    match operation.action {
        Action::Read { pieces, count } => {
            // SAFETY: as the caller promises.
            result_of(|| unsafe { libc::preadv(fd, pieces, count as i32, offset) })
        }
        Action::Write {
            pieces,
            count,
            stable,
        } => {
            // SAFETY: as the caller promises.
            let written = result_of(|| unsafe { libc::pwritev(fd, pieces, count as i32, offset) });
            match stable && written > 0 {
                true => Some(flush(fd)).filter(|it| *it < 0).unwrap_or(written),
                false => written,
            }
        }
        Action::Flush => flush(fd),
        Action::Allocate { mode, bytes } => {
            let Ok(bytes) = i64::try_from(bytes) else {
                return -libc::EINVAL;
            };
            // SAFETY: no memory is passed.
            result_of(|| unsafe { libc::fallocate(fd, mode, offset, bytes) } as isize)
        }
    }
}

fn flush(fd: RawFd) -> i32 {
    // SAFETY: no memory is passed.
    result_of(|| unsafe { libc::fdatasync(fd) } as isize)
}

fn result_of(call: impl FnOnce() -> isize) -> i32 {
    match call() {
        -1 => -io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO),
        done => i32::try_from(done).unwrap_or(i32::MAX),
    }
}
