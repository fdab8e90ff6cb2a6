use super::*;
use crate::testing::in_netns;

#[test]
fn everything_needed_is_found_by_trying() {
    in_netns("everything_needed_is_found_by_trying", || {
        for check in checks() {
            assert!(check.ok, "{check:?}");
            assert_eq!(check.remedy, None);
        }
        assert_eq!(best_hook(), Hook::Tcx);
    });
}

/// A trial fails if the kernel lacks the feature: no check can only succeed.
#[test]
fn an_unknown_helper_is_not_found() {
    in_netns("an_unknown_helper_is_not_found", || {
        let program = [
            set_register(1, 0),
            instruction(0x85, 0, 4_000),
            set_register(0, 0),
            EXIT,
        ];
        assert!(bpf::prog_load("", SCHED_CLS, 0, &program).is_err());
    });
}

#[test]
fn versions_are_read() {
    assert_eq!(version("6.18.44-cloud"), Some((6, 18)));
    assert_eq!(version("6.1"), Some((6, 1)));
    assert_eq!(version("6"), None);
    assert_eq!(version(""), None);
}

#[test]
fn a_missing_thing_comes_with_a_remedy() {
    let missing = check("x", false, "get it", Err(io::Error::other("no")));
    assert_eq!((missing.ok, missing.remedy), (false, Some("get it")));
}
