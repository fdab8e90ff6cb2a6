//! Replacement of the policies in force.
//!
//! Between two packets the judge is given the new policies ([`Judge::set_policies`]), VMs their
//! quotas, and every flow is judged again. Flows that are denied are cut ([`super::cut`]), unless
//! their policy leaves them. After the grace no packet of a denied flow leaves any more.
//!
//! A flow keeps the number of the rule that admitted it. So the previous run of rules stays known,
//! and in `RULES`, for as long as a flow refers to one of them.
//!
//! [`Judge::set_policies`]: crate::name_gate::Judge::set_policies
use std::collections::HashSet;

use crate::{
    clock::Clock,
    context::Context,
    control::{Reload, Reloaded},
    datapath::Datapath,
    event_loop::Engine,
    flow::EndReason,
    port::{FrameIo, Outbox},
    record::rule_texts::RuleTexts,
    relay::{Rejudged, Standing},
    services::Services,
    state::Core,
    vm::VmNet,
};

impl<D: Datapath, P: FrameIo, C: Clock, S: Services> Engine<D, P, C, S> {
    /// Puts the policies in force.
    pub fn reload(&mut self, reload: Reload) -> Reloaded {
        let now_ns = self.clock.now_ns();
        let Reload {
            mut policies,
            rule_base,
            local,
            vms,
            strictly,
        } = reload;
        // The refusals until now refer to the texts of the previous rules.
        self.record_refusals();
        self.core.refusals.forget_rules();
        policies.set_local(&local);
        let named = self.core.rules_of_flows();
        let forwards = self.core.rule_texts.forwards();
        let mut rule_texts = std::mem::take(&mut self.core.rule_texts);
        self.core.renumber_forwards(&mut rule_texts, |rule_texts| {
            rule_texts.set(rule_base, policies.described(), forwards, &named);
        });
        self.core.rule_texts = rule_texts;
        self.core.rule_base = rule_base;
        let of_vm: Vec<(u32, u32)> = vms.iter().map(|vm| (vm.id, vm.policy)).collect();
        let judge = self.core.judge.clone();
        judge.borrow_mut().set_policies(policies, &of_vm, now_ns);
        for spec in vms {
            let stats = self.core.datapath.stats(spec.row);
            let vm = VmNet::new(spec, stats);
            self.services.vm_added(&vm);
            self.core.set_vm(vm);
        }
        let may_stay = |vm| !strictly.contains(&vm);
        let refused = self.core.refused_flows(now_ns, may_stay);
        let cut = self.cut_slots(&refused.cut, EndReason::Policy);
        let relayed = self.rejudge_loopback(may_stay, now_ns);
        let kept = refused.live - cut + relayed.live - relayed.cut;
        Reloaded {
            cut: (cut + relayed.cut) as u64,
            kept: kept as u64,
            left: (refused.left + relayed.left) as u64,
            ends: self.after_ends(),
        }
    }

    /// Ends the connections to the host's loopback that are now denied. `may_stay` says of a VM
    /// whether its connections are left if its policy says so.
    fn rejudge_loopback(&mut self, may_stay: impl Fn(u32) -> bool, now_ns: u64) -> Rejudged {
        let mut out = std::mem::replace(&mut self.core.out, Outbox::new(0));
        let cx = &mut Context {
            now_ns,
            out: &mut out,
            poller: &self.poller,
        };
        let core = &self.core;
        let judges = |vm: &VmNet, to, host_port| match core.stands(vm, to, host_port) {
            Standing::Left if !may_stay(vm.id) => Standing::Cut,
            standing => standing,
        };
        let rejudged = self.services.rejudge_loopback(&judges, cx);
        self.core.out = out;
        rejudged
    }
}

impl<D: Datapath> Core<D> {
    /// Returns the elements of `RULES` to which this process's flows refer.
    fn rules_of_flows(&self) -> HashSet<u32> {
        let slots = self.flows.all();
        let rules = slots.iter().map(|slot| self.datapath.slot(*slot).rule());
        rules.collect()
    }

    /// Assigns the forwards their elements of `RULES` in another run.
    fn renumber_forwards(&mut self, texts: &mut RuleTexts, set: impl FnOnce(&mut RuleTexts)) {
        let places: Vec<_> = self
            .forwards
            .iter()
            .map(|(key, forward)| (*key, texts.forward(forward.rule)))
            .collect();
        set(texts);
        for (key, place) in places {
            if let (Some(forward), Some(place)) = (self.forwards.get_mut(&key), place) {
                forward.rule = texts.rule_of_forward(place);
            }
        }
    }
}
