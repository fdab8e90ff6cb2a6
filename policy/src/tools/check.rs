//! Warnings about a policy file that can be used but probably means something else.
use std::net::IpAddr;

use slipgate_abi::{Protocol, maps::DEFAULT_RULES};

use super::compiled::Compiled;
use crate::{Action, Destination, LoopbackPorts, Policy, Rule, Standing};

/// Ports of protocols whose clients send no server name, or not in their first bytes.
const NOT_NAMED: [u16; 24] = [
    20, 21, 22, 23, 25, 53, 69, 110, 119, 123, 143, 161, 389, 445, 514, 587, 1433, 3306, 3389,
    5432, 5900, 6379, 11211, 27017,
];

/// Returns a line with the number of rules, policies and warnings.
pub fn summary(compiled: &Compiled, warnings: usize) -> String {
    let named = compiled.policies.iter().count() - 1;
    let rules: usize = compiled.policies.iter().map(|p| p.standing().count()).sum();
    let count = |n: usize, what: &str| match n {
        1 => format!("1 {what}"),
        _ => format!("{n} {what}s"),
    };
    let named = match named {
        0 => String::new(),
        1 => ", 1 named policy".to_owned(),
        _ => format!(", {named} named policies"),
    };
    let rules = count(rules, "rule");
    match warnings {
        0 => format!("good: {rules}{named}"),
        _ => format!(
            "can be used: {rules}{named}, {}",
            count(warnings, "warning")
        ),
    }
}

/// Returns warnings, each a line that begins with its place. `gateway`: the guests' gateway, whose
/// ports may lead to the host's loopback.
pub fn warnings(compiled: &Compiled, gateway: IpAddr) -> Vec<String> {
    let mut warnings = Vec::new();
    for policy in compiled.policies.iter() {
        for rule in policy.standing() {
            let place = policy.note(rule.id).and_then(|note| note.place.clone());
            let place = place.unwrap_or_else(|| compiled.file.name());
            let short = describe_short(policy, rule);
            let mut warn = |why: String| warnings.push(format!("{place}: warning: {short}{why}"));
            if let Some(earlier) = policy.covered_by(rule) {
                let earlier = policy.describe(earlier);
                warn(format!(" never decides: {earlier} matches all of it"));
            }
            if let Some(earlier) = policy.uninspected_by(rule) {
                let earlier = policy.describe(earlier);
                warn(format!(
                    " does not inspect what {earlier} admits: that stands before it"
                ));
            }
            if let Some(why) = cannot_be_inspected(rule.rule) {
                warn(format!(": {why}"));
            }
            if let Some(other) = opposite(policy, rule) {
                let other = policy.describe(other.id);
                warn(format!(
                    " names the same as {other}: where both match, the first decides"
                ));
            }
        }
        warnings.extend(of_default(policy, &compiled.file.name()));
        warnings.extend(of_loopback(policy, gateway, &compiled.file.name()));
    }
    let texts = compiled.policies.texts().count();
    if texts > DEFAULT_RULES as usize {
        warnings.push(format!(
            "{}: warning: {texts} rules and defaults are more than the {DEFAULT_RULES} that there \
             is room for: give --max-rules more, or put long lists into a deny file, which is one \
             rule",
            compiled.file.name()
        ));
    } else if texts > DEFAULT_RULES as usize / 2 {
        warnings.push(format!(
            "{}: warning: {texts} rules and defaults are more than half of the {DEFAULT_RULES} \
             that there is room for unless --max-rules says more: while slipgate runs they can't \
             all be replaced at once; a deny file is one rule",
            compiled.file.name()
        ));
    }
    warnings
}

/// Returns a rule's number and text without its place, with which the line already begins.
fn describe_short(policy: &Policy, rule: Standing<'_>) -> String {
    let text = match rule.rule {
        Rule::Match(action, pattern) => format!("{} {pattern}", action.name()),
        Rule::Name(action, pattern) => format!("{} {pattern}", action.name()),
        Rule::DenyFile(file) => format!("deny_file {}", file.name()),
    };
    format!("{}, `{text}`", policy.call(rule.id))
}

/// Returns why an inspect rule matches no flow that sends a server name; `None` if it may match
/// some.
fn cannot_be_inspected(rule: &Rule) -> Option<String> {
    let covers = |port, protocol| match rule {
        Rule::Match(Action::Inspect, pattern) => {
            pattern.covers(protocol) && pattern.ports().is_none_or(|(a, b)| (a..=b).contains(&port))
        }
        Rule::Name(Action::Inspect, pattern) => pattern.covers(port, protocol),
        _ => false,
    };
    if !matches!(
        rule,
        Rule::Match(Action::Inspect, _) | Rule::Name(Action::Inspect, _)
    ) {
        return None;
    }
    let tcp = (1..=u16::MAX).any(|port| covers(port, Protocol::Tcp));
    let named_tcp =
        tcp && (1..=u16::MAX).any(|port| !NOT_NAMED.contains(&port) && covers(port, Protocol::Tcp));
    let quic = covers(443, Protocol::Udp);
    let problem = if named_tcp || quic {
        return None;
    } else if tcp {
        "the protocol of this port does not begin with TLS or HTTP, so every connection would \
         be refused"
    } else if (1..=u16::MAX).any(|port| covers(port, Protocol::Udp)) {
        "over UDP only QUIC gives a name, at port 443; everything else would be refused"
    } else {
        "ping gives no name, so all of it would be refused"
    };
    Some(problem.to_owned())
}

/// Returns an earlier rule about the same name with the opposite effect. A rule that covers this
/// one is left out: another warning reports it.
fn opposite<'p>(policy: &'p Policy, rule: Standing<'p>) -> Option<Standing<'p>> {
    let Rule::Name(action, pattern) = rule.rule else {
        return None;
    };
    let mut earlier = policy.standing().take_while(|s| s.id < rule.id);
    earlier.find(|other| match other.rule {
        Rule::Name(theirs, other) => {
            theirs.admits() != action.admits()
                && other.is_about_same(pattern)
                && !other.contains(pattern)
        }
        _ => false,
    })
}

/// Warns about entries with a port that a rule refuses: an entry overrides the default, but not a
/// rule.
fn of_loopback(policy: &Policy, gateway: IpAddr, file: &str) -> Vec<String> {
    let refused = |entry: &LoopbackPorts| {
        let (first, last) = entry.ports;
        let protocols = [(entry.tcp, Protocol::Tcp), (entry.udp, Protocol::Udp)];
        let protocols = protocols.into_iter().filter(|(has, _)| *has);
        protocols
            .flat_map(|(_, protocol)| (first..=last).map(move |port| (port, protocol)))
            .find_map(|(port, protocol)| {
                let addr = entry.address.map_or(gateway, IpAddr::V4);
                let to = Destination {
                    addr,
                    port,
                    protocol,
                };
                let lead = policy.host_loopback(&[], to, gateway)?;
                (!lead.decision.is_allowed()).then(|| policy.explain_loopback(to, &lead))
            })
    };
    let list = policy.settings().host_loopback.iter();
    list.filter_map(refused)
        .map(|why| format!("{file}: warning: {why}"))
        .collect()
}

fn of_default(policy: &Policy, file: &str) -> Vec<String> {
    let of = match &policy.settings().name {
        Some(name) => format!("policy {name}: "),
        None => String::new(),
    };
    let warning = |text: &str| format!("{file}: warning: {of}{text}");
    let rules: Vec<&Rule> = policy.standing().map(|standing| standing.rule).collect();
    let denies = rules.iter().any(|rule| match rule {
        Rule::Match(action, _) | Rule::Name(action, _) => !action.admits(),
        Rule::DenyFile(_) => true,
    });
    let by_name = rules
        .iter()
        .any(|rule| matches!(rule, Rule::Name(action, _) if action.admits()));
    let inspects_names = rules
        .iter()
        .any(|rule| matches!(rule, Rule::Name(Action::Inspect, _)));
    let mut warnings = Vec::new();
    if policy.without_dns().is_some() && by_name {
        warnings.push(warning(
            "resolvers is \"none\", so no name is ever resolved: the rules that allow names open \
             nothing",
        ));
    }
    match policy.default_action() {
        Action::Deny if !rules.is_empty() && !by_name => warnings.push(warning(
            "the default is deny and no rule allows a name: guests can ask DNS for nothing",
        )),
        Action::Allow | Action::Inspect if inspects_names => warnings.push(warning(
            "the default is allow: who does not ask DNS for an inspected name, but knows its \
             address, is not inspected there",
        )),
        Action::Allow | Action::Inspect if by_name && !denies => warnings.push(warning(
            "the default is allow and nothing is denied: the rules by name change nothing",
        )),
        _ => {}
    }
    warnings
}
