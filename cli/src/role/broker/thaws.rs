//! Thaws that the engine prepares.
//!
//! A thaw takes two steps: the engine has the timers of the VM's flows begin anew, and only then does
//! anything pass. A freeze takes one. So a freeze that is asked for in between must not be undone by the
//! engine's answer to the thaw before it, and a thaw after that freeze counts again.
use std::collections::BTreeMap;

/// Rows of VMs that are about to be thawed, by request.
#[derive(Debug, Default)]
pub(super) struct Thaws(BTreeMap<u64, u32>);

impl Thaws {
    /// A thaw was asked for.
    pub(super) fn begin(&mut self, request: u64, row: u32) {
        self.0.insert(request, row);
    }

    /// A VM is to be frozen, whatever was asked for before.
    pub(super) fn forget(&mut self, row: u32) {
        self.0.retain(|_, thawed| *thawed != row);
    }

    /// The engine is ready: whom to thaw, if that still holds.
    pub(super) fn take(&mut self, request: u64) -> Option<u32> {
        self.0.remove(&request)
    }
}

#[cfg(test)]
#[path = "thaws_test.rs"]
mod tests;
