//! The judge: rules, and what DNS has opened by them.
//!
//! # Theory of operation
//! The engine has one, shared by admission and the DNS proxy. A question is judged by its name
//! before it is looked up ([`NamePolicy::question`]); an answer, from upstream or from the cache,
//! before it goes to the guest ([`NamePolicy::answer`]): every name that it leads through must be
//! one that may be asked for, no address may be protected, and then the addresses are open to that
//! VM, before it can know them. Admission asks [`Judge::decide`].
//!
//! | | with a rule by name or `--default deny` |
//! | --- | --- |
//! | a name that a rule denies, or that none allows with `--default deny` | REFUSED, not looked up |
//! | TXT, NULL, ANY with `--default deny` | REFUSED |
//! | an answer that leads to such a name | REFUSED |
//! | an answer about an allowed name with a protected address | REFUSED ("rebinding") |
//! | an answer for which the VM has no room | REFUSED; what lives stays |
use std::{
    cell::RefCell,
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
    rc::Rc,
};

use serde::{Deserialize, Serialize};

use super::{
    Action, Decision, Destination, LocalAddresses, Policy, PolicySet,
    explain::target,
    learnt::{Full, Learnt, LearntName, MAX_PER_VM},
    protected::{embedded, shut_v6},
};
use crate::dns::{
    ExtendedError, Name, NamePolicy, NameVerdict, answer::Answer, chain::Chain, message::Type,
};

/// Rules by which questions were refused that are told apart, per VM.
const COUNTED_RULES: usize = 16;
/// As much of a refused name is kept, bytes.
const SHOWN_NAME: usize = 100;

/// A judge as it is shared.
pub type SharedJudge = Rc<RefCell<Judge>>;

/// The rules, and what DNS has opened by them.
#[derive(Debug)]
pub struct Judge {
    policies: PolicySet,
    /// Each VM's, by id.
    of_vm: HashMap<u32, u32>,
    learnt: Learnt,
    counts: HashMap<u32, NameCounts>,
}

/// A decision, and the name that it is due to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// What was decided.
    pub decision: Decision,
    /// The name that opened the address.
    pub name: Option<Rc<LearntName>>,
    /// Whether an inspect rule decided.
    pub inspect: bool,
}

/// What was refused in a VM's DNS, since the engine began.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NameCounts {
    /// Questions for names that may not be asked for.
    pub refused_names: u64,
    /// Questions for types that may not be asked for.
    pub refused_types: u64,
    /// Answers that led to a name that may not be asked for.
    pub refused_chains: u64,
    /// Answers with a protected address.
    pub rebinding: u64,
    /// Answers for which there was no room.
    pub full: u64,
    /// Addresses open by name, now.
    pub open: u64,
    /// Refused names by rule, with the last such name; of the first 16 rules.
    pub refused_by: Vec<RefusedQuestions>,
}

/// Questions that one rule refused.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RefusedQuestions {
    /// The rule as typed.
    pub rule: String,
    /// How many.
    pub questions: u64,
    /// The last one's name.
    pub last: String,
}

impl Judge {
    /// A judge who knows the rules and has heard nothing.
    pub fn new(policies: impl Into<PolicySet>) -> Self {
        Self {
            policies: policies.into(),
            of_vm: HashMap::new(),
            learnt: Learnt::default(),
            counts: HashMap::new(),
        }
    }

    /// The same, to be shared.
    pub fn shared(policies: impl Into<PolicySet>) -> SharedJudge {
        Rc::new(RefCell::new(Self::new(policies)))
    }

    /// All policies.
    pub fn policies(&self) -> &PolicySet {
        &self.policies
    }

    /// Which addresses are the host's and the guests', now.
    pub fn set_local(&mut self, local: &LocalAddresses) {
        self.policies.set_local(local);
    }

    /// Says which policy a VM has.
    pub fn assign(&mut self, vm: u32, policy: u32) {
        self.of_vm.insert(vm, policy);
    }

    /// The index of a VM's policy in the set; `None`: that VM was never spoken of.
    pub fn policy_of(&self, vm: u32) -> Option<u32> {
        self.of_vm.get(&vm).copied()
    }

    /// A VM's policy. A VM that was never spoken of has the only one, and where there are several
    /// one that refuses everything.
    pub fn policy(&self, vm: u32) -> &Policy {
        self.policies.of(self.policy_of(vm))
    }

    /// Judges a destination for a VM.
    pub fn decide(&self, vm: u32, to: Destination, now_ns: u64) -> Verdict {
        let policy = self.policy(vm);
        let decision = policy.decide(to);
        let by_address = Verdict {
            decision,
            name: None,
            inspect: policy.inspects(decision.rule),
        };
        // What is denied by address or protected is out of reach of names.
        let by_rule = decision.rule != policy.default_id();
        if by_rule && !decision.is_allowed() {
            return by_address;
        }
        let mut best: Option<Verdict> = None;
        for name in self.learnt.names(vm, to.addr, now_ns) {
            let Some(decision) = policy.first_of(&name.rules, to) else {
                continue;
            };
            let rank = |d: &Decision| (!d.is_allowed(), d.rule);
            if best
                .as_ref()
                .is_none_or(|b| rank(&decision) < rank(&b.decision))
            {
                best = Some(Verdict {
                    decision,
                    name: Some(name.clone()),
                    inspect: policy.inspects(decision.rule),
                });
            }
        }
        match best {
            Some(best) if !by_rule || best.decision.rule < decision.rule => best,
            _ => by_address,
        }
    }

    /// [`Judge::decide`] in sentences, one a line.
    pub fn explain(&self, vm: u32, to: Destination, now_ns: u64) -> String {
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
            target(to),
            self.policy(vm).named(decision),
            to.addr,
            name.name,
        )
    }

    /// Whether a name may be asked for, the rule that decides about a connection to it, and the
    /// addresses that it opened to the VM.
    pub fn name(
        &self,
        vm: u32,
        name: Name<'_>,
        to: Destination,
        now_ns: u64,
    ) -> (Decision, Option<Decision>, Vec<Ipv4Addr>) {
        let policy = self.policy(vm);
        let rules = policy.about(name);
        let question = match policy.judges_names() {
            true => policy.resolves(&rules),
            false => Decision {
                rule: policy.default_id(),
                line: None,
                refusal: None,
            },
        };
        let open = self.learnt.addresses(vm, &name.without_dot(), now_ns);
        (question, policy.first_of(&rules, to), open)
    }

    /// What was refused in a VM's DNS.
    pub fn counts(&self, vm: u32) -> NameCounts {
        NameCounts {
            open: self.learnt.count(vm) as u64,
            ..self.counts.get(&vm).cloned().unwrap_or_default()
        }
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, vm: u32) {
        self.learnt.forget(vm);
        self.counts.remove(&vm);
        self.of_vm.remove(&vm);
    }

    fn count(&mut self, vm: u32) -> &mut NameCounts {
        self.counts.entry(vm).or_default()
    }

    /// Why a name may not be asked for, in words.
    fn refusal(&self, vm: u32, decision: Decision, name: Name<'_>) -> ExtendedError {
        let policy = self.policy(vm);
        match decision.rule {
            rule if rule == policy.default_id() => ExtendedError::prohibited(format!(
                "no rule allows {}, and the default is deny",
                name.without_dot()
            )),
            rule => ExtendedError::blocked(format!(
                "{} is refused by {}, {}",
                name.without_dot(),
                policy.call(rule),
                policy.text(decision)
            )),
        }
    }

    /// The first address that a name of the world may not have.
    fn shut(&self, vm: u32, chain: &Chain) -> Option<ExtendedError> {
        let policy = self.policy(vm);
        let v4 = |addr| policy.shut_space(addr).map(|space| space.describe());
        chain.addresses.iter().find_map(|(addr, _)| {
            let what = match addr {
                IpAddr::V4(addr) => v4(*addr),
                IpAddr::V6(addr) => shut_v6(*addr).or_else(|| v4(embedded(*addr)?)),
            }?;
            let text = format!("refused by the safe defaults: the answer has {addr}, {what}");
            Some(ExtendedError::blocked(text))
        })
    }

    fn judge_answer(
        &mut self,
        vm: u32,
        name: Name<'_>,
        answer: &Answer,
        age_s: u32,
        now_ns: u64,
    ) -> Result<(), ExtendedError> {
        let Some(chain) = Chain::of(answer, name) else {
            self.count(vm).refused_chains += 1;
            let text = "refused: the answer leads in a circle, or through too many names";
            return Err(ExtendedError::blocked(text.into()));
        };
        let mut rules = self.policy(vm).about(name);
        let by_rule = !rules.is_empty();
        for step in &chain.steps {
            let about = self.policy(vm).about(Name(step));
            let decision = self.policy(vm).resolves(&about);
            if !decision.is_allowed() {
                self.count(vm).refused_chains += 1;
                return Err(self.refusal(vm, decision, Name(step)));
            }
            // What is denied of a name on the way is not to be had by another name for it.
            let policy = self.policy(vm);
            rules.extend(about.into_iter().filter(|order| policy.is_deny(*order)));
        }
        if by_rule && let Some(error) = self.shut(vm, &chain) {
            self.count(vm).rebinding += 1;
            return Err(error);
        }
        if rules.is_empty() {
            return Ok(());
        }
        rules.sort_unstable();
        rules.dedup();
        let addresses: Vec<(Ipv4Addr, u32)> = chain
            .addresses
            .iter()
            .filter_map(|(addr, ttl)| match addr {
                IpAddr::V4(addr) => Some((*addr, ttl.saturating_sub(age_s))),
                IpAddr::V6(_) => None,
            })
            .collect();
        let learnt = Rc::new(LearntName {
            name: name.without_dot().into(),
            rules: rules.into(),
        });
        let policy = self.policies.of(self.of_vm.get(&vm).copied());
        let same = |a: &[u32], b: &[u32]| policy.same_effect(a, b);
        self.learnt
            .open(vm, &learnt, &addresses, same, now_ns)
            .map_err(|Full| {
                self.count(vm).full += 1;
                let text = format!("refused: {MAX_PER_VM} addresses are open by name already");
                ExtendedError::prohibited(text)
            })
    }
}

impl NameCounts {
    fn refused(&mut self, rule: String, mut name: String) {
        name.truncate(SHOWN_NAME); // ASCII, as names are shown

        self.refused_names += 1;
        if let Some(by) = self.refused_by.iter_mut().find(|by| by.rule == rule) {
            by.questions += 1;
            by.last = name;
        } else if self.refused_by.len() < COUNTED_RULES {
            self.refused_by.push(RefusedQuestions {
                rule,
                questions: 1,
                last: name,
            });
        }
    }
}

/// The DNS proxy's end of a shared judge.
#[derive(Clone, Debug)]
pub struct ByRules(pub SharedJudge);

impl NamePolicy for ByRules {
    fn rule(&self, vm: u32, name: Name<'_>) -> Option<String> {
        let judge = self.0.borrow();
        let policy = judge.policy(vm);
        let judges = policy.judges_names();
        judges.then(|| policy.text(policy.resolves(&policy.about(name))))
    }

    fn question(&mut self, vm: u32, name: Name<'_>, qtype: u16) -> NameVerdict {
        let mut judge = self.0.borrow_mut();
        let policy = judge.policy(vm);
        if !policy.judges_names() {
            return NameVerdict::Allow;
        }
        let default = policy.default_action();
        let decision = policy.resolves(&policy.about(name));
        if !decision.is_allowed() {
            let text = policy.text(decision);
            judge.count(vm).refused(text, name.without_dot());
            return NameVerdict::Refuse(judge.refusal(vm, decision, name));
        }
        let carries_anything = matches!(qtype, Type::TXT | Type::NULL | Type::ANY);
        if carries_anything && default == Action::Deny {
            judge.count(vm).refused_types += 1;
            let text = "TXT, NULL and ANY are refused, for the default is deny";
            return NameVerdict::Refuse(ExtendedError::prohibited(text.into()));
        }
        NameVerdict::Allow
    }

    fn answer(
        &mut self,
        vm: u32,
        name: Name<'_>,
        answer: &Answer,
        age_s: u32,
        now_ns: u64,
    ) -> NameVerdict {
        let mut judge = self.0.borrow_mut();
        if !judge.policy(vm).judges_names() {
            return NameVerdict::Allow;
        }
        match judge.judge_answer(vm, name, answer, age_s, now_ns) {
            Ok(()) => NameVerdict::Allow,
            Err(error) => NameVerdict::Refuse(error),
        }
    }
}

#[cfg(test)]
#[path = "judge_test.rs"]
mod tests;
