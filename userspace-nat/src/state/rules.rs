//! The rules in force, their elements of `RULES`, and what names have opened by them.
//!
//! Openings by DNS are kept for a successor in the map `NAMES`. An entry holds the names that the
//! answer led through ([`LearntName::chain`]), not the rules that named them. A successor judges
//! these by its own rules, and opens the address for the time that is left. A chain of names that
//! is longer than an element is not kept: the guest has to resolve its name again. The same holds
//! for an opening for which the map has no room; no VM can take the room that the others need
//! ([`Reserve`]).
use std::{collections::BTreeMap, net::IpAddr, rc::Rc};

use slipgate_abi::{
    Protocol, Refusal, RuleIndex, SlotIndex, SlotRef, VmId, maps::MAX_NAMES, names::MAX_NAME_LEN,
};
use slipgate_policy::{Decision, Destination, Lead, NatBehaviour, OnReload, RuleId};

use crate::{
    datapath::{NameMap, RememberedName},
    name_gate::{Change, Had, LearntName, SharedJudge},
    quota::Reserve,
    record::rule_texts::RuleTexts,
    relay::Standing,
    vm::VmNet,
};

/// The rules in force, and the names by which they admitted live flows.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) judge: SharedJudge,
    /// The rules by their elements of `RULES`.
    pub(crate) texts: RuleTexts,
    /// Names that opened live flows' addresses, by slot, each with the slot's generation.
    opened_by: BTreeMap<SlotIndex, (u32, Rc<LearntName>)>,
}

impl Rules {
    /// Returns the rules of a judge.
    pub(super) fn new(judge: SharedJudge) -> Self {
        let texts = RuleTexts::new(judge.borrow().policies());
        Self {
            judge,
            texts,
            opened_by: BTreeMap::new(),
        }
    }

    /// Returns the element of `RULES` of a rule in force.
    pub(crate) const fn element_of(rule: RuleId) -> RuleIndex {
        RuleIndex::new(rule.0)
    }

    /// Notes the name that opened a flow's address.
    pub(crate) fn opened_by(&mut self, slot: SlotIndex, generation: u32, name: Rc<LearntName>) {
        self.opened_by.insert(slot, (generation, name));
    }

    /// Returns the name that opened a live flow's address, if one did.
    pub(crate) fn name_of(&self, slot: SlotIndex, generation: u32) -> Option<&LearntName> {
        let (of, name) = self.opened_by.get(&slot)?;
        (*of == generation).then_some(name)
    }

    /// Removes and returns the name that opened a flow's address, because the flow has ended.
    pub(crate) fn forget_name(
        &mut self,
        slot: SlotIndex,
        generation: u32,
    ) -> Option<Rc<LearntName>> {
        self.name_of(slot, generation)?;
        self.opened_by.remove(&slot).map(|(_, name)| name)
    }

    /// Returns slots, generations and names of the flows whose addresses names opened, in order of
    /// the slots, from `from` on. Who takes a page of them pays for that page.
    pub(crate) fn names_of_flows(
        &self,
        from: SlotIndex,
    ) -> impl Iterator<Item = (SlotIndex, u32, &LearntName)> {
        let flows = self.opened_by.range(from..);
        flows.map(|(slot, (generation, name))| (*slot, *generation, &**name))
    }

    /// Whether an inspect rule admitted a flow, or a rule that is no longer known in a policy that
    /// has inspect rules.
    pub(crate) fn has_inspect_rule(&self, live: SlotRef) -> bool {
        let rule = RuleId(live.rule_index().get());
        let judge = self.judge.borrow();
        let policy = judge.policy(live.id());
        policy.inspections().0 && (!policy.has(rule) || policy.inspects(rule))
    }

    /// Returns how the translated ports of a VM's flows behave.
    pub(crate) fn nat_behaviour(&self, vm: VmId, protocol: Protocol) -> NatBehaviour {
        self.judge.borrow().nat(vm).of(protocol)
    }

    /// Judges a translated port of another guest, or a guest that sends from one. What a rule wants
    /// inspected is refused: such flows are not.
    pub(crate) fn decide_hairpin(&self, vm: VmId, to: Destination) -> Decision {
        let verdict = self.judge.borrow().decide_hairpin(vm, to);
        let uninspected = verdict.inspect.then_some(Refusal::Inspection);
        Decision {
            refusal: verdict.decision.refusal.or(uninspected),
            ..verdict.decision
        }
    }

    /// Whether an address may be a forward's client: not in the VM's own network, of the host, or
    /// in address space that no outside host has.
    pub(crate) fn may_come_in(&self, vm: &VmNet, remote: IpAddr) -> bool {
        let judge = self.judge.borrow();
        let space = judge.policy(vm.id).protected(remote);
        !vm.is_on_link(remote) && space.is_none_or(|(_, space)| space.may_come_in())
    }

    /// Whether ports of an address may lead to the host's loopback.
    pub(crate) fn leads_to_loopback(&self, vm: &VmNet, addr: IpAddr) -> bool {
        let judge = self.judge.borrow();
        judge
            .policy(vm.id)
            .has_loopback_at(&vm.host_loopback, addr, gateway(vm, addr))
    }

    /// Returns the port on the host's loopback to which a destination leads; `None` when it leads
    /// nowhere. The VM's policy must list the port, and no rule may deny it.
    pub(crate) fn lead(&self, vm: &VmNet, to: Destination) -> Option<Lead> {
        let judge = self.judge.borrow();
        judge
            .policy(vm.id)
            .host_loopback(&vm.host_loopback, to, gateway(vm, to.addr))
    }

    /// Judges a live connection to the host's loopback by the present rules.
    pub(crate) fn standing(&self, vm: &VmNet, to: Destination, host_port: u16) -> Standing {
        match self.lead(vm, to) {
            Some(lead) if lead.decision.is_allowed() && lead.host_port == host_port => {
                Standing::Stands
            }
            _ => match self.judge.borrow().on_reload(vm.id) {
                OnReload::Keep => Standing::Left,
                OnReload::Cut => Standing::Cut,
            },
        }
    }

    /// Writes the openings and their ends since the last call to the map. `vms`: number of VMs that
    /// share its room.
    pub(crate) fn remember_openings(&self, map: &mut impl NameMap, vms: usize) {
        let changes = self.judge.borrow_mut().take_changes();
        if changes.is_empty() {
            return;
        }
        let reserve = Reserve::new(MAX_NAMES as usize, vms);
        for change in changes {
            match change {
                Change::Opened(vm, addr, name, expires_ns) => {
                    let (held, total) = self.judge.borrow().open_by_name(vm);
                    let free = (MAX_NAMES as usize).saturating_sub(total);
                    if name.chain().len() > MAX_NAME_LEN || !reserve.allows(free, || held) {
                        continue;
                    }
                    map.remember_name(&RememberedName {
                        vm,
                        addr,
                        name: name.chain().into(),
                        expires_ns,
                    });
                }
                Change::Ended(vm, addr, name) => {
                    if name.chain().len() <= MAX_NAME_LEN {
                        map.forget_name(vm, addr, name.chain());
                    }
                }
            }
        }
    }

    /// Restores the openings of a predecessor that the present rules allow, and deletes the others.
    /// Returns how many addresses are open.
    pub(crate) fn reopen(&self, map: &mut impl NameMap, vms: usize, now_ns: u64) -> usize {
        let mut open = 0;
        let mut all = map.remembered_names();
        all.sort_unstable_by_key(|remembered| remembered.vm);
        for of_vm in all.chunk_by(|a, b| a.vm == b.vm) {
            let vm = of_vm[0].vm;
            let had = of_vm.iter().map(|remembered| Had {
                addr: remembered.addr,
                chain: &remembered.name,
                until_ns: remembered.expires_ns,
                noted_ns: remembered.expires_ns,
            });
            let had: Vec<_> = had.collect();
            let again = self.judge.borrow_mut().reopen(vm, &had, now_ns);
            for (remembered, is_open) in of_vm.iter().zip(again) {
                open += usize::from(is_open);
                if !is_open {
                    map.forget_name(vm, remembered.addr, &remembered.name);
                }
            }
        }
        self.remember_openings(map, vms);
        open
    }
}

/// Returns the gateway's address of the family of a destination. To a VM without IPv6 none of that
/// family leads anywhere.
fn gateway(vm: &VmNet, to: IpAddr) -> IpAddr {
    vm.gateway_of(to).unwrap_or(vm.gateway.into())
}
