//! Replacement of the policies in force.
//!
//! # Theory of operation
//! Between two packets the judge is given the new policies ([`Judge::set_policies`]), and VMs their
//! quotas: what comes from now on is judged by these. Then a walk judges every flow again, some in
//! each turn of the loop ([`SlotWalk`]). Flows that are denied are cut ([`super::cut`]), unless
//! their policy leaves them. The broker is told once the walk is over and the grace of the flows that it cut:
//! after that no packet of a denied flow leaves any more.
//!
//! A flow keeps the number of the rule that admitted it. So earlier runs of rules stay known, and in
//! `RULES`, for as long as a flow refers to one of them.
//!
//! Policies that arrive during a walk have it finished at once, and so is the adoption of a
//! predecessor's flows: these are judged by what was in force at the start first.
//!
//! [`Judge::set_policies`]: crate::name_gate::Judge::set_policies
use std::collections::{HashSet, VecDeque};

use slipgate_abi::{RuleIndex, VmId};

use crate::{
    admission::rejudge::judge_again,
    clock::Clock,
    control::{Reload, Reloaded},
    datapath::Datapath,
    event_loop::{Engine, cut::MOST_PROBES},
    flow::{EndReason, STEPS_PER_TURN, SlotWalk},
    poll::Context,
    port::FrameIo,
    relay::{Rejudged, Standing},
    state::Core,
    vm::VmNet,
};

/// Steps to judge a flow: its slot is read, and its destination is looked up among the rules.
const STEPS_PER_LOOK: u32 = 16;
/// Steps to cut a flow: its guest may have to be asked for a segment.
const STEPS_PER_CUT: u32 = 64;
/// Most flows that are judged in a turn.
#[cfg(test)]
pub(super) const LOOKS_PER_TURN: u32 = STEPS_PER_TURN / STEPS_PER_LOOK + 1;

/// The walk that is under way, if one is, and results that the broker is to be told.
#[derive(Debug, Default)]
pub(super) struct Reloading {
    walk: Option<Judging>,
    done: VecDeque<Reloaded>,
}

impl Reloading {
    /// Whether flows are still to be judged.
    pub(super) fn is_under_way(&self) -> bool {
        self.walk.is_some()
    }

    /// Takes the next result that the broker is to be told.
    pub(super) fn take_done(&mut self) -> Option<Reloaded> {
        self.done.pop_front()
    }
}

/// The judging of all flows by policies that have come in force.
#[derive(Debug)]
struct Judging {
    id: u64,
    /// VMs that keep no denied flow.
    strictly: HashSet<VmId>,
    slots: SlotWalk,
    /// Elements of `RULES` that flows refer to.
    named: HashSet<RuleIndex>,
    /// Guests' connections that may still be probed.
    probes: usize,
    live: usize,
    cut: usize,
    left: usize,
}

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
    /// Puts the policies in force. [`Control::reloaded`] is called once every flow is judged.
    ///
    /// [`Control::reloaded`]: crate::control::Control::reloaded
    pub fn reload(&mut self, reload: Reload) {
        // An error ends the engine at the end of the turn.
        let _ = self.adopt_all();
        while self.reloading.is_under_way() {
            self.go_on_reloading();
        }
        let now_ns = self.clock.now_ns();
        let Reload {
            id,
            mut policies,
            rule_base,
            local,
            vms,
            strictly,
        } = reload;
        // The refusals until now refer to the texts of the previous rules.
        self.record_refusals();
        self.core.journal.refusals.forget_rules();
        policies.set_local(&local);
        let core = &mut self.core;
        core.forwards.renumber(&mut core.rules, |rules| {
            let forwards = rules.texts.forwards();
            rules.texts.set(rule_base, policies.described(), forwards);
        });
        let of_vm: Vec<(VmId, u32)> = vms.iter().map(|vm| (vm.id, vm.policy)).collect();
        let mut judge = self.core.rules.judge.borrow_mut();
        judge.set_policies(policies, &of_vm, now_ns);
        drop(judge);
        for spec in vms {
            self.replace_vm(spec, false);
        }
        let strictly = HashSet::from_iter(strictly);
        let relayed = self.rejudge_loopback(|vm| !strictly.contains(&vm), now_ns);
        let mut slots = SlotWalk::default();
        slots.start(&self.core.nat.flows);
        self.reloading.walk = Some(Judging {
            id,
            strictly,
            slots,
            named: HashSet::new(),
            probes: MOST_PROBES,
            live: relayed.live,
            cut: relayed.cut,
            left: relayed.left,
        });
    }

    /// Does a turn's part of the walk, if one is under way.
    pub(super) fn go_on_reloading(&mut self) {
        let Some(mut walk) = self.reloading.walk.take() else {
            return;
        };
        let now_ns = self.clock.now_ns();
        let mut steps = STEPS_PER_TURN;
        let mut cut = Vec::new();
        while let Some(slot) = walk.slots.next(&self.core.nat.flows, &mut steps) {
            // One that has ended is not recorded yet.
            walk.named
                .insert(self.core.nat.datapath.slot(slot).rule_index());
            let may_stay = |vm| !walk.strictly.contains(&vm);
            let standing = judge_again(&self.core, slot, now_ns, may_stay);
            walk.live += usize::from(standing.is_some());
            walk.left += usize::from(standing == Some(Standing::Left));
            let cost = match standing {
                Some(Standing::Cut) => {
                    cut.push(slot);
                    STEPS_PER_CUT
                }
                _ => STEPS_PER_LOOK,
            };
            steps = steps.saturating_sub(cost);
        }
        walk.cut += self.cut_probing(&cut, EndReason::Policy, &mut walk.probes);
        if walk.slots.is_under_way() {
            self.reloading.walk = Some(walk);
            return;
        }
        self.core.rules.texts.forget_unnamed(&walk.named);
        let done = Reloaded {
            id: walk.id,
            cut: walk.cut as u64,
            kept: (walk.live - walk.cut) as u64,
            left: walk.left as u64,
            ends: self.after_ends(),
        };
        self.reloading.done.push_back(done);
    }

    /// Ends the connections to the host's loopback that are now denied. `may_stay` says of a VM
    /// whether its connections are left if its policy says so.
    fn rejudge_loopback(&mut self, may_stay: impl Fn(VmId) -> bool, now_ns: u64) -> Rejudged {
        let Core { rules, out, .. } = &mut self.core;
        let cx = &mut Context::new(now_ns, &mut out.queue, &self.poller);
        let judges = |vm: &VmNet, to, host_port| match rules.standing(vm, to, host_port) {
            Standing::Left if !may_stay(vm.id) => Standing::Cut,
            standing => standing,
        };
        self.services.relay.rejudge(&judges, cx)
    }
}
