//! The compiled policy.
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use slipgate_abi::Refusal;

use super::{
    Action, Decision, DenyFile, Destination, LocalAddresses, Rule, RuleId, Space,
    matcher::{Entry, Matcher},
    names::NameMatcher,
    pattern::Pattern,
    protected::Protected,
};
use crate::{dns::Name, prefix_map::PrefixMap};

/// A list of rules, compiled. One policy may serve any number of guests.
#[derive(Clone, Debug)]
pub struct Policy {
    default: Action,
    pub(super) rules: Vec<Rule>,
    /// `--allow` and `--deny`, by position among the rules.
    all: Matcher,
    /// The denies among them.
    denies: Matcher,
    /// Positions of the deny files, ascending.
    files: Vec<u32>,
    protected: Protected,
    /// Rules by name, by position among the rules.
    names: NameMatcher,
}

impl Policy {
    /// Compiles `rules`, which are in the order typed.
    pub fn new(default: Action, rules: Vec<Rule>) -> Self {
        let entries = |wanted: fn(Action) -> bool| {
            Matcher::new(
                rules
                    .iter()
                    .zip(0..)
                    .filter_map(|(rule, order)| match rule {
                        Rule::Match(action, pattern) if wanted(*action) => Some(Entry {
                            pattern: *pattern,
                            order,
                        }),
                        Rule::Match(..) | Rule::Name(..) | Rule::DenyFile(_) => None,
                    }),
            )
        };
        let names = rules
            .iter()
            .zip(0..)
            .filter_map(|(rule, order)| match rule {
                Rule::Name(_, pattern) => Some((order, pattern)),
                Rule::Match(..) | Rule::DenyFile(_) => None,
            });
        Self {
            default,
            names: NameMatcher::new(names),
            all: entries(|_| true),
            denies: entries(|action| action == Action::Deny),
            files: rules
                .iter()
                .zip(0..)
                .filter(|(rule, _)| matches!(rule, Rule::DenyFile(_)))
                .map(|(_, order)| order)
                .collect(),
            rules,
            protected: Protected::new(&LocalAddresses::default()),
        }
    }

    /// Says which addresses are the host's and the guests', now. To be called at start and
    /// whenever an address comes or goes.
    pub fn set_local(&mut self, local: &LocalAddresses) {
        self.protected = Protected::new(local);
    }

    /// Judges a destination.
    pub fn decide(&self, to: Destination) -> Decision {
        let space = self.protected.space_of(to.addr);
        let matched = match space {
            None => self.all.first(to, 0),
            // Only allows as specific as the protected range count; denies all do.
            Some((range, _)) => earliest(
                self.all.first(to, range.prefix_len()),
                self.denies.first(to, 0),
            ),
        };
        if let Some((order, line)) = self.in_files(to, matched) {
            return decision(order, Some(line), Action::Deny);
        }
        match matched {
            Some(order) => decision(order, None, self.action(order)),
            None if space.is_some() => Decision {
                rule: RuleId::PROTECTED,
                line: None,
                refusal: Some(Refusal::Protected),
            },
            None => self.by_default(),
        }
    }

    /// Every rule's text, in the order of [`RuleId`].
    pub fn texts(&self) -> impl Iterator<Item = String> {
        [
            format!("--default {}", self.default.name()),
            "safe defaults".to_owned(),
        ]
        .into_iter()
        .chain(self.rules.iter().map(rule_text))
    }

    /// A rule's text; with the file's line, where it was one.
    pub fn text(&self, decision: Decision) -> String {
        let text = self
            .texts()
            .nth(decision.rule.0 as usize)
            .unwrap_or_default();
        match decision.line {
            Some(line) => format!("{text}, line {line}"),
            None => text,
        }
    }

    /// The default action.
    pub fn default_action(&self) -> Action {
        self.default
    }

    /// The protected range that contains `addr`, if one does.
    pub fn protected(&self, addr: Ipv4Addr) -> Option<(Ipv4Net, Space)> {
        self.protected.space_of(addr)
    }

    /// Prefixes of which every address, port and protocol is refused by a rule, whatever else the
    /// rules say: what the kernel's guard may drop on its own. A prefix of which an earlier allow
    /// opens a part is left out whole. Each comes with the rule that refuses it.
    ///
    /// Port 53 and the guest's own network are served by the engine before any rule is asked; the
    /// guard must let them through first.
    pub fn deny_prefixes(&self) -> Vec<(Ipv4Net, RuleId)> {
        let mut allowed: Vec<Ipv4Net> = Vec::new();
        let mut earlier: Option<PrefixMap<()>> = None;
        let mut found: Vec<(Ipv4Net, RuleId)> = Vec::new();
        for (rule, order) in self.rules.iter().zip(0..) {
            if let Rule::Match(Action::Allow, pattern) = rule {
                allowed.push(pattern.prefix());
                earlier = None;
                continue;
            }
            let earlier = earlier
                .get_or_insert_with(|| PrefixMap::new(allowed.iter().map(|prefix| (*prefix, ()))));
            found.extend(
                denied_whole(rule)
                    .filter(|prefix| !earlier.overlaps(*prefix))
                    .map(|prefix| (prefix, id(order))),
            );
        }
        // Sorting is stable: of equal prefixes the first rule stays.
        found.sort_by_key(|(prefix, _)| *prefix);
        found.dedup_by_key(|(prefix, _)| *prefix);
        found
    }

    /// Whether questions are judged by their names: there is a rule by name, or the default is
    /// deny.
    pub fn judges_names(&self) -> bool {
        self.default == Action::Deny || !self.names.is_empty()
    }

    /// Places of the rules about a name (in lower case), ascending.
    pub(super) fn about(&self, name: Name<'_>) -> Vec<u32> {
        self.names.matching(name)
    }

    /// Whether a name with these rules is resolved: whether it may be connected to at all.
    pub(super) fn resolves(&self, rules: &[u32]) -> Decision {
        for &order in rules {
            match &self.rules[order as usize] {
                Rule::Name(Action::Allow, _) => return decision(order, None, Action::Allow),
                Rule::Name(Action::Deny, pattern) if pattern.is_whole() => {
                    return decision(order, None, Action::Deny);
                }
                _ => {}
            }
        }
        self.by_default()
    }

    /// The first of these rules by name that speaks of a port and protocol.
    pub(super) fn first_of(&self, rules: &[u32], to: Destination) -> Option<Decision> {
        rules
            .iter()
            .find_map(|&order| match &self.rules[order as usize] {
                Rule::Name(action, pattern) if pattern.covers(to.port, to.protocol) => {
                    Some(decision(order, None, *action))
                }
                _ => None,
            })
    }

    /// Whether two lists of rules by name decide alike.
    pub(super) fn same_effect(&self, a: &[u32], b: &[u32]) -> bool {
        let effect = |order: &u32| match &self.rules[*order as usize] {
            Rule::Name(action, pattern) => Some((*action, pattern.scope())),
            Rule::Match(..) | Rule::DenyFile(_) => None,
        };
        a == b || a.iter().map(effect).eq(b.iter().map(effect))
    }

    /// Whether this is a rule that denies.
    pub(super) fn is_deny(&self, order: u32) -> bool {
        self.action(order) == Action::Deny
    }

    /// The protected space around an address that no rule by address opens on purpose.
    pub(super) fn shut_space(&self, addr: Ipv4Addr) -> Option<Space> {
        let (range, space) = self.protected(addr)?;
        let opens = self.rules.iter().any(|rule| match rule {
            Rule::Match(Action::Allow, pattern) => {
                let prefix = pattern.prefix();
                prefix.contains(&addr) && prefix.prefix_len() >= range.prefix_len()
            }
            _ => false,
        });
        (!opens).then_some(space)
    }

    /// Whether a flow that `rule` let in may stay: for the rules by name, whose openings are not
    /// known any more at a new start, what the rule says is enough.
    pub fn keeps(&self, rule: RuleId, to: Destination) -> bool {
        let decision = self.decide(to);
        let by_name = || {
            let order = rule.0.checked_sub(RuleId::FIRST_TYPED.0)?;
            match self.rules.get(order as usize)? {
                Rule::Name(Action::Allow, pattern) => Some(pattern.covers(to.port, to.protocol)),
                _ => None,
            }
        };
        match decision.refusal {
            None => true,
            Some(Refusal::Default) => by_name().unwrap_or(false),
            Some(_) => false,
        }
    }

    fn by_default(&self) -> Decision {
        Decision {
            rule: RuleId::DEFAULT,
            line: None,
            refusal: (self.default == Action::Deny).then_some(Refusal::Default),
        }
    }

    /// The first deny file with a line for `to`, if it comes before `matched`.
    fn in_files(&self, to: Destination, matched: Option<u32>) -> Option<(u32, u32)> {
        let before = matched.unwrap_or(u32::MAX);
        self.files
            .iter()
            .take_while(|order| **order < before)
            .find_map(|order| match &self.rules[*order as usize] {
                Rule::DenyFile(file) => Some((*order, file.line_for(to)?)),
                Rule::Match(..) | Rule::Name(..) => None,
            })
    }

    fn action(&self, order: u32) -> Action {
        match &self.rules[order as usize] {
            Rule::Match(action, _) | Rule::Name(action, _) => *action,
            Rule::DenyFile(_) => Action::Deny,
        }
    }
}

fn decision(order: u32, line: Option<u32>, action: Action) -> Decision {
    Decision {
        rule: id(order),
        line,
        refusal: (action == Action::Deny).then_some(Refusal::Rule),
    }
}

fn id(order: u32) -> RuleId {
    RuleId(RuleId::FIRST_TYPED.0 + order)
}

fn earliest(a: Option<u32>, b: Option<u32>) -> Option<u32> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

fn rule_text(rule: &Rule) -> String {
    match rule {
        Rule::Match(action, pattern) => format!("--{} {pattern}", action.name()),
        Rule::Name(action, pattern) => format!("--{} {pattern}", action.name()),
        Rule::DenyFile(file) => format!("--deny-file {}", file.name()),
    }
}

fn denied_whole(rule: &Rule) -> Box<dyn Iterator<Item = Ipv4Net> + '_> {
    let whole = |pattern: &Pattern| pattern.is_whole().then_some(pattern.prefix());
    match rule {
        Rule::Match(Action::Deny, pattern) => Box::new(whole(pattern).into_iter()),
        Rule::Match(Action::Allow, _) | Rule::Name(..) => Box::new(std::iter::empty()),
        Rule::DenyFile(file) => Box::new(DenyFile::patterns(file).filter_map(move |p| whole(&p))),
    }
}

#[cfg(test)]
#[path = "policy_test.rs"]
pub(super) mod tests;
