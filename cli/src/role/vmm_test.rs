use super::unless_stub;

#[test]
fn a_stub_is_no_guest_and_the_error_says_what_builds_one() {
    assert_eq!(unless_stub(b"ELF").unwrap(), b"ELF");
    let error = unless_stub(b"").unwrap_err().to_string();
    assert!(error.contains("`cargo xtask build`"), "{error}");
}
