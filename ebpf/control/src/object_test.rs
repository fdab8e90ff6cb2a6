use super::*;

#[test]
fn a_stub_is_refused_and_the_error_says_what_builds_the_object() {
    assert_eq!(unless_stub("slipgate.o", b"ELF").unwrap(), b"ELF");
    let error = unless_stub("slipgate.o", b"").unwrap_err().to_string();
    assert!(error.contains("slipgate.o"), "{error}");
    assert!(error.contains("`cargo xtask build`"), "{error}");
}
