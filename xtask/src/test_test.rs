use super::*;

/// Members by these names; the testbed has integration tests.
fn members() -> Vec<Package> {
    let names = [
        "slipgate-abi",
        "slipgate-guest",
        "slipgate-control",
        "slipgate-bench",
        "xtask",
        "slipgate-testbed",
    ];
    let member = |name: &str| Package {
        name: name.to_owned(),
        folder: "/".into(),
        dependencies: Vec::new(),
        roots: Vec::new(),
        tests: match name {
            TESTBED => ["stress", "e2e", "another"].map(str::to_owned).into(),
            _ => Vec::new(),
        },
    };
    names.map(member).into()
}

#[test]
fn quick_crates_go_first_and_together() {
    let members = members();
    let rounds = rounds(&members, &[]).unwrap();
    let crates: Vec<_> = rounds.iter().map(|round| round.crates.join(" ")).collect();
    assert_eq!(
        crates,
        [
            "slipgate-abi xtask",
            "slipgate-guest",
            "slipgate-control",
            "slipgate-testbed",
            "slipgate-testbed",
            "slipgate-testbed",
            "slipgate-bench"
        ]
    );
    let threads: Vec<_> = rounds.iter().map(|round| round.threads).collect();
    assert_eq!(threads[..3], [None; 3]);
    assert_eq!(threads[4..], [Some(1); 3]);
}

#[test]
fn only_wanted_crates_are_tested() {
    let members = members();
    let wanted = ["slipgate-guest".to_owned()];
    let rounds = rounds(&members, &wanted).unwrap();
    assert_eq!(rounds.len(), 1);
    assert_eq!(rounds[0].crates, ["slipgate-guest"]);
}

#[test]
fn each_test_of_the_testbed_is_in_one_call() {
    let members = members();
    let wanted = [TESTBED.to_owned()];
    let rounds = rounds(&members, &wanted).unwrap();
    let chosen: Vec<_> = rounds.iter().flat_map(Round::chosen).collect();
    assert_eq!(
        chosen,
        [
            "--package=slipgate-testbed",
            "--test=e2e",
            "--package=slipgate-testbed",
            "--lib",
            "--bins",
            "--test=stress",
            "--test=another",
            "--package=slipgate-testbed",
            "--doc"
        ]
    );
}

#[test]
fn an_unknown_crate_is_named() {
    let why = rounds(&members(), &["slipgat".to_owned()])
        .unwrap_err()
        .to_string();
    assert!(
        why.contains("--package slipgat:") && why.contains("slipgate-abi"),
        "{why}"
    );
}
