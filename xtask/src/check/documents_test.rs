use super::*;

fn known() -> Tests {
    let at = |path: &str| vec![path.to_owned()];
    Tests::from([
        ("a_guest_ends".to_owned(), at("tests/tests/e2e/ends.rs")),
        (
            "a_flow_ends".to_owned(),
            at("userspace-nat/src/event_loop/tests/ends.rs"),
        ),
        (
            "rfc1_one_is_two".to_owned(),
            at("userspace-nat/src/one_test.rs"),
        ),
    ])
}

#[track_caller]
fn assert_wrong(document: &str, expected: &[(usize, &str)]) {
    let wrong = wrong_in(document, &known());
    let wrong: Vec<_> = wrong
        .iter()
        .map(|(line, what)| (*line, what.as_str()))
        .collect();
    assert_eq!(wrong, expected, "{document}");
}

#[test]
fn what_is_there_as_it_is_marked_is_right() {
    assert_wrong(
        "`a_guest_ends` (X), `a_flow_ends`, `rfc1_one_is_two` (E, U)",
        &[],
    );
    assert_wrong(
        "shown by `a_guest_ends` and `a_guest_ends` (X; also in words)",
        &[],
    );
    assert_wrong(
        "`rfc1_…` (U); `some_flag` is none, nor is `other_flag` (see there)",
        &[],
    );
    assert_wrong(
        "| what | shown by |\n| --- | --- |\n| it | `a_flow_ends` (E); fuzz target `dns_proxy` |",
        &[],
    );
}

#[test]
fn a_test_of_another_tier_is_named() {
    let there = "`a_flow_ends` (X) is in userspace-nat/src/event_loop/tests/ends.rs";
    assert_wrong(
        "all is well\n`a_guest_ends`, `a_flow_ends` (X)",
        &[(2, there)],
    );
    let beside = "`a_flow_ends` (U) is in userspace-nat/src/event_loop/tests/ends.rs";
    assert_wrong("`a_flow_ends` (U)", &[(1, beside)]);
}

#[test]
fn a_test_that_is_none_is_named() {
    assert_wrong(
        "`a_guest_end` (X)",
        &[(1, "there is no test `a_guest_end`")],
    );
    let table =
        "| promise | test |\n| --- | --- |\n| it_is_so | `never_written` |\n\n`elsewhere_none`";
    assert_wrong(table, &[(3, "there is no test `never_written`")]);
    let unknown = "`a_flow_ends` is marked Z, which xtask/src/check/documents.rs does not know";
    assert_wrong("`a_flow_ends` (Z)", &[(1, unknown)]);
}

#[test]
fn tests_are_found_in_a_source() {
    let source =
        "fn helper() {}\n#[test]\n#[ignore]\nfn one() {}\n  #[test]\n  fn two(x in 0..1) {}\n";
    assert_eq!(tests_in(source), ["one", "two"]);
    let matrix = "use a;\n\nmatrix! {\n    three: [hybrid_ipv4],\n        without [user_ipv4]: \"no\";\n    \
                  four: [hybrid_ipv4];\n}\n\nfn three() {}\n";
    assert_eq!(tests_in(matrix), ["three", "four"]);
}

#[test]
fn sources_are_found_in_a_document() {
    let document = "see `a/b.rs`, `c.rs` and `x/y.md`\n\n`d/e_f.rs` says `g/{h,i}.rs`";
    assert_eq!(
        sources_in(document).collect::<Vec<_>>(),
        [(1, "a/b.rs"), (3, "d/e_f.rs")]
    );
}

#[test]
fn the_documents_of_this_checkout_name_what_is_there() {
    check(&Workspace::find().unwrap()).unwrap();
}
