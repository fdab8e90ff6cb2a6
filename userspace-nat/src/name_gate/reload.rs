//! Replacement of the policies in force.
//!
//! Openings are judged again by their names ([`Judge::rejudge`]). So new flows are judged by the
//! new rules from the first packet on, whatever was asked for before. For each live flow the engine
//! asks whether it may go on.
use slipgate_abi::VmId;
use slipgate_policy::{
    Action, Decision, Destination, Identity, Name, OnReload, Policy, Rule, name_means,
};

use super::{Judge, LearntName, has_timers, openings::split};

impl Judge {
    /// Replaces policies by their indexes; `None`: it is removed. `of_vm` has each VM that has one of
    /// them, with the index of its policy from now on.
    pub fn change_policies(
        &mut self,
        policies: Vec<(u32, Option<Policy>)>,
        of_vm: &[(VmId, u32)],
        now_ns: u64,
    ) {
        let local = self.local.clone().unwrap_or_default();
        for (index, mut policy) in policies {
            if let Some(policy) = &mut policy {
                policy.set_local(&local);
                self.has_timers |= has_timers(policy);
            }
            self.policies.put(index, policy);
            let generation = self.generations.entry(index).or_default();
            *generation = generation.wrapping_add(1);
        }
        for &(vm, policy) in of_vm {
            self.assign(vm, policy);
        }
        self.rejudge(of_vm.iter().map(|(vm, _)| *vm), now_ns);
    }

    /// Returns the generation of a policy.
    pub(super) fn generation_of(&self, index: u32) -> u16 {
        self.generations.get(&index).copied().unwrap_or_default()
    }

    /// Whether a live flow may go on: whether it would be admitted now or, if a name opened it and
    /// that opening is over, would be admitted while that lasted. `by`: that name, as far as it is
    /// known. For a flow whose name is not known, `rule` is the rule that admitted it: a rule with
    /// the same meaning is enough.
    ///
    /// A flow that was never inspected (`was_inspected`) does not go on where a rule inspects: its
    /// content is unknown, and it could go on for ever.
    pub fn keeps(
        &self,
        vm: VmId,
        to: Destination,
        by: Option<&LearntName>,
        rule: Option<&Identity>,
        was_inspected: bool,
        now_ns: u64,
    ) -> bool {
        let policy = self.policy(vm);
        let verdict = self.decide(vm, to, now_ns);
        let by_default = [policy.default_id(), policy.dns_bypass_id()];
        let by_default = by_default.contains(&verdict.decision.rule);
        let allowed = verdict.decision.is_allowed();
        let goes = |decision: Decision| {
            decision.is_allowed() && (was_inspected || !policy.inspects(decision.rule))
        };
        let named = || by.map(|by| self.first_of_chain(vm, by, to));
        // A new connection that names a server whose name is denied would be refused, whatever else is
        // open.
        let is_denied = || named().flatten().is_some_and(|named| !named.is_allowed());
        if was_inspected && policy.inspects(verdict.decision.rule) && is_denied() {
            return false;
        }
        // A rule by address decides finally, and so does a name that is open and allowed.
        if !by_default && verdict.name.is_none() || allowed && verdict.name.is_some() {
            return goes(verdict.decision);
        }
        match named() {
            Some(Some(decision)) => goes(decision),
            _ if allowed => goes(verdict.decision),
            Some(None) => false,
            None => rule.is_some_and(|rule| names(policy, rule, was_inspected, to)),
        }
    }

    /// Returns what is done with a VM's flows that may not go on.
    pub fn on_reload(&self, vm: VmId) -> OnReload {
        self.policy(vm).settings().on_reload
    }

    /// Returns the first rule by name for a destination among the rules about a chain of names. If
    /// a name of the chain is denied now, it is the rule that denies it. Returns `None` when there
    /// is no rule.
    fn first_of_chain(&self, vm: VmId, by: &LearntName, to: Destination) -> Option<Decision> {
        let policy = self.policy(vm);
        let (name, steps) = split(by.chain())?;
        let mut rules = policy.about(name);
        for step in &steps {
            let about = policy.about(Name(step));
            let asked = self.asks(vm, Name(step), &about);
            if !asked.is_allowed() {
                return policy.place_of(asked.rule).map(|_| asked);
            }
            rules.extend(
                about
                    .into_iter()
                    .filter(|place| policy.is_deny(place.order)),
            );
        }
        rules.sort_unstable();
        rules.dedup();
        policy.first_of(&rules, to)
    }
}

/// Whether a rule by name that admits a destination has the same meaning as `identity`.
fn names(policy: &Policy, identity: &Identity, was_inspected: bool, to: Destination) -> bool {
    policy.meanings().any(|(rule, meaning)| match rule {
        Rule::Name(action, pattern) => {
            identity.means(meaning)
                && action.admits()
                && (was_inspected || *action != Action::Inspect)
                && pattern.covers(to.port, to.protocol)
                && (!policy.bypasses_dns(to) || name_means(pattern))
        }
        Rule::Match(..) | Rule::DenyFile(_) => false,
    })
}

#[cfg(test)]
#[path = "reload_test.rs"]
mod tests;
