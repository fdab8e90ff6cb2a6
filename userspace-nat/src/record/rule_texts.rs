//! The rules by their elements of `RULES`: those in force, and earlier ones by which live flows
//! were admitted. Their texts are for people; rules are compared by their identity.
use std::collections::HashSet;

use slipgate_abi::RuleIndex;

use crate::datapath::Datapath;
use slipgate_policy::{Described, Identity};

/// Runs of rules in `RULES`, the one in force last.
#[derive(Debug, Default)]
pub(crate) struct RuleTexts {
    runs: Vec<Run>,
    /// Number of rules of the policies in the last run; the forwards' rules follow.
    policies: u32,
}

#[derive(Debug)]
struct Run {
    base: RuleIndex,
    rules: Vec<Described>,
}

impl RuleTexts {
    /// Sets the rules in force: the policies' rules, and behind them the forwards'. Earlier runs
    /// stay known.
    pub(crate) fn set(
        &mut self,
        base: RuleIndex,
        policies: impl Iterator<Item = Described>,
        forwards: Vec<Described>,
    ) {
        let mut rules: Vec<Described> = policies.collect();
        self.policies = rules.len() as u32;
        rules.extend(forwards);
        self.runs.push(Run { base, rules });
    }

    /// Forgets the earlier runs that `named` does not refer to, except for the first one, which
    /// relayed forwards refer to.
    pub(crate) fn forget_unnamed(&mut self, named: &HashSet<RuleIndex>) {
        let Some(in_force) = self.runs.pop() else {
            return;
        };
        let mut is_first = true;
        self.runs.retain(|run| {
            let all = run.base..run.base.nth(run.rules.len() as u32);
            std::mem::take(&mut is_first) || named.iter().any(|rule| all.contains(rule))
        });
        self.runs.push(in_force);
    }

    /// Replaces all runs by one.
    pub(crate) fn begin(
        &mut self,
        base: RuleIndex,
        policies: impl Iterator<Item = Described>,
        forwards: Vec<Described>,
    ) {
        self.runs.clear();
        self.set(base, policies, forwards);
    }

    /// Returns the first element of the run in force.
    pub(crate) fn base(&self) -> RuleIndex {
        self.runs.last().map_or(RuleIndex::new(0), |run| run.base)
    }

    /// Returns the rules of the forwards in force.
    pub(crate) fn forwards(&self) -> Vec<Described> {
        let run = self.runs.last();
        run.map_or_else(Vec::new, |run| run.rules[self.policies as usize..].to_vec())
    }

    /// Returns the position of an element of `RULES` among the forwards in force; `None` when it
    /// precedes them.
    pub(crate) fn forward(&self, rule: RuleIndex) -> Option<u32> {
        rule.offset_from(self.base().nth(self.policies))
    }

    /// Returns the element of `RULES` of a forward in force, by its position.
    pub(crate) fn rule_of_forward(&self, forward: u32) -> RuleIndex {
        self.base().nth(self.policies + forward)
    }

    /// Returns the text of a rule of these runs.
    pub(crate) fn known(&self, rule: RuleIndex) -> Option<&str> {
        self.described(rule).map(|rule| rule.text.as_str())
    }

    fn described(&self, rule: RuleIndex) -> Option<&Described> {
        // A new run may use elements of an old run that no flow refers to.
        self.runs.iter().rev().find_map(|run| {
            let at = rule.offset_from(run.base)?;
            run.rules.get(at as usize)
        })
    }

    /// Returns the text of a rule; that of a predecessor's run is read from the kernel.
    pub(crate) fn text(&self, rule: RuleIndex, datapath: &impl Datapath) -> Option<String> {
        let known = self.known(rule).map(str::to_owned);
        known.or_else(|| Some(datapath.rule(rule)?.text))
    }

    /// Returns the identity of a rule; that of a predecessor's run is read from the kernel.
    pub(crate) fn identity(&self, rule: RuleIndex, datapath: &impl Datapath) -> Option<Identity> {
        let known = self.described(rule).map(|rule| rule.identity);
        known.or_else(|| Some(datapath.rule(rule)?.identity))
    }
}
