//! The end of a machine: the first outcome counts, and wakes the waiting thread.
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Mutex, MutexGuard, PoisonError},
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

use crate::report::{Cause, Report};

/// Outcome of a machine's run.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The guest powered itself off (ACPI S5).
    PoweredOff,
    /// The guest requested a restart (i8042).
    Reset,
    /// The guest gave its own exit status, by a byte to port 0xF4.
    GuestExit(u8),
    /// A [`StopHandle`] stopped the machine.
    Stopped,
    /// The guest can't continue: a triple fault, or an exit that KVM or the VMM can't handle.
    Crashed(Box<Report>),
}

impl Outcome {
    /// Returns whether the guest has reset the machine: by the i8042, which is ACPI's reset register
    /// too, or by a triple fault, as an operating system does when nothing else has worked.
    pub fn is_reset(&self) -> bool {
        match self {
            Outcome::Reset => true,
            Outcome::Crashed(report) => report.cause == Cause::TripleFault,
            Outcome::PoweredOff | Outcome::GuestExit(_) | Outcome::Stopped => false,
        }
    }
}

/// Amount that an outcome adds to the bell's count. A stop adds less.
const OUTCOME: u64 = 1 << 32;

/// Shared by vCPUs and stop handles, which set the outcome, and the thread in `Machine::run`, which
/// waits for it.
pub(crate) struct Ending {
    first: Mutex<Option<Outcome>>,
    bell: EventFd,
}

impl Ending {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            first: Mutex::new(None),
            bell: EventFd::new(EFD_CLOEXEC)?,
        })
    }

    /// Ends the machine with this outcome, unless it has ended already.
    pub(crate) fn with(&self, outcome: Outcome) {
        let mut first = self.first();
        if first.is_none() {
            *first = Some(outcome);
            drop(first);
            // The write fails only when the count is at its limit: then the eventfd is signalled
            // already.
            let _ = self.bell.write(OUTCOME);
        }
    }

    /// Blocks until there is an outcome, and returns it. `true`: a stop was asked for too.
    pub(crate) fn wait(&self) -> (Outcome, bool) {
        // An eventfd's read fails with EINTR only.
        let rung = loop {
            if let Ok(rung) = self.bell.read() {
                break rung;
            }
        };
        let is_stopped = rung % OUTCOME != 0;
        (self.first().clone().unwrap_or(Outcome::Stopped), is_stopped)
    }

    /// Forgets the outcome, which was waited for: the machine goes on. A stop meanwhile is kept.
    pub(crate) fn forget(&self) {
        *self.first() = None;
    }

    /// Returns the outcome, if there is one.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        self.first().clone()
    }

    fn first(&self) -> MutexGuard<'_, Option<Outcome>> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stop_handle(&self) -> io::Result<StopHandle> {
        Ok(StopHandle(self.bell.try_clone()?))
    }
}

/// Stops a machine from another thread, or from a signal handler.
#[derive(Debug)]
pub struct StopHandle(EventFd);

impl StopHandle {
    /// Ends the machine with [`Outcome::Stopped`], unless it ended by itself. It takes effect at
    /// once, whatever the guest does. The method calls write(2) and nothing else, so a signal
    /// handler may call it.
    pub fn stop(&self) {
        // The write fails only when the count is at its limit: then the eventfd is signalled
        // already.
        let _ = self.0.write(1);
    }
}

impl AsFd for StopHandle {
    /// Returns an eventfd. Writing 8 bytes to it, a count from 1 to 2^32 - 1 in native order, stops
    /// the machine.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the eventfd is open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(&self.0)) }
    }
}
