use std::net::Ipv4Addr;

use ipnet::IpNet;
use proptest::prelude::*;
use slipgate_abi::Protocol;

use super::*;
use crate::{
    DenyFile, LocalAddresses, Pattern, RuleId,
    cpu_time_test::cpu_time,
    rule::tests::{allow, deny, to},
    strategies::{destination, pattern},
};

fn file(text: &str) -> Rule {
    Rule::DenyFile(Box::new(DenyFile::parse("f", text).unwrap()))
}

fn refusal(policy: &Policy, addr: &str) -> Option<Refusal> {
    policy.decide(to(Protocol::Tcp, addr, 80)).refusal
}

#[test]
fn no_safe_default_protects_a_translated_port_and_every_rule_does() {
    let mut policy = Policy::new(
        Action::Allow,
        vec![deny("192.0.2.1:81/tcp"), file("192.0.2.1:82\n")],
    );
    policy.set_local(&LocalAddresses {
        host: vec!["192.0.2.1".parse().unwrap()],
        guests: Vec::new(),
    });
    let hairpin = |policy: &Policy, port| {
        let to = to(Protocol::Tcp, "192.0.2.1", port);
        (policy.decide(to).refusal, policy.decide_hairpin(to).refusal)
    };
    assert_eq!(hairpin(&policy, 80), (Some(Refusal::Protected), None));
    assert_eq!(hairpin(&policy, 81).1, Some(Refusal::Rule));
    assert_eq!(hairpin(&policy, 82).1, Some(Refusal::Rule));
    let closed = Policy::new(Action::Deny, vec![allow("192.0.2.0/24:80")]);
    assert_eq!(hairpin(&closed, 80).1, None);
    assert_eq!(hairpin(&closed, 81).1, Some(Refusal::Default));
}

#[test]
fn the_first_match_in_the_order_typed_wins() {
    let policy = Policy::new(
        Action::Allow,
        vec![
            allow("192.0.2.1:443/tcp"),
            deny("192.0.2.0/24"),
            allow("192.0.2.7"),
            file("198.51.100.0/24:80\n"),
        ],
    );
    let rule = |protocol, addr, port| policy.decide(to(protocol, addr, port)).rule.0;
    assert_eq!(rule(Protocol::Tcp, "192.0.2.1", 443), 3);
    assert_eq!(rule(Protocol::Udp, "192.0.2.1", 443), 4);
    assert_eq!(
        rule(Protocol::Tcp, "192.0.2.7", 443),
        4,
        "an earlier deny stands"
    );
    let by_file = policy.decide(to(Protocol::Tcp, "198.51.100.9", 80));
    assert_eq!((by_file.rule.0, by_file.line), (6, Some(1)));
    assert_eq!(by_file.refusal, Some(Refusal::Rule));
    assert_eq!(rule(Protocol::Tcp, "198.51.100.9", 81), 0);
    let texts: Vec<String> = policy.texts().collect();
    assert_eq!(texts[0], "--default allow");
    assert_eq!(texts[3], "--allow 192.0.2.1:443/tcp");
    assert_eq!(policy.text(by_file), "--deny-file f, line 1");
}

#[test]
fn a_file_after_an_allow_does_not_undo_it() {
    let policy = Policy::new(
        Action::Allow,
        vec![allow("192.0.2.1"), file("192.0.2.0/24")],
    );
    assert_eq!(refusal(&policy, "192.0.2.1"), None);
    assert_eq!(refusal(&policy, "192.0.2.2"), Some(Refusal::Rule));
}

#[test]
fn the_default_decides_last() {
    for (default, expected) in [
        (Action::Allow, None),
        (Action::Deny, Some(Refusal::Default)),
    ] {
        let policy = Policy::new(default, vec![deny("192.0.2.1"), allow("192.0.2.2")]);
        assert_eq!(refusal(&policy, "192.0.2.1"), Some(Refusal::Rule));
        assert_eq!(refusal(&policy, "192.0.2.2"), None);
        assert_eq!(refusal(&policy, "192.0.2.3"), expected);
    }
}

#[test]
fn protected_space_is_refused_by_default() {
    let mut policy = Policy::new(Action::Allow, vec![allow("0.0.0.0/0")]);
    policy.set_local(&LocalAddresses {
        host: vec!["203.0.113.5".parse().unwrap()],
        guests: vec!["198.18.0.0/24".parse().unwrap()],
    });
    let protected = [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "127.8.8.8",
        "168.63.129.16",
        "169.254.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "203.0.113.5",
        "198.18.0.77",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
    ];
    for addr in protected {
        assert_eq!(refusal(&policy, addr), Some(Refusal::Protected), "{addr}");
    }
    let open = [
        "1.1.1.1",
        "9.255.255.255",
        "11.0.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "126.1.1.1",
        "128.0.0.1",
        "169.253.1.1",
        "169.255.0.0",
        "172.15.0.0",
        "172.32.0.0",
        "192.167.0.1",
        "192.169.0.1",
        "203.0.113.6",
        "198.18.1.1",
        "223.255.255.255",
    ];
    for addr in open {
        assert_eq!(refusal(&policy, addr), None, "{addr}");
    }
}

#[test]
fn only_an_allow_that_means_it_opens_protected_space() {
    let host = LocalAddresses {
        host: vec!["10.1.2.3".parse().unwrap()],
        guests: Vec::new(),
    };
    let refused = |rules: Vec<Rule>, addr: &str| {
        let mut policy = Policy::new(Action::Allow, rules);
        policy.set_local(&host);
        refusal(&policy, addr)
    };
    let protected = Some(Refusal::Protected);
    assert_eq!(refused(vec![allow("0.0.0.0/0")], "10.1.2.4"), protected);
    assert_eq!(refused(vec![allow("8.0.0.0/6")], "10.1.2.4"), protected);
    assert_eq!(refused(vec![allow("10.0.0.0/8")], "10.1.2.4"), None);
    assert_eq!(refused(vec![allow("10.1.2.0/24:80")], "10.1.2.4"), None);
    assert_eq!(
        refused(vec![allow("10.1.2.0/24:81")], "10.1.2.4"),
        protected
    );
    // The host's own address inside an opened network stays refused until a rule gives it.
    assert_eq!(refused(vec![allow("10.0.0.0/8")], "10.1.2.3"), protected);
    assert_eq!(refused(vec![allow("10.1.2.3:80/tcp")], "10.1.2.3"), None);
    // A metadata service inside link-local, likewise.
    assert_eq!(refused(vec![allow("169.254.0.0/16")], "169.254.1.1"), None);
    assert_eq!(
        refused(vec![allow("169.254.0.0/16")], "169.254.169.254"),
        protected
    );
    assert_eq!(
        refused(vec![allow("169.254.169.254")], "169.254.169.254"),
        None
    );
    // A broad allow before a deny is passed over, and the deny named.
    let by_rule = Some(Refusal::Rule);
    assert_eq!(
        refused(vec![allow("0.0.0.0/0"), deny("0.0.0.0/0")], "10.1.2.4"),
        by_rule
    );
    // A deny before the allow decides.
    assert_eq!(
        refused(vec![deny("0.0.0.0/0:80"), allow("10.0.0.0/8")], "10.1.2.4"),
        by_rule
    );
}

#[test]
fn deny_prefixes_are_those_no_flow_gets_through() {
    let policy = Policy::new(
        Action::Allow,
        vec![
            deny("192.0.2.0/24"),
            allow("198.51.100.7:443"),
            deny("198.51.100.0/24"),
            deny("203.0.113.0/24:25"),
            deny("203.0.113.9/tcp"),
            file("192.0.2.0/24\n198.51.100.7\n198.51.100.8\n203.0.113.77:1\n"),
            allow("203.0.113.0/24"),
            deny("203.0.113.40"),
            deny("192.0.2.0/24"),
        ],
    );
    let found: Vec<(String, u32)> = policy
        .deny_prefixes()
        .into_iter()
        .map(|(prefix, rule)| (prefix.to_string(), rule.0))
        .collect();
    assert_eq!(
        found,
        [
            ("192.0.2.0/24".to_owned(), 3),
            ("198.51.100.8/32".to_owned(), 8)
        ]
    );
}

#[test]
fn ipv6_has_its_own_protected_space() {
    let policy = Policy::new(Action::Allow, vec![allow("::/0"), allow("fd12::/16")]);
    let protected = Some(Refusal::Protected);
    for (addr, expected) in [
        ("2001:db8::1", None),
        ("2606:4700::1111", None),
        ("fd12::1", None),
        ("::", protected),
        ("::1", protected),
        ("::192.0.2.1", protected),
        ("::ffff:192.0.2.1", protected),
        ("64:ff9b:1::1", protected),
        ("100::1", protected),
        ("fd00::1", protected),
        ("fd00:ec2::254", protected),
        ("fe80::1", protected),
        ("fec0::1", protected),
        ("ff02::1", protected),
        ("febf:ffff::1", protected),
        ("fe00::1", None),
    ] {
        assert_eq!(refusal(&policy, addr), expected, "{addr}");
    }
    // Metadata inside unique local space is opened by itself only.
    let policy = Policy::new(Action::Allow, vec![allow("fd00::/8")]);
    assert_eq!(refusal(&policy, "fd00::1"), None);
    assert_eq!(refusal(&policy, "fd00:ec2::254"), protected);
    let space = |addr: &str| policy.shut_space(addr.parse().unwrap());
    assert_eq!(space("fd00:ec2::254"), Some(Space::Metadata));
    assert_eq!(space("fd00:ec3::254"), None);
}

#[test]
fn an_address_that_leads_to_an_ipv4_address_is_judged_as_that_too() {
    let policy = |rules: Vec<Rule>, default| Policy::new(default, rules);
    // NAT64, 6to4 and Teredo (inverted) forms of one address.
    let forms = |v4: [u8; 4]| {
        let [a, b, c, d] = v4.map(u16::from);
        let (high, low) = (a << 8 | b, c << 8 | d);
        let (not_high, not_low) = (!high, !low);
        [
            format!("64:ff9b::{high:x}:{low:x}"),
            format!("2002:{high:x}:{low:x}::1"),
            format!("2001:0:4136:e378:8000:63bf:{not_high:x}:{not_low:x}"),
        ]
    };
    for addr in forms([169, 254, 169, 254]) {
        let open = policy(vec![allow("::/0")], Action::Allow);
        assert_eq!(refusal(&open, &addr), Some(Refusal::Protected), "{addr}");
        assert_eq!(
            open.shut_space(addr.parse().unwrap()),
            Some(Space::Metadata)
        );
        let text = open.explain(to(Protocol::Tcp, &addr, 80)).to_string();
        assert!(
            text.contains("leads to the IPv4 address in it, 169.254.169.254"),
            "{text}"
        );
    }
    for addr in forms([203, 0, 113, 9]) {
        let decide = |rules, default| refusal(&policy(rules, default), &addr);
        let by_rule = Some(Refusal::Rule);
        assert_eq!(decide(vec![], Action::Allow), None, "{addr}");
        assert_eq!(decide(vec![deny("203.0.113.0/24")], Action::Allow), by_rule);
        assert_eq!(
            decide(vec![allow("::/0"), deny("203.0.113.0/24")], Action::Allow),
            by_rule,
            "an allow of the outer address does not open the inner one"
        );
        assert_eq!(
            decide(vec![deny("2000::/3"), deny("64::/16")], Action::Allow),
            by_rule
        );
        assert_eq!(decide(vec![], Action::Deny), Some(Refusal::Default));
        assert_eq!(decide(vec![allow("203.0.113.9:80")], Action::Deny), None);
        assert_eq!(decide(vec![allow("::/0")], Action::Deny), None);
    }
    // A public resolver is one by whatever translator it is reached.
    let by_name = vec![allow("::/0"), Rule::parse(Action::Allow, "a.test").unwrap()];
    let policy = policy(by_name, Action::Deny);
    for addr in forms([8, 8, 8, 8]) {
        assert_eq!(
            refusal(&policy, &addr),
            Some(Refusal::DnsElsewhere),
            "{addr}"
        );
    }
}

/// The documented meaning, tried rule by rule.
fn naive(policy: &Policy, to: Destination) -> Decision {
    let outer = naive_alone(policy, to);
    let Some(inner) = to.inside() else {
        return outer;
    };
    let inner = naive_alone(policy, inner);
    let speaks = |decision: Decision| decision.rule != RuleId::DEFAULT;
    match (speaks(outer), speaks(inner)) {
        (_, true) if inner.refusal.is_some() => inner,
        (false, true) => inner,
        _ => outer,
    }
}

fn naive_alone(policy: &Policy, to: Destination) -> Decision {
    let space = policy.protected(to.addr);
    // No public resolver has these addresses, so only the port counts. Without rules by name (there
    // are none here) names are judged only if the default is deny.
    let is_dns_over_tls = to.port == 853 && to.protocol != Protocol::Icmp;
    let elsewhere = is_dns_over_tls && policy.default_action() == Action::Deny;
    for (rule, order) in policy.rules.iter().zip(0..) {
        match rule {
            Rule::Match(action, pattern) => {
                let means_space = |range: IpNet| range.contains(&pattern.prefix());
                let means_dns = match pattern.ports() {
                    Some((853, 853)) => true,
                    Some(_) => pattern.is_one_address(),
                    None => false,
                };
                let counts = *action == Action::Deny
                    || (space.is_none_or(|(range, _)| means_space(range))
                        && (means_dns || !elsewhere));
                if counts && pattern.matches(to) {
                    return policy.decision(order, None, *action);
                }
            }
            Rule::Name(..) => {}
            Rule::DenyFile(file) => {
                if let Some(index) = file.patterns().position(|p| p.matches(to)) {
                    // The test's files have neither comments nor blank lines.
                    return policy.decision(order, Some(index as u32 + 1), Action::Deny);
                }
            }
        }
    }
    let (rule, refusal) = match (space, policy.default_action()) {
        (Some(_), _) => (RuleId::PROTECTED, Some(Refusal::Protected)),
        (None, _) if elsewhere => (policy.dns_bypass_id(), Some(Refusal::DnsElsewhere)),
        (None, Action::Deny) => (RuleId::DEFAULT, Some(Refusal::Default)),
        (None, _) => (RuleId::DEFAULT, None),
    };
    Decision {
        rule,
        line: None,
        refusal,
    }
}

fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let rule = prop_oneof![
        4 => pattern().prop_map(|p| Rule::Match(Action::Allow, p)),
        4 => pattern().prop_map(|p| Rule::Match(Action::Deny, p)),
        1 => prop::collection::vec(pattern(), 1..6).prop_map(|patterns| {
            let lines: Vec<String> = patterns.iter().map(Pattern::to_string).collect();
            file(&lines.join("\n"))
        }),
    ];
    prop::collection::vec(rule, 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn decisions_are_those_of_trying_each_rule(
        rules in rules(),
        deny_by_default in any::<bool>(),
        host in prop::collection::vec(0_u32..16, 0..3),
        destinations in prop::collection::vec(destination(), 1..60),
    ) {
        let default = if deny_by_default { Action::Deny } else { Action::Allow };
        let mut policy = Policy::new(default, rules);
        policy.set_local(&LocalAddresses {
            host: host.iter().map(|low| Ipv4Addr::from_bits(0x0a00_0000 | low).into()).collect(),
            guests: vec!["198.51.100.8/30".parse().unwrap()],
        });
        let whole = policy.deny_prefixes();
        for to in destinations {
            let decision = policy.decide(to);
            prop_assert_eq!(decision, naive(&policy, to), "{:?}", to);
            if whole.iter().any(|(prefix, _)| prefix.contains(&to.addr)) {
                prop_assert!(!decision.is_allowed(), "the guard would drop {:?}", to);
            }
            prop_assert!(!policy.explain(to).to_string().is_empty());
        }
    }
}

/// Found by the above: an allow of the network does not open DNS over TLS there.
#[test]
fn the_port_of_dns_over_tls_is_shut_to_an_allow_that_does_not_mean_it() {
    for (rule, opens) in [
        ("198.51.100.0/28/tcp", false),
        ("198.51.100.0/28:853", true),
    ] {
        let policy = Policy::new(Action::Deny, vec![allow(rule)]);
        let to = to(Protocol::Tcp, "198.51.100.0", 853);
        let decision = policy.decide(to);
        assert_eq!(decision, naive(&policy, to), "{rule}");
        assert_eq!(decision.is_allowed(), opens, "{rule}");
    }
}

/// Trying them one by one takes a hundred times as long.
#[test]
fn a_thousand_rules_are_not_tried_one_by_one() {
    let policy = |rules: u32| {
        let rule = |i: u32| {
            let net = Ipv4Addr::from_bits(0x0b00_0000 + (i << 12));
            match i % 3 {
                0 => deny(&format!("{net}/20:25/tcp")),
                1 => allow(&format!("{net}/20:443")),
                _ => deny(&format!("0.0.0.0/0:{}", 10_000 + i)),
            }
        };
        Policy::new(Action::Allow, (0..rules).map(rule).collect())
    };
    let refused = |policy: &Policy| {
        let to = |i: u32| Destination {
            addr: Ipv4Addr::from_bits(0x0b00_0000 + (i.wrapping_mul(2_654_435_761) >> 9)).into(),
            port: (i % 20_000) as u16,
            protocol: Protocol::Tcp,
        };
        let decisions = (0..100_000).map(|i| policy.decide(to(i)));
        decisions.filter(|decision| !decision.is_allowed()).count()
    };
    let (few, many) = (policy(10), policy(1_000));
    let (few_took, few_refused) = cpu_time(|| refused(&few));
    let (many_took, many_refused) = cpu_time(|| refused(&many));
    println!("100,000 decisions: {few_took:?} by 10 rules, {many_took:?} by 1,000");
    assert!(many_refused > few_refused && few_refused > 0);
    assert!(
        many_took < few_took * 20,
        "{many_took:?} against {few_took:?}"
    );
}
