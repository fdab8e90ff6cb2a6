use super::*;
use crate::{Resolvers, Settings};

fn policy(default: Action, rules: &[(Action, &str)]) -> Policy {
    let rules = rules.iter().map(|(a, t)| Rule::parse(*a, t).unwrap());
    Policy::new(default, rules.collect())
}

#[test]
fn some_name_is_resolved_where_a_rule_lets_one_be_or_the_default_does() {
    use Action::{Allow, Deny, Inspect};
    let resolves = |default, rules: &[_]| policy(default, rules).resolves_nothing().is_none();
    assert!(resolves(Allow, &[]));
    assert!(resolves(Allow, &[(Deny, "example.com")]));
    assert!(!resolves(Deny, &[]));
    // An allow by address opens no name, of whatever address.
    assert!(!resolves(
        Deny,
        &[(Allow, "10.0.2.3:53"), (Inspect, "0.0.0.0/0")]
    ));
    assert!(!resolves(Deny, &[(Deny, "example.com")]));
    assert!(resolves(Deny, &[(Allow, "*.example.com:443")]));
    assert!(resolves(Deny, &[(Inspect, "example.com")]));
    let hidden = [(Deny, "*.example.com"), (Allow, "a.example.com:443")];
    assert!(!resolves(Deny, &hidden));
    let in_part = [(Deny, "*.example.com:80"), (Allow, "a.example.com:443")];
    assert!(resolves(Deny, &in_part));
    let later = [(Allow, "a.example.com:443"), (Deny, "*.example.com")];
    assert!(resolves(Deny, &later));
}

#[test]
fn who_refuses_is_named() {
    let (yes, text) = policy(Action::Allow, &[]).explain_port_53();
    assert!(yes && text.contains("slipgate's own resolver"), "{text}");
    let (yes, text) = policy(Action::Deny, &[]).explain_port_53();
    assert!(
        !yes && text.contains("by --default deny. No rule"),
        "{text}"
    );
    let mut settings = Settings::default();
    settings.dns.resolvers = Resolvers::Nobody;
    let none = policy(Action::Allow, &[]).with(settings);
    let (yes, text) = none.explain_port_53();
    assert!(!yes && text.contains("by --dns none"), "{text}");
}
