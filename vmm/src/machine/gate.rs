//! A gate at which the vCPU threads wait for the machine's start.
use std::sync::{Condvar, Mutex};

/// Gate that opens once, for all threads.
#[derive(Default)]
pub(crate) struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    /// Opens the gate for all threads.
    pub(crate) fn open(&self) {
        *self.open.lock().expect("no holder panics") = true;
        self.opened.notify_all();
    }

    /// Blocks until the gate is open.
    pub(crate) fn pass(&self) {
        let open = self.open.lock().expect("no holder panics");
        drop(self.opened.wait_while(open, |open| !*open));
    }
}
