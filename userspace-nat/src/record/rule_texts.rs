//! The rules, by their elements of `RULES`: those in force, and those by which flows that
//! live were let in before. Their texts are for people; what they are told by is their identity.
use std::collections::HashSet;

use crate::datapath::Datapath;
use slipgate_policy::{Described, Identity};

/// Runs of rules, the one in force last.
#[derive(Debug, Default)]
pub(crate) struct RuleTexts {
    runs: Vec<Run>,
    /// How many of the last one's are the policies'; the forwards' follow.
    policies: u32,
}

#[derive(Debug)]
struct Run {
    base: u32,
    rules: Vec<Described>,
}

impl RuleTexts {
    /// The rules in force from now on: the policies', and behind them the forwards'. Of those before,
    /// what `named` has stays known, and the first ones, which relayed forwards name.
    pub(crate) fn set(
        &mut self,
        base: u32,
        policies: impl Iterator<Item = Described>,
        forwards: Vec<Described>,
        named: &HashSet<u32>,
    ) {
        let mut rules: Vec<Described> = policies.collect();
        self.policies = rules.len() as u32;
        rules.extend(forwards);
        let mut is_first = true;
        self.runs.retain(|run| {
            let all = run.base..run.base + run.rules.len() as u32;
            std::mem::take(&mut is_first) || named.iter().any(|rule| all.contains(rule))
        });
        self.runs.push(Run { base, rules });
    }

    /// Begins with these.
    pub(crate) fn begin(
        &mut self,
        base: u32,
        policies: impl Iterator<Item = Described>,
        forwards: Vec<Described>,
    ) {
        self.runs.clear();
        self.set(base, policies, forwards, &HashSet::new());
    }

    /// The forwards in force.
    pub(crate) fn forwards(&self) -> Vec<Described> {
        let run = self.runs.last();
        run.map_or_else(Vec::new, |run| run.rules[self.policies as usize..].to_vec())
    }

    /// Which of the forwards' texts in force an element is.
    pub(crate) fn forward(&self, rule: u32) -> Option<u32> {
        let run = self.runs.last()?;
        rule.checked_sub(run.base + self.policies)
    }

    /// The element of one of the forwards' texts in force.
    pub(crate) fn rule_of_forward(&self, forward: u32) -> u32 {
        let base = self.runs.last().map_or(0, |run| run.base);
        base + self.policies + forward
    }

    /// A text of these runs.
    pub(crate) fn known(&self, rule: u32) -> Option<&str> {
        self.described(rule).map(|rule| rule.text.as_str())
    }

    fn described(&self, rule: u32) -> Option<&Described> {
        // Elements of an old run that no flow names may be a new one's.
        self.runs.iter().rev().find_map(|run| {
            let at = rule.checked_sub(run.base)?;
            run.rules.get(at as usize)
        })
    }

    /// A text; of a predecessor's run it is read from the kernel.
    pub(crate) fn text(&self, rule: u32, datapath: &impl Datapath) -> Option<String> {
        let known = self.known(rule).map(str::to_owned);
        known.or_else(|| Some(datapath.rule(rule)?.text))
    }

    /// What a rule is told by; of a predecessor's run it is read from the kernel.
    pub(crate) fn identity(&self, rule: u32, datapath: &impl Datapath) -> Option<Identity> {
        let known = self.described(rule).map(|rule| rule.identity);
        known.or_else(|| Some(datapath.rule(rule)?.identity))
    }
}
