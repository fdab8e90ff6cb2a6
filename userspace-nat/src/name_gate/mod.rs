//! The name gate: the rules about names, and the addresses that DNS has opened by them.
//!
//! # Theory of operation
//! The engine has one [`Judge`], shared by admission and the DNS proxy. A question is judged by its
//! name before it is looked up ([`NamePolicy::question`]). An answer, from upstream or from the
//! cache, is judged before it goes to the guest ([`NamePolicy::answer`]): the guest must be allowed
//! to ask for every name that it leads through, and no address may be protected. Then the addresses
//! are open to that VM, before it can know them. Admission calls [`Judge::decide`]. [`question`]
//! has the first of these, [`answer`] the second, and [`openings`] the life of what is open.
//!
//! | | with a rule by name or `--default deny` |
//! | --- | --- |
//! | a name that a rule denies, or that none allows with `--default deny` | REFUSED, not looked up |
//! | a name with more labels, or a longer one, than the policy permits | REFUSED |
//! | a public resolver's name ([`slipgate_policy::is_canary`] and its like) that no rule names | REFUSED |
//! | a name that a browser asks for to learn whether it may use such a resolver | no such name |
//! | any, where the policy has no resolvers | REFUSED, whatever the rules |
//! | TXT, NULL, ANY, and types that are not in common use, with `--default deny` | REFUSED, unless the policy lists them |
//! | more than a VM may say by new names beneath a wildcard, or by the choice of known ones ([`slipgate_policy::Asker`]) | REFUSED |
//! | an answer that leads to such a name | REFUSED |
//! | an answer about an allowed name with a protected address | REFUSED ("rebinding") |
//! | an answer for which the VM has no room | REFUSED; live openings stay |
mod answer;
mod by_rules;
mod inspect;
mod learnt;
mod openings;
mod question;
mod reload;

use std::{cell::RefCell, collections::HashMap, hash::RandomState, net::IpAddr, rc::Rc};

use slipgate_abi::VmId;
use slipgate_model::{NameCounts, RefusedQuestions};
use slipgate_policy::{
    Asker, Decision, Destination, Idle, LocalAddresses, Name, NatSettings, Policy, PolicySet,
    Sleep, Timers,
};

use self::learnt::Learnt;
pub use self::{
    by_rules::ByRules,
    inspect::NameRefusal,
    learnt::{Change, LearntName, MAX_PER_VM},
    openings::Had,
};

/// Most rules per VM for which refused questions are counted separately.
const COUNTED_RULES: usize = 16;
/// Longest part of a refused name that is kept, bytes.
const SHOWN_NAME: usize = 100;

/// A judge shared by admission and the DNS proxy.
pub type SharedJudge = Rc<RefCell<Judge>>;

/// The rules, and the addresses that DNS has opened by them.
#[derive(Debug)]
pub struct Judge {
    policies: PolicySet,
    /// Whether a policy has, or had, other timers than the default.
    has_timers: bool,
    /// Addresses of the host and the guests as they were last set, for policies that come later.
    local: Option<LocalAddresses>,
    /// Index of each VM's policy, by VM id.
    of_vm: HashMap<VmId, u32, foldhash::fast::RandomState>,
    learnt: Learnt,
    counts: HashMap<VmId, NameCounts>,
    askers: HashMap<VmId, Asker>,
    hasher: RandomState,
    /// Generations of the policies that changed, by index: answers cached under another one are not
    /// used.
    generations: HashMap<u32, u16>,
}

/// A decision about a destination, and the name that led to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// The decision and its rule.
    pub decision: Decision,
    /// Name that opened the address, if one did.
    pub name: Option<Rc<LearntName>>,
    /// Whether an inspect rule decided.
    pub inspect: bool,
}

impl Judge {
    /// Creates a judge with these rules and no openings.
    pub fn new(policies: impl Into<PolicySet>) -> Self {
        let policies = policies.into();
        let has_timers = policies.iter().any(has_timers);
        Self {
            has_timers,
            local: None,
            policies,
            of_vm: HashMap::default(),
            learnt: Learnt::default(),
            counts: HashMap::new(),
            askers: HashMap::new(),
            hasher: RandomState::new(),
            generations: HashMap::new(),
        }
    }

    /// Creates a judge that can be shared.
    pub fn shared(policies: impl Into<PolicySet>) -> SharedJudge {
        Rc::new(RefCell::new(Self::new(policies)))
    }

    /// Returns the policies in force.
    pub fn policies(&self) -> &PolicySet {
        &self.policies
    }

    /// Sets the addresses of the host and the guests.
    pub fn set_local(&mut self, local: &LocalAddresses) {
        if self.local.as_ref() != Some(local) {
            self.local = Some(local.clone());
            self.policies.set_local(local);
        }
    }

    /// Sets the index of a VM's policy.
    pub fn assign(&mut self, vm: VmId, policy: u32) {
        self.of_vm.insert(vm, policy);
    }

    /// Returns the index of a VM's policy in the set; `None` when none was assigned.
    pub fn policy_of(&self, vm: VmId) -> Option<u32> {
        self.of_vm.get(&vm).copied()
    }

    /// Returns a VM's policy. A VM without an assigned policy has the only one, or where there are
    /// several one that refuses everything.
    pub fn policy(&self, vm: VmId) -> &Policy {
        self.policies.of(self.policy_of(vm))
    }

    /// Returns the idle time-outs of a VM's flows.
    pub fn timers(&self, vm: VmId) -> Timers {
        match self.has_timers {
            true => self.policy(vm).settings().timers,
            false => Timers::default(),
        }
    }

    /// Returns how the translated ports of a VM's flows behave.
    pub fn nat(&self, vm: VmId) -> NatSettings {
        self.policy(vm).settings().nat
    }

    /// Returns what is held for a VM while it sleeps.
    pub fn sleep(&self, vm: VmId) -> Sleep {
        self.policy(vm).settings().sleep
    }

    /// Returns what does not count as activity of a VM.
    pub fn idle(&self, vm: VmId) -> Idle {
        self.policy(vm).settings().idle
    }

    /// Judges a destination for a VM.
    pub fn decide(&self, vm: VmId, to: Destination, now_ns: u64) -> Verdict {
        let policy = self.policy(vm);
        let names = self.learnt.effects(vm, to.addr, now_ns);
        let names = names.map(|name| (name, &*name.rules));
        let (decision, name) = policy.decide_among(to, names);
        Verdict {
            decision,
            name: name.cloned(),
            inspect: policy.inspects(decision.rule),
        }
    }

    /// Judges a translated port of another guest, or a guest that sends from one, for a VM. No name
    /// opens the host's addresses.
    pub fn decide_hairpin(&self, vm: VmId, to: Destination) -> Verdict {
        let policy = self.policy(vm);
        let decision = policy.decide_hairpin(to);
        Verdict {
            decision,
            name: None,
            inspect: policy.inspects(decision.rule),
        }
    }

    /// Explains [`Judge::decide`] in sentences, one a line.
    pub fn explain(&self, vm: VmId, to: Destination, now_ns: u64) -> String {
        let verdict = self.decide(vm, to, now_ns);
        let Some(name) = verdict.name else {
            return self.policy(vm).explain(to).to_string();
        };
        let decision = verdict.decision;
        let outcome = if decision.is_allowed() {
            "allowed"
        } else {
            "refused"
        };
        format!(
            "{} is {outcome} by {}.\n{} is an address of {}, as this VM was told by DNS.",
            to.describe(),
            self.policy(vm).named(decision),
            to.addr,
            name.name,
        )
    }

    /// Returns whether a name may be asked for, the rule by name that decides about a connection to
    /// `to`, and the addresses that the name has opened to the VM.
    pub fn name(
        &self,
        vm: VmId,
        name: Name<'_>,
        to: Destination,
        now_ns: u64,
    ) -> (Decision, Option<Decision>, Vec<IpAddr>) {
        let policy = self.policy(vm);
        let rules = policy.about(name);
        let question = policy.may_ask(name, &rules);
        let open = self.learnt.addresses(vm, &name.without_dot(), now_ns);
        (question, policy.first_of(&rules, to), open)
    }

    /// Returns the counts of refusals in a VM's DNS, and of its openings.
    pub fn counts(&self, vm: VmId) -> NameCounts {
        NameCounts {
            open: self.learnt.count(vm) as u64,
            ..self.counts.get(&vm).cloned().unwrap_or_default()
        }
    }

    /// Removes the state of a VM that is gone.
    pub fn forget(&mut self, vm: VmId) {
        self.learnt.forget(vm);
        self.counts.remove(&vm);
        self.askers.remove(&vm);
        self.of_vm.remove(&vm);
    }

    fn count(&mut self, vm: VmId) -> &mut NameCounts {
        self.counts.entry(vm).or_default()
    }

    /// Counts a question that a rule refused.
    fn count_refused(&mut self, vm: VmId, rule: String, mut name: String) {
        name.truncate(SHOWN_NAME); // ASCII, as names are shown

        let counts = self.count(vm);
        counts.refused_names += 1;
        if let Some(by) = counts.refused_by.iter_mut().find(|by| by.rule == rule) {
            by.questions += 1;
            by.last = name;
        } else if counts.refused_by.len() < COUNTED_RULES {
            counts.refused_by.push(RefusedQuestions {
                rule,
                questions: 1,
                last: name,
            });
        }
    }
}

fn has_timers(policy: &Policy) -> bool {
    policy.settings().timers != Timers::default()
}

#[cfg(test)]
#[path = "answer_test.rs"]
mod answer_tests;
#[cfg(test)]
#[path = "judge_asks_test.rs"]
mod asks_tests;
#[cfg(test)]
#[path = "judge_test.rs"]
mod tests;
