//! Forked children, as in the tests of the other sandboxes, enter the jail.
use nix::{
    sys::wait::WaitStatus,
    unistd::{setresgid, setresuid},
};
use slipgate_testbed::require_root_and_tun;

use super::{super::tests::confined_by, *};

/// Enters a user namespace in which none can be made.
fn without_user_namespaces() -> bool {
    unshare(CloneFlags::CLONE_NEWUSER).is_ok()
        && fs::write("/proc/self/uid_map", "0 0 1").is_ok()
        && fs::write("/proc/self/setgroups", "deny").is_ok()
        && fs::write("/proc/self/gid_map", "0 0 1").is_ok()
        && setresgid(Gid::from_raw(0), Gid::from_raw(0), Gid::from_raw(0)).is_ok()
        && setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0)).is_ok()
        && fs::write("/proc/sys/user/max_user_namespaces", "0").is_ok()
}

fn has_empty_root() -> bool {
    fs::read_dir("/").is_ok_and(|entries| entries.count() == 0)
}

#[track_caller]
fn assert_passes(prepare: fn() -> bool, call: impl FnOnce() -> bool) {
    let end = confined_by(|_| prepare(), call);
    assert!(matches!(end, WaitStatus::Exited(_, 0)), "{end:?}");
}

#[test]
fn a_missing_user_namespace_is_an_error_and_the_others_are_entered() {
    require_root_and_tun!();
    assert_passes(without_user_namespaces, || {
        let refused = enter().err().map(|e| e.to_string());
        refused.is_some_and(|e| e.contains("a user namespace")) && has_empty_root()
    });
    assert_passes(|| true, || enter().is_ok() && has_empty_root());
}
