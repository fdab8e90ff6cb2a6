//! What becomes of a guest that asks for a name and connects to what it is told, in words.
//!
//! # Theory of operation
//! Nobody knows the addresses that DNS will tell, and a rule by address may speak of some of them.
//! So the address space is cut into ranges in which all addresses are decided alike ([`cut`]): by
//! the prefixes of all that is said by address. One address of each range is judged as it would be
//! after the guest has asked ([`Policy::decide_as`]), and what differs from the rest is told: of
//! rules' ranges by their prefixes. Protected space and lines of deny files only ever refuse, of
//! which one sentence tells. Public resolvers are decided in their own way, at all ports but that
//! of DNS over TLS: no broad rule opens them, and a rule by name may ([`Policy::first_of`]). They
//! are so all alike, but for those that a rule gives or denies by address; one sentence tells of
//! them, that they are opened or that they stay shut.
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use slipgate_abi::Protocol;

use crate::{
    Action, DNS_PORT, Decision, Destination, Name, Place, Policy, Rule,
    compile::{
        dns_bypass::{is_by_address, resolvers},
        protected::everywhere,
    },
};

/// Ranges of addresses that are told of.
const SHOWN_RANGES: usize = 8;

/// Addresses that are decided alike: those of a prefix that are in no narrower one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Range {
    prefix: Ipv4Net,
    /// Whether a rule has that prefix; a deny file's lines are not counted.
    is_rules: bool,
    /// The range around it.
    parent: usize,
    /// One of its addresses; `None`: narrower prefixes have them all.
    address: Option<Ipv4Addr>,
}

/// What becomes of a connection, as far as it is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    Refused,
    Admitted,
    Inspected,
}

impl Outcome {
    const fn describe(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Admitted => "admitted and not inspected",
            Self::Inspected => "admitted and inspected",
        }
    }
}

impl Policy {
    /// What becomes of a guest that asks for a name and connects to what it is told, in sentences,
    /// one a line; and whether it comes through, where no rule speaks of the address in particular.
    /// `port`: `None`: to whatever port.
    pub fn explain_name(&self, name: Name<'_>, port: Option<(u16, Protocol)>) -> (bool, String) {
        if let Some((DNS_PORT, Protocol::Tcp | Protocol::Udp)) = port {
            return self.explain_port_53();
        }
        let shown = name.without_dot();
        if let Some(text) = self.without_dns() {
            let sentence = format!("{shown} is not resolved, by {text}: no name is.");
            return (false, sentence);
        }
        let about = self.about(name);
        let question = self.may_ask(name, &about);
        if !question.is_allowed() {
            let by = self.by(question);
            let sentence = format!("{shown} is not resolved, {by}: the guest is answered REFUSED.");
            return (false, sentence);
        }
        let mut sentences = vec![format!("{shown} is resolved, {}.", self.by(question))];
        let passes = match port {
            None => self.explain_any_port(&about, &mut sentences),
            Some(port) => self.explain_one_port(name, &about, port, &mut sentences),
        };
        (passes, sentences.join("\n"))
    }

    fn explain_any_port(&self, about: &[Place], sentences: &mut Vec<String>) -> bool {
        let admits = |place: &Place| self.by_name(*place).is_some_and(|(a, _)| a.admits());
        let opens = about.iter().any(admits);
        let default = self.default_action();
        sentences.push(match opens {
            true => "Its addresses are opened for the ports of the rules about it, below.".into(),
            false => format!(
                "No rule by name opens its addresses: they are judged by address, and the default \
                 is {}.",
                default.name()
            ),
        });
        opens || default != Action::Deny
    }

    fn explain_one_port(
        &self,
        name: Name<'_>,
        about: &[Place],
        (port, protocol): (u16, Protocol),
        sentences: &mut Vec<String>,
    ) -> bool {
        let at = |addr| Destination {
            addr,
            port,
            protocol,
        };
        let mut ranges = cut(self.prefixes(port, protocol));
        let judged = |range: &Range| Some(self.decide_told(at(range.address?), name, about));
        let outcome = |range: &Range| Some(self.outcome(judged(range)?.0));
        let is_resolver = |range: &Range| {
            let to = at(range.prefix.addr());
            let is_one = range.prefix.prefix_len() == range.prefix.max_prefix_len();
            is_one && self.bypasses_dns(to) && is_by_address(to)
        };
        // What else is no rule's (a deny file's line) and not refused is decided as what is around
        // it: where narrower ranges have all addresses of one, it stands for it.
        for index in (1..ranges.len()).rev() {
            let (range, around) = (ranges[index], ranges[index].parent);
            let is_alike = !range.is_rules && !is_resolver(&range);
            let is_wanted = is_alike && ranges[around].address.is_none();
            if is_wanted && outcome(&range).is_some_and(|o| o != Outcome::Refused) {
                ranges[around].address = range.address;
            }
        }
        let elsewhere = judged(&ranges[0]);
        let passes = match elsewhere {
            Some((decision, _)) => decision.is_allowed(),
            // Every address is in a range of its own.
            None => ranges
                .iter()
                .filter_map(outcome)
                .any(|o| o != Outcome::Refused),
        };
        // Resolvers of which no rule by address speaks in particular, nor denies them.
        let resolvers = ranges.iter().find_map(|range| {
            let is_one = !range.is_rules && is_resolver(range);
            let (decision, by_name) = judged(range).filter(|_| is_one)?;
            let (here, around) = (self.outcome(decision), outcome(&ranges[range.parent]));
            let is_own = by_name || decision.rule == self.dns_bypass_id();
            (is_own && around != Some(here)).then_some((decision, here))
        });
        let opened = resolvers.filter(|(_, here)| *here != Outcome::Refused);
        // Of what is shut though the name is open one sentence tells.
        let (mut differing, mut opens_some) = (Vec::new(), passes || opened.is_some());
        for range in ranges.iter().skip(1).filter(|range| range.is_rules) {
            let Some((decision, _)) = judged(range) else {
                continue;
            };
            let around = match resolvers {
                Some((_, of_resolvers)) if is_resolver(range) => Some(of_resolvers),
                _ => outcome(&ranges[range.parent]),
            };
            let here = self.outcome(decision);
            let is_told = passes && here == Outcome::Refused;
            if around != Some(here) && !is_told {
                opens_some |= here != Outcome::Refused;
                let (prefix, by) = (range.prefix, self.by(decision));
                let here = here.describe();
                differing.push(format!(
                    "Where its address is in {prefix}, it is {here} {by}."
                ));
            }
        }
        let what = match protocol {
            Protocol::Icmp => "Ping".to_owned(),
            protocol => format!("{} port {port}", protocol.name().to_uppercase()),
        };
        if let Some((decision, by_name)) = elsewhere {
            let speaks = ranges[0].address;
            let speaks = speaks
                .and_then(|addr| self.first_of(about, at(addr)))
                .is_some();
            let due = Due {
                by_name,
                speaks,
                everywhere: differing.is_empty() && opened.is_none(),
            };
            self.tell_elsewhere(&what, decision, due, sentences);
        } else {
            sentences.push(format!("{what} of it is decided by its address:"));
        }
        let more = differing.len().saturating_sub(SHOWN_RANGES);
        sentences.extend(differing.into_iter().take(SHOWN_RANGES));
        if more > 0 {
            sentences.push(format!(
                "In {more} more ranges it is decided in its own way."
            ));
        }
        if let Some((decision, here)) = opened {
            let (here, by) = (here.describe(), self.by(decision));
            sentences.push(format!(
                "Where its address is a public resolver's, it is {here} {by}."
            ));
        }
        let mut rules = self.rules.iter();
        if opens_some && rules.any(|rule| !matches!(rule, Rule::Name(..))) {
            let shut = match resolvers.is_some() && opened.is_none() {
                true => ", protected space and public resolvers stay",
                false => ", and protected space, stays",
            };
            sentences.push(format!(
                "What a rule by address denies{shut} shut all the same."
            ));
        }
        passes
    }

    /// Tells of the addresses of which no rule speaks in particular.
    fn tell_elsewhere(
        &self,
        what: &str,
        decision: Decision,
        due: Due,
        sentences: &mut Vec<String>,
    ) {
        let (by, outcome) = (self.by(decision), self.outcome(decision));
        if due.by_name && outcome == Outcome::Refused {
            sentences.push(format!("{what} of it is refused {by}."));
        } else if due.by_name {
            sentences.push(format!("{what} of what DNS tells for it is opened {by}."));
            if outcome == Outcome::Inspected {
                sentences.push(
                    "Inspected: the connection must say a name that the rules let in there."
                        .to_owned(),
                );
            }
        } else if self.place_of(decision.rule).is_some() {
            let whatever = match due.everywhere {
                true => "whatever address it has",
                false => "where nothing below says otherwise",
            };
            let why = match (due.speaks, outcome) {
                (false, _) => "and no rule by name speaks of it",
                (true, Outcome::Refused) => "which beats every name",
                (true, _) => "which comes before the rule about the name",
            };
            let outcome = outcome.describe();
            sentences.push(format!(
                "{what} of it is {outcome} {whatever}, {by}, {why}."
            ));
        } else if decision.rule == self.dns_bypass_id() {
            sentences.push(format!("{what} of it is refused, {by}."));
        } else {
            sentences.push(format!(
                "No rule by name speaks of {what}: the address is judged by itself, and the default \
                 is {}.",
                self.default_action().name()
            ));
        }
    }

    fn outcome(&self, decision: Decision) -> Outcome {
        match (decision.is_allowed(), self.inspects(decision.rule)) {
            (false, _) => Outcome::Refused,
            (true, false) => Outcome::Admitted,
            (true, true) => Outcome::Inspected,
        }
    }

    fn by(&self, decision: Decision) -> String {
        match self.place_of(decision.rule) {
            Some(_) => format!("by {}", self.named(decision)),
            None if decision.rule == self.dns_bypass_id() => {
                "for it is of a resolver elsewhere (safe defaults)".to_owned()
            }
            None if decision.rule == self.protected_id() => {
                "for it is protected (safe defaults)".to_owned()
            }
            None => format!("for the default is {}", self.default_action().name()),
        }
    }

    /// All that is said by address of a port, and whether a rule says it.
    fn prefixes(&self, port: u16, protocol: Protocol) -> Vec<(Ipv4Net, bool)> {
        let mut prefixes = Vec::new();
        for rule in &self.rules {
            match rule {
                Rule::Match(_, pattern) if pattern.scope().matches(port, protocol) => {
                    prefixes.push((pattern.prefix(), true));
                }
                Rule::DenyFile(file) => {
                    let lines = file.patterns();
                    let lines = lines.filter(|line| line.scope().matches(port, protocol));
                    prefixes.extend(lines.map(|line| (line.prefix(), false)));
                }
                Rule::Match(..) | Rule::Name(..) => {}
            }
        }
        prefixes.extend(everywhere().map(|prefix| (prefix, false)));
        prefixes.extend(resolvers().map(|addr| (Ipv4Net::from(addr), false)));
        prefixes
    }
}

/// What the decision about most addresses is due to.
struct Due {
    /// It is the rules about the name.
    by_name: bool,
    /// They speak of it.
    speaks: bool,
    /// No range is decided otherwise.
    everywhere: bool,
}

/// Cuts the address space by prefixes. The first range is what none of them has.
fn cut(mut prefixes: Vec<(Ipv4Net, bool)>) -> Vec<Range> {
    prefixes.push((Ipv4Net::default(), false));
    // Those around others first; of equals a rule's.
    prefixes.sort_by_key(|(p, is_rules)| (p.network(), p.prefix_len(), !is_rules));
    prefixes.dedup_by_key(|(prefix, _)| *prefix);
    let mut ranges: Vec<Range> = Vec::with_capacity(prefixes.len());
    // Those that are not at their end, and their first address that no narrower one had.
    let mut open: Vec<(usize, u64)> = Vec::new();
    let end = |ranges: &mut Vec<Range>, (at, next): (usize, u64)| {
        let range: &mut Range = &mut ranges[at];
        if next <= u64::from(range.prefix.broadcast().to_bits()) {
            range
                .address
                .get_or_insert(Ipv4Addr::from_bits(next as u32));
        }
    };
    for (prefix, is_rules) in prefixes {
        while let Some(last) = open.pop_if(|(at, _)| !ranges[*at].prefix.contains(&prefix)) {
            end(&mut ranges, last);
        }
        let first = u64::from(prefix.network().to_bits());
        let parent = open.last_mut().map_or(0, |(at, next)| {
            if *next < first {
                let gap = Ipv4Addr::from_bits(*next as u32);
                ranges[*at].address.get_or_insert(gap);
            }
            *next = u64::from(prefix.broadcast().to_bits()) + 1;
            *at
        });
        open.push((ranges.len(), first));
        ranges.push(Range {
            prefix,
            is_rules,
            parent,
            address: None,
        });
    }
    while let Some(last) = open.pop() {
        end(&mut ranges, last);
    }
    ranges
}

#[cfg(test)]
#[path = "name_test.rs"]
mod tests;
