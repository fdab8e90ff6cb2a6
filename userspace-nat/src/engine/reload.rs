//! Other policies under way.
//!
//! Between two packets the judge gets the new ones ([`Judge::set_policies`]), VMs their quotas, and
//! every flow is asked whether it may go on. Those that may not are cut ([`super::cut`]), unless
//! their policy leaves them. Whoever asked is answered after the grace: no packet of what is denied
//! now leaves any more.
//!
//! A flow keeps the number of the rule that let it in. So the run of rules before stays known, and
//! in `RULES`, for as long as a flow names one of it.
//!
//! [`Judge::set_policies`]: crate::name_gate::Judge::set_policies
use std::{collections::HashSet, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{Protocol, SlotRef, slot::SlotFlags, tcp::TcpBits};

use super::{
    Context, Control, ControlReply, Engine, Services, commands::Later, core::Core,
    rule_texts::RuleTexts,
};
use crate::{
    clock::Clock,
    datapath::Datapath,
    flow::{EndReason, State},
    port::{FrameIo, Outbox},
    relay::{Rejudged, Standing},
    vm::{VmNet, VmSpec},
};
use slipgate_policy::{Described, Destination, LocalAddresses, OnReload, PolicySet};

/// What is to be in force from now on.
#[derive(Debug)]
pub struct Reload {
    /// Returned with the answer.
    pub request: u64,
    /// The policies.
    pub policies: PolicySet,
    /// Where their run begins in `RULES`.
    pub rule_base: u32,
    /// What the rules protect on this host.
    pub local: LocalAddresses,
    /// All VMs, with their policy and quotas.
    pub vms: Vec<VmSpec>,
    /// VMs, by id, of whose flows none is left that may not be, whatever their policy says.
    pub strictly: Vec<u32>,
}

/// Flows that the rules of now would not admit.
#[derive(Debug, Default)]
pub(super) struct Refused {
    /// To be cut.
    pub(super) cut: Vec<u32>,
    /// Left, for their policy says so.
    pub(super) left: usize,
    /// All that live, these included.
    pub(super) live: usize,
}

impl<D: Datapath, P: FrameIo, C: Clock, K: Control, S: Services> Engine<D, P, C, K, S> {
    /// Puts it in force.
    pub(super) fn reload(&mut self, reload: Reload, now_ns: u64) {
        let Reload {
            request,
            mut policies,
            rule_base,
            local,
            vms,
            strictly,
        } = reload;
        // Those of before have its texts.
        self.record_refusals();
        self.core.refusals.forget_rules();
        policies.set_local(&local);
        let named = self.core.rules_of_flows();
        let forwards = self.core.rule_texts.forwards();
        let rules: Vec<Described> = policies.described().collect();
        let mut rule_texts = std::mem::take(&mut self.core.rule_texts);
        self.core.renumber_forwards(&mut rule_texts, |rule_texts| {
            rule_texts.set(rule_base, rules.into_iter(), forwards, &named);
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
        let reply = ControlReply::Applied {
            request,
            cut: (cut + relayed.cut) as u64,
            kept: kept as u64,
            left: (refused.left + relayed.left) as u64,
        };
        self.answer_after_ends(Later::Reply(reply));
    }

    /// Ends the connections to the host's loopback that may not be any more. `may_stay`: of which VMs
    /// they are left, if their policy says so.
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
    /// The flows that would not be admitted by the rules and forwards of now. `may_stay`: of which VMs
    /// they are left, if their policy says so.
    pub(super) fn refused_flows(&self, now_ns: u64, may_stay: impl Fn(u32) -> bool) -> Refused {
        let mut refused = Refused::default();
        for slot in self.flows.all() {
            let lives = self.flows.entry(slot).is_some_and(|entry| {
                matches!(entry.state, State::Live | State::Ending) && !self.flows.is_cut(slot)
            });
            if !lives {
                continue;
            }
            refused.live += 1;
            let live = self.datapath.slot(slot);
            if self.is_allowed(slot, live, now_ns) {
                continue;
            }
            let on_reload = self.judge.borrow().on_reload(live.vm());
            if on_reload == OnReload::Keep && may_stay(live.vm()) {
                refused.left += 1;
            } else {
                refused.cut.push(slot);
            }
        }
        refused
    }

    fn is_allowed(&self, slot: u32, live: SlotRef, now_ns: u64) -> bool {
        if live.flags() & SlotFlags::INBOUND != 0 {
            let forward = self.forward_for(&live.world_tuple(), live.vm());
            let leads = forward.is_some_and(|forward| forward.guest_port == live.guest_port());
            let vm = self.vm_by_id(live.vm());
            return leads && vm.is_some_and(|vm| self.may_come_in(&vm.net, live.remote().into()));
        }
        let Some(protocol) = Protocol::from_ip(live.protocol()) else {
            return false;
        };
        let to = Destination {
            addr: live.remote().into(),
            port: live.remote_port(),
            protocol,
        };
        let generation = live.generation().load(Relaxed);
        let by = self.opened_by.get(&slot);
        let by = by.filter(|(of, _)| *of == generation);
        let rule = self.rule_texts.identity(live.rule(), &self.datapath);
        let by = by.map(|(_, name)| &**name);
        let is_in_session = self.flows.entry(slot).is_some_and(|e| e.is_held());
        let was_released = live.tcp().load(Relaxed) & TcpBits::HELD != 0;
        let was_inspected = is_in_session || was_released;
        let judge = self.judge.borrow();
        judge.keeps(live.vm(), to, by, rule.as_ref(), was_inspected, now_ns)
    }

    /// The elements of `RULES` that flows of ours name.
    fn rules_of_flows(&self) -> HashSet<u32> {
        let slots = self.flows.all();
        let rules = slots.iter().map(|slot| self.datapath.slot(*slot).rule());
        rules.collect()
    }

    /// Gives the forwards their elements in another run.
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
