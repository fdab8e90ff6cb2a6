use super::*;
use crate::{AnnotatedRule, Note, Policy, PolicySet, Settings};

/// Returns the identity of a policy's only rule.
fn described(name: &str, action: Action, text: &str, http: Http) -> Described {
    let rule = Rule::parse(action, text).unwrap();
    let note = Note {
        http,
        ..Note::default()
    };
    let policy = Policy::new(Action::Deny, vec![AnnotatedRule { rule, note }]).with(Settings {
        name: Some(name.to_owned()),
        ..Settings::default()
    });
    policy.described().last().unwrap()
}

#[test]
fn rules_mean_the_same_where_they_do_the_same() {
    let of = |action, text: &str| described("a", action, text, Http::Each).identity;
    let same = |a: &str, b: &str| of(Action::Allow, a).meaning == of(Action::Allow, b).meaning;
    assert!(same("192.0.2.1/32:80-80", "192.0.2.1:80"));
    assert!(same("A.example.com.", "a.example.com"));
    for (a, b) in [
        ("192.0.2.1:80", "192.0.2.1:81"),
        ("192.0.2.1:80/tcp", "192.0.2.1:80/udp"),
        ("192.0.2.0/24", "192.0.2.0/25"),
        ("*.example.com", "example.com"),
        ("a.example.com:80", "a.example.com"),
    ] {
        assert!(!same(a, b), "{a} {b}");
    }
    assert_ne!(
        of(Action::Allow, "a.b").meaning,
        of(Action::Deny, "a.b").meaning
    );
    let inspect = |http| {
        described("a", Action::Inspect, "a.b", http)
            .identity
            .meaning
    };
    assert_ne!(inspect(Http::Each), inspect(Http::First));
    let allow = |http| described("a", Action::Allow, "a.b", http).identity.meaning;
    assert_eq!(allow(Http::Each), allow(Http::First), "it inspects nothing");
}

#[test]
fn policies_share_meanings_and_nothing_else() {
    let of = |name: &str| described(name, Action::Allow, "a.b", Http::Each).identity;
    assert_eq!(of("x").meaning, of("y").meaning);
    assert_ne!(of("x").whole, of("y").whole);
    // Also where their texts are equal as far as they are kept.
    let long = "n".repeat(200);
    assert_ne!(of(&format!("{long}1")).whole, of(&format!("{long}2")).whole);
}

#[test]
fn each_rule_of_a_set_is_told_apart_and_comes_back_from_the_kernel() {
    let rules = ["192.0.2.1", "a.b", "*.a.b"].map(|text| Rule::parse(Action::Allow, text).unwrap());
    let policies = ["x", "y"].map(|name| {
        Policy::new(Action::Deny, rules.to_vec()).with(Settings {
            name: Some(name.to_owned()),
            is_learning: name == "y",
            ..Settings::default()
        })
    });
    let set = PolicySet::new(policies.to_vec());
    let described: Vec<Described> = set.described().collect();
    let texts: Vec<String> = set.texts().collect();
    assert!(described.iter().map(|rule| &rule.text).eq(&texts));
    let wholes: std::collections::HashSet<_> = described.iter().map(|d| d.identity.whole).collect();
    assert_eq!(wholes.len(), 12);
    for (at, rule) in described.iter().enumerate() {
        assert_eq!(rule.identity.is_learning, at >= 6);
        let back = Described::of_element(&rule.element(), rule.text.clone());
        assert_eq!(back.as_ref(), Some(rule));
    }
    assert_eq!(
        Described::of_element(&RuleElement::FREE, String::new()),
        None
    );
}
