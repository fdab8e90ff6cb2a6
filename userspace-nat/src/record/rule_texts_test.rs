use super::*;
use slipgate_policy::{Action, Rule, Settings};

fn policy(name: &str, rules: usize) -> Policy {
    let rule = |at| Rule::parse(Action::Deny, &format!("10.0.0.{at}")).unwrap();
    Policy::new(Action::Allow, (0..rules).map(rule).collect::<Vec<_>>()).with(Settings {
        name: Some(name.into()),
        ..Settings::default()
    })
}

#[test]
fn each_policy_has_its_run_and_the_former_one_stays_known() {
    let mut texts = RuleTexts::new(&PolicySet::numbered_from(
        10,
        vec![policy("a", 1), policy("b", 2)],
    ));
    texts.set_forwards(RuleIndex::new(100), vec!["--forward x".into()]);
    let known = |texts: &RuleTexts, rule| texts.known(RuleIndex::new(rule)).map(str::to_owned);
    assert_eq!(known(&texts, 13).as_deref(), Some("[a] --deny 10.0.0.0"));
    assert_eq!(known(&texts, 14).as_deref(), Some("[b] --default allow"));
    assert_eq!(known(&texts, 18).as_deref(), Some("[b] --deny 10.0.0.1"));
    assert_eq!(known(&texts, 100).as_deref(), Some("--forward x"));
    for none in [9, 19, 99, 101, u32::MAX] {
        assert_eq!(known(&texts, none), None, "{none}");
    }
    // Another policy at the index of a; b keeps its elements.
    texts.change(&[(0, Some(policy("c", 3).numbered(50)))]);
    assert_eq!(known(&texts, 53).as_deref(), Some("[c] --deny 10.0.0.0"));
    assert_eq!(known(&texts, 13).as_deref(), Some("[a] --deny 10.0.0.0"));
    assert_eq!(known(&texts, 14).as_deref(), Some("[b] --default allow"));
    // The elements of a are used again.
    texts.change(&[(1, Some(policy("d", 0).numbered(10)))]);
    assert_eq!(known(&texts, 10).as_deref(), Some("[d] --default allow"));
    assert_eq!(known(&texts, 13).as_deref(), Some("[a] --deny 10.0.0.0"));
    texts.change(&[(1, None)]);
    assert_eq!(known(&texts, 10).as_deref(), Some("[d] --default allow"));
}

#[test]
fn former_runs_are_forgotten_when_there_are_many() {
    let mut texts = RuleTexts::default();
    for change in 0..1_000u32 {
        texts.change(&[(0, Some(policy("a", 1).numbered(change * 4)))]);
    }
    assert_eq!(texts.former.len(), MOST_FORMER);
    assert!(texts.known(RuleIndex::new(0)).is_none());
    assert!(texts.known(RuleIndex::new(998 * 4)).is_some());
}

#[test]
fn no_forwards_leave_the_policy_whose_run_begins_there() {
    let mut texts = RuleTexts::new(&PolicySet::numbered_from(10, vec![policy("a", 1)]));
    let known = |texts: &RuleTexts, rule| texts.known(RuleIndex::new(rule)).map(str::to_owned);
    texts.set_forwards(RuleIndex::new(10), Vec::new());
    assert_eq!(known(&texts, 13).as_deref(), Some("[a] --deny 10.0.0.0"));
    texts.set_forwards(RuleIndex::new(100), vec!["--forward x".into()]);
    texts.set_forwards(RuleIndex::new(10), Vec::new());
    texts.set_forwards(RuleIndex::new(101), vec!["--forward y".into()]);
    assert_eq!(known(&texts, 13).as_deref(), Some("[a] --deny 10.0.0.0"));
    assert_eq!(known(&texts, 100).as_deref(), Some("--forward x"));
    assert_eq!(known(&texts, 101).as_deref(), Some("--forward y"));
}
