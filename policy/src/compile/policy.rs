//! The compiled policy: rules as look-up structures.
use std::net::IpAddr;

use super::{
    dns_bypass,
    identity::{Meaning, meaning_of},
    protected::{Protected, Space},
};
use crate::{
    Action, AnnotatedRule, LocalAddresses, Note, Pattern, Rule, Settings,
    rule::{
        matcher::{Entry, Matcher},
        names::NameMatcher,
    },
};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Place of a pattern by name: a rule, or a line of a deny file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PatternRef {
    /// Position of the rule, from 0.
    pub order: u32,
    /// Line of the deny file, from 1; 0: the rule itself.
    pub line: u32,
}

/// A compiled list of rules. One policy may serve any number of guests.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Policy {
    /// Settings beside the rules.
    pub(crate) settings: Settings,
    /// Action where no rule matches.
    pub(crate) default: Action,
    /// Number of the default, the first of the policy's range of rule numbers.
    pub(crate) first: u32,
    /// Rules in the order given.
    pub(crate) rules: Vec<Rule>,
    /// Metadata of each rule.
    pub(crate) notes: Vec<Note>,
    /// Digest of each rule's meaning.
    pub(crate) meanings: Vec<Meaning>,
    /// Rules by address, by position.
    pub(crate) all: Matcher,
    /// Rules by address that deny, by position.
    pub(crate) denies: Matcher,
    /// Rules by address that open resolvers which bypass the rules by name, by position.
    pub(crate) bypass_allows: Matcher,
    /// Positions of the rules by address that admit, ascending.
    pub(crate) address_admits: Vec<u32>,
    /// Positions of the deny files, ascending.
    pub(crate) files: Vec<u32>,
    /// Whether a rule inspects, and whether a rule by address does.
    pub(crate) inspections: (bool, bool),
    /// Whether a deny file has lines by name.
    pub(crate) files_have_names: bool,
    /// Protected ranges. Not serialized: the process that decides sets its local addresses.
    #[serde(skip)]
    pub(crate) protected: Protected,
    /// Rules by name, by position.
    pub(crate) names: NameMatcher,
}

impl Policy {
    /// Compiles `rules`, in the order given.
    pub fn new<R: Into<AnnotatedRule>>(default: Action, rules: Vec<R>) -> Self {
        let written = rules.into_iter().map(Into::into);
        let (rules, notes): (Vec<Rule>, Vec<Note>) =
            written.map(|w: AnnotatedRule| (w.rule, w.note)).unzip();
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
            bypass_allows: entries(|action, pattern| {
                action.admits() && dns_bypass::opens_bypass(pattern)
            }),
            address_admits: Self::positions(
                &rules,
                |rule| matches!(rule, Rule::Match(action, _) if action.admits()),
            ),
            files: Self::positions(&rules, |rule| matches!(rule, Rule::DenyFile(_))),
            inspections: Self::find_inspections(&rules),
            files_have_names: rules
                .iter()
                .any(|rule| matches!(rule, Rule::DenyFile(file) if file.has_names())),
            rules,
            protected: Protected::new(&LocalAddresses::default()),
        }
    }

    /// Returns the policy with other settings.
    pub fn with(self, settings: Settings) -> Self {
        Self { settings, ..self }
    }

    /// Returns the settings beside the rules.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns whether some rule inspects, and whether a rule by address does.
    pub fn inspections(&self) -> (bool, bool) {
        self.inspections
    }

    fn positions(rules: &[Rule], wanted: impl Fn(&Rule) -> bool) -> Vec<u32> {
        let all = rules.iter().zip(0..).filter(|(rule, _)| wanted(rule));
        all.map(|(_, order)| order).collect()
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

    /// Sets the current addresses of the host and the guests. To be called at start and whenever an
    /// address is added or removed.
    pub fn set_local(&mut self, local: &LocalAddresses) {
        self.protected = Protected::new(local);
    }

    /// Returns the rules, each with the digest of its meaning.
    pub fn meanings(&self) -> impl Iterator<Item = (&Rule, &Meaning)> {
        self.rules.iter().zip(&self.meanings)
    }

    /// Returns the default action.
    pub fn default_action(&self) -> Action {
        self.default
    }

    /// Returns the most specific protected range that contains `addr`, if one does.
    pub fn protected(&self, addr: IpAddr) -> Option<(IpNet, Space)> {
        self.protected.space_of(addr)
    }

    pub(crate) fn action(&self, order: u32) -> Action {
        match &self.rules[order as usize] {
            Rule::Match(action, _) | Rule::Name(action, _) => *action,
            Rule::DenyFile(_) => Action::Deny,
        }
    }
}
