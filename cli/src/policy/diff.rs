//! `slipgate policy diff`: what a candidate would have changed, by what was recorded.
mod limits;

use std::{collections::BTreeMap, process::ExitCode};

use slipgate_abi::{Protocol, VmRates};
use userspace_nat::{
    dns::Name,
    rules::{Action, Decision, Destination, Policy, wire},
};

use self::limits::Bounds;
use super::{
    Compiled,
    flow_log::{self, Recorded, Seen},
};
use crate::{
    args::DiffArgs,
    config::{ConfigError, limits_in_file, policy_in_file},
    show::{plain::one_line, print_once},
};

const EXIT_DIFFERENT: u8 = 1;

/// What the files say otherwise of a VM and no record can be held against.
const NO_RATES: &str =
    "not compared: bytes and packets per second, for a record does not say when they passed\n";

/// What a policy makes of something.
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

/// How often, what, and by which rule.
type Line = (u64, String, String);

/// What was decided otherwise, by outcome, whether it is a question, and what it is about.
type Changes = BTreeMap<(bool, Outcome, String, String), u64>;

/// What a file makes of a record, one thing after the other.
struct Side<'c> {
    compiled: &'c Compiled,
    args: &'c DiffArgs,
    bounds: Bounds,
    /// Those of the VM that the last record was of.
    rates: VmRates,
}

/// What of a record is decided, by what, and what it is about where that is no rule's.
type Decided = (Outcome, String, Option<&'static str>);

pub(super) fn run(args: &DiffArgs) -> anyhow::Result<ExitCode> {
    let (before, after) = (Compiled::read(&args.before)?, Compiled::read(&args.after)?);
    let mut sides = [&before, &after].map(|compiled| Side {
        compiled,
        args,
        bounds: Bounds::default(),
        rates: VmRates::default(),
    });
    let mut changes = Changes::new();
    let mut told = 0;
    let mut failed = None;
    let mut rates_differ = false;
    let mut recorded = Recorded::default();
    let reader = flow_log::read(&args.flow_log, &mut |seen| {
        recorded.note(&seen);
        if args.vm.as_deref().is_some_and(|only| only != seen.vm()) {
            return;
        }
        told += u64::from(!matches!(seen, Seen::End { .. }));
        let [before, after] = &mut sides;
        match (before.decide(&seen), after.decide(&seen)) {
            (Ok(was), Ok(is)) => compare(was, is, &seen, &mut changes),
            (Err(e), _) | (_, Err(e)) => failed = failed.take().or(Some(e)),
        }
        rates_differ |= before.rates != after.rates;
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    recorded.has(args.vm.as_deref(), "--vm", &args.flow_log)?;
    let mut text = text(&changes, told);
    if rates_differ {
        text.push_str(NO_RATES);
    }
    print_once(&text)?;
    if reader.foreign > 0 {
        crate::log::say(format_args!(
            "{} lines of {} are no records and were left out",
            reader.foreign,
            args.flow_log.display()
        ));
    }
    Ok(match changes.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_DIFFERENT),
    })
}

impl Side<'_> {
    /// `None`: there is nothing to decide.
    fn decide(&mut self, seen: &Seen) -> Result<Option<Decided>, ConfigError> {
        let vm = seen.vm();
        let place = policy_in_file(&self.compiled.file, vm, self.args.policy.as_deref())?;
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
            Seen::Loopback { to, host_port, .. } => by_rules(led(policy, *to, *host_port)),
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
                let Ok(wire) = wire(name) else {
                    return Ok(None);
                };
                let name = Name(&wire);
                if let Some((what, by)) = self.bounds.question(vm, limits, *at_ns) {
                    return Ok(Some((Outcome::Refused, by, Some(what))));
                }
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
    // What a bound refuses is told in sum: which of many it met is chance.
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

/// Whether a policy leads a destination to that port of the host's loopback. Whatever address it
/// was, it was the gateway's, or is listed by itself.
fn led(policy: &Policy, to: Destination, host_port: u16) -> (Outcome, String) {
    match policy.host_loopback(to, to.addr) {
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

/// An answer is refused for any name that it leads through.
fn answered(policy: &Policy, asked: (Outcome, String), chain: &[String]) -> (Outcome, String) {
    if asked.0 == Outcome::Refused {
        return asked;
    }
    let refused = chain.iter().find_map(|alias| {
        // One that no rule can have is let in by a default only.
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
        // What is inspected is the connection.
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
        Protocol::Icmp => format!("{host}/icmp"),
        protocol => format!("{host}:{}/{}", to.port, protocol.name()),
    }
}

fn text(changes: &Changes, told: u64) -> String {
    if changes.is_empty() {
        return format!("the same: all of {told} flows, questions and refusals recorded\n");
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
    text.push_str(&format!("{count} decided otherwise, of {told} records\n"));
    text
}
