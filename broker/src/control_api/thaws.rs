//! Thaws that the engine prepares.
//!
//! A thaw takes two steps: the engine has the timers of the VM's flows begin anew, and only then does
//! anything pass. A freeze takes one. So a freeze that is asked for in between must not be undone by the
//! engine's answer to the thaw before it, and a thaw after that freeze counts again.
use std::collections::BTreeMap;

/// VMs that are about to be thawed, by request.
#[derive(Debug, Default)]
pub(super) struct Thaws(BTreeMap<u64, Thaw>);

/// A thaw, when the engine is ready for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Thaw {
    /// It holds, of the VM of this row.
    Of(u32),
    /// The VM was frozen again meanwhile.
    Undone,
}

impl Thaws {
    /// A thaw was asked for.
    pub(super) fn begin(&mut self, request: u64, row: u32) {
        self.0.insert(request, Thaw::Of(row));
    }

    /// A VM is to be frozen, whatever was asked for before.
    pub(super) fn undo(&mut self, row: u32) {
        let all = self.0.values_mut();
        let of_row = all.filter(|thaw| **thaw == Thaw::Of(row));
        of_row.for_each(|thaw| *thaw = Thaw::Undone);
    }

    /// The engine is ready: what was asked for by that request, if it was a thaw.
    pub(super) fn take(&mut self, request: u64) -> Option<Thaw> {
        self.0.remove(&request)
    }
}

#[cfg(test)]
#[path = "thaws_test.rs"]
mod tests;
