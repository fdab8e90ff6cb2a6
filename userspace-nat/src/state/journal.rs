//! Events since the last record was written: flows that began, and refusals.
use slipgate_abi::{Refusal, RuleIndex, SlotIndex, VmId};
use slipgate_model::FlowTuple;

use crate::record::Refusals;

/// A refusal, and the element of `RULES` that caused it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Refused {
    pub(crate) reason: Refusal,
    pub(crate) rule: Option<RuleIndex>,
}

impl From<Refusal> for Refused {
    fn from(reason: Refusal) -> Self {
        Self { reason, rule: None }
    }
}

/// Events that wait to be recorded. The engine records starts of flows before a message of the
/// broker can change what a rule's number means.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    /// Refusals, summed up by VM, reason and rule.
    pub(crate) refusals: Refusals,
    /// Whether starts of flows are recorded.
    pub(crate) records_starts: bool,
    /// Slots of the flows that have begun.
    pub(crate) started: Vec<SlotIndex>,
}

impl Journal {
    /// Notes that a flow has begun, if starts are recorded.
    pub(crate) fn flow_started(&mut self, slot: SlotIndex) {
        if self.records_starts {
            self.started.push(slot);
        }
    }

    /// Notes that a VM's flow was refused.
    pub(crate) fn flow_refused(&mut self, guest: &FlowTuple, refused: Refused, now_ns: u64) {
        let Refused { reason, rule } = refused;
        self.refusals
            .note(VmId::new(guest.scope), reason.name(), rule, guest, now_ns);
    }
}
