//! Confinement of the processes: of the engine before it reads the first frame, of the VMM before
//! it reads the kernel, and of the metrics process before it accepts a connection.
//!
//! Engine and VMM handle input of hostile guests, so they keep only the descriptors that they were
//! given. Each changes to a user of its own ([`slipgate_control::users`]), drops every capability
//! for good (bounding and ambient sets included), can't be traced, dumped or outlive the broker,
//! and then confines itself to the system calls of its loop ([`filter`], [`vmm`]): any other ends
//! the process.
mod filter;
#[cfg(target_arch = "x86_64")]
pub(crate) mod jail;
mod rules;
pub(crate) mod servers;
#[cfg(target_arch = "x86_64")]
pub(crate) mod vmm;

use std::io;

use nix::{
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::Signal,
    },
    unistd::{Gid, Pid, Uid, geteuid, getppid, setgroups, setresgid, setresuid},
};
use slipgate_broker::privileges::{ConfinementError, drop_bounding_set, keep_capabilities, prctl};

/// Descriptors that the engine may have.
const ENGINE_FILES: u64 = 65_536;

/// Returns the number of files that the engine may open: up to the host's hard limit, read before
/// it is confined.
pub(crate) fn engine_files() -> io::Result<u64> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(hard.min(ENGINE_FILES))
}

/// Confines the engine for good. `broker`: the parent, whose death ends this process. `user`: the
/// user that the process becomes. `is_userspace`: whether its sockets carry the guest's flows.
/// `start_threads` starts the engine's threads, and opens what the filters keep from being opened:
/// without privileges, and under the same filters as soon as this function returns. None can be
/// started later.
pub(crate) fn enter<T>(
    broker: Pid,
    user: u32,
    is_userspace: bool,
    start_threads: impl FnOnce() -> io::Result<T>,
) -> Result<T, ConfinementError> {
    let filters = filter::compile(is_userspace)?;
    give_up_privileges(broker, user, ENGINE_FILES)?;
    let threads = start_threads()
        .map_err(|source| ConfinementError::new("starting the threads that write files", source))?;
    filters.apply()?;
    Ok(threads)
}

/// Leaves the calling process without privileges. `files`: how many descriptors it may have.
fn give_up_privileges(broker: Pid, user: u32, files: u64) -> Result<(), ConfinementError> {
    prctl("no_new_privs", libc::PR_SET_NO_NEW_PRIVS, 1)?;
    limit_resources(files)?;
    drop_bounding_set(0)?;
    become_user(user)?;
    keep_capabilities(0)?;
    bind_to(broker)
}

/// Keeps other processes out, and this one from outliving the broker.
fn bind_to(broker: Pid) -> Result<(), ConfinementError> {
    // After the change of user, which clears both.
    prctl("dumpable", libc::PR_SET_DUMPABLE, 0)?;
    prctl(
        "parent death signal",
        libc::PR_SET_PDEATHSIG,
        Signal::SIGKILL as libc::c_ulong,
    )?;
    // Not for the VMM in a PID namespace of its own, where the parent is 0 before and after its end:
    // it notices that when it has read what was sent, or when it answers, and ends.
    if getppid() != broker {
        let gone = io::ErrorKind::BrokenPipe.into();
        return Err(ConfinementError::new("the broker is gone already", gone));
    }
    Ok(())
}

fn limit_resources(files: u64) -> Result<(), ConfinementError> {
    limit("RLIMIT_CORE", Resource::RLIMIT_CORE, 0)?;
    limit("RLIMIT_NOFILE", Resource::RLIMIT_NOFILE, files)?;
    limit("RLIMIT_MSGQUEUE", Resource::RLIMIT_MSGQUEUE, 0)?;
    limit("RLIMIT_STACK", Resource::RLIMIT_STACK, 8 << 20)
}

/// Lowers both limits of a resource to `most`, unless the hard one is lower.
fn limit(step: &'static str, resource: Resource, most: u64) -> Result<(), ConfinementError> {
    let (_, hard) = getrlimit(resource).map_err(failed(step))?;
    let most = hard.min(most);
    setrlimit(resource, most, most).map_err(failed(step))
}

/// Unless the process is not root, or root of a user namespace that has no other user.
fn become_user(user: u32) -> Result<(), ConfinementError> {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let has_others = map.split_whitespace().nth(2) != Some("1");
    if !geteuid().is_root() || !has_others {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    setgroups(&[]).map_err(failed("supplementary groups"))?;
    setresgid(gid, gid, gid).map_err(failed("group"))?;
    setresuid(uid, uid, uid).map_err(failed("user"))
}

fn failed(step: &'static str) -> impl Fn(nix::Error) -> ConfinementError {
    move |e| ConfinementError::new(step, e.into())
}

#[cfg(test)]
#[path = "sandbox_test.rs"]
mod tests;
