//! Strategies for random policies and destinations that overlap often, for property tests of this
//! crate and of its dependents.
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use proptest::prelude::*;
use slipgate_abi::Protocol;

use crate::{Action, DenyFile, Destination, Pattern, Policy, Rule};

/// Upper bound, exclusive, of the number of rules in a random policy.
const MOST_RULES: usize = 8;

/// Patterns over few addresses and ports, so that they overlap.
pub fn pattern() -> impl Strategy<Value = Pattern> {
    let prefix = prop_oneof![
        4 => (0_u32..16, 28_u8..=32).prop_map(|(low, len)| (0xc633_6400 | low, len)),
        2 => (0_u32..16, 28_u8..=32).prop_map(|(low, len)| (0x0a00_0000 | low, len)),
        1 => (Just(0x0a00_0000), 6_u8..=10),
        1 => (Just(0), Just(0)),
    ];
    let ports = prop::option::of((1_u16..12, 0_u16..4));
    (prefix, ports, 0_usize..6).prop_map(|((bits, len), ports, protocol)| {
        let addr = Ipv4Addr::from_bits(bits);
        let prefix = Ipv4Net::new(addr, len).unwrap().trunc();
        let protocol = match (protocol, ports) {
            (0, _) => "/tcp",
            (1, _) => "/udp",
            (2, None) => "/icmp",
            _ => "",
        };
        let ports = ports.map_or(String::new(), |(first, more)| {
            format!(":{first}-{}", if more == 3 { 65535 } else { first + more })
        });
        format!("{prefix}{ports}{protocol}").parse().unwrap()
    })
}

/// Destinations that the patterns of [`pattern`] match often.
pub fn destination() -> impl Strategy<Value = Destination> {
    let addr = prop_oneof![
        (0_u32..16).prop_map(|low| 0xc633_6400 | low),
        (0_u32..16).prop_map(|low| 0x0a00_0000 | low),
        any::<u32>(),
    ];
    let port = prop_oneof![4 => 1_u16..16, 1 => Just(65535), 1 => any::<u16>()];
    (addr, port, 0_usize..3).prop_map(|(bits, port, protocol)| {
        let protocol = Protocol::all()[protocol];
        Destination {
            addr: Ipv4Addr::from_bits(bits),
            port: if protocol == Protocol::Icmp { 0 } else { port },
            protocol,
        }
    })
}

/// Names to ask for: names that rules give, names beneath them, a public resolver's, and a canary.
pub const NAMES: [&str; 7] = [
    "a.test",
    "b.a.test",
    "c.b.a.test",
    "other.test",
    "dns.google",
    "use-application-dns.net",
    "net",
];

/// Rules by name, as text.
pub fn name_pattern() -> impl Strategy<Value = String> {
    let name = prop_oneof![
        prop::sample::select(&NAMES[..]).prop_map(str::to_owned),
        prop::sample::select(&["*.a.test", "*.test", "*.google", "*.net"][..])
            .prop_map(str::to_owned),
    ];
    let scope = prop::sample::select(&["", "", ":1-8", ":443", "/tcp", ":5/udp", "/icmp"][..]);
    (name, scope).prop_map(|(name, scope)| name + scope)
}

/// Rules by address, by name, and deny files.
pub fn rule() -> impl Strategy<Value = Rule> {
    let action = prop::sample::select(&[Action::Allow, Action::Deny, Action::Inspect][..]);
    let text = prop_oneof![
        3 => pattern().prop_map(|p| p.to_string()),
        1 => prop::sample::select(&["1.1.1.1:443", "0.0.0.0/1", "128.0.0.0/1", "0.0.0.0/0:853"][..])
            .prop_map(str::to_owned),
        4 => name_pattern(),
    ];
    let line = prop_oneof![pattern().prop_map(|p| p.to_string()), name_pattern()];
    let file = prop::collection::vec(line, 1..4);
    prop_oneof![
        7 => (action, text).prop_filter_map("ping is not inspected", |(action, text)| {
            Rule::parse(action, &text).ok()
        }),
        1 => file.prop_map(|lines| {
            Rule::DenyFile(Box::new(DenyFile::parse("list", &lines.join("\n")).unwrap()))
        }),
    ]
}

/// Policies of up to seven rules.
pub fn policy() -> impl Strategy<Value = Policy> {
    policy_of(rule())
}

/// Policies of up to seven rules from the given strategy.
pub fn policy_of(rule: impl Strategy<Value = Rule>) -> impl Strategy<Value = Policy> {
    let default = prop::sample::select(&[Action::Allow, Action::Deny][..]);
    let rules = prop::collection::vec(rule, 0..MOST_RULES);
    (default, rules).prop_map(|(default, rules)| Policy::new(default, rules))
}
