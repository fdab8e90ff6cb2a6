//! Replacement of policies in force.
//!
//! # Theory of operation
//! A change has the policies that are new, changed or removed, and the VMs that are concerned. It is
//! carried out in these steps, each of which takes several turns of the loop where there is much to
//! do, and one change after another:
//!
//! 1. what a predecessor left of the concerned VMs' flows is adopted: each flow is judged once by
//!    what was in force at the start, and then by what comes. Until then the present policies stay
//!    in force for these VMs;
//! 2. between two packets the judge is given the new policies ([`Judge::change_policies`]), and VMs
//!    their quotas: what comes from now on is judged by these;
//! 3. the concerned VMs' flows are judged again. Flows that are denied are cut ([`super::cut`]),
//!    unless their policy leaves them. The broker is told once that is over, with a token for the
//!    grace of the flows that were cut: after that no packet of a denied flow leaves any more.
//!
//! Messages about a VM that come before the second step are carried out at once, except that the VM
//! keeps its policy until then ([`Reloading::meanwhile`]).
//!
//! A flow keeps the number of the rule that admitted it. So earlier runs of rules stay in `RULES`
//! for as long as a flow refers to one of them.
//!
//! [`Judge::change_policies`]: crate::name_gate::Judge::change_policies
use std::collections::{HashSet, VecDeque};

use slipgate_abi::{SlotIndex, VmId, VmRow};
use slipgate_model::VmSpec;

use crate::{
    admission::rejudge::judge_again,
    clock::Clock,
    control::{Reload, Reloaded},
    datapath::Datapath,
    event_loop::{Engine, cut::MOST_PROBES},
    flow::{EndReason, Flows, STEPS_PER_TURN},
    poll::Context,
    port::FrameIo,
    relay::{Rejudged, Standing},
    state::{Core, VmTable},
    vm::VmNet,
};

/// Steps to judge a flow: its slot is read, and its destination is looked up among the rules.
const STEPS_PER_LOOK: u32 = 16;
/// Steps to cut a flow: its guest may have to be asked for a segment.
const STEPS_PER_CUT: u32 = 64;
/// Flows of a VM that are listed for one step.
const LISTED_PER_STEP: u32 = 64;
/// Most flows that are judged in a turn.
#[cfg(test)]
pub(super) const LOOKS_PER_TURN: u32 = STEPS_PER_TURN / STEPS_PER_LOOK + 1;

/// Changes that wait, the one whose flows are judged, and results that the broker is to be told.
#[derive(Debug, Default)]
pub(super) struct Reloading {
    waiting: VecDeque<Waiting>,
    walk: Option<Judging>,
    done: VecDeque<Reloaded>,
}

/// A change that is not in force yet.
#[derive(Debug)]
struct Waiting {
    reload: Reload,
    /// VMs of which a predecessor's flows may be left.
    to_adopt: Vec<VmRow>,
}

impl Waiting {
    fn new(reload: Reload) -> Self {
        Self {
            to_adopt: reload.vms.iter().map(|vm| vm.row).collect(),
            reload,
        }
    }

    /// Whether a VM that comes now has a policy of this change.
    fn concerns(&self, vm: &VmSpec) -> bool {
        let mut changed = self.reload.policies.iter();
        changed.any(|(index, _)| *index == vm.policy)
    }
}

impl Reloading {
    /// Whether policies are still to be put in force, or flows to be judged.
    pub(super) fn is_under_way(&self) -> bool {
        self.walk.is_some() || !self.waiting.is_empty()
    }

    /// Takes the next result that the broker is to be told.
    pub(super) fn take_done(&mut self) -> Option<Reloaded> {
        self.done.pop_front()
    }

    /// Notes another description of a VM for changes that wait and concern it. Returns the
    /// description that holds until then, with the VM's present policy.
    pub(super) fn meanwhile(&mut self, spec: VmSpec, present: Option<u32>) -> VmSpec {
        let mut is_concerned = false;
        for waiting in &mut self.waiting {
            let mut vms = waiting.reload.vms.iter_mut();
            if let Some(own) = vms.find(|vm| vm.id == spec.id) {
                *own = VmSpec {
                    policy: own.policy,
                    ..spec.clone()
                };
                is_concerned = true;
            } else if waiting.concerns(&spec) {
                waiting.reload.vms.push(spec.clone());
            }
        }
        match present.filter(|_| is_concerned) {
            Some(policy) => VmSpec { policy, ..spec },
            None => spec,
        }
    }

    /// Forgets a VM that is removed.
    pub(super) fn forget(&mut self, id: VmId) {
        for waiting in &mut self.waiting {
            waiting.reload.vms.retain(|vm| vm.id != id);
        }
    }
}

/// The judging of the concerned VMs' flows by policies that have come in force.
#[derive(Debug)]
struct Judging {
    id: u64,
    /// VMs that keep no denied flow.
    strictly: HashSet<VmId>,
    /// VMs whose flows are not listed yet, the next one last.
    vms: Vec<(VmRow, VmId)>,
    /// VM whose flows are listed.
    row: VmRow,
    /// Flows of that VM that are still to be judged.
    slots: Vec<SlotIndex>,
    /// Guests' connections that may still be probed.
    probes: usize,
    live: usize,
    cut: usize,
    left: usize,
}

impl Judging {
    /// Returns the next flow; `None` when no step of this turn, or no flow, is left.
    fn next(&mut self, flows: &Flows, vms: &VmTable, steps: &mut u32) -> Option<SlotIndex> {
        while *steps > 0 {
            *steps -= 1;
            if let Some(slot) = self.slots.pop() {
                // One that ended meanwhile may be another VM's by now.
                let entry = flows.entry(slot);
                if entry.is_some_and(|entry| entry.vm_row == self.row) {
                    return Some(slot);
                }
                continue;
            }
            let (row, id) = self.vms.pop()?;
            if vms.id_of(row) == Some(id) {
                self.row = row;
                self.slots = flows.slots_of(row).to_vec();
                let listed = self.slots.len() as u32;
                *steps = steps.saturating_sub(listed / LISTED_PER_STEP);
            }
        }
        None
    }

    fn is_over(&self) -> bool {
        self.vms.is_empty() && self.slots.is_empty()
    }
}

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
    /// Puts policies in force, at once if no change is under way and no predecessor's flow is left
    /// of the VMs. [`Control::reloaded`] is called once every flow is judged.
    ///
    /// [`Control::reloaded`]: crate::control::Control::reloaded
    pub fn reload(&mut self, reload: Reload) {
        self.core.rules.judge.borrow_mut().set_local(&reload.local);
        self.reloading.waiting.push_back(Waiting::new(reload));
        self.go_on_switching(0);
    }

    /// Adopts flows of VMs that the next change concerns, `most` slots, and puts the change in force
    /// when none is left.
    fn go_on_switching(&mut self, most: usize) {
        if self.reloading.walk.is_some() {
            return;
        }
        let Some(mut next) = self.reloading.waiting.pop_front() else {
            return;
        };
        if self.core.nat.flows.are_left() && !self.adopt_some(&mut next.to_adopt, most) {
            self.reloading.waiting.push_front(next);
            return;
        }
        self.switch(next.reload);
    }

    /// Gives the judge the policies, and VMs their quotas, and begins to judge their flows.
    fn switch(&mut self, reload: Reload) {
        let now_ns = self.clock.now_ns();
        let Reload {
            id,
            policies,
            local: _,
            vms,
            strictly,
        } = reload;
        // The refusals until now refer to the texts of the previous rules.
        self.record_refusals();
        for vm in &vms {
            self.core.journal.refusals.forget_rules(vm.id);
        }
        self.core.rules.texts.change(&policies);
        let of_vm: Vec<(VmId, u32)> = vms.iter().map(|vm| (vm.id, vm.policy)).collect();
        let mut judge = self.core.rules.judge.borrow_mut();
        judge.change_policies(policies, &of_vm, now_ns);
        drop(judge);
        let concerned: HashSet<VmId> = vms.iter().map(|vm| vm.id).collect();
        let rows = vms.iter().rev().map(|vm| (vm.row, vm.id)).collect();
        // Those that can't leave by the uplink or the routes of their VM's new policy.
        let left = vms.into_iter().map(|spec| self.replace_vm(spec, false));
        let left: usize = left.sum();
        let strictly = HashSet::from_iter(strictly);
        let relayed = self.rejudge_loopback(&concerned, |vm| !strictly.contains(&vm), now_ns);
        self.reloading.walk = Some(Judging {
            id,
            strictly,
            vms: rows,
            row: VmRow::NOBODY,
            slots: Vec::new(),
            probes: MOST_PROBES,
            live: relayed.live + left,
            cut: relayed.cut + left,
            left: relayed.left,
        });
    }

    /// Does a turn's part of a change, if one is under way.
    pub(super) fn go_on_reloading(&mut self) {
        self.go_on_switching(self.adopting.slots_per_turn);
        let Some(mut walk) = self.reloading.walk.take() else {
            return;
        };
        let now_ns = self.clock.now_ns();
        let mut steps = STEPS_PER_TURN;
        let (mut cut, mut off_pool) = (Vec::new(), Vec::new());
        while let Some(slot) = walk.next(&self.core.nat.flows, &self.core.vms, &mut steps) {
            let may_stay = |vm| !walk.strictly.contains(&vm);
            let standing = judge_again(&self.core, slot, now_ns, may_stay);
            walk.live += usize::from(standing.is_some());
            walk.left += usize::from(standing == Some(Standing::Left));
            let cost = match standing {
                Some(Standing::Cut) => {
                    match self.core.nat.is_off_pool(slot) {
                        true => off_pool.push(slot),
                        false => cut.push(slot),
                    }
                    STEPS_PER_CUT
                }
                _ => STEPS_PER_LOOK,
            };
            steps = steps.saturating_sub(cost);
        }
        for (slots, reason) in [
            (cut, EndReason::Policy),
            (off_pool, EndReason::NatAddresses),
        ] {
            walk.cut += self.cut_probing(&slots, reason, &mut walk.probes).len();
        }
        if !walk.is_over() {
            self.reloading.walk = Some(walk);
            return;
        }
        let done = Reloaded {
            id: walk.id,
            cut: walk.cut as u64,
            kept: (walk.live - walk.cut) as u64,
            left: walk.left as u64,
            ends: self.after_ends(),
        };
        self.reloading.done.push_back(done);
        self.go_on_switching(0);
    }

    /// Ends those of some VMs' connections to the host's loopback that are now denied. `may_stay`
    /// says of a VM whether its connections are left if its policy says so.
    fn rejudge_loopback(
        &mut self,
        concerned: &HashSet<VmId>,
        may_stay: impl Fn(VmId) -> bool,
        now_ns: u64,
    ) -> Rejudged {
        let Core { rules, out, .. } = &mut self.core;
        let cx = &mut Context::new(now_ns, &mut out.queue, &self.poller);
        let judges = |vm: &VmNet, to, host_port| match rules.standing(vm, to, host_port) {
            Standing::Left if !may_stay(vm.id) => Standing::Cut,
            standing => standing,
        };
        self.services.relay.rejudge(concerned, &judges, cx)
    }
}
