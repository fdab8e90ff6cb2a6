use super::*;
use crate::{
    Action, DenyFile, LocalAddresses,
    rule::tests::{allow, deny, to},
};

fn why(rules: Vec<Rule>, destination: Destination) -> String {
    let mut policy = Policy::new(Action::Allow, rules);
    policy.set_local(&LocalAddresses {
        host: vec!["203.0.113.5".parse().unwrap()],
        guests: vec!["10.0.2.0/24".parse().unwrap()],
    });
    policy.explain(destination).to_string()
}

#[test]
fn names_the_rule_as_typed() {
    let text = why(
        vec![allow("1.1.1.1"), deny("192.0.2.0/24:25/tcp")],
        to(Protocol::Tcp, "192.0.2.9", 25),
    );
    assert_eq!(
        text,
        "TCP to 192.0.2.9:25 is refused by rule 2, `--deny 192.0.2.0/24:25/tcp`."
    );
}

#[test]
fn names_the_line_of_a_file() {
    let file = DenyFile::parse("bad.txt", "# one\n192.0.2.0/24\n").unwrap();
    let text = why(
        vec![Rule::DenyFile(Box::new(file))],
        to(Protocol::Icmp, "192.0.2.9", 0),
    );
    assert_eq!(
        text,
        "Ping to 192.0.2.9 is refused by rule 1, `--deny-file bad.txt, line 2`.\n\
         Line 2 of bad.txt reads 192.0.2.0/24."
    );
}

#[test]
fn says_when_nothing_matched() {
    let text = why(Vec::new(), to(Protocol::Udp, "192.0.2.9", 53));
    assert_eq!(
        text,
        "UDP to 192.0.2.9:53 is allowed: no rule matches, and the default is allow."
    );
}

#[test]
fn says_why_a_broad_allow_does_not_open_and_what_would() {
    let text = why(vec![allow("0.0.0.0/0")], to(Protocol::Tcp, "10.0.0.9", 22));
    assert_eq!(
        text,
        "TCP to 10.0.0.9:22 is refused by the safe defaults: 10.0.0.9 is private (RFC 1918).\n\
         `--allow 0.0.0.0/0` matches too, but is broader than 10.0.0.0/8 and so does not open it.\n\
         `--allow 10.0.0.9:22/tcp` would open it."
    );
}

#[test]
fn what_it_proposes_works() {
    for (destination, what) in [
        ("10.0.0.9", "private (RFC 1918)"),
        ("224.0.0.9", "multicast"),
    ] {
        let to = to(Protocol::Tcp, destination, 22);
        let text = why(Vec::new(), to);
        let proposal = text.split('`').nth(1).unwrap();
        let proposal = proposal.strip_prefix("--allow ").unwrap();
        assert_eq!(
            why(vec![allow(proposal)], to),
            format!(
                "TCP to {destination}:22 is allowed by rule 1, `--allow {destination}:22/tcp`.\n\
                 {destination} is {what}: the rule opens it on purpose."
            )
        );
    }
}

#[test]
fn nothing_is_proposed_where_nothing_opens() {
    for (destination, because) in [
        ("203.0.113.5", "No rule opens it: a flow to the host itself"),
        ("127.0.0.1", "No rule opens it: a flow to the host itself"),
        ("10.0.2.9", "No rule opens it: a VM's own network"),
    ] {
        let to = to(Protocol::Tcp, destination, 80);
        let text = why(Vec::new(), to);
        assert!(text.contains(because), "{text}");
        assert!(!text.contains("would open it"), "{text}");
        let opened = why(vec![allow(destination)], to);
        assert!(opened.contains("and no rule opens it: a "), "{opened}");
    }
}
