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

use slipgate_abi::VmId;

use crate::{
    admission::rejudge::refused_flows,
    clock::Clock,
    control::{Reload, Reloaded},
    datapath::Datapath,
    event_loop::Engine,
    flow::EndReason,
    poll::Context,
    port::FrameIo,
    relay::{Rejudged, Standing},
    state::{Core, Nat},
    vm::VmNet,
};

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
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
        self.core.journal.refusals.forget_rules();
        policies.set_local(&local);
        let Nat {
            flows, datapath, ..
        } = &self.core.nat;
        let used = flows.all().into_iter();
        let used: HashSet<_> = used.map(|slot| datapath.slot(slot).rule_index()).collect();
        let core = &mut self.core;
        core.forwards.renumber(&mut core.rules, |rules| {
            let forwards = rules.texts.forwards();
            let texts = &mut rules.texts;
            texts.set(rule_base, policies.described(), forwards, &used);
        });
        let of_vm: Vec<(VmId, u32)> = vms.iter().map(|vm| (vm.id, vm.policy)).collect();
        let mut judge = self.core.rules.judge.borrow_mut();
        judge.set_policies(policies, &of_vm, now_ns);
        drop(judge);
        for spec in vms {
            let stats = self.core.nat.datapath.stats(spec.row);
            let vm = VmNet::new(spec, stats);
            self.services.relay.add_vm(vm.clone());
            self.core.set_vm(vm);
        }
        let may_stay = |vm| !strictly.contains(&vm);
        let refused = refused_flows(&self.core, now_ns, may_stay);
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
