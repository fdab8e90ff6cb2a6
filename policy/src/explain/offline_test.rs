use proptest::prelude::*;

use super::*;
use crate::{
    Settings,
    strategies::{destination, pattern},
};

fn policy(default: Action, rules: &[(Action, &str)]) -> Policy {
    let rules = rules
        .iter()
        .map(|(action, text)| Rule::parse(*action, text).unwrap());
    Policy::new(default, rules.collect()).with(Settings::default())
}

fn covered(rules: &[(Action, &str)]) -> Vec<Option<u32>> {
    let policy = policy(Action::Deny, rules);
    let number = |id: RuleId| id.0 - RuleId::FIRST_TYPED.0 + 1;
    let by = |standing| policy.covered_by(standing).map(number);
    policy.standing().map(by).collect()
}

#[test]
fn a_rule_within_an_earlier_one_is_covered_but_for_protected_space() {
    use Action::{Allow, Deny};
    assert_eq!(
        covered(&[
            (Allow, "0.0.0.0/0:443"),
            (Deny, "203.0.113.0/24:443/tcp"),
            (Deny, "203.0.113.0/24"),
            (Allow, "10.0.0.0/8:443"),
            (Allow, "10.1.0.0/16:443"),
            (Deny, "0.0.0.0/0"),
            (Allow, "10.2.0.0/16:80"),
        ]),
        [None, Some(1), None, None, Some(4), None, Some(6)]
    );
    assert_eq!(
        covered(&[
            (Allow, "*.ok.test:443"),
            (Allow, "a.ok.test:443/tcp"),
            (Allow, "ok.test:443"),
            (Deny, "*.b.ok.test:443"),
            (Allow, "xok.test:443"),
            (Allow, "a.ok.test"),
        ]),
        [None, Some(1), None, Some(1), None, None]
    );
}

proptest! {
    #[test]
    fn what_is_contained_never_matches_alone(a in pattern(), b in pattern(), to in destination()) {
        if a.contains(&b) && b.matches(to) {
            prop_assert!(a.matches(to));
        }
        prop_assert!(a.contains(&a));
    }

    #[test]
    fn a_covered_rule_never_decides(
        rules in proptest::collection::vec((any::<bool>(), pattern()), 0..8),
        tos in proptest::collection::vec(destination(), 30),
    ) {
        let rules: Vec<Rule> = rules.into_iter().map(|(allow, pattern)| {
            Rule::Match(if allow { Action::Allow } else { Action::Deny }, pattern)
        }).collect();
        let policy = Policy::new(Action::Deny, rules);
        let covered: Vec<RuleId> = policy
            .standing()
            .filter(|s| policy.covered_by(*s).is_some())
            .map(|s| s.id)
            .collect();
        for to in tos {
            let decision = policy.decide(to);
            prop_assert!(!covered.contains(&decision.rule), "{to:?} {decision:?}");
            if let Some(first) = policy.matching(to).first() {
                prop_assert!(policy.place_of(decision.rule).is_none() || decision.rule >= *first);
            }
        }
    }
}
