//! Prefixes that the kernel's guard may drop without asking the engine.
use ipnet::IpNet;

use super::policy::Policy;
use crate::{Action, DenyFile, Pattern, PrefixMap, Rule, RuleId};

impl Policy {
    /// Returns the prefixes of which a rule refuses every address, port and protocol, whatever the
    /// other rules say: the kernel's guard may drop these on its own. A prefix is left out whole if
    /// an earlier allow opens a part of it. Each comes with the rule that refuses it.
    ///
    /// The engine serves port 53 and the guest's own network before it tries any rule; the guard
    /// must let them through first.
    pub fn deny_prefixes(&self) -> Vec<(IpNet, RuleId)> {
        let mut allowed: Vec<IpNet> = Vec::new();
        let mut earlier: Option<PrefixMap<()>> = None;
        let mut found: Vec<(IpNet, RuleId)> = Vec::new();
        for (rule, order) in self.rules.iter().zip(0..) {
            if let Rule::Match(Action::Allow | Action::Inspect, pattern) = rule {
                allowed.push(pattern.prefix());
                earlier = None;
                continue;
            }
            let earlier = earlier
                .get_or_insert_with(|| PrefixMap::new(allowed.iter().map(|prefix| (*prefix, ()))));
            found.extend(
                denied_whole(rule)
                    .filter(|prefix| !earlier.overlaps(*prefix))
                    .map(|prefix| (prefix, self.id(order))),
            );
        }
        // Sorting is stable: of equal prefixes the first rule remains.
        found.sort_by_key(|(prefix, _)| *prefix);
        found.dedup_by_key(|(prefix, _)| *prefix);
        found
    }
}

fn denied_whole(rule: &Rule) -> Box<dyn Iterator<Item = IpNet> + '_> {
    let whole = |pattern: &Pattern| pattern.is_whole().then_some(pattern.prefix());
    match rule {
        Rule::Match(Action::Deny, pattern) => Box::new(whole(pattern).into_iter()),
        Rule::Match(..) | Rule::Name(..) => Box::new(std::iter::empty()),
        Rule::DenyFile(file) => Box::new(DenyFile::patterns(file).filter_map(move |p| whole(&p))),
    }
}
