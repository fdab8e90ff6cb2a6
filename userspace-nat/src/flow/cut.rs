//! Changes to flows on request: cut, capture, restart of their timers.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{SlotIndex, Verdict, VmRow, vm::VmFlags};

use super::{EndReason, Flows, State, table::Marks};
use crate::datapath::Datapath;

impl EndReason {
    /// Whether the flow is denied: from the first phase of its end none of its packets is sent on.
    pub const fn is_cut(self) -> bool {
        matches!(
            self,
            Self::Policy
                | Self::Cut
                | Self::Generation
                | Self::Uplink
                | Self::Prefix
                | Self::Route
                | Self::Inspection
                | Self::ResetForGood
        )
    }
}

impl Flows {
    /// Ends a flow that is denied. Its packets come to the engine until the grace is over, and
    /// [`Flows::revive`] lets none pass. Returns whether the flow was live, or was ending and might
    /// have lived on.
    pub fn cut(
        &mut self,
        datapath: &mut impl Datapath,
        slot: SlotIndex,
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
    pub fn is_cut(&self, slot: SlotIndex) -> bool {
        self.entry(slot)
            .is_some_and(|entry| entry.state == State::Ending && entry.end_reason.is_cut())
    }

    /// Why a flow was cut, while its grace is not over.
    pub fn cut_by(&self, slot: SlotIndex) -> Option<EndReason> {
        let entry = self.entry(slot).filter(|_| self.is_cut(slot));
        entry.map(|entry| entry.end_reason)
    }

    /// Whether a flow was cut because its destination is not reached as it was. Nothing is sent there.
    pub fn is_astray(&self, slot: SlotIndex) -> bool {
        self.cut_by(slot) == Some(EndReason::Route)
    }

    /// Sets whether the engine carries a flow for a capture. A flow that is also held
    /// ([`Flows::hold`]) stays with the engine.
    pub fn capture(&mut self, datapath: &mut impl Datapath, slot: SlotIndex, captured: bool) {
        self.set_mark(datapath, slot, Marks::CAPTURED, captured);
    }

    /// Returns to the kernel a flow that a predecessor carried for a capture, which ended with it.
    /// A flow that it inspected has been ended before.
    pub(crate) fn release_captured(&mut self, datapath: &mut impl Datapath, slot: SlotIndex) {
        if datapath.slot(slot).verdict().load(Relaxed) == Verdict::Engine as u32 {
            self.release(datapath, slot);
        }
    }

    /// Restarts the timers of a VM's flows: they were silent because the VM was frozen, or slept.
    pub fn begin_timers(&self, datapath: &impl Datapath, row: VmRow, now_ns: u64) {
        for &slot in self.slots_of(row) {
            let live = datapath.slot(slot);
            live.tx_last_ns().fetch_max(now_ns, Relaxed);
        }
    }
}

/// Whether a VM is frozen or sleeps: nothing passes, so its flows are silent.
pub fn is_paused(datapath: &impl Datapath, row: VmRow) -> bool {
    let paused = VmFlags::FROZEN | VmFlags::ASLEEP;
    datapath
        .vm(row)
        .is_some_and(|vm| vm.flags().load(Relaxed) & paused != 0)
}

/// Whether a VM sleeps: what comes for it is held.
pub fn is_asleep(datapath: &impl Datapath, row: VmRow) -> bool {
    datapath
        .vm(row)
        .is_some_and(|vm| vm.flags().load(Relaxed) & VmFlags::ASLEEP != 0)
}
