use std::path::Path;

use slipgate_policy::document::{CliOverrides, PolicyFile};

use super::*;
use crate::config::tests::config;

#[test]
fn a_policy_that_somebody_names_stays_and_the_refusal_says_who() {
    let plain = config(&["a", "b"], CliOverrides::default());
    let unused = |config: &Config, name: &str, users: &[&str]| {
        check_unused(config, name, users.iter().copied()).map_err(|e| e.to_string())
    };
    let why = unused(&plain, "p", &["b"]).unwrap_err();
    assert!(why.contains("the policy p is that of b:"), "{why}");
    assert!(unused(&plain, "q", &[]).is_ok());

    let why = unused(&plain, "p", &["a"; MOST_NAMED + 3]).unwrap_err();
    assert!(why.contains("a and 3 more:"), "{why}");

    let flags = CliOverrides {
        policy_name: Some("p".to_owned()),
        ..CliOverrides::default()
    };
    let mut by_flag = config(&[], CliOverrides::default());
    by_flag.flags = flags;
    let why = unused(&by_flag, "p", &[]).unwrap_err();
    assert!(why.contains("--policy-name"), "{why}");

    let mut by_file = config(&[], CliOverrides::default());
    let text = "default = \"deny\"\n[vms]\nx = \"p\"\n".to_owned();
    by_file.base_file = Some(PolicyFile::parse(Path::new("f.toml"), text).unwrap());
    let why = unused(&by_file, "p", &[]).unwrap_err();
    assert!(why.contains("[vms] of f.toml"), "{why}");
}

#[test]
fn the_policy_files_own_of_that_name_takes_its_place() {
    let mut named = config(&["a"], CliOverrides::default());
    let text = "[policy.p]\ndefault = \"deny\"\n".to_owned();
    named.base_file = Some(PolicyFile::parse(Path::new("f.toml"), text).unwrap());
    assert!(check_unused(&named, "p", ["a"].into_iter()).is_ok());
}
