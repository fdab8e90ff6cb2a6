//! Comparison of the decisions of two policy files about recorded flows and questions.
use std::collections::BTreeMap;

use slipgate_abi::{Protocol, VmRates};

use super::{bounds::Bounds, compiled::Compiled, flow_log::Seen};
use crate::{
    Action, Decision, Destination, Name, Policy,
    document::{ConfigError, limits_in_file, policy_in_file},
    one_line, wire,
};

/// Note where the files differ in rates, which cannot be compared by a record.
const NO_RATES: &str =
    "not compared: bytes and packets per second, for a record does not say when they passed\n";

/// Outcome of a flow or question under a policy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Outcome {
    Refused,
    Inspected,
    Allowed,
}

impl Outcome {
    fn heading(self, questions: bool) -> &'static str {
        match (self, questions) {
            (Self::Refused, false) => "refused from now on:",
            (Self::Inspected, _) => "inspected from now on:",
            (Self::Allowed, false) => "let through from now on:",
            (Self::Refused, true) => "questions refused from now on:",
            (Self::Allowed, true) => "questions answered from now on:",
        }
    }
}

/// Count, subject, and deciding rule.
type Line = (u64, String, String);

/// Counts of changed decisions, by whether it is a question, the new outcome, the subject, and the
/// deciding rule.
type Changes = BTreeMap<(bool, Outcome, String, String), u64>;

/// One file, with the state of its limits over the record.
#[derive(Debug)]
struct Side<'c> {
    compiled: &'c Compiled,
    /// Policy of VMs that name none.
    policy: Option<&'c str>,
    bounds: Bounds,
    /// Rates of the VM of the last record.
    rates: VmRates,
}

/// Outcome of a record, deciding rule or setting, and the limit's resource where a limit decided.
type Decided = (Outcome, String, Option<&'static str>);

/// Comparison of two files over records, taken one after the other.
#[derive(Debug)]
pub struct Diff<'c> {
    sides: [Side<'c>; 2],
    changes: Changes,
    records: u64,
    rates_differ: bool,
}

impl<'c> Diff<'c> {
    /// Creates a comparison without records. `policy`: the policy of VMs to which the files give
    /// none.
    pub fn new(before: &'c Compiled, after: &'c Compiled, policy: Option<&'c str>) -> Self {
        Self {
            sides: [before, after].map(|compiled| Side {
                compiled,
                policy,
                bounds: Bounds::default(),
                rates: VmRates::default(),
            }),
            changes: Changes::new(),
            records: 0,
            rates_differ: false,
        }
    }

    /// Compares the decisions of both files about a record.
    ///
    /// # Errors
    /// A file has no policy for the VM.
    pub fn take(&mut self, seen: &Seen) -> Result<(), ConfigError> {
        self.records += u64::from(!matches!(seen, Seen::End { .. }));
        let [before, after] = &mut self.sides;
        let (was, is) = (before.decide(seen)?, after.decide(seen)?);
        self.rates_differ |= before.rates != after.rates;
        compare(was, is, seen, &mut self.changes);
        Ok(())
    }

    /// Whether both files decide alike about all records.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Returns the changed decisions as text.
    pub fn text(&self) -> String {
        let mut text = text(&self.changes, self.records);
        if self.rates_differ {
            text.push_str(NO_RATES);
        }
        text
    }
}

impl Side<'_> {
    /// Decides on a record; `None` if there is nothing to decide.
    fn decide(&mut self, seen: &Seen) -> Result<Option<Decided>, ConfigError> {
        let vm = seen.vm();
        let place = policy_in_file(&self.compiled.file, vm, self.policy)?;
        let policy = self.compiled.policies.of(Some(place));
        let limits = limits_in_file(&self.compiled.file, place);
        self.rates = limits.rates;
        let by_rules = |(outcome, by)| Some((outcome, by, None));
        Ok(match seen {
            Seen::End { id, .. } => {
                self.bounds.end(vm, id);
                None
            }
            Seen::Refused { to, name, .. } => by_rules(flow(policy, *to, name)),
            Seen::Loopback { to, host_port, .. } => by_rules(loopback(policy, *to, *host_port)),
            Seen::Flow {
                to,
                name,
                id,
                at_ns,
                is_over,
                ..
            } => {
                let decided = flow(policy, *to, name);
                let over = (decided.0 != Outcome::Refused).then(|| {
                    self.bounds
                        .flow(vm, limits, id.as_deref(), *at_ns, *is_over)
                });
                match over.flatten() {
                    Some((what, by)) => Some((Outcome::Refused, by, Some(what))),
                    None => by_rules(decided),
                }
            }
            Seen::Question {
                name,
                kind,
                chain,
                at_ns,
                from_cache,
                ..
            } => {
                // Whatever it asks for counts.
                if let Some((what, by)) = self.bounds.question(vm, limits, *at_ns) {
                    return Ok(Some((Outcome::Refused, by, Some(what))));
                }
                let Ok(wire) = wire(name) else {
                    return Ok(None);
                };
                let name = Name(&wire);
                let asked = question(policy, name, kind);
                let looked_up = asked.0 != Outcome::Refused && !from_cache;
                let over = looked_up
                    .then(|| self.bounds.lookup(vm, limits, policy, name, kind, *at_ns))
                    .flatten();
                match over {
                    Some((what, by)) => Some((Outcome::Refused, by, Some(what))),
                    None => by_rules(answered(policy, asked, chain)),
                }
            }
        })
    }
}

fn compare(was: Option<Decided>, is: Option<Decided>, seen: &Seen, changes: &mut Changes) {
    let (Some(was), Some(is)) = (was, is) else {
        return;
    };
    if was.0 == is.0 {
        return;
    }
    let (what, count, is_question) = match seen {
        Seen::End { .. } => return,
        Seen::Flow { to, name, .. } => (target(*to, name.as_deref()), 1, false),
        Seen::Loopback { to, .. } => (target(*to, None), 1, false),
        Seen::Refused {
            to, name, count, ..
        } => (target(*to, name.as_deref()), *count, false),
        Seen::Question { name, kind, .. } => {
            let what = match &kind[..] {
                "TXT" | "NULL" | "ANY" => format!("{name} ({kind})"),
                _ => name.clone(),
            };
            (what, 1, true)
        }
    };
    // Refusals by a limit are summed up: which flow meets the limit is chance.
    let (what, by) = match (was.2, is.2) {
        (_, Some(bound)) => (bound.to_owned(), is.1),
        (Some(bound), None) => (bound.to_owned(), format!("{}, and not by {}", is.1, was.1)),
        (None, None) => (what, is.1),
    };
    *changes.entry((is_question, is.0, what, by)).or_default() += count;
}

fn flow(policy: &Policy, to: Destination, name: &Option<String>) -> (Outcome, String) {
    let name = name.as_ref().and_then(|name| wire(name).ok());
    let decision = match &name {
        Some(name) => policy.decide_as(to, Name(name)),
        None => policy.decide(to),
    };
    outcome(policy, decision)
}

/// Returns whether a policy leads a destination to the recorded port of the host's loopback. The
/// destination's address was the gateway's, or an entry gives it.
fn loopback(policy: &Policy, to: Destination, host_port: u16) -> (Outcome, String) {
    match policy.host_loopback(&[], to, to.addr) {
        Some(lead) if !lead.decision.is_allowed() => {
            (Outcome::Refused, policy.named(lead.decision))
        }
        Some(lead) if lead.host_port == host_port => (Outcome::Allowed, lead.text),
        Some(lead) => (
            Outcome::Refused,
            format!("{}, which leads elsewhere", lead.text),
        ),
        None => (Outcome::Refused, "no host_loopback lists it".to_owned()),
    }
}

/// Refuses an answer if any alias in its chain may not be asked for.
fn answered(policy: &Policy, asked: (Outcome, String), chain: &[String]) -> (Outcome, String) {
    if asked.0 == Outcome::Refused {
        return asked;
    }
    let refused = chain.iter().find_map(|alias| {
        // An alias that no rule can name is allowed by the default only.
        let Ok(wire) = wire(alias) else {
            let by = "no rule can name it".to_owned();
            return (policy.default_action() == Action::Deny).then_some((alias, by));
        };
        let (is, by) = question(policy, Name(&wire), "A");
        (is == Outcome::Refused).then_some((alias, by))
    });
    match refused {
        Some((alias, by)) => (Outcome::Refused, format!("{by}, for its alias {alias}")),
        None => asked,
    }
}

fn question(policy: &Policy, name: Name<'_>, kind: &str) -> (Outcome, String) {
    if let Some(text) = policy.without_dns() {
        return (Outcome::Refused, text);
    }
    let decision = policy.question(name);
    if decision.is_allowed()
        && policy.judges_names()
        && let Some(text) = policy.settings().dns.too_much(name)
    {
        return (Outcome::Refused, text);
    }
    let number = match kind {
        "NULL" => 10,
        "TXT" => 16,
        "ANY" => 255,
        _ => 0,
    };
    let types = &policy.settings().dns.types;
    if decision.is_allowed()
        && number != 0
        && policy.default_action() == Action::Deny
        && !types.contains(&number)
    {
        return (Outcome::Refused, format!("dns.types, which has no {kind}"));
    }
    let (outcome, by) = outcome(policy, decision);
    match outcome {
        // Inspection concerns the connection, not the question.
        Outcome::Inspected => (Outcome::Allowed, by),
        _ => (outcome, by),
    }
}

fn outcome(policy: &Policy, decision: Decision) -> (Outcome, String) {
    let outcome = match decision.is_allowed() {
        false => Outcome::Refused,
        true if policy.inspects(decision.rule) => Outcome::Inspected,
        true => Outcome::Allowed,
    };
    let by = match policy.place_of(decision.rule) {
        Some(_) => policy.named(decision),
        None => policy.text(decision),
    };
    (outcome, by)
}

fn target(to: Destination, name: Option<&str>) -> String {
    let host = name.map_or_else(|| to.addr.to_string(), str::to_owned);
    match to.protocol {
        Protocol::Icmp | Protocol::Icmpv6 => format!("{host}/icmp"),
        protocol => format!("{host}:{}/{}", to.port, protocol.name()),
    }
}

fn text(changes: &Changes, records: u64) -> String {
    if changes.is_empty() {
        return format!("the same: all of {records} flows, questions and refusals recorded\n");
    }
    let mut sections: BTreeMap<(bool, Outcome), Vec<Line>> = BTreeMap::new();
    for ((is_question, outcome, what, by), count) in changes {
        let section = sections.entry((*is_question, *outcome)).or_default();
        section.push((*count, one_line(what), one_line(by)));
    }
    let mut text = String::new();
    for ((is_question, outcome), mut lines) in sections {
        text.push_str(&format!("{}\n", outcome.heading(is_question)));
        lines.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        let width = lines
            .iter()
            .map(|line| line.1.chars().count())
            .max()
            .unwrap_or(0);
        for (count, what, by) in lines {
            text.push_str(&format!("  {count:>8}  {what:<width$}  by {by}\n"));
        }
    }
    let count: u64 = changes.values().sum();
    text.push_str(&format!(
        "{count} decided otherwise, of {records} records\n"
    ));
    text
}
