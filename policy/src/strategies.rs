//! For tests of this crate and of its dependents: strategies for random policies and destinations that
//! overlap often, and settings that several test.
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::RangeInclusive,
};

use ipnet::IpNet;
use proptest::prelude::*;
use slipgate_abi::Protocol;

use crate::{
    Action, DenyFile, Destination, DnsSettings, NewNames, Pattern, Policy, Rule, Settings,
};

/// Upper bound, exclusive, of the number of rules in a random policy.
const MOST_RULES: usize = 8;

/// Settings by which questions may say as many octets a minute, and at once.
pub fn questions_of(octets_per_minute: u32, burst_octets: u32) -> Settings {
    let new_names = NewNames {
        octets_per_minute,
        burst_octets,
    };
    let dns = DnsSettings {
        new_names,
        ..DnsSettings::default()
    };
    Settings {
        dns,
        ..Settings::default()
    }
}

/// Parts of the address space of which patterns and destinations are, and the lengths of prefixes
/// there: documentation and private space of both families, and IPv4 inside IPv6.
fn parts() -> impl Strategy<Value = (IpAddr, RangeInclusive<u8>)> {
    prop_oneof![
        4 => Just(("198.51.100.0", 28..=32)),
        2 => Just(("10.0.0.0", 28..=32)),
        2 => Just(("2001:db8::", 124..=128)),
        1 => Just(("fd00::", 124..=128)),
        1 => Just(("64:ff9b::a00:0", 124..=128)),
        1 => Just(("64:ff9b::c633:6400", 124..=128)),
    ]
    .prop_map(|(addr, lens)| (addr.parse().unwrap(), lens))
}

/// Returns an address with other lowest four bits.
fn with_low(addr: IpAddr, low: u8) -> IpAddr {
    match addr {
        IpAddr::V4(addr) => Ipv4Addr::from_bits(addr.to_bits() | u32::from(low)).into(),
        IpAddr::V6(addr) => Ipv6Addr::from_bits(addr.to_bits() | u128::from(low)).into(),
    }
}

/// Patterns over few addresses and ports, so that they overlap.
pub fn pattern() -> impl Strategy<Value = Pattern> {
    let crowded =
        (parts(), 0_u8..16, any::<prop::sample::Index>()).prop_map(|((addr, lens), low, index)| {
            let len = lens.clone().nth(index.index(lens.count())).unwrap();
            IpNet::new_assert(with_low(addr, low), len).trunc()
        });
    let prefix = prop_oneof![
        6 => crowded,
        1 => (6_u8..=10).prop_map(|len| IpNet::new_assert([10, 0, 0, 0].into(), len).trunc()),
        1 => prop::sample::select(&["0.0.0.0/0", "::/0", "64:ff9b::/96", "fc00::/7"][..])
            .prop_map(|text| text.parse().unwrap()),
    ];
    let ports = prop::option::of((1_u16..12, 0_u16..4));
    (prefix, ports, 0_usize..6).prop_map(|(prefix, ports, protocol)| {
        let protocol = match (protocol, ports) {
            (0, _) => "/tcp",
            (1, _) => "/udp",
            (2, None) => "/icmp",
            _ => "",
        };
        let ports = ports.map_or(String::new(), |(first, more)| {
            format!(":{first}-{}", if more == 3 { 65535 } else { first + more })
        });
        let (open, close) = if prefix.addr().is_ipv6() {
            ("[", "]")
        } else {
            ("", "")
        };
        format!("{open}{prefix}{close}{ports}{protocol}")
            .parse()
            .unwrap()
    })
}

/// Destinations that the patterns of [`pattern`] match often.
pub fn destination() -> impl Strategy<Value = Destination> {
    let addr = prop_oneof![
        4 => (parts(), 0_u8..16).prop_map(|((addr, _), low)| with_low(addr, low)),
        1 => any::<Ipv4Addr>().prop_map(IpAddr::V4),
        1 => any::<Ipv6Addr>().prop_map(IpAddr::V6),
    ];
    let port = prop_oneof![4 => 1_u16..16, 1 => Just(65535), 1 => any::<u16>()];
    (addr, port, 0_usize..3).prop_map(|(addr, port, protocol)| {
        let protocol = Protocol::all()[protocol];
        Destination {
            addr,
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
