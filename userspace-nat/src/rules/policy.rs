//! The compiled policy.
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use slipgate_abi::Refusal;

use super::{
    Action, Decision, DenyFile, Destination, Http, LocalAddresses, Note, Rule, RuleId, Settings,
    Space, Written,
    elsewhere::{self, elsewhere},
    matcher::{Entry, Matcher},
    name_pattern::NamePattern,
    names::NameMatcher,
    pattern::Pattern,
    protected::Protected,
};
use crate::{
    dns::{Name, Resolvers},
    prefix_map::PrefixMap,
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

    /// Gives it its run of rule numbers; returns where the next one's begins.
    pub(super) fn number_from(&mut self, first: u32) -> u32 {
        self.first = first;
        first + RuleId::FIRST_TYPED.0 + self.rules.len() as u32
    }

    /// Whether a rule's number is of this policy.
    pub fn has(&self, rule: RuleId) -> bool {
        let after = self.first + RuleId::FIRST_TYPED.0 + self.rules.len() as u32;
        (self.first..after).contains(&rule.0)
    }

    /// A rule's place among those typed, from 0; `None`: the default, the safe defaults, or another
    /// policy's.
    pub fn place_of(&self, rule: RuleId) -> Option<u32> {
        let typed = self.first + RuleId::FIRST_TYPED.0;
        let place = rule.0.checked_sub(typed)?;
        (place < self.rules.len() as u32).then_some(place)
    }

    /// The number of the default.
    pub fn default_id(&self) -> RuleId {
        RuleId(self.first + RuleId::DEFAULT.0)
    }

    /// The number of the safe defaults.
    pub fn protected_id(&self) -> RuleId {
        RuleId(self.first + RuleId::PROTECTED.0)
    }

    /// The number of the safe default against resolvers elsewhere.
    pub fn elsewhere_id(&self) -> RuleId {
        RuleId(self.first + RuleId::DNS_ELSEWHERE.0)
    }

    fn id(&self, place: u32) -> RuleId {
        RuleId(self.first + RuleId::FIRST_TYPED.0 + place)
    }

    /// How a rule is to be called in a sentence: `rule 3`, of which policy if it has a name.
    pub fn call(&self, rule: RuleId) -> String {
        let number = self.place_of(rule).map_or(0, |place| place + 1);
        match &self.settings.name {
            Some(name) => format!("rule {number} of policy {name}"),
            None => format!("rule {number}"),
        }
    }

    /// What is known of a rule beside it.
    pub fn note(&self, rule: RuleId) -> Option<&Note> {
        self.notes.get(self.place_of(rule)? as usize)
    }

    /// Whether the rule has its connections inspected.
    pub fn inspects(&self, rule: RuleId) -> bool {
        self.place_of(rule)
            .is_some_and(|place| self.action(place) == Action::Inspect)
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

    /// How far an inspect rule follows an HTTP/1 connection.
    pub fn http(&self, rule: RuleId) -> Http {
        self.note(rule).map_or(Http::Each, |note| note.http)
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

    /// Every rule's text, in the order of [`RuleId`].
    pub fn texts(&self) -> impl Iterator<Item = String> {
        (0..RuleId::FIRST_TYPED.0 + self.rules.len() as u32)
            .map(|offset| self.rule_text(RuleId(self.first + offset)))
    }

    /// A rule's text; with the file's line, where it was one.
    pub fn text(&self, decision: Decision) -> String {
        let text = self.rule_text(decision.rule);
        match decision.line {
            Some(line) => format!("{text}, line {line}"),
            None => text,
        }
    }

    fn rule_text(&self, rule: RuleId) -> String {
        let of = self.of_name();
        if let Some(place) = self.place_of(rule) {
            let dashes = self.dashes(self.notes[place as usize].place.is_none());
            return format!("{of}{dashes}{}", rule_text(&self.rules[place as usize]));
        }
        match rule {
            _ if rule == self.default_id() => {
                let dashes = self.dashes(self.settings.file.is_none());
                format!("{of}{dashes}default {}", self.default.name())
            }
            _ if rule == self.protected_id() => format!("{of}safe defaults"),
            _ if rule == self.elsewhere_id() => format!("{of}safe defaults: DNS elsewhere"),
            _ => String::new(),
        }
    }

    /// What was typed is shown as a flag.
    fn dashes(&self, typed: bool) -> &'static str {
        if typed { "--" } else { "" }
    }

    /// Why none of its VMs' questions is answered, as rules are called; `None`: they are.
    pub fn without_dns(&self) -> Option<String> {
        let of = self.of_name();
        let nobody = self.settings.dns.resolvers == Resolvers::Nobody;
        nobody.then(|| match self.settings.file {
            None => format!("{of}--dns none"),
            Some(_) => format!("{of}resolvers none"),
        })
    }

    /// What a rule's text begins with where there are several policies.
    fn of_name(&self) -> String {
        let name = self.settings.name.as_ref();
        name.map_or_else(String::new, |name| format!("[{name}] "))
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
        // Sorting is stable: of equal prefixes the first rule stays.
        found.sort_by_key(|(prefix, _)| *prefix);
        found.dedup_by_key(|(prefix, _)| *prefix);
        found
    }

    /// Whether questions are judged by their names: there is a rule by name, or the default is
    /// deny.
    pub fn judges_names(&self) -> bool {
        self.default == Action::Deny
            || !self.names.is_empty()
            || self.files_have_names
            || self.inspections.1
    }

    /// Places of what is said of a name (in lower case), ascending.
    pub(super) fn about(&self, name: Name<'_>) -> Vec<Place> {
        let typed = self.names.matching(name).into_iter();
        let mut about: Vec<Place> = typed.map(|order| Place { order, line: 0 }).collect();
        if self.files_have_names {
            for &order in &self.files {
                if let Rule::DenyFile(file) = &self.rules[order as usize] {
                    let lines = file.lines_about(name).into_iter();
                    about.extend(lines.map(|line| Place { order, line }));
                }
            }
            about.sort_unstable();
        }
        about
    }

    /// What is said of names there.
    pub(super) fn by_name(&self, place: Place) -> Option<(Action, &NamePattern)> {
        match &self.rules[place.order as usize] {
            Rule::Name(action, pattern) => Some((*action, pattern)),
            Rule::DenyFile(file) => Some((Action::Deny, file.name_at(place.line)?)),
            Rule::Match(..) => None,
        }
    }

    /// Whether a name with these rules is resolved: whether it may be connected to at all.
    pub(super) fn resolves(&self, rules: &[Place]) -> Decision {
        let decides = |place: &&Place| {
            let said = self.by_name(**place);
            said.is_some_and(|(action, pattern)| action.admits() || pattern.is_whole())
        };
        let first = rules.iter().find(decides);
        first.map_or(self.by_default(), |place| self.decision_at(*place))
    }

    /// The first of these rules by name that speaks of a port and protocol. To a resolver elsewhere
    /// only those admit that mean it.
    pub(super) fn first_of(&self, rules: &[Place], to: Destination) -> Option<Decision> {
        let elsewhere = self.elsewhere(to);
        let speaks = |place: &&Place| {
            self.by_name(**place).is_some_and(|(action, pattern)| {
                let counts = !(elsewhere && action.admits()) || elsewhere::name_means(pattern);
                counts && pattern.covers(to.port, to.protocol)
            })
        };
        let first = rules.iter().find(speaks)?;
        Some(self.decision_at(*first))
    }

    /// Whether one of these rules by name gives that very name, and admits.
    pub(super) fn names_exactly(&self, rules: &[Place]) -> bool {
        let is = |place: &Place| {
            let said = self.by_name(*place);
            said.is_some_and(|(action, pattern)| action.admits() && pattern.is_exact())
        };
        rules.iter().any(is)
    }

    /// How many octets of a name (in lower case) are beneath the narrowest wildcard that lets it be
    /// asked for; `None`: no wildcard does, or a rule gives the name itself.
    pub(super) fn octets_beneath(&self, name: Name<'_>) -> Option<usize> {
        let about = self.about(name);
        let admitting = about.iter().filter_map(|place| self.by_name(*place));
        let patterns = || admitting.clone().filter(|(action, _)| action.admits());
        if patterns().any(|(_, pattern)| pattern.is_exact()) {
            return None;
        }
        let beneath = patterns().map(|(_, pattern)| name.0.len() - pattern.name().0.len());
        beneath.min()
    }

    /// Whether a name is a public resolver's that these rules, about it, do not give by that name.
    pub(super) fn hides(&self, name: Name<'_>, rules: &[Place]) -> bool {
        elsewhere::is_resolver(name)
            && !self.names_exactly(rules)
            && self.resolves(rules).is_allowed()
    }

    fn decision_at(&self, place: Place) -> Decision {
        let line = (place.line > 0).then_some(place.line);
        self.decision(place.order, line, self.action(place.order))
    }

    /// Whether two lists of rules by name decide alike.
    pub(super) fn same_effect(&self, a: &[Place], b: &[Place]) -> bool {
        let effect = |place: &Place| {
            let (action, pattern) = self.by_name(*place)?;
            let means = elsewhere::name_means(pattern);
            Some((action, pattern.scope(), action.admits() && means))
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

    fn by_default(&self) -> Decision {
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

fn rule_text(rule: &Rule) -> String {
    match rule {
        Rule::Match(action, pattern) => format!("{} {pattern}", action.name()),
        Rule::Name(action, pattern) => format!("{} {pattern}", action.name()),
        Rule::DenyFile(file) => format!("deny-file {}", file.name()),
    }
}

fn denied_whole(rule: &Rule) -> Box<dyn Iterator<Item = Ipv4Net> + '_> {
    let whole = |pattern: &Pattern| pattern.is_whole().then_some(pattern.prefix());
    match rule {
        Rule::Match(Action::Deny, pattern) => Box::new(whole(pattern).into_iter()),
        Rule::Match(..) | Rule::Name(..) => Box::new(std::iter::empty()),
        Rule::DenyFile(file) => Box::new(DenyFile::patterns(file).filter_map(move |p| whole(&p))),
    }
}

#[cfg(test)]
#[path = "policy_test.rs"]
pub(crate) mod tests;
