//! Which rules refused new flows, and how many.
use serde::Serialize;
use slipgate_abi::{RuleIndex, RuleRefusals, VmCounters};

/// A rule that refused new flows.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct RefusedBy {
    /// The rule's number, as in `flows` and the flow log.
    pub(crate) rule: RuleIndex,
    /// The rule as it was given.
    pub(crate) text: String,
    /// Number of refused flows.
    pub(crate) flows: u64,
}

/// A VM's, the most frequent first; `text_of` knows a rule's text by its number.
pub(super) fn of(
    counters: &VmCounters,
    text_of: impl Fn(RuleIndex) -> Option<String>,
) -> Vec<RefusedBy> {
    let refused_by = |counted: &RuleRefusals| {
        let rule = RuleIndex::new(counted.rule.checked_sub(1)?);
        Some(RefusedBy {
            rule,
            text: text_of(rule).unwrap_or_default(),
            flows: counted.flows,
        })
    };
    let mut rules: Vec<_> = counters
        .refused_by_rule
        .iter()
        .filter_map(refused_by)
        .collect();
    sort(&mut rules);
    rules
}

/// Adds the counts of another VM.
pub(super) fn add(to: &mut Vec<RefusedBy>, from: &[RefusedBy]) {
    for more in from {
        match to.iter_mut().find(|known| known.rule == more.rule) {
            Some(known) => known.flows += more.flows,
            None => to.push(more.clone()),
        }
    }
    sort(to);
}

fn sort(rules: &mut [RefusedBy]) {
    rules.sort_by_key(|by| (std::cmp::Reverse(by.flows), by.rule));
}
