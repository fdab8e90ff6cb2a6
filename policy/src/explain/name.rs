//! Explanation of a name: what happens to a guest that asks for it and connects to the answer.
//!
//! # Theory of operation
//!
//! The addresses that DNS will return are unknown, and rules by address may concern some of them.
//! So the address space is cut into ranges in which all addresses are decided alike ([`cut`]), by
//! the prefixes of all rules by address. One address of each range is judged as after the guest has
//! asked ([`Policy::decide_as`]). A range of a rule whose outcome differs from that of its
//! surroundings gets a sentence with its prefix. Protected space and lines of deny files only ever
//! refuse, and share one sentence.
//!
//! Public resolvers are decided in their own way, at all ports but that of DNS over TLS: no broad
//! rule opens them, and a rule by name may ([`Policy::first_of`]). All of them are decided alike,
//! except those that a rule by address gives or denies. One sentence says whether they are opened
//! or stay refused.
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use slipgate_abi::Protocol;

use crate::{
    Action, DNS_PORT, Decision, Destination, Name, PatternRef, Policy, Rule,
    compile::{
        dns_bypass::{is_by_address, resolvers},
        protected::everywhere,
    },
    rule::embedded::leading_to,
};

/// Maximum number of ranges that get a sentence.
const SHOWN_RANGES: usize = 8;

/// Addresses that are decided alike: those of a prefix that are in no narrower prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Range {
    prefix: IpNet,
    /// Whether a rule gives the prefix; a deny file's lines do not count.
    is_rules: bool,
    /// Index of the range that contains it.
    parent: usize,
    /// One address of the range; `None`: narrower prefixes contain all of them.
    address: Option<IpAddr>,
}

/// Outcome of a connection, in the detail that is explained.
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
    /// Explains what happens to a guest that asks for a name and connects to the answer, in
    /// sentences, one per line. Returns also whether the connection is admitted at an address that
    /// no rule concerns in particular. `port`: `None` for any port.
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

    fn explain_any_port(&self, about: &[PatternRef], sentences: &mut Vec<String>) -> bool {
        let admits = |place: &PatternRef| self.by_name(*place).is_some_and(|(a, _)| a.admits());
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
        about: &[PatternRef],
        (port, protocol): (u16, Protocol),
        sentences: &mut Vec<String>,
    ) -> bool {
        let at = |addr| Destination {
            addr,
            port,
            protocol,
        };
        let mut ranges = cut(self.prefixes(port, protocol));
        let judged = |range: &Range| Some(self.decide_given(at(range.address?), name, about));
        let outcome = |range: &Range| Some(self.outcome(judged(range)?.0));
        let is_resolver = |range: &Range| {
            let to = at(range.prefix.addr());
            let is_one = range.prefix.prefix_len() == range.prefix.max_prefix_len();
            is_one && self.bypasses_dns(to) && is_by_address(to)
        };
        // Any other range that is no rule's (a deny file's line) and not refused is decided as its
        // surroundings: where narrower ranges contain all addresses of one, it represents it.
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
            // Narrower ranges contain every address.
            None => ranges
                .iter()
                .filter_map(outcome)
                .any(|o| o != Outcome::Refused),
        };
        // Public resolvers that no rule by address gives or denies.
        let resolvers = ranges.iter().find_map(|range| {
            let is_one = !range.is_rules && is_resolver(range);
            let (decision, by_name) = judged(range).filter(|_| is_one)?;
            let (here, around) = (self.outcome(decision), outcome(&ranges[range.parent]));
            let is_own = by_name || decision.rule == self.dns_bypass_id();
            (is_own && around != Some(here)).then_some((decision, here))
        });
        let opened = resolvers.filter(|(_, here)| *here != Outcome::Refused);
        // One sentence at the end covers the refused ranges of an open name.
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
            let is_told =
                passes && here == Outcome::Refused && self.place_of(decision.rule).is_some();
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
            Protocol::Icmp | Protocol::Icmpv6 => "Ping".to_owned(),
            protocol => format!("{} port {port}", protocol.name().to_uppercase()),
        };
        if let Some((decision, by_name)) = elsewhere {
            let speaks = ranges[0].address;
            let speaks = speaks
                .and_then(|addr| self.first_of(about, at(addr)))
                .is_some();
            let circumstances = Circumstances {
                by_name,
                speaks,
                everywhere: differing.is_empty() && opened.is_none(),
            };
            self.explain_elsewhere(&what, decision, circumstances, sentences);
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

    /// Appends the sentences about the addresses that no rule concerns in particular.
    fn explain_elsewhere(
        &self,
        what: &str,
        decision: Decision,
        circumstances: Circumstances,
        sentences: &mut Vec<String>,
    ) {
        let (by, outcome) = (self.by(decision), self.outcome(decision));
        if circumstances.by_name && outcome == Outcome::Refused {
            sentences.push(format!("{what} of it is refused {by}."));
        } else if circumstances.by_name {
            sentences.push(format!("{what} of what DNS tells for it is opened {by}."));
            if outcome == Outcome::Inspected {
                sentences.push(
                    "Inspected: the connection must say a name that the rules let in there."
                        .to_owned(),
                );
            }
        } else if self.place_of(decision.rule).is_some() {
            let whatever = match circumstances.everywhere {
                true => "whatever address it has",
                false => "where nothing below says otherwise",
            };
            let why = match (circumstances.speaks, outcome) {
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

    /// Returns the outcome that a decision means.
    fn outcome(&self, decision: Decision) -> Outcome {
        match (decision.is_allowed(), self.inspects(decision.rule)) {
            (false, _) => Outcome::Refused,
            (true, false) => Outcome::Admitted,
            (true, true) => Outcome::Inspected,
        }
    }

    /// Returns the part of a sentence that names the reason of a decision.
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

    /// Returns the prefixes by which addresses are decided at a port, each with whether a rule
    /// gives it.
    fn prefixes(&self, port: u16, protocol: Protocol) -> Vec<(IpNet, bool)> {
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
        prefixes.extend(everywhere().map(|(prefix, _)| (prefix, false)));
        prefixes.extend(resolvers().map(|addr| (IpNet::from(addr), false)));
        // IPv6 addresses that lead to IPv4 addresses are decided as these.
        let v4 = prefixes.iter().filter_map(|(prefix, _)| match prefix {
            IpNet::V4(prefix) => Some(*prefix),
            IpNet::V6(_) => None,
        });
        let leading: Vec<IpNet> = v4.flat_map(leading_to).collect();
        prefixes.extend(leading.into_iter().map(|prefix| (prefix, false)));
        prefixes
    }
}

/// Circumstances of the decision about most addresses.
struct Circumstances {
    /// Whether the rules about the name made it.
    by_name: bool,
    /// Whether a rule about the name matches the port.
    speaks: bool,
    /// Whether no range is decided otherwise.
    everywhere: bool,
}

/// Cuts the address space by prefixes. The first range has the IPv4 addresses outside all of them;
/// it is the parent of the range of such IPv6 addresses too, which counts as a rule's: a sentence
/// is about it where it differs.
fn cut(mut prefixes: Vec<(IpNet, bool)>) -> Vec<Range> {
    prefixes.push((Ipv4Net::default().into(), false));
    prefixes.push((Ipv6Net::default().into(), true));
    // Enclosing prefixes first; of equal ones a rule's.
    prefixes.sort_by_key(|(p, is_rules)| (p.network(), p.prefix_len(), !is_rules));
    prefixes.dedup_by_key(|(prefix, _)| *prefix);
    let mut ranges: Vec<Range> = Vec::with_capacity(prefixes.len());
    // Open ranges, with their first address that no narrower range contains; `None`: no address
    // follows the narrower ranges.
    let mut open: Vec<(usize, Option<IpAddr>)> = Vec::new();
    let end = |ranges: &mut Vec<Range>, (at, next): (usize, Option<IpAddr>)| {
        let range: &mut Range = &mut ranges[at];
        if let Some(next) = next.filter(|next| range.prefix.contains(next)) {
            range.address.get_or_insert(next);
        }
    };
    for (prefix, is_rules) in prefixes {
        while let Some(last) = open.pop_if(|(at, _)| !ranges[*at].prefix.contains(&prefix)) {
            end(&mut ranges, last);
        }
        let first = prefix.network();
        let parent = open.last_mut().map_or(0, |(at, next)| {
            if let Some(gap) = next.filter(|next| *next < first) {
                ranges[*at].address.get_or_insert(gap);
            }
            *next = after(prefix.broadcast());
            *at
        });
        open.push((ranges.len(), Some(first)));
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

/// Returns the next address; `None` after the last of a family.
fn after(addr: IpAddr) -> Option<IpAddr> {
    match addr {
        IpAddr::V4(addr) => Some(IpAddr::V4(addr.to_bits().checked_add(1)?.into())),
        IpAddr::V6(addr) => Some(IpAddr::V6(addr.to_bits().checked_add(1)?.into())),
    }
}

#[cfg(test)]
#[path = "name_test.rs"]
mod tests;
