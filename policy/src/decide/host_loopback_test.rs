use slipgate_abi::Protocol;

use super::*;
use crate::{
    Action, LocalAddresses, LoopbackError, LoopbackPorts, MOST_LOOPBACK_ENTRIES, Rule, Settings,
    rule::tests::{allow, deny, to},
};

const GATEWAY: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 2, 2));

fn entries(texts: &[&str]) -> Vec<LoopbackPorts> {
    let mut all = Vec::new();
    for text in texts {
        text.parse::<LoopbackPorts>()
            .and_then(|entry| entry.add_to(&mut all))
            .unwrap();
    }
    all
}

fn policy(default: Action, rules: Vec<Rule>, listed: &[&str]) -> Policy {
    let mut policy = Policy::new(default, rules).with(Settings {
        host_loopback: entries(listed),
        ..Settings::default()
    });
    policy.set_local(&LocalAddresses {
        host: vec!["203.0.113.5".parse().unwrap()],
        guests: vec!["10.0.2.0/24".parse().unwrap()],
    });
    policy
}

#[test]
fn entries_are_ports_and_where_they_lead() {
    let lead = |text: &str, protocol, addr: &str, port| {
        let entry: LoopbackPorts = text.parse().unwrap();
        entry.leads(to(protocol, addr, port), GATEWAY)
    };
    let (tcp, udp) = (Protocol::Tcp, Protocol::Udp);
    assert_eq!(lead("8080", tcp, "10.0.2.2", 8080), Some(8080));
    assert_eq!(lead("8080", udp, "10.0.2.2", 8080), Some(8080));
    assert_eq!(lead("8080", Protocol::Icmp, "10.0.2.2", 8080), None);
    assert_eq!(lead("8080", tcp, "10.0.2.2", 8081), None);
    assert_eq!(lead("8080", tcp, "10.0.2.3", 8080), None);
    assert_eq!(lead("8080:80/tcp", tcp, "10.0.2.2", 8080), Some(80));
    assert_eq!(lead("8080:80/tcp", udp, "10.0.2.2", 8080), None);
    assert_eq!(lead("8080:80/tcp", tcp, "10.0.2.2", 80), None);
    assert_eq!(
        lead("9000-9010:7000-7010", udp, "10.0.2.2", 9010),
        Some(7010)
    );
    assert_eq!(lead("9000-9010:7000-7010", udp, "10.0.2.2", 9011), None);
    assert_eq!(lead("10.0.2.9:80/tcp", tcp, "10.0.2.9", 80), Some(80));
    assert_eq!(lead("10.0.2.9:80/tcp", tcp, "10.0.2.2", 80), None);
    let most = "1-52:65484-65535/udp";
    assert_eq!(lead(most, udp, "10.0.2.2", 52), Some(65_535));
    for text in ["8080", "8080:80/tcp", "9000-9010/udp", "10.0.2.9:1-2:3-4"] {
        let entry: LoopbackPorts = text.parse().unwrap();
        assert_eq!(entry.to_string(), format!("host_loopback {text}"));
    }
}

#[test]
fn what_is_no_entry_is_told() {
    for (text, said) in [
        ("", "\"\" is no port"),
        ("0", "\"0\" is no port"),
        ("80:", "\"\" is no port"),
        ("90-80", "\"90-80\" is no port"),
        ("65536", "\"65536\" is no port"),
        ("80/icmp", "\"icmp\" is neither"),
        ("80-81:80", "2 ports lead to 1"),
        ("10.0.2:80", "\"10.0.2\" is no IPv4 address"),
        ("50-60", "port 53 is slipgate's own: its DNS"),
        ("67", "port 67 is slipgate's own: its DHCP"),
    ] {
        let error = text.parse::<LoopbackPorts>().unwrap_err().to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
    assert!("67/tcp".parse::<LoopbackPorts>().is_ok());
}

#[test]
fn a_port_leads_to_one_place() {
    let mut all = entries(&["8000-8010", "10.0.2.9:80", "53000/tcp"]);
    let add = |text: &str, all: &mut Vec<_>| text.parse::<LoopbackPorts>().unwrap().add_to(all);
    let twice = add("8010-8020:9010-9020/udp", &mut all).unwrap_err();
    assert_eq!(twice, LoopbackError::Twice(8_010, 8_010));
    assert!(add("53000/udp", &mut all).is_ok());
    assert!(add("80", &mut all).is_ok(), "of another address");
    assert!(add("10.0.2.9:80/tcp", &mut all).is_err());
    let mut many = Vec::new();
    for port in 1_000..1_000 + MOST_LOOPBACK_ENTRIES {
        add(&port.to_string(), &mut many).unwrap();
    }
    assert_eq!(add("80", &mut many), Err(LoopbackError::TooMany));
}

#[test]
fn nothing_is_led_that_is_not_listed_and_a_deny_beats_the_list() {
    let at = to(Protocol::Tcp, "10.0.2.2", 8080);
    let leads = |default, rules, listed: &[&str]| {
        let lead = policy(default, rules, listed).host_loopback(&[], at, GATEWAY);
        lead.map(|lead| (lead.host_port, lead.decision.refusal))
    };
    assert_eq!(leads(Action::Allow, vec![allow("0.0.0.0/0")], &[]), None);
    assert_eq!(leads(Action::Allow, vec![allow("10.0.2.2")], &["80"]), None);
    // Neither the default nor the safe defaults speak of what is listed.
    for default in [Action::Allow, Action::Deny] {
        assert_eq!(leads(default, vec![], &["8080:80"]), Some((80, None)));
    }
    let denied = Some((80, Some(Refusal::Rule)));
    for rule in [
        "10.0.2.2:8080",
        "10.0.2.2",
        "0.0.0.0/0",
        "10.0.2.2:8080/tcp",
    ] {
        let rules = vec![deny(rule)];
        assert_eq!(leads(Action::Allow, rules, &["8080:80"]), denied, "{rule}");
        // An allow that is too broad for protected space does not come before it.
        let rules = vec![allow("0.0.0.0/0"), deny(rule)];
        assert_eq!(leads(Action::Allow, rules, &["8080:80"]), denied, "{rule}");
    }
    let rules = vec![allow("10.0.2.2:8080"), deny("10.0.0.0/8")];
    assert_eq!(leads(Action::Deny, rules, &["8080:80"]), Some((80, None)));
    for other in ["10.0.2.2:8080/udp", "10.0.2.2:8081", "10.0.2.3"] {
        let led = leads(Action::Allow, vec![deny(other)], &["8080:80"]);
        assert_eq!(led, Some((80, None)), "{other}");
    }
    let rules = vec![Rule::parse(Action::Inspect, "10.0.2.2:8080").unwrap()];
    let inspected = Some((80, Some(Refusal::Inspection)));
    assert_eq!(leads(Action::Allow, rules, &["8080:80"]), inspected);
}

#[test]
fn a_vms_own_entries_come_before_the_policys() {
    let own = entries(&["8080:81", "9000/tcp"]);
    let policy = policy(
        Action::Allow,
        vec![deny("10.0.2.2:9000")],
        &["8080:80", "8081"],
    );
    let lead = |port| {
        let lead = policy.host_loopback(&own, to(Protocol::Tcp, "10.0.2.2", port), GATEWAY);
        lead.map(|lead| (lead.host_port, lead.decision.refusal))
    };
    assert_eq!(lead(8080), Some((81, None)));
    assert_eq!(lead(8081), Some((8081, None)));
    assert_eq!(lead(9000), Some((9000, Some(Refusal::Rule))));
    assert_eq!(lead(9001), None);
}

#[test]
fn it_is_said_where_it_leads_and_what_stands_against_it() {
    let at = to(Protocol::Udp, "10.0.2.2", 8080);
    let said = |rules| {
        let policy = policy(Action::Deny, rules, &["8080:80"]);
        let lead = policy.host_loopback(&[], at, GATEWAY).unwrap();
        policy.explain_loopback(at, &lead)
    };
    assert_eq!(
        said(vec![]),
        "UDP to 10.0.2.2:8080 is allowed: `host_loopback 8080:80` leads it to the host's \
         127.0.0.1:80."
    );
    assert_eq!(
        said(vec![deny("10.0.2.2")]),
        "UDP to 10.0.2.2:8080 is refused by rule 1, `--deny 10.0.2.2`: `host_loopback 8080:80` \
         leads it to the host's 127.0.0.1:80, but a rule that denies has precedence."
    );
}
