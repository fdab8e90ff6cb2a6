use std::collections::BTreeSet;

use proptest::prelude::*;
use slipgate_abi::{Protocol, Refusal};

use super::*;
use crate::rules::{
    Destination, Judge, Rule, Settings,
    matcher::tests::{destination, pattern},
    policy::tests::{allow, deny, to},
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
fn each_vm_is_judged_by_its_own_and_numbers_run_through() {
    let mut judge = Judge::new(two());
    judge.assign(1, 0);
    judge.assign(2, 1);
    let here = to(Protocol::Tcp, HERE, 80);
    let (first, second) = (judge.decide(1, here, 0), judge.decide(2, here, 0));
    assert_eq!(
        (first.decision.rule, first.decision.refusal),
        (RuleId(3), None)
    );
    assert_eq!(second.decision.rule, RuleId(4 + 3));
    assert_eq!(second.decision.refusal, Some(Refusal::Rule));
    let texts: Vec<String> = judge.policies().texts().collect();
    assert_eq!(texts[3], "[a] --allow 192.0.2.1");
    assert_eq!(texts[7], "[b] --deny 192.0.2.1");
    assert_eq!(texts[4], "[b] default allow");
    assert_eq!(texts.len(), 4 + 5);
    let said = judge.explain(2, here, 0);
    assert!(said.contains("rule 1 of policy b"), "{said}");
}

#[test]
fn who_has_no_policy_of_several_gets_nothing() {
    let mut judge = Judge::new(two());
    judge.assign(3, 9);
    for vm in [3, 4] {
        let decision = judge
            .decide(vm, to(Protocol::Tcp, "203.0.113.1", 80), 0)
            .decision;
        assert_eq!(decision.refusal, Some(Refusal::Default), "VM {vm}");
        assert!(judge.policies().with(decision.rule).is_none());
    }
    judge.assign(3, 1);
    let there = to(Protocol::Tcp, "203.0.113.1", 80);
    assert!(judge.decide(3, there, 0).decision.is_allowed());
    judge.forget(3);
    assert!(!judge.decide(3, there, 0).decision.is_allowed());
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
        let mut judge = Judge::new(set);
        let mut numbers = BTreeSet::new();
        for (index, alone) in policies.iter().enumerate() {
            let vm = index as u32 + 10;
            judge.assign(vm, index as u32);
            for &to in &tos {
                let to: Destination = to;
                let (decided, by_itself) = (judge.decide(vm, to, 0).decision, alone.decide(to));
                prop_assert_eq!(decided.refusal, by_itself.refusal);
                prop_assert_eq!(&texts[decided.rule.0 as usize], &alone.text(by_itself));
                prop_assert_eq!(judge.policies().text(decided), alone.text(by_itself));
                prop_assert!(judge.policy(vm).has(decided.rule));
                numbers.insert((decided.rule, index));
            }
        }
        // No number is two policies'.
        let rules: BTreeSet<_> = numbers.iter().map(|(rule, _)| rule).collect();
        prop_assert_eq!(rules.len(), numbers.len());
    }
}
