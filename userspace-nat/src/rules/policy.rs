//! The compiled policy.
mod by_name;
mod guard;
mod texts;

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use slipgate_abi::Refusal;

use super::{
    Action, Decision, Destination, LocalAddresses, Note, Rule, Settings, Space, Written,
    elsewhere::{self, elsewhere},
    identity::{Meaning, meaning_of},
    matcher::{Entry, Matcher},
    names::NameMatcher,
    pattern::Pattern,
    protected::Protected,
};

/// Where something is said of a name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Place {
    /// The rule, from 0.
    pub(super) order: u32,
    /// The line of a deny file, from 1; 0: the rule itself.
    pub(super) line: u32,
}

/// A list of rules, compiled. One policy may serve any number of guests.
#[derive(Clone, Debug)]
pub struct Policy {
    settings: Settings,
    default: Action,
    /// The number of its default, the first of its run.
    first: u32,
    pub(super) rules: Vec<Rule>,
    /// What is known of each rule beside it.
    notes: Vec<Note>,
    /// What each of them means.
    meanings: Vec<Meaning>,
    /// Rules by address, by position among the rules.
    all: Matcher,
    /// The denies among them.
    denies: Matcher,
    /// Those that mean resolvers elsewhere.
    meant: Matcher,
    /// Positions of the deny files, ascending.
    files: Vec<u32>,
    /// Whether a rule has connections inspected, and whether one does by address.
    inspections: (bool, bool),
    /// Whether one of them has lines by name.
    files_have_names: bool,
    protected: Protected,
    /// Rules by name, by position among the rules.
    names: NameMatcher,
}

impl Policy {
    /// Compiles `rules`, which are in the order typed.
    pub fn new<R: Into<Written>>(default: Action, rules: Vec<R>) -> Self {
        let written = rules.into_iter().map(Into::into);
        let (rules, notes): (Vec<Rule>, Vec<Note>) =
            written.map(|w: Written| (w.rule, w.note)).unzip();
        let entries = |wanted: fn(Action, &Pattern) -> bool| {
            Matcher::new(
                rules
                    .iter()
                    .zip(0..)
                    .filter_map(|(rule, order)| match rule {
                        Rule::Match(action, pattern) if wanted(*action, pattern) => Some(Entry {
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
            settings: Settings::default(),
            default,
            first: 0,
            meanings: rules
                .iter()
                .zip(&notes)
                .map(|(rule, note)| meaning_of(rule, note.http))
                .collect(),
            notes,
            names: NameMatcher::new(names),
            all: entries(|_, _| true),
            denies: entries(|action, _| action == Action::Deny),
            meant: entries(|action, pattern| action.admits() && elsewhere::means(pattern)),
            files: rules
                .iter()
                .zip(0..)
                .filter(|(rule, _)| matches!(rule, Rule::DenyFile(_)))
                .map(|(_, order)| order)
                .collect(),
            inspections: Self::find_inspections(&rules),
            files_have_names: rules
                .iter()
                .any(|rule| matches!(rule, Rule::DenyFile(file) if file.has_names())),
            rules,
            protected: Protected::new(&LocalAddresses::default()),
        }
    }

    /// The same rules with other settings.
    pub fn with(self, settings: Settings) -> Self {
        Self { settings, ..self }
    }

    /// What it says beside its rules.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether some rule has connections inspected, and whether one does by address.
    pub fn inspections(&self) -> (bool, bool) {
        self.inspections
    }

    fn find_inspections(rules: &[Rule]) -> (bool, bool) {
        let is = |rule: &Rule| match rule {
            Rule::Match(Action::Inspect, _) => (true, true),
            Rule::Name(Action::Inspect, _) => (true, false),
            _ => (false, false),
        };
        let all = rules.iter().map(is);
        all.fold((false, false), |a, b| (a.0 | b.0, a.1 | b.1))
    }

    /// Says which addresses are the host's and the guests', now. To be called at start and
    /// whenever an address comes or goes.
    pub fn set_local(&mut self, local: &LocalAddresses) {
        self.protected = Protected::new(local);
    }

    /// Judges a destination.
    pub fn decide(&self, to: Destination) -> Decision {
        let space = self.protected.space_of(to.addr);
        let elsewhere = self.elsewhere(to);
        let shortest = space.map_or(0, |(range, _)| range.prefix_len());
        let matched = match (space, elsewhere) {
            (None, false) => self.all.first(to, 0),
            // Only allows as specific as the protected range count; denies all do.
            (Some(_), false) => earliest(self.all.first(to, shortest), self.denies.first(to, 0)),
            // Only allows that mean a resolver.
            (_, true) => earliest(self.meant.first(to, shortest), self.denies.first(to, 0)),
        };
        if let Some((order, line)) = self.in_files(to, matched) {
            return self.decision(order, Some(line), Action::Deny);
        }
        let refused = |rule, refusal| Decision {
            rule,
            line: None,
            refusal: Some(refusal),
        };
        match matched {
            Some(order) => self.decision(order, None, self.action(order)),
            None if space.is_some() => refused(self.protected_id(), Refusal::Protected),
            None if elsewhere => refused(self.elsewhere_id(), Refusal::DnsElsewhere),
            None => self.by_default(),
        }
    }

    /// Whether a destination is a resolver that the rules by name are not to be got around by.
    pub(super) fn elsewhere(&self, to: Destination) -> bool {
        self.judges_names() && elsewhere(to).is_some()
    }

    /// The rules, with what each means.
    pub(super) fn meant(&self) -> impl Iterator<Item = (&Rule, &Meaning)> {
        self.rules.iter().zip(&self.meanings)
    }

    /// The default action.
    pub fn default_action(&self) -> Action {
        self.default
    }

    /// The protected range that contains `addr`, if one does.
    pub fn protected(&self, addr: Ipv4Addr) -> Option<(Ipv4Net, Space)> {
        self.protected.space_of(addr)
    }

    /// The protected space around an address that no rule by address opens on purpose.
    pub(super) fn shut_space(&self, addr: Ipv4Addr) -> Option<Space> {
        let (range, space) = self.protected(addr)?;
        let opens = self.rules.iter().any(|rule| match rule {
            Rule::Match(Action::Allow | Action::Inspect, pattern) => {
                let prefix = pattern.prefix();
                prefix.contains(&addr) && prefix.prefix_len() >= range.prefix_len()
            }
            _ => false,
        });
        (!opens).then_some(space)
    }

    fn decision(&self, order: u32, line: Option<u32>, action: Action) -> Decision {
        Decision {
            rule: self.id(order),
            line,
            refusal: (action == Action::Deny).then_some(Refusal::Rule),
        }
    }

    pub(super) fn by_default(&self) -> Decision {
        Decision {
            rule: self.default_id(),
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

fn earliest(a: Option<u32>, b: Option<u32>) -> Option<u32> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
#[path = "policy_test.rs"]
pub(crate) mod tests;
