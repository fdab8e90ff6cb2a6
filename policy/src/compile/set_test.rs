use std::collections::BTreeSet;

use proptest::prelude::*;
use slipgate_abi::{Protocol, Refusal};

use super::*;
use crate::{
    Destination, Rule, Settings,
    rule::tests::{allow, deny, to},
    strategies::{destination, pattern, policy as any_policy},
};

fn named(name: &str, default: Action, rules: Vec<Rule>) -> Policy {
    Policy::new(default, rules).with(Settings {
        name: Some(name.into()),
        file: Some("p.toml".into()),
        ..Settings::default()
    })
}

fn two() -> PolicySet {
    PolicySet::new(vec![
        named("a", Action::Deny, vec![allow("192.0.2.1")]),
        named(
            "b",
            Action::Allow,
            vec![deny("192.0.2.1"), deny("192.0.2.2")],
        ),
    ])
}

const HERE: &str = "192.0.2.1";

#[test]
fn each_policy_decides_for_itself_and_numbers_run_through() {
    let set = two();
    let here = to(Protocol::Tcp, HERE, 80);
    let first = set.of(Some(0)).decide(here);
    let second = set.of(Some(1)).decide(here);
    assert_eq!((first.rule, first.refusal), (RuleId(3), None));
    assert_eq!(second.rule, RuleId(4 + 3));
    assert_eq!(second.refusal, Some(Refusal::Rule));
    let texts: Vec<String> = set.texts().collect();
    assert_eq!(texts[3], "[a] --allow 192.0.2.1");
    assert_eq!(texts[7], "[b] --deny 192.0.2.1");
    assert_eq!(texts[4], "[b] default allow");
    assert_eq!(texts.len(), 4 + 5);
    let said = set.of(Some(1)).explain(here).to_string();
    assert!(said.contains("rule 1 of policy b"), "{said}");
}

#[test]
fn who_has_no_policy_of_several_gets_nothing() {
    let set = two();
    let there = to(Protocol::Tcp, "203.0.113.1", 80);
    for index in [Some(9), None] {
        let decision = set.of(index).decide(there);
        assert_eq!(decision.refusal, Some(Refusal::Default), "{index:?}");
        assert!(set.with(decision.rule).is_none());
    }
    assert!(set.of(Some(1)).decide(there).is_allowed());
}

fn policies() -> impl Strategy<Value = Vec<Policy>> {
    let rule = (any::<bool>(), pattern()).prop_map(|(allow, pattern)| {
        let action = if allow { Action::Allow } else { Action::Deny };
        Rule::Match(action, pattern)
    });
    let rules = proptest::collection::vec(rule, 0..12);
    let policy = (any::<bool>(), rules).prop_map(|(allow, rules)| {
        Policy::new(if allow { Action::Allow } else { Action::Deny }, rules)
    });
    proptest::collection::vec(policy, 1..5)
}

proptest! {
    #[test]
    fn a_set_decides_as_each_alone(policies in policies(), tos in proptest::collection::vec(destination(), 20)) {
        let set = PolicySet::new(policies.clone());
        let texts: Vec<String> = set.texts().collect();
        let mut numbers = BTreeSet::new();
        for (index, alone) in policies.iter().enumerate() {
            let of_set = set.of(Some(index as u32));
            for &to in &tos {
                let to: Destination = to;
                let (decided, by_itself) = (of_set.decide(to), alone.decide(to));
                prop_assert_eq!(decided.refusal, by_itself.refusal);
                prop_assert_eq!(&texts[decided.rule.0 as usize], &alone.text(by_itself));
                prop_assert_eq!(set.text(decided), alone.text(by_itself));
                prop_assert!(of_set.has(decided.rule));
                numbers.insert((decided.rule, index));
            }
        }
        // No number is two policies'.
        let rules: BTreeSet<_> = numbers.iter().map(|(rule, _)| rule).collect();
        prop_assert_eq!(rules.len(), numbers.len());
    }

    #[test]
    fn what_is_sent_is_what_was_compiled(
        policies in proptest::collection::vec(any_policy(), 1..4), cut in any::<proptest::sample::Index>(),
    ) {
        let set = PolicySet::new(policies);
        let bytes = set.to_bytes();
        prop_assert_eq!(PolicySet::from_bytes(&bytes).unwrap(), set);
        prop_assert!(PolicySet::from_bytes(&bytes[..cut.index(bytes.len())]).is_err());
        let mut foreign = bytes;
        foreign[0] ^= 0x40;
        let other = PolicySet::from_bytes(&foreign);
        prop_assert!(matches!(other, Err(CompiledError::Format(_))), "{other:?}");
    }
}
