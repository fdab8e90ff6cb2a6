use crate::{Action, Rule, strategies::questions_of, wire};

use super::*;

#[test]
fn what_questions_say_is_bounded_whether_names_are_new_or_known() {
    let settings = questions_of(60, 10);
    let rules = ["*.code.test", "fixed.test"].map(|rule| Rule::parse(Action::Allow, rule).unwrap());
    let policy = Policy::new(Action::Deny, rules.to_vec()).with(settings.clone());
    let mut bounds = Bounds::default();
    let mut over = |policy: &Policy, name: &str| {
        let wire = wire(name).unwrap();
        bounds.lookup("vm", Limits::default(), policy, Name(&wire), "A", Some(1))
    };
    // Four octets each, with their type.
    assert_eq!(over(&policy, "a.code.test"), None);
    assert_eq!(over(&policy, "b.code.test"), None);
    let by = || "new_name_octets_per_minute 60".to_owned();
    let exceeded = |what| Some((what, by()));
    let new = exceeded("new names beneath wildcards");
    assert_eq!(over(&policy, "c.code.test"), new);
    // A bit each, of the least limit, 512; and 16 for the type.
    for i in 0..494 {
        assert_eq!(over(&policy, "a.code.test"), None, "{i}");
    }
    assert_eq!(over(&policy, "fixed.test"), None);
    let again = exceeded("questions asked before");
    assert_eq!(over(&policy, "fixed.test"), None, "two bits, one of three");
    assert_eq!(over(&policy, "a.code.test"), again);
    // Where the default admits any name, those that rules give are nothing special.
    let rules = vec![Rule::parse(Action::Inspect, "fixed.test").unwrap()];
    let open = Policy::new(Action::Allow, rules).with(settings);
    for i in 0..100 {
        assert_eq!(over(&open, "fixed.test"), None, "{i}");
    }
}
