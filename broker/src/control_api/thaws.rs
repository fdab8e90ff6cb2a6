//! Thaws that the engine prepares.
//!
//! A thaw takes two steps: the engine restarts the timers of the VM's flows, and only then do
//! packets pass. A freeze takes one. So the engine's answer to a thaw must not undo a freeze that
//! was requested in between, and a thaw after that freeze counts again.
use std::collections::BTreeMap;

use slipgate_abi::VmRow;

/// Answer to a client whose thaw was cancelled.
pub(crate) const FROZEN_AGAIN: &str = "it was frozen again meanwhile";

/// VMs that are about to be thawed, by request.
#[derive(Debug, Default)]
pub(crate) struct Thaws(BTreeMap<u64, Thaw>);

/// State of a thaw when the engine is ready for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Thaw {
    /// The thaw is valid, for the VM of this row.
    Of(VmRow),
    /// The VM was frozen again meanwhile.
    Undone,
}

impl Thaws {
    /// Records that a thaw was requested.
    pub(crate) fn begin(&mut self, request: u64, row: VmRow) {
        self.0.insert(request, Thaw::Of(row));
    }

    /// Cancels the thaws of a VM, because it is to be frozen.
    pub(crate) fn undo(&mut self, row: VmRow) {
        let all = self.0.values_mut();
        let of_row = all.filter(|thaw| **thaw == Thaw::Of(row));
        of_row.for_each(|thaw| *thaw = Thaw::Undone);
    }

    /// Returns the thaw of this request, if it was one. The engine is ready for it.
    pub(crate) fn take(&mut self, request: u64) -> Option<Thaw> {
        self.0.remove(&request)
    }
}

#[cfg(test)]
#[path = "thaws_test.rs"]
mod tests;
