//! Forked children, as in the tests of the other sandboxes, enter the jail.
use std::collections::BTreeMap;

use nix::{
    sys::wait::WaitStatus,
    unistd::{setresgid, setresuid},
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
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

/// As on a host whose root is an initial RAM file system.
fn without_pivot_root() -> bool {
    let refused = SeccompAction::Errno(libc::EINVAL as u32);
    let rules = BTreeMap::from([(libc::SYS_pivot_root, Vec::new())]);
    let filter = TargetArch::try_from(std::env::consts::ARCH)
        .and_then(|arch| SeccompFilter::new(rules, SeccompAction::Allow, refused, arch))
        .and_then(BpfProgram::try_from);
    filter.is_ok_and(|filter| seccompiler::apply_filter(&filter).is_ok())
}

/// The usual way out of a root that is but a directory of another one: the process takes a root below,
/// and goes upwards from where it was. Whether there is nothing but what it has made itself.
fn finds_nothing_above() -> bool {
    const BELOW: &str = "below";
    let writable = libc::MS_REMOUNT | libc::MS_BIND;
    let is_below = mount(None, c"/", writable, None).is_ok()
        && fs::create_dir(format!("/{BELOW}")).is_ok()
        && nix::unistd::chroot(format!("/{BELOW}").as_str()).is_ok();
    let goes_up = || (0..64).all(|_| nix::unistd::chdir("..").is_ok());
    let names = || {
        let names = fs::read_dir("/")
            .ok()?
            .map(|entry| Some(entry.ok()?.file_name()));
        names.collect::<Option<Vec<_>>>()
    };
    is_below
        && goes_up()
        && nix::unistd::chroot(".").is_ok()
        && names().is_some_and(|names| names == [BELOW])
}

#[test]
fn nothing_lies_above_the_root_whether_the_old_one_is_taken_away_or_covered() {
    require_root_and_tun!();
    let hosts: [fn() -> bool; 2] = [|| true, without_pivot_root];
    for prepare in hosts {
        assert_passes(prepare, || {
            enter().is_ok() && has_empty_root() && finds_nothing_above()
        });
    }
}
