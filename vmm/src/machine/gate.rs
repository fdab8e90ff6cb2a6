//! Where the vCPUs wait for the start.
use std::sync::{Condvar, Mutex};

/// Opens once, for all.
#[derive(Default)]
pub(crate) struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    /// Lets everybody through.
    pub(crate) fn open(&self) {
        *self.open.lock().expect("no holder panics") = true;
        self.opened.notify_all();
    }

    /// Blocks until it is open.
    pub(crate) fn pass(&self) {
        let open = self.open.lock().expect("no holder panics");
        drop(self.opened.wait_while(open, |open| !*open));
    }
}
