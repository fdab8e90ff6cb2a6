//! Whether the VMM of `slipgate run` can have namespaces of its own.
use std::{fs, path::Path};

use nix::{
    sched::{CloneFlags, unshare},
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, fork, geteuid},
};

use super::{
    Finding, State,
    user_mode::{SETTINGS, USER_NAMESPACES},
};

const WHAT: &str = "jail";
/// Those of the VMM but for the user namespace.
const NAMESPACES: CloneFlags = CloneFlags::CLONE_NEWNS
    .union(CloneFlags::CLONE_NEWPID)
    .union(CloneFlags::CLONE_NEWNET)
    .union(CloneFlags::CLONE_NEWIPC)
    .union(CloneFlags::CLONE_NEWUTS)
    .union(CloneFlags::CLONE_NEWCGROUP);

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
    let forbidden = USER_NAMESPACES.iter().find(|(setting, forbids, _)| {
        // Root may make them with these two.
        let binds = !is_root || setting.starts_with("user/");
        let value = fs::read_to_string(settings.join(setting)).unwrap_or_default();
        binds && value.trim().parse() == Ok(*forbids)
    });
    let note = |found: &str| {
        let remedy = match forbidden {
            Some((_, _, remedy)) => format!("for `slipgate run`: {remedy}"),
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
    let (none, flags) = (std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE);
    // SAFETY: the path is terminated, and these flags take no other text.
    unsafe { libc::mount(none, c"/".as_ptr(), none, flags, none.cast()) == 0 }
}

#[cfg(test)]
#[path = "jail_test.rs"]
mod tests;
