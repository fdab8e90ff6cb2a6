//! A user's rules: patterns, deny files, and the policy made of them.
//!
//! Input: `default (1) | destination (see [`Tape::destination`]) | lines …`. Each line begins with
//! `+` (allow), `?` (inspect), `-` (deny), or belongs to the deny file between them.
use ipnet::{IpNet, Ipv4Net};
use slipgate_abi::{Protocol, Refusal};
use slipgate_policy::{
    Action, Decision, DenyFile, Destination, LocalAddresses, NamePattern, Pattern, Policy,
    PrefixMap, Rule, embedded,
};

use crate::{
    tape::Tape,
    vms::{GUEST, HOST},
};

/// Maximum number of lines; the slow oracle tries each.
const MAX_LINES: usize = 200;

/// Compiles a policy from the lines, and decides about one destination.
pub fn rules(input: &[u8]) {
    let mut tape = Tape::new(input);
    let default = if tape.u8() & 1 == 0 {
        Action::Allow
    } else {
        Action::Deny
    };
    let to = tape.destination();
    let text = String::from_utf8_lossy(tape.rest());
    let lines: Vec<&str> = text.lines().take(MAX_LINES).collect();

    let file_text: String = lines.iter().flat_map(|line| [line, "\n"]).collect();
    // A file with one bad line is refused whole; the good lines alone are one that is not.
    let _ = DenyFile::parse("whole", &file_text);
    let good: Vec<&str> = lines.iter().copied().filter(|l| is_line(l)).collect();
    let file = DenyFile::parse("good", &good.join("\n")).expect("each of its lines is one");
    deny_file(&file, &good, to);

    let rules: Vec<Rule> = lines.iter().filter_map(|line| rule(line)).collect();
    longest_prefix(&rules, to);
    let middle = rules.len() / 2;
    let (before, after) = rules.split_at(middle);
    let all = [before, &[Rule::DenyFile(Box::new(file))], after].concat();
    policy(default, all, to);
}

fn is_line(line: &str) -> bool {
    let rule = line.split_once('#').map_or(line, |(rule, _)| rule);
    rule.trim().is_empty() || pattern(rule).is_some() || is_name(rule)
}

/// Checks that a name is printed in a form that parses to the same name.
fn is_name(text: &str) -> bool {
    if !NamePattern::is_meant_by(text) {
        return false;
    }
    let Ok(pattern) = text.parse::<NamePattern>() else {
        return false;
    };
    assert_eq!(pattern.to_string().parse().as_ref(), Ok(&pattern));
    true
}

fn rule(line: &str) -> Option<Rule> {
    let (sign, rest) = line.split_at_checked(1)?;
    let action = match sign {
        "+" => Action::Allow,
        "?" => Action::Inspect,
        "-" => Action::Deny,
        _ => return None,
    };
    match is_name(rest) {
        true => Rule::parse(action, rest).ok(),
        false => Some(Rule::Match(action, pattern(rest)?)),
    }
}

/// Checks that a pattern is printed in a form that parses to the same pattern.
fn pattern(text: &str) -> Option<Pattern> {
    let pattern = match text.parse::<Pattern>() {
        Ok(pattern) => pattern,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return None;
        }
    };
    assert_eq!(
        pattern.to_string().parse::<Pattern>().as_ref(),
        Ok(&pattern)
    );
    let json = serde_json::to_string(&pattern).expect("a string");
    assert_eq!(serde_json::from_str::<Pattern>(&json).ok(), Some(pattern));
    Some(pattern)
}

/// Compares with the first line that matches, found by trying each.
fn deny_file(file: &DenyFile, lines: &[&str], to: Destination) {
    let first = lines.iter().zip(1..).find_map(|(line, number)| {
        let rule = line.split_once('#').map_or(*line, |(rule, _)| rule).trim();
        let pattern: Pattern = rule.parse().ok()?;
        pattern.matches(to).then_some(number)
    });
    assert_eq!(file.line_for(to), first);
    if let Some(line) = first {
        assert!(file.pattern_at(line).is_some_and(|p| p.matches(to)));
    }
}

/// Compares with the longest prefix, found by trying each.
fn longest_prefix(rules: &[Rule], to: Destination) {
    let prefixes = || {
        rules.iter().filter_map(|rule| match rule {
            Rule::Match(_, pattern) => Some(pattern.prefix()),
            Rule::Name(..) | Rule::DenyFile(_) => None,
        })
    };
    let map = PrefixMap::new(prefixes().map(|prefix| (prefix, ())));
    let slow: Option<IpNet> = prefixes()
        .filter(|prefix| prefix.contains(&to.addr))
        .max_by_key(IpNet::prefix_len);
    assert_eq!(map.longest(to.addr).map(|(prefix, ())| prefix), slow);
    let host = IpNet::from(to.addr);
    assert_eq!(map.overlaps(host), slow.is_some());
}

/// Compares with the first matching rule, found by trying each; only an allow within it opens
/// protected space. An IPv4 address inside an IPv6 address is judged too.
fn policy(default: Action, rules: Vec<Rule>, to: Destination) {
    let mut policy = Policy::new(default, rules.clone());
    policy.set_local(&LocalAddresses {
        host: vec![HOST.into()],
        guests: vec![
            Ipv4Net::new(GUEST.into(), 24)
                .expect("a prefix length")
                .trunc()
                .into(),
        ],
    });
    let decision = policy.decide(to);
    let names = |rule: &Rule| match rule {
        Rule::Name(..) => true,
        Rule::DenyFile(file) => file.has_names(),
        Rule::Match(..) => false,
    };
    let judges = default == Action::Deny || rules.iter().any(names);
    // Who is a known resolver, the list says.
    let known = decision.refusal == Some(Refusal::DnsElsewhere);
    let elsewhere = known || judges && to.port == 853 && to.protocol != Protocol::Icmp;
    assert!(judges || !elsewhere);
    let means = |pattern: &Pattern| {
        pattern.ports() == Some((853, 853)) || pattern.ports().is_some() && pattern.is_one_address()
    };
    // `None`: neither a rule nor a safe default decides.
    let judged = |to: Destination| {
        let protected = policy.protected(to.addr).map(|(range, _)| range);
        let decides = |rule: &Rule| match rule {
            Rule::Match(Action::Allow | Action::Inspect, pattern) => {
                pattern.matches(to)
                    && (!elsewhere || means(pattern))
                    && protected.is_none_or(|p| pattern.prefix().prefix_len() >= p.prefix_len())
            }
            Rule::Match(Action::Deny, pattern) => pattern.matches(to),
            // No name was asked for.
            Rule::Name(..) => false,
            Rule::DenyFile(file) => file.line_for(to).is_some(),
        };
        match rules.iter().find(|rule| decides(rule)) {
            Some(Rule::Match(action, _)) => Some(action.admits()),
            Some(Rule::Name(..) | Rule::DenyFile(_)) => Some(false),
            None => (protected.is_some() || elsewhere).then_some(false),
        }
    };
    let inside = embedded(to.addr).and_then(|addr| {
        judged(Destination {
            addr: addr.into(),
            ..to
        })
    });
    let allowed = match (judged(to), inside) {
        (_, Some(false)) => false,
        (None, Some(true)) => true,
        (outside, _) => outside.unwrap_or(default == Action::Allow),
    };
    assert_eq!(decision.is_allowed(), allowed);
    told(&policy, to, decision);
}

fn told(policy: &Policy, to: Destination, decision: Decision) {
    let explanation = policy.explain(to);
    assert_eq!(explanation.decision, decision);
    assert!(!explanation.to_string().is_empty());
    assert!(!policy.text(decision).is_empty());
    for (prefix, _) in policy.deny_prefixes() {
        // What XDP drops by prefix alone, no rule before it may allow.
        assert!(!(prefix.contains(&to.addr) && decision.is_allowed()));
    }
}
