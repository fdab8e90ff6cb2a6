//! How a machine comes to its end: the first reason counts, and wakes the thread that waits.
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::OnceLock,
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

use crate::report::Report;

/// How a machine ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The guest switched itself off (ACPI S5).
    PoweredOff,
    /// The guest asked for a restart (i8042).
    Reset,
    /// The guest gave its own exit status, by a byte to port 0xF4.
    GuestExit(u8),
    /// A [`StopHandle`] was used.
    Stopped,
    /// The guest can't go on: a triple fault, or an exit that KVM or the VMM can't handle.
    Crashed(Box<Report>),
}

/// Where vCPUs and stop handles meet the thread in `Machine::run`.
pub(crate) struct Ending {
    first: OnceLock<Outcome>,
    bell: EventFd,
}

impl Ending {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            first: OnceLock::new(),
            bell: EventFd::new(EFD_CLOEXEC)?,
        })
    }

    /// Ends the machine, unless it ended already.
    pub(crate) fn with(&self, outcome: Outcome) {
        if self.first.set(outcome).is_ok() {
            // Fails only when the count is at its limit: then it rings already.
            let _ = self.bell.write(1);
        }
    }

    /// Blocks until there is an outcome.
    pub(crate) fn wait(&self) -> Outcome {
        // An eventfd's read does not fail but for EINTR.
        while self.bell.read().is_err() {}
        self.first.get().cloned().unwrap_or(Outcome::Stopped)
    }

    pub(crate) fn stop_handle(&self) -> io::Result<StopHandle> {
        Ok(StopHandle(self.bell.try_clone()?))
    }
}

/// Stops a machine from another thread, or from a signal handler.
#[derive(Debug)]
pub struct StopHandle(EventFd);

impl StopHandle {
    /// Ends the machine with [`Outcome::Stopped`], unless it ended by itself; at once, whatever
    /// the guest does. One write(2) and nothing else, so a signal handler may call it.
    pub fn stop(&self) {
        // Fails only when the count is at its limit: then it rings already.
        let _ = self.0.write(1);
    }
}

impl AsFd for StopHandle {
    /// An eventfd: 8 bytes, a count above 0 in native order, written to it stop the machine.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the eventfd is open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(&self.0)) }
    }
}
