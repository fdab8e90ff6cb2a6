//! The compiled policy.
use std::net::Ipv4Addr;

use super::{
    dns_bypass,
    identity::{Meaning, meaning_of},
    protected::{Protected, Space},
};
use crate::{
    Action, LocalAddresses, Note, Pattern, Rule, Settings, Written,
    rule::{
        matcher::{Entry, Matcher},
        names::NameMatcher,
    },
};
use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

/// Where something is said of a name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Place {
    /// The rule, from 0.
    pub order: u32,
    /// The line of a deny file, from 1; 0: the rule itself.
    pub line: u32,
}

/// A list of rules, compiled. One policy may serve any number of guests.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Policy {
    pub(crate) settings: Settings,
    pub(crate) default: Action,
    /// The number of its default, the first of its run.
    pub(crate) first: u32,
    pub(crate) rules: Vec<Rule>,
    /// What is known of each rule beside it.
    pub(crate) notes: Vec<Note>,
    /// What each of them means.
    pub(crate) meanings: Vec<Meaning>,
    /// Rules by address, by position among the rules.
    pub(crate) all: Matcher,
    /// The denies among them.
    pub(crate) denies: Matcher,
    /// Those that mean resolvers elsewhere.
    pub(crate) meant: Matcher,
    /// Positions of the deny files, ascending.
    pub(crate) files: Vec<u32>,
    /// Whether a rule has connections inspected, and whether one does by address.
    pub(crate) inspections: (bool, bool),
    /// Whether one of them has lines by name.
    pub(crate) files_have_names: bool,
    /// Not sent: whoever decides by it says which addresses are local.
    #[serde(skip)]
    pub(crate) protected: Protected,
    /// Rules by name, by position among the rules.
    pub(crate) names: NameMatcher,
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
            meant: entries(|action, pattern| action.admits() && dns_bypass::means(pattern)),
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

    /// The rules, with what each means.
    pub fn meanings(&self) -> impl Iterator<Item = (&Rule, &Meaning)> {
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

    pub(crate) fn action(&self, order: u32) -> Action {
        match &self.rules[order as usize] {
            Rule::Match(action, _) | Rule::Name(action, _) => *action,
            Rule::DenyFile(_) => Action::Deny,
        }
    }
}
