//! Dropping of privileges: the broker drops those that it does not need while it serves, the other
//! processes drop all.
use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Highest capability number tried; the kernel refuses unknown ones.
const LAST_CAPABILITY: libc::c_ulong = 63;
/// Version of the capability structures (`_LINUX_CAPABILITY_VERSION_3`).
const CAPABILITY_VERSION: u32 = 0x2008_0522;

/// A step of confinement that failed. The process does not run then.
#[derive(thiserror::Error, Debug)]
#[error("confining the process: {step}")]
pub struct ConfinementError {
    step: &'static str,
    #[source]
    source: io::Error,
}

impl ConfinementError {
    /// A step that failed.
    pub fn new(step: &'static str, source: io::Error) -> Self {
        Self { step, source }
    }
}

/// Raises the soft limit of open files to the hard one: each forward is a descriptor, and the usual
/// soft limit of 1,024 is for programs that use select(2).
///
/// # Errors
/// The kernel refuses.
pub fn raise_file_limit() -> nix::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
}

/// Capabilities that the broker needs while it serves: for devices, their programs, routes and
/// neighbours (`CAP_NET_ADMIN`), to reopen a flow log anywhere (`CAP_DAC_OVERRIDE`), to kill
/// processes that run as other users (`CAP_KILL`), and to start replacements, which drop privileges
/// (`CAP_SETGID`, `CAP_SETUID`, `CAP_SETPCAP`). Programs and maps are loaded before, and using
/// loaded ones needs no `CAP_BPF`. Numbers from <linux/capability.h>.
const BROKER_KEEPS: [u32; 6] = [1, 5, 6, 7, 8, 12];
/// Additional capability of a daemon: forwards that are added may use ports below 1024
/// (`CAP_NET_BIND_SERVICE`).
const DAEMON_KEEPS: u32 = 10;

/// Drops every capability that the broker does not need while it serves. As root it still owns its
/// files. `is_daemon`: whether forwards are added while it serves.
///
/// # Errors
/// The kernel refuses a step.
pub fn limit_broker(is_daemon: bool) -> Result<(), ConfinementError> {
    let set = |numbers: &[u32]| numbers.iter().fold(0u64, |set, n| set | 1 << n);
    let daemons = if is_daemon { 1 << DAEMON_KEEPS } else { 0 };
    let keep = set(&BROKER_KEEPS) | daemons;
    prctl("no_new_privs", libc::PR_SET_NO_NEW_PRIVS, 1)?;
    drop_bounding_set(keep)?;
    keep_capabilities(keep)
}

/// Removes all capabilities but these from the bounding set, and all from the ambient set.
///
/// # Errors
/// The kernel refuses.
pub fn drop_bounding_set(keep: u64) -> Result<(), ConfinementError> {
    for capability in (0..=LAST_CAPABILITY).filter(|n| keep & 1 << n == 0) {
        match prctl("capability bounding set", libc::PR_CAPBSET_DROP, capability) {
            Ok(()) => {}
            // Past the kernel's last one; or not ours to drop, and then no_new_privs must do.
            Err(e) if e.source.raw_os_error() == Some(libc::EINVAL) => break,
            Err(e) if e.source.raw_os_error() == Some(libc::EPERM) => break,
            Err(e) => return Err(e),
        }
    }
    prctl(
        "ambient capabilities",
        libc::PR_CAP_AMBIENT,
        libc::PR_CAP_AMBIENT_CLEAR_ALL as libc::c_ulong,
    )
}

/// Keeps at most these of the present capabilities.
///
/// # Errors
/// The kernel refuses.
pub fn keep_capabilities(keep: u64) -> Result<(), ConfinementError> {
    // version, pid (0: this thread); then effective, permitted, inheritable for each 32
    let header = [CAPABILITY_VERSION, 0];
    let mut sets = [0u32; 6];
    let failed = || ConfinementError {
        step: "capabilities",
        source: io::Error::last_os_error(),
    };
    // SAFETY: both point to memory of the size that version 3 has, alive during the call.
    if unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) } != 0 {
        return Err(failed());
    }
    for (half, sets) in sets.chunks_exact_mut(3).enumerate() {
        let permitted = sets[1] & (keep >> (32 * half)) as u32;
        sets.copy_from_slice(&[permitted, permitted, 0]);
    }
    // SAFETY: as above.
    if unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) } != 0 {
        return Err(failed());
    }
    Ok(())
}

/// Makes the calling thread another user's, without groups, and keeps at most these capabilities of
/// it. The rest of the process stays as it is. Only the capabilities change if the process is not
/// root, or is root of a user namespace that has no other user.
///
/// The real and the saved user stay the process's: by these the kernel decides who may send signals,
/// and one to a thread is one to the whole process. So other processes of `user`, which may be nobody,
/// can't stop it. What the thread may do, and whom others see at the end of its sockets, is the
/// effective user's. Against the thread's own code that is no barrier: it shares the process's memory.
///
/// # Errors
/// The kernel refuses a step.
pub fn limit_thread(user: u32, keep: u64) -> Result<(), ConfinementError> {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let has_others = has_several_users(&map);
    if nix::unistd::geteuid().is_root() && has_others {
        prctl("keeping capabilities", libc::PR_SET_KEEPCAPS, 1)?;
        let id = libc::c_long::from(user);
        // SAFETY: numbers only. The C library's functions would change all threads.
        let dumpable = unsafe { libc::prctl(libc::PR_GET_DUMPABLE) };
        for (step, call, arguments) in [
            ("supplementary groups", libc::SYS_setgroups, [0; 3]),
            ("group", libc::SYS_setresgid, [id; 3]),
            ("user", libc::SYS_setresuid, [-1, id, -1]),
        ] {
            let [first, second, third] = arguments;
            // SAFETY: numbers, and of setgroups an empty list.
            if unsafe { libc::syscall(call, first, second, third) } != 0 {
                let source = io::Error::last_os_error();
                return Err(ConfinementError { step, source });
            }
        }
        if dumpable == 1 {
            // The change of user has changed that of the process.
            prctl("dumpable", libc::PR_SET_DUMPABLE, 1)?;
        }
    }
    keep_capabilities(keep)
}

/// Whether a user namespace of this `uid_map` has more than one user.
fn has_several_users(map: &str) -> bool {
    let numbers: Vec<_> = map.split_whitespace().collect();
    // One line: the first user inside, the first outside, and how many.
    !matches!(numbers[..], [_, _, "1"])
}

/// Calls prctl(2) with an option that takes a number.
///
/// # Errors
/// The kernel refuses.
pub fn prctl(
    step: &'static str,
    option: libc::c_int,
    argument: libc::c_ulong,
) -> Result<(), ConfinementError> {
    let zero: libc::c_ulong = 0;
    // SAFETY: the options used here take numbers only.
    let rc = unsafe { libc::prctl(option, argument, zero, zero, zero) };
    if rc < 0 {
        return Err(ConfinementError {
            step,
            source: io::Error::last_os_error(),
        });
    }
    Ok(())
}

#[cfg(test)]
#[path = "privileges_test.rs"]
mod tests;
