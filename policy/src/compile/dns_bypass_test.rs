use slipgate_abi::Refusal;

use super::*;
use crate::{Action, Decision, Policy, Rule, wire};

fn to(addr: [u8; 4], port: u16, protocol: Protocol) -> Destination {
    let addr = addr.into();
    Destination {
        addr,
        port,
        protocol,
    }
}

fn tcp(addr: [u8; 4], port: u16) -> Destination {
    to(addr, port, Protocol::Tcp)
}

const GOOGLE: [u8; 4] = [8, 8, 8, 8];
const OTHER: [u8; 4] = [203, 0, 113, 9];

fn policy(default: Action, rules: &[&str]) -> Policy {
    let rule = |text: &&str| match text.strip_prefix('!') {
        Some(text) => Rule::parse(Action::Deny, text).unwrap(),
        None => Rule::parse(Action::Allow, text).unwrap(),
    };
    Policy::new(default, rules.iter().map(rule).collect())
}

fn refusal(policy: &Policy, to: Destination) -> Option<Refusal> {
    policy.decide(to).refusal
}

#[test]
fn every_line_of_the_list_is_understood() {
    let lines = include_str!("public_resolvers.txt").lines();
    for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let text = line.strip_prefix("canary ").unwrap_or(line);
        let known = match text.parse::<IpAddr>() {
            Ok(addr) => {
                dns_bypass(Destination {
                    addr,
                    port: 443,
                    protocol: Protocol::Tcp,
                }) == Some(BypassKind::Resolver)
            }
            Err(_) => {
                let pattern: NamePattern = text.parse().expect(line);
                let name = match pattern.is_exact() {
                    true => wire(text).unwrap(),
                    false => wire(&text.replace('*', "x")).unwrap(),
                };
                match line == text {
                    true => is_resolver(Name(&name)),
                    false => is_canary(Name(&name)),
                }
            }
        };
        assert!(known, "{line}");
    }
}

#[test]
fn a_broad_allow_and_the_default_open_no_resolver_elsewhere() {
    let elsewhere = Some(Refusal::DnsElsewhere);
    for policy in [
        policy(Action::Deny, &["0.0.0.0/0"]),
        policy(
            Action::Deny,
            &["0.0.0.0/0:443/tcp", "0.0.0.0/0:1-1000", "8.8.8.8"],
        ),
        policy(Action::Allow, &["!evil.test"]),
    ] {
        for port in [443, 853, 5_353] {
            assert_eq!(refusal(&policy, tcp(GOOGLE, port)), elsewhere, "{port}");
            let udp = to(GOOGLE, port, Protocol::Udp);
            assert_eq!(refusal(&policy, udp), elsewhere, "{port}");
        }
        assert_eq!(refusal(&policy, tcp(OTHER, 853)), elsewhere);
        assert_eq!(refusal(&policy, to(OTHER, 853, Protocol::Udp)), elsewhere);
        assert_eq!(refusal(&policy, tcp(OTHER, 443)), None, "the control");
    }
    // Ping is no question.
    let ping = to(GOOGLE, 0, Protocol::Icmp);
    assert_eq!(refusal(&policy(Action::Deny, &["8.8.8.8"]), ping), None);
    // Where names are not judged, nothing is to be got around.
    assert_eq!(refusal(&policy(Action::Allow, &[]), tcp(GOOGLE, 853)), None);
    let by_address = policy(Action::Allow, &["!192.0.2.1"]);
    assert_eq!(refusal(&by_address, tcp(GOOGLE, 443)), None);
}

#[test]
fn a_rule_that_means_a_resolver_opens_it_and_denies_count() {
    let meant = policy(
        Action::Deny,
        &[
            "!8.8.4.4",
            "8.8.8.8:443/tcp",
            "8.8.4.4:443",
            "203.0.113.0/24:853/tcp",
        ],
    );
    assert_eq!(refusal(&meant, tcp(GOOGLE, 443)), None);
    let elsewhere = Some(Refusal::DnsElsewhere);
    assert_eq!(refusal(&meant, to(GOOGLE, 443, Protocol::Udp)), elsewhere);
    assert_eq!(refusal(&meant, tcp([8, 8, 4, 4], 443)), Some(Refusal::Rule));
    assert_eq!(refusal(&meant, tcp(OTHER, 853)), None);
    assert_eq!(refusal(&meant, to(OTHER, 853, Protocol::Udp)), elsewhere);
    // Protected space stays so, and is called so.
    let private = policy(Action::Deny, &["0.0.0.0/0:853/tcp"]);
    assert_eq!(
        refusal(&private, tcp([10, 0, 0, 1], 853)),
        Some(Refusal::Protected)
    );
    let private = policy(Action::Deny, &["10.0.0.0/8:853/tcp"]);
    assert_eq!(refusal(&private, tcp([10, 0, 0, 1], 853)), None);
}

#[test]
fn it_is_told_apart_and_explained() {
    let policy = policy(Action::Deny, &["0.0.0.0/0:443"]);
    let decision = policy.decide(tcp(GOOGLE, 443));
    assert_eq!(policy.text(decision), "safe defaults: DNS elsewhere");
    let explained = policy.explain(tcp(GOOGLE, 443)).to_string();
    assert!(
        explained.contains("a public resolver's address"),
        "{explained}"
    );
    assert!(
        explained.contains("`--allow 8.8.8.8:443/tcp` would open it"),
        "{explained}"
    );
    let explained = policy.explain(tcp(OTHER, 853)).to_string();
    assert!(
        explained.contains("the port of DNS over TLS"),
        "{explained}"
    );
}

fn question(rules: &[&str], default: Action, name: &str) -> Decision {
    let name = wire(name).unwrap();
    policy(default, rules).question(Name(&name))
}

#[test]
fn a_resolvers_name_is_asked_for_only_by_a_rule_that_gives_it() {
    let elsewhere = Some(Refusal::DnsElsewhere);
    let deny = |rules, name| question(rules, Action::Deny, name).refusal;
    assert_eq!(deny(&["*.google:443"], "dns.google"), elsewhere);
    assert_eq!(deny(&["*.google:443", "dns.google"], "dns.google"), None);
    assert_eq!(
        deny(&["*.dns.nextdns.io"], "abc123.dns.nextdns.io"),
        elsewhere
    );
    assert_eq!(deny(&["*.google:443"], "www.google"), None, "the control");
    assert_eq!(deny(&[], "dns.google"), Some(Refusal::Default));
    let open = |rules, name| question(rules, Action::Allow, name).refusal;
    assert_eq!(open(&["!evil.test"], "dns.google"), elsewhere);
    assert_eq!(open(&[], "dns.google"), None, "nothing is judged by name");
}
