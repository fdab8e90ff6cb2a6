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
//! | a name with more labels, or a longer one, than the policy takes | REFUSED |
//! | a public resolver's name ([`super::elsewhere`]) that no rule gives | REFUSED |
//! | a name that a browser asks for to learn whether it may use such a resolver | no such name |
//! | any, where the policy has no resolvers | REFUSED, by whatever rules |
//! | TXT, NULL, ANY, and types that are none of those in use, with `--default deny` | REFUSED, unless the policy has them |
//! | more new names beneath a wildcard than a VM may ask for ([`super::asking`]) | REFUSED |
//! | an answer that leads to such a name | REFUSED |
//! | an answer about an allowed name with a protected address | REFUSED ("rebinding") |
//! | an answer for which the VM has no room | REFUSED; what lives stays |
use std::{
    cell::RefCell,
    collections::HashMap,
    hash::RandomState,
    net::{IpAddr, Ipv4Addr},
    rc::Rc,
};

use serde::{Deserialize, Serialize};
use slipgate_abi::Refusal;

use super::{
    Action, Change, Decision, Destination, LocalAddresses, Policy, PolicySet,
    asking::Asker,
    elsewhere::is_canary,
    explain::target,
    learnt::{Full, Lasting, Learnt, LearntName, MAX_PER_VM},
    policy::Place,
    protected::{embedded, shut_v6},
};
use crate::{
    clock::SECOND_NS,
    dns::{
        ExtendedError, Name, NamePolicy, NameVerdict, Resolvers, Telling, answer::Answer,
        chain::Chain, message::Type, name::end_of_plain, query::Key,
    },
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
    pub(super) learnt: Learnt,
    counts: HashMap<u32, NameCounts>,
    askers: HashMap<u32, Asker>,
    hasher: RandomState,
    /// Of the rules: answers kept under others are not told.
    generation: u16,
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
    /// Questions for names of resolvers elsewhere.
    pub elsewhere: u64,
    /// Questions beyond the rate.
    pub over_rate: u64,
    /// Questions for new names beneath a wildcard, beyond what a VM may say by them.
    pub new_names: u64,
    /// Addresses open by name, now.
    pub open: u64,
    /// Connections and flows under inspect rules that were ended, by reason.
    #[serde(default)]
    pub inspected: crate::inspect::RefusedCounts,
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
            askers: HashMap::new(),
            hasher: RandomState::new(),
            generation: 0,
        }
    }

    pub(super) fn replace_policies(&mut self, policies: PolicySet) {
        self.policies = policies;
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
        let default = [policy.default_id(), policy.elsewhere_id()];
        let by_rule = !default.contains(&decision.rule);
        if by_rule && !decision.is_allowed() {
            return by_address;
        }
        let mut best: Option<Verdict> = None;
        for name in self.learnt.effects(vm, to.addr, now_ns) {
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
            true => self.asks(vm, name, &rules),
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
        self.askers.remove(&vm);
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
            rule if rule == policy.elsewhere_id() => ExtendedError::blocked(format!(
                "{0} is refused by the safe defaults: DNS elsewhere; --allow {0} would open it",
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

    /// Whether a name may be asked for.
    pub(super) fn asks(&self, vm: u32, name: Name<'_>, rules: &[Place]) -> Decision {
        let policy = self.policy(vm);
        match policy.hides(name, rules) {
            true => Decision {
                rule: policy.elsewhere_id(),
                line: None,
                refusal: Some(Refusal::DnsElsewhere),
            },
            false => policy.resolves(rules),
        }
    }

    fn judge_question(&mut self, vm: u32, name: Name<'_>, qtype: u16) -> Result<(), ExtendedError> {
        let policy = self.policy(vm);
        if let Some(text) = policy.without_dns() {
            let error = ExtendedError::prohibited(format!("refused by {text}"));
            self.count(vm).refused(text, name.without_dot());
            return Err(error);
        }
        if !policy.judges_names() {
            return Ok(());
        }
        let about = policy.about(name);
        if is_canary(name) && !policy.names_exactly(&about) {
            let text = "refused by the safe defaults: DNS elsewhere";
            self.count(vm).elsewhere += 1;
            return Err(ExtendedError::no_such_name(text.into()));
        }
        let decision = self.asks(vm, name, &about);
        if !decision.is_allowed() {
            let error = self.refusal(vm, decision, name);
            let text = policy.text(decision);
            let elsewhere = decision.rule == policy.elsewhere_id();
            let count = self.count(vm);
            count.elsewhere += u64::from(elsewhere);
            count.refused(text, name.without_dot());
            return Err(error);
        }
        let dns = &policy.settings().dns;
        if let Some(text) = dns.too_much(name) {
            self.count(vm).refused_names += 1;
            return Err(ExtendedError::prohibited(format!("refused: {text}")));
        }
        let shut = policy.default_action() == Action::Deny && !is_common(qtype);
        if shut && !dns.types.contains(&qtype) {
            self.count(vm).refused_types += 1;
            let text = match qtype {
                Type::TXT | Type::NULL | Type::ANY => {
                    "TXT, NULL and ANY are refused, for the default is deny".to_owned()
                }
                _ => format!("type {qtype} is refused, for the default is deny"),
            };
            return Err(ExtendedError::prohibited(text));
        }
        Ok(())
    }

    /// Whether a name is new to the VM, and one too many beneath a wildcard.
    fn judge_lookup(&mut self, vm: u32, key: Key<'_>, now_ns: u64) -> Result<(), ExtendedError> {
        let Some(octets) = self.policy(vm).octets_beneath(key.name()) else {
            return Ok(());
        };
        let may = self.policy(vm).settings().dns.new_names;
        let asker = self.askers.entry(vm);
        let asker = asker.or_insert_with(|| Asker::new(may, now_ns));
        asker.set(may);
        if asker.asks(&self.hasher, key.question(), octets, now_ns) {
            return Ok(());
        }
        self.count(vm).new_names += 1;
        let text = format!(
            "refused: more than {} octets of new names beneath wildcards a minute",
            may.octets_per_minute
        );
        Err(ExtendedError::prohibited(text))
    }

    fn judge_answer(
        &mut self,
        vm: u32,
        name: Name<'_>,
        answer: &Answer,
        age_s: u32,
        now_ns: u64,
    ) -> Result<(), ExtendedError> {
        // A question that was under way when the policy changed is judged by the new one.
        let policy = self.policy(vm);
        let decision = self.asks(vm, name, &policy.about(name));
        if !decision.is_allowed() {
            let error = self.refusal(vm, decision, name);
            let text = policy.text(decision);
            self.count(vm).refused(text, name.without_dot());
            return Err(error);
        }
        let Some(mut chain) = Chain::of(answer, name) else {
            self.count(vm).refused_chains += 1;
            let text = "refused: the answer leads in a circle, or through too many names";
            return Err(ExtendedError::blocked(text.into()));
        };
        for (_, ttl_s) in &mut chain.addresses {
            *ttl_s = ttl_s.saturating_sub(age_s);
        }
        let dns = &self.policy(vm).settings().dns;
        let lasting = Lasting {
            floor_s: dns.ttl_floor_s,
            ceiling_s: dns.ttl_ceiling_s,
        };
        self.open(vm, name, &chain, lasting, now_ns)
    }

    /// Opens what a way leads to, by the present policy, if that has nothing against it.
    fn open(
        &mut self,
        vm: u32,
        name: Name<'_>,
        chain: &Chain,
        lasting: Lasting,
        now_ns: u64,
    ) -> Result<(), ExtendedError> {
        let mut rules = self.policy(vm).about(name);
        let by_rule = !rules.is_empty();
        let mut way = name.0.to_vec();
        for step in &chain.steps {
            way.extend_from_slice(step);
            let about = self.policy(vm).about(Name(step));
            let decision = self.asks(vm, Name(step), &about);
            if !decision.is_allowed() {
                self.count(vm).refused_chains += 1;
                return Err(self.refusal(vm, decision, Name(step)));
            }
            // What is denied of a name on the way is not to be had by another name for it.
            let policy = self.policy(vm);
            rules.extend(
                about
                    .into_iter()
                    .filter(|place| policy.is_deny(place.order)),
            );
        }
        if by_rule && let Some(error) = self.shut(vm, chain) {
            self.count(vm).rebinding += 1;
            return Err(error);
        }
        // What a connection says is held against what was asked for, rules or none.
        let (inspects, by_address) = self.policy(vm).inspections();
        if rules.is_empty() && !by_address {
            return Ok(());
        }
        rules.sort_unstable();
        rules.dedup();
        let addresses: Vec<(Ipv4Addr, u32)> = chain
            .addresses
            .iter()
            .filter_map(|(addr, ttl)| match addr {
                IpAddr::V4(addr) => Some((*addr, *ttl)),
                IpAddr::V6(_) => None,
            })
            .collect();
        let learnt = Rc::new(LearntName {
            name: name.without_dot().into(),
            rules: rules.into(),
            way: way.into(),
        });
        let policy = self.policies.of(self.of_vm.get(&vm).copied());
        let same = |a: &LearntName, b: &LearntName| match inspects {
            true => a.name == b.name && a.rules == b.rules,
            false => policy.same_effect(&a.rules, &b.rules),
        };
        self.learnt
            .open(vm, &learnt, &addresses, same, lasting, now_ns)
            .map_err(|Full| {
                self.count(vm).full += 1;
                let text =
                    format!("refused: no room, {MAX_PER_VM} addresses are open by name at most");
                ExtendedError::prohibited(text)
            })
    }

    /// Addresses open by name to a VM, and to all of them.
    pub fn open_by_name(&self, vm: u32) -> (usize, usize) {
        (self.learnt.count(vm), self.learnt.total())
    }

    /// Ends openings whose time is over.
    pub fn expire(&mut self, now_ns: u64) {
        self.learnt.expire(now_ns);
    }

    /// What opened and what ended since the last call, for a successor.
    pub fn take_changes(&mut self) -> Vec<Change> {
        self.learnt.take_changes()
    }

    /// Opens again what a predecessor, or this judge under other rules, had open until `expires_ns`
    /// by a way ([`LearntName::way`]), as far as the present rules have nothing against it.
    pub fn reopen(
        &mut self,
        vm: u32,
        addr: Ipv4Addr,
        way: &[u8],
        expires_ns: u64,
        now_ns: u64,
    ) -> bool {
        let left_ns = expires_ns.saturating_sub(now_ns);
        // The floor was counted when it opened.
        let lasting = Lasting {
            floor_s: 0,
            ceiling_s: self.policy(vm).settings().dns.ttl_ceiling_s,
        };
        let left_s = u32::try_from(left_ns / SECOND_NS).unwrap_or(u32::MAX);
        let Some((name, steps)) = split(way) else {
            return false;
        };
        if left_s == 0 || !self.policy(vm).judges_names() {
            return false;
        }
        let about = self.policy(vm).about(name);
        let chain = Chain {
            steps,
            addresses: vec![(addr.into(), left_s)],
        };
        self.asks(vm, name, &about).is_allowed()
            && self.open(vm, name, &chain, lasting, now_ns).is_ok()
            && (!about.is_empty() || self.policy(vm).inspections().1)
    }

    /// Judges anew what is open, after the rules or a VM's policy changed.
    pub fn rejudge(&mut self, now_ns: u64) {
        self.generation = self.generation.wrapping_add(1);
        let vms = self.learnt.vms();
        for vm in vms {
            for (addr, name, expires_ns) in self.learnt.forget(vm) {
                self.reopen(vm, addr, &name.way, expires_ns, now_ns);
            }
        }
    }
}

/// Types that clients ask for in the course of a connection. Others carry whatever their owner
/// likes, and nothing that one needs.
fn is_common(qtype: u16) -> bool {
    const COMMON: [u16; 18] = [
        Type::A,
        2, // NS
        Type::CNAME,
        Type::SOA,
        Type::PTR,
        Type::MX,
        Type::AAAA,
        Type::SRV,
        Type::NAPTR,
        Type::DNAME,
        43, // DS
        44, // SSHFP
        48, // DNSKEY
        52, // TLSA
        Type::NSEC,
        Type::SVCB,
        Type::HTTPS,
        257, // CAA
    ];
    COMMON.contains(&qtype)
}

/// A way's first name, and the others.
pub(super) fn split(way: &[u8]) -> Option<(Name<'_>, Vec<Box<[u8]>>)> {
    let end = end_of_plain(way, 0)?;
    let (first, mut rest) = way.split_at(end);
    let mut steps = Vec::new();
    while !rest.is_empty() {
        let (step, after) = rest.split_at(end_of_plain(rest, 0)?);
        steps.push(step.into());
        rest = after;
    }
    Some((Name(first), steps))
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
        if let Some(text) = policy.without_dns() {
            return Some(text);
        }
        let judges = policy.judges_names();
        judges.then(|| policy.text(judge.asks(vm, name, &policy.about(name))))
    }

    fn telling(&self, vm: u32) -> Telling {
        let judge = self.0.borrow();
        let policy = judge.policy(vm);
        let index = judge.policy_of(vm).unwrap_or(0) & 0xffff;
        Telling {
            view: u32::from(judge.generation) << 16 | index,
            strips_ech: policy.inspections().0,
            ttl_ceiling_s: policy.settings().dns.ttl_ceiling_s,
        }
    }

    fn resolvers(&self, vm: u32) -> Resolvers {
        self.0.borrow().policy(vm).settings().dns.resolvers.clone()
    }

    fn question(&mut self, vm: u32, name: Name<'_>, qtype: u16) -> NameVerdict {
        self.0.borrow_mut().judge_question(vm, name, qtype).into()
    }

    fn lookup(&mut self, vm: u32, key: Key<'_>, now_ns: u64) -> NameVerdict {
        self.0.borrow_mut().judge_lookup(vm, key, now_ns).into()
    }

    fn over_rate(&mut self, vm: u32, per_second: u32) -> ExtendedError {
        self.0.borrow_mut().count(vm).over_rate += 1;
        ExtendedError::over_rate(per_second)
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
        judge.judge_answer(vm, name, answer, age_s, now_ns).into()
    }
}

#[cfg(test)]
#[path = "judge_asks_test.rs"]
mod asks_tests;
#[cfg(test)]
#[path = "judge_test.rs"]
mod tests;
