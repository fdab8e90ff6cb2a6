//! Whether the VMM of `slipgate run` can have namespaces of its own.
use std::path::Path;

use nix::{
    sched::{CloneFlags, unshare},
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, fork, geteuid},
};

use super::{
    Finding, State,
    user_mode::{SETTINGS, forbidden_by},
};
use crate::sandbox::jail;

const WHAT: &str = "jail";
/// Those of the VMM but for the user namespace: the one that it is made in, and those that it enters.
const NAMESPACES: CloneFlags = jail::NAMESPACES.union(CloneFlags::CLONE_NEWPID);

/// Reports by trying, in a process of its own.
pub(super) fn found() -> Finding {
    let is_root = geteuid().is_root();
    of(
        can_enter(NAMESPACES | CloneFlags::CLONE_NEWUSER),
        is_root && can_enter(NAMESPACES),
        is_root,
        Path::new(SETTINGS),
    )
}

/// `with_user`: all namespaces can be made; `without_user`: all but the user namespace.
fn of(with_user: bool, without_user: bool, is_root: bool, settings: &Path) -> Finding {
    // Root may make them whatever the other two are.
    let binds = |setting: &str| !is_root || setting.starts_with("user/");
    let forbidden = forbidden_by(settings, binds);
    let note = |found: &str| {
        let remedy = match forbidden {
            Some((_, remedy)) => format!("for `slipgate run`: {remedy}"),
            None => {
                "for `slipgate run`: permit it namespaces, in a container by CAP_SYS_ADMIN and \
                     a seccomp profile with unshare and mount"
                    .to_owned()
            }
        };
        Finding::ok(WHAT, found).with(State::Note, remedy)
    };
    match (with_user && forbidden.is_none(), without_user) {
        (true, _) => Finding::ok(WHAT, "the VMM has namespaces and a root of its own"),
        (false, true) => note("the VMM has all namespaces but a user namespace"),
        (false, false) => note(
            "the VMM has no namespaces of its own: its user, its capabilities and its system calls \
             are confined all the same",
        ),
    }
}

fn can_enter(namespaces: CloneFlags) -> bool {
    // SAFETY: the child makes system calls, and ends.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            let entered = unshare(namespaces).is_ok() && can_mount();
            let refused = i32::from(!entered);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(refused) }
        }
        Ok(ForkResult::Parent { child }) => {
            matches!(waitpid(child, None), Ok(WaitStatus::Exited(_, 0)))
        }
        Err(_) => false,
    }
}

/// Whether this process may change its mounts, which AppArmor's profiles of containers deny. It is
/// in a mount namespace of its own.
fn can_mount() -> bool {
    jail::set_mounts_apart().is_ok()
}

#[cfg(test)]
#[path = "jail_test.rs"]
mod tests;
