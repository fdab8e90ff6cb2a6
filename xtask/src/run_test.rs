use super::wants_bpf_log;

#[test]
fn logging_programs_are_built_for_who_asks_for_them() {
    let wants =
        |args: &[&str]| wants_bpf_log(&args.iter().map(|a| (*a).to_owned()).collect::<Vec<_>>());
    assert!(!wants(&[]));
    assert!(!wants(&["attach", "--tap", "tap0"]));
    assert!(wants(&["attach", "--tap", "tap0", "--bpf-log"]));
}
