use super::{Count, Summary};

fn read(output: &str) -> Summary {
    let mut summary = Summary::default();
    output.lines().for_each(|line| summary.read_line(line));
    summary
}

fn count(passed: u32, failed: u32, skipped: u32) -> Count {
    Count {
        passed,
        failed,
        skipped,
    }
}

const UNIT: &str = "\
    Finished `test` profile [unoptimized + debuginfo] target(s) in 0.03s
     Running unittests src/lib.rs (target/debug/deps/slipgate_abi-0cdb5e1c4e2b3f10)

running 3 tests
test checksum::tests::odd ... ok
test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.25s
";

const END_TO_END: &str = "     Running tests/attach.rs (/t/debug/deps/attach-93b1f9a8f5c1e0aa)
test two_guests ... skipped: two_guests: no /dev/net/tun
ok
skipped: three_guests: no bpffs
test result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 3.50s
---- adopts_after_kill stdout ----
";

#[test]
fn adds_up_suites() {
    let summary = read(&format!("{UNIT}{END_TO_END}"));
    assert_eq!(summary.total(), count(3 + 2, 1, 1 + 2));
}

#[test]
fn the_report_names_suites_skips_and_failures_and_ends_with_the_sums() {
    let report = read(&format!("{UNIT}{END_TO_END}")).to_string();
    let expected = "\
suite                      passed  failed  skipped  seconds
slipgate_abi (src/lib.rs)       3       0        1     0.25
tests/attach.rs                 2       1        2     3.50
skipped: two_guests: no /dev/net/tun
skipped: three_guests: no bpffs
failed: tests/attach.rs: adopts_after_kill
5 passed, 1 failed, 3 skipped";
    assert_eq!(report, expected);
}

#[test]
fn tests_of_programs_that_nobody_named_are_listed_and_not_counted() {
    let line = "left out: a_guest: set THE_VARIABLE to its binary";
    let summary = read(&END_TO_END.replace("skipped: three_guests: no bpffs", line));
    assert_eq!(summary.total(), count(2, 1, 1));
    let report = summary.to_string();
    assert!(report.lines().any(|shown| shown == line), "{report}");
}

#[test]
fn a_suite_without_result_has_crashed() {
    let crashed = "     Running tests/attach.rs (target/debug/deps/attach-93b1f9a8f5c1e0aa)
running 2 tests
error: test failed, to rerun pass `-p slipgate-testbed --test attach`";
    let summary = read(&format!("{crashed}\n{UNIT}"));
    assert_eq!(summary.total(), count(3, 1, 1));
    assert!(summary.to_string().contains("0.00  crashed\n"));
}

#[test]
fn doc_tests_may_report_more_than_once() {
    let summary = read(
        "   Doc-tests userspace_nat
test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.20s",
    );
    assert_eq!(summary.total(), count(3, 0, 0));
    assert!(summary.to_string().contains("userspace_nat (doc)"));
}

#[test]
fn empty_suites_are_not_listed() {
    let summary = read(
        "   Doc-tests xtask
test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
    );
    assert_eq!(summary.to_string().lines().count(), 2);
}

#[test]
fn prose_about_skipping_is_no_skip() {
    let summary = read(&format!(
        "{UNIT}the rest was skipped: see above\nskipped: nothing"
    ));
    assert_eq!(summary.total(), count(3, 0, 1));
}

#[test]
fn suites_not_run_by_cargo_count_too() {
    let mut summary = read(UNIT);
    summary.add("fuzz dns", true, 5.0);
    summary.add("fuzz engine", false, 1.5);
    assert_eq!(summary.total(), count(3 + 1, 1, 1));
    assert!(
        summary
            .to_string()
            .contains("fuzz engine                     0       1        0     1.50\n")
    );
}

#[test]
fn measurements_and_children_are_no_tests_of_a_run() {
    let run = |reason| {
        read(&format!(
            "     Running unittests src/lib.rs (target/debug/deps/a-0123456789abcdef)
test cost ... ignored, {reason}
test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.10s"
        ))
    };
    assert_eq!(run("a measurement").total(), count(1, 0, 0));
    assert_eq!(run("the child of another").total(), count(1, 0, 0));
    assert_eq!(run("of a release: dist").total(), count(1, 0, 0));
    assert_eq!(run("flaky").total(), count(1, 0, 1));
}
