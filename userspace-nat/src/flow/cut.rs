//! What is done to flows from outside: cut, captured, their timers begun anew.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::vm::VmFlags;

use super::{EndReason, Flows, State};
use crate::datapath::Datapath;

impl EndReason {
    /// Whether the flow may not go on: no packet of it is sent on from its first phase.
    pub const fn is_cut(self) -> bool {
        matches!(
            self,
            Self::Policy | Self::Cut | Self::Inspection | Self::ResetForGood
        )
    }
}

impl Flows {
    /// Ends a flow that is not to go on. Its packets come to the engine until the grace is over, and
    /// [`Flows::revive`] lets none pass. Whether it was to live on, or might have.
    pub fn cut(
        &mut self,
        datapath: &mut impl Datapath,
        slot: u32,
        reason: EndReason,
        now_ns: u64,
    ) -> bool {
        let ends = self.entry(slot).is_some_and(|entry| match entry.state {
            State::Live => true,
            State::Ending => !entry.end_reason.is_cut(),
            State::Unlinked | State::Finished => false,
        });
        if ends {
            self.enqueue_end(datapath, slot, State::Ending, reason, now_ns);
        }
        ends
    }

    /// Whether a flow was cut and its grace is not over.
    pub fn is_cut(&self, slot: u32) -> bool {
        self.entry(slot)
            .is_some_and(|entry| entry.state == State::Ending && entry.end_reason.is_cut())
    }

    /// Has the engine carry a flow for a capture, or the kernel again; one that is held besides
    /// ([`Flows::hold`]) stays with the engine.
    pub fn capture(&mut self, datapath: &mut impl Datapath, slot: u32, captured: bool) {
        // One that is ending gets its verdict when it is revived.
        if let Some(entry) = self.table.set_captured(slot, captured)
            && entry.state == State::Live
        {
            entry.set_verdict(datapath.slot(slot));
        }
    }

    /// Has a VM's flows count as seen now: they were not silent of their own will.
    pub fn begin_timers(&self, datapath: &impl Datapath, row: u16, now_ns: u64) {
        for &slot in self.slots_of(row) {
            let live = datapath.slot(slot);
            live.tx_last_ns().fetch_max(now_ns, Relaxed);
        }
    }
}

/// Whether everything from and to a VM is dropped: then its flows can't help being silent.
pub fn is_frozen(datapath: &impl Datapath, row: u16) -> bool {
    datapath
        .vm(row)
        .is_some_and(|vm| vm.flags().load(Relaxed) & VmFlags::FROZEN != 0)
}
