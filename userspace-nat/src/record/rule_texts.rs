//! The rules by their elements of `RULES`: those in force, and earlier ones by which live flows
//! were admitted. Their texts are for people; rules are compared by their identity.
use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap, VecDeque},
};

use slipgate_abi::RuleIndex;

use crate::datapath::Datapath;
use slipgate_policy::{Described, Identity, Policy, PolicySet};

/// Most earlier runs that are remembered. The kernel's `RULES` has those that flows refer to, with
/// texts that may be truncated.
const MOST_FORMER: usize = 64;
/// Most rules in these.
const MOST_FORMER_RULES: usize = 8_192;

/// Runs of rules in `RULES`: one for each policy, and one for the forwards.
#[derive(Debug, Default)]
pub(crate) struct RuleTexts {
    /// The runs in force, by their first elements.
    in_force: BTreeMap<u32, Vec<Described>>,
    /// First elements of the policies' runs, by the policies' indexes.
    of_policy: HashMap<u32, u32>,
    /// First element of the forwards' run.
    forwards: Option<u32>,
    /// Earlier runs with their first elements, the latest last.
    former: VecDeque<(u32, Vec<Described>)>,
}

impl RuleTexts {
    /// The rules of these policies.
    pub(crate) fn new(policies: &PolicySet) -> Self {
        let mut texts = Self::default();
        for (index, policy) in policies.indexed() {
            texts.add(index, policy);
        }
        texts
    }

    /// Sets the rules of policies by their indexes; `None`: there is none any more. The runs of the
    /// policies before stay known for a while.
    pub(crate) fn change(&mut self, policies: &[(u32, Option<Policy>)]) {
        for (index, _) in policies {
            if let Some(base) = self.of_policy.remove(index) {
                self.retire(base);
            }
        }
        for (index, policy) in policies {
            if let Some(policy) = policy {
                self.add(*index, policy);
            }
        }
    }

    fn add(&mut self, index: u32, policy: &Policy) {
        let base = policy.numbers().start;
        self.of_policy.insert(index, base);
        self.in_force.insert(base, policy.described().collect());
    }

    /// Sets the rules of the forwards, from this element on. Without any there is no run: the element
    /// may be the first of a policy's.
    pub(crate) fn set_forwards(&mut self, base: RuleIndex, texts: Vec<String>) {
        if let Some(base) = self.forwards.take() {
            self.retire(base);
        }
        if texts.is_empty() {
            return;
        }
        let rules = texts.into_iter().map(Described::forward).collect();
        self.forwards = Some(base.get());
        self.in_force.insert(base.get(), rules);
    }

    fn retire(&mut self, base: u32) {
        let Some(rules) = self.in_force.remove(&base) else {
            return;
        };
        self.former.push_back((base, rules));
        let rules = |former: &VecDeque<(u32, Vec<Described>)>| -> usize {
            former.iter().map(|(_, rules)| rules.len()).sum()
        };
        while self.former.len() > MOST_FORMER
            || self.former.len() > 1 && rules(&self.former) > MOST_FORMER_RULES
        {
            self.former.pop_front();
        }
    }

    fn described(&self, rule: RuleIndex) -> Option<&Described> {
        let within = |base: u32, rules: &'_ Vec<Described>| -> Option<usize> {
            let at = rule.offset_from(RuleIndex::new(base))? as usize;
            (at < rules.len()).then_some(at)
        };
        let mut before = self.in_force.range(..=rule.get());
        if let Some((base, rules)) = before.next_back()
            && let Some(at) = within(*base, rules)
        {
            return rules.get(at);
        }
        // A later run may use elements of an earlier one that no flow refers to.
        let mut former = self.former.iter().rev();
        former.find_map(|(base, rules)| rules.get(within(*base, rules)?))
    }

    /// Returns the text of a rule that is remembered.
    pub(crate) fn known(&self, rule: RuleIndex) -> Option<&str> {
        self.described(rule).map(|rule| rule.text.as_str())
    }

    /// Returns the text of a rule; that of one that is not remembered is read from the kernel.
    pub(crate) fn text(&self, rule: RuleIndex, datapath: &impl Datapath) -> Option<Cow<'_, str>> {
        let known = self.known(rule).map(Cow::Borrowed);
        known.or_else(|| Some(Cow::Owned(datapath.rule(rule)?.text)))
    }

    /// Returns the identity of a rule; that of one that is not remembered is read from the kernel.
    pub(crate) fn identity(&self, rule: RuleIndex, datapath: &impl Datapath) -> Option<Identity> {
        let known = self.described(rule).map(|rule| rule.identity);
        known.or_else(|| Some(datapath.rule(rule)?.identity))
    }
}

#[cfg(test)]
#[path = "rule_texts_test.rs"]
mod tests;
