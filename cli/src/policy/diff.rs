//! `slipgate policy diff`: what a candidate would have changed, by what was recorded.
use std::{collections::BTreeMap, process::ExitCode};

use slipgate_abi::Protocol;
use userspace_nat::{
    dns::Name,
    rules::{Action, Decision, Destination, Policy, wire},
};

use super::{
    Compiled,
    flow_log::{self, Seen},
};
use crate::{
    args::DiffArgs,
    config::{ConfigError, policy_in_file},
    show::{plain::one_line, print_once},
};

const EXIT_DIFFERENT: u8 = 1;

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

pub(super) fn run(args: &DiffArgs) -> anyhow::Result<ExitCode> {
    let (before, after) = (Compiled::read(&args.before)?, Compiled::read(&args.after)?);
    let mut changes = Changes::new();
    let mut told = 0;
    let mut failed = None;
    let wanted = |vm: &str| args.vm.as_deref().is_none_or(|only| only == vm);
    let reader = flow_log::read(&args.flow_log, &mut |seen| {
        if !wanted(vm_of(&seen)) {
            return;
        }
        told += 1;
        let policies = (
            policy_of(&before, vm_of(&seen), args),
            policy_of(&after, vm_of(&seen), args),
        );
        match policies {
            (Ok(before), Ok(after)) => compare(before, after, seen, &mut changes),
            (Err(e), _) | (_, Err(e)) => failed = failed.take().or(Some(e)),
        }
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    print_once(&text(&changes, told))?;
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

fn vm_of(seen: &Seen) -> &str {
    match seen {
        Seen::Flow { vm, .. }
        | Seen::Loopback { vm, .. }
        | Seen::Question { vm, .. }
        | Seen::Refused { vm, .. } => vm,
    }
}

fn policy_of<'c>(
    compiled: &'c Compiled,
    vm: &str,
    args: &DiffArgs,
) -> Result<&'c Policy, ConfigError> {
    let place = policy_in_file(&compiled.file, vm, args.policy.as_deref())?;
    Ok(compiled.policies.of(Some(place)))
}

fn compare(before: &Policy, after: &Policy, seen: Seen, changes: &mut Changes) {
    let (was, is, what, count, is_question) = match seen {
        Seen::Flow { to, name, .. } => {
            let (was, is) = (flow(before, to, &name), flow(after, to, &name));
            (was, is, target(to, name.as_deref()), 1, false)
        }
        Seen::Loopback { to, host_port, .. } => {
            let (was, is) = (led(before, to, host_port), led(after, to, host_port));
            (was, is, target(to, None), 1, false)
        }
        Seen::Refused {
            to, name, count, ..
        } => {
            let (was, is) = (flow(before, to, &name), flow(after, to, &name));
            (was, is, target(to, name.as_deref()), count, false)
        }
        Seen::Question {
            name, kind, chain, ..
        } => {
            let Ok(wire) = wire(&name) else {
                return;
            };
            let asks = |policy| answered(policy, Name(&wire), &kind, &chain);
            let what = match &kind[..] {
                "TXT" | "NULL" | "ANY" => format!("{name} ({kind})"),
                _ => name,
            };
            (asks(before), asks(after), what, 1, true)
        }
    };
    if was.0 != is.0 {
        *changes.entry((is_question, is.0, what, is.1)).or_default() += count;
    }
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
fn answered(policy: &Policy, name: Name<'_>, kind: &str, chain: &[String]) -> (Outcome, String) {
    let asked = question(policy, name, kind);
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
    let decision = policy.question(name);
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
        return (Outcome::Refused, format!("{kind} is not among the types"));
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
