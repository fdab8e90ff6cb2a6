//! Other policies in the place of those that are in force.
//!
//! What DNS opened is judged anew, by the names ([`Judge::rejudge`]): so new flows see the new rules
//! from the first packet on, whatever was asked for before. Flows that live are asked for one by one
//! whether they may go on.
use slipgate_policy::{
    Action, Decision, Destination, Identity, Name, OnReload, Policy, PolicySet, Rule, name_means,
};

use super::{Judge, LearntName, openings::split};

impl Judge {
    /// Puts `policies` in the place of those there are; `of_vm` says which each VM has, by id. VMs
    /// that it does not speak of keep their index.
    pub fn set_policies(&mut self, policies: PolicySet, of_vm: &[(u32, u32)], now_ns: u64) {
        self.replace_policies(policies);
        for &(vm, policy) in of_vm {
            self.assign(vm, policy);
        }
        self.rejudge(now_ns);
    }

    /// Whether a flow that is there may go on: whether it would be admitted now, or, where it came
    /// by a name whose opening is over, would be while that lasted. `by`: that name, as far as it is
    /// known. Of a flow whose name is not known, the rule that let it in is asked (`rule`): that is
    /// enough when a rule that means the same is there.
    ///
    /// A flow that was never inspected (`was_inspected`) does not go on where a rule inspects: what was
    /// said in it nobody has seen, and it could say the like for ever.
    pub fn keeps(
        &self,
        vm: u32,
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
        // A rule by address has the last word, and a name that is open and allows.
        if !by_default && verdict.name.is_none() || allowed && verdict.name.is_some() {
            return goes(verdict.decision);
        }
        match by.map(|by| self.first_of_way(vm, by, to)) {
            Some(Some(decision)) => goes(decision),
            _ if allowed => goes(verdict.decision),
            Some(None) => false,
            None => rule.is_some_and(|rule| names(policy, rule, was_inspected, to)),
        }
    }

    /// What becomes of a VM's flows that may not go on.
    pub fn on_reload(&self, vm: u32) -> OnReload {
        self.policy(vm).settings().on_reload
    }

    /// The first rule by name about a way that speaks of a destination. Where the way is not to be
    /// gone any more, it is the rule that says so; `None`: no rule does.
    fn first_of_way(&self, vm: u32, by: &LearntName, to: Destination) -> Option<Decision> {
        let policy = self.policy(vm);
        let (name, steps) = split(by.way())?;
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

/// Whether a rule by name that lets a destination in means what this one did.
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
