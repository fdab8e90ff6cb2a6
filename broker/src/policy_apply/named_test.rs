use std::path::Path;

use slipgate_policy::document::{CliOverrides, PolicyFile};

use super::*;
use crate::config::tests::config;

fn with_policy(vm: &str) -> Config {
    let mut config = config(&["a", "b"], CliOverrides::default());
    let at = config.vms.iter().position(|it| it.name == vm).unwrap();
    config.vms[at].flags.policy = Some("p".to_owned());
    config
}

#[test]
fn a_policy_that_somebody_names_stays_and_the_refusal_says_who() {
    let named = with_policy("b");
    let why = check_unused(&named, "p").unwrap_err().to_string();
    assert!(why.contains("the policy p is that of b:"), "{why}");
    assert!(check_unused(&named, "q").is_ok());

    let mut crowd = config(&["a"], CliOverrides::default());
    let mut vm = crowd.vms.remove(0);
    vm.flags.policy = Some("p".to_owned());
    crowd.vms = vec![vm; MOST_NAMED + 3];
    let why = check_unused(&crowd, "p").unwrap_err().to_string();
    assert!(why.contains("a and 3 more:"), "{why}");

    let flags = CliOverrides {
        policy_name: Some("p".to_owned()),
        ..CliOverrides::default()
    };
    let mut by_flag = config(&[], CliOverrides::default());
    by_flag.flags = flags;
    let why = check_unused(&by_flag, "p").unwrap_err().to_string();
    assert!(why.contains("--policy-name"), "{why}");
}

#[test]
fn the_policy_files_own_of_that_name_takes_its_place() {
    let mut named = with_policy("a");
    let text = "[policy.p]\ndefault = \"deny\"\n".to_owned();
    named.base_file = Some(PolicyFile::parse(Path::new("f.toml"), text).unwrap());
    assert!(check_unused(&named, "p").is_ok());
}
