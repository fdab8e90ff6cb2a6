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

fn texts(loaded: &LoadedPolicies) -> Vec<String> {
    loaded.compile().unwrap().texts().collect()
}

#[test]
fn an_open_vm_has_its_policy_but_for_the_default_and_others_have_theirs() {
    let rules = vec![
        RuleFlag::Match(Action::Allow, "a.test:443".into()),
        RuleFlag::Match(Action::Inspect, "192.0.2.0/24:443".into()),
        RuleFlag::Match(Action::Deny, "198.51.100.0/24".into()),
    ];
    let mut config = config(&["a", "b"], denying(rules));
    let loaded = config.load_policies().unwrap();
    let learning = LearningVms {
        with_policy: vec!["b".into(), "gone".into()],
        open: vec!["b".into(), "gone".into()],
    };
    let all = learning.add_to(&mut config, &loaded);
    assert_eq!((config.vms[0].policy, config.vms[1].policy), (0, 1));
    let is_learning = |policy: &LoadedPolicy| policy.settings.is_learning;
    assert!(all.policies.iter().map(is_learning).eq([false, true]));
    let all = texts(&all);
    assert_eq!(all[..6], texts(&loaded));
    assert_eq!(
        all[6..],
        [
            "[learning b] --default allow",
            "[learning b] safe defaults",
            "[learning b] safe defaults: DNS elsewhere",
            "[learning b] --allow a.test:443",
            "[learning b] --allow 192.0.2.0/24:443",
            "[learning b] --deny 198.51.100.0/24",
        ]
    );
    // Settled anew, it has its own again.
    assert_eq!(config.settled().unwrap().vms[1].policy, 0);
}

#[test]
fn a_vm_that_is_closed_again_has_its_own_also_among_policies_that_stay() {
    let mut config = config(&["a"], denying(Vec::new()));
    let loaded = config.load_policies().unwrap();
    let with_room = LearningVms {
        with_policy: vec!["a".into()],
        open: Vec::new(),
    };
    let all = with_room.add_to(&mut config, &loaded);
    assert_eq!((config.vms[0].policy, all.policies.len()), (0, 2));
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
        assert_eq!(LearningVms::of(&[opened]).with_policy.len(), 0);
    }
}
