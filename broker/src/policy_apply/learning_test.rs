use std::os::unix::net::UnixStream;

use slipgate_policy::document::{CliOverrides, RuleFlag};

use super::*;
use crate::config::tests::config;

/// Overrides that deny everything except what these rules permit.
fn denying(rules: Vec<RuleFlag>) -> CliOverrides {
    CliOverrides {
        default: Some(Action::Deny),
        rules,
        ..CliOverrides::default()
    }
}

#[test]
fn an_open_vm_has_its_policy_but_for_the_default() {
    let rules = vec![
        RuleFlag::Match(Action::Allow, "a.test:443".into()),
        RuleFlag::Match(Action::Inspect, "192.0.2.0/24:443".into()),
        RuleFlag::Match(Action::Deny, "198.51.100.0/24".into()),
    ];
    let config = config(&["b"], denying(rules));
    let own = config.load_policies().unwrap().policies.remove(0);
    assert!(!own.settings.is_learning);
    let open = open(&own, "b");
    assert!(open.settings.is_learning);
    let texts: Vec<String> = open.compile().unwrap().texts().collect();
    assert_eq!(
        texts,
        [
            "[learning b] --default allow",
            "[learning b] safe defaults",
            "[learning b] safe defaults: DNS elsewhere",
            "[learning b] --allow a.test:443",
            "[learning b] --allow 192.0.2.0/24:443",
            "[learning b] --deny 198.51.100.0/24",
        ]
    );
}

#[test]
fn a_client_that_ends_or_shuts_its_side_is_seen() {
    for shuts in [true, false] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut opened = LearningVm {
            vm: "a".into(),
            lifeline: theirs.into(),
            over: false,
            again_at: None,
        };
        assert!(!opened.has_ended());
        match shuts {
            true => ours.shutdown(std::net::Shutdown::Write).unwrap(),
            false => drop(ours),
        }
        assert!(opened.has_ended());
        opened.over = true;
        assert!(opened.lifeline().is_none());
    }
}
