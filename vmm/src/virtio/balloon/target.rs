//! What the host asks the guest for, and what the guest says it has given.
use std::{
    io,
    os::fd::{AsRawFd as _, RawFd},
    sync::{
        Arc,
        atomic::{
            AtomicU32,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{BalloonCounters, PAGE_BYTES};

/// The balloon's size, wanted and present; any thread may set it.
#[derive(Clone, Debug)]
pub(crate) struct Target(Arc<State>);

#[derive(Debug)]
struct State {
    wanted_pages: AtomicU32,
    actual_pages: AtomicU32,
    /// Signals that another size is wanted.
    changed: EventFd,
    counters: Arc<BalloonCounters>,
}

impl Target {
    pub(super) fn new(bytes: u64, counters: Arc<BalloonCounters>) -> io::Result<Self> {
        let target = Self(Arc::new(State {
            wanted_pages: AtomicU32::new(0),
            actual_pages: AtomicU32::new(0),
            changed: EventFd::new(EFD_NONBLOCK)?,
            counters,
        }));
        target.want(pages(bytes));
        Ok(target)
    }

    /// Asks the guest for so many bytes in all, of which there are no more than its memory has.
    pub(crate) fn ask_for(&self, bytes: u64) {
        self.want(pages(bytes));
        // The count is at its limit at most: then the thread wakes all the same.
        let _ = self.0.changed.write(1);
    }

    fn want(&self, pages: u32) {
        self.0.wanted_pages.store(pages, Release);
        let bytes = u64::from(pages) * PAGE_BYTES;
        self.0.counters.target_bytes.store(bytes, Relaxed);
    }

    /// Takes over what was saved.
    pub(super) fn restore(&self, wanted_pages: u32, actual_pages: u32) {
        self.want(wanted_pages);
        self.set_actual(actual_pages);
    }

    /// Pages that the guest is asked for.
    pub(super) fn wanted(&self) -> u32 {
        self.0.wanted_pages.load(Acquire)
    }

    /// Pages that the guest says it has given.
    pub(super) fn actual(&self) -> u32 {
        self.0.actual_pages.load(Acquire)
    }

    pub(super) fn set_actual(&self, pages: u32) {
        self.0.actual_pages.store(pages, Release);
        let bytes = u64::from(pages) * PAGE_BYTES;
        self.0.counters.actual_bytes.store(bytes, Relaxed);
    }

    /// Readable when another size is wanted.
    pub(super) fn descriptor(&self) -> RawFd {
        self.0.changed.as_raw_fd()
    }

    /// Returns whether another size is wanted since the last call.
    pub(super) fn has_changed(&self) -> bool {
        self.0.changed.read().is_ok()
    }
}

fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes / PAGE_BYTES).unwrap_or(u32::MAX)
}
