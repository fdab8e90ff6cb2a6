use super::{compiled_together, rounds};

const MEMBERS: [&str; 6] = [
    "slipgate-abi",
    "slipgate-guest",
    "slipgate-control",
    "slipgate-bench",
    "xtask",
    "slipgate-testbed",
];

#[test]
fn quick_crates_go_first_and_together() {
    assert_eq!(
        rounds(&MEMBERS, &[]).unwrap(),
        [
            vec!["slipgate-abi", "xtask"],
            vec!["slipgate-guest"],
            vec!["slipgate-control"],
            vec!["slipgate-testbed"],
            vec!["slipgate-bench"]
        ]
    );
}

#[test]
fn only_wanted_crates_are_tested() {
    let wanted = ["slipgate-testbed".to_owned()];
    assert_eq!(
        rounds(&MEMBERS, &wanted).unwrap(),
        [vec!["slipgate-testbed"]]
    );
}

#[test]
fn an_unknown_crate_is_named() {
    let why = rounds(&MEMBERS, &["slipgat".to_owned()])
        .unwrap_err()
        .to_string();
    assert!(
        why.contains("--package slipgat:") && why.contains("slipgate-abi"),
        "{why}"
    );
}

#[test]
fn all_but_the_guest_are_compiled_by_one_call() {
    assert_eq!(
        compiled_together(&[
            "slipgate-abi",
            "slipgate-guest",
            "xtask",
            "slipgate-testbed"
        ]),
        [
            vec!["slipgate-abi", "xtask", "slipgate-testbed"],
            vec!["slipgate-guest"]
        ]
    );
    assert_eq!(compiled_together(&["xtask"]), [["xtask"]]);
}
