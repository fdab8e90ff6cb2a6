//! What the processes give up: the engine before it reads the first frame, the VMM before it reads
//! the kernel, the broker once everything is in place.
//!
//! Engine and VMM handle what hostile guests send, so they keep only what they were handed:
//! descriptors. They change to a user of their own each ([`slipgate_control::users`]), drop every capability for good (bounding and ambient sets
//! included), can't be traced, dumped or outlive the broker, and then confine themselves to the
//! system calls of their loops ([`filter`], [`vmm`]): any other ends the process.
mod filter;
pub(crate) mod metrics;
mod rules;
pub(crate) mod vmm;

use std::io;

use nix::{
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::Signal,
    },
    unistd::{Gid, Pid, Uid, geteuid, getppid, setgroups, setresgid, setresuid},
};

/// Highest capability number tried; the kernel refuses what it does not know.
const LAST_CAPABILITY: libc::c_ulong = 63;
/// `_LINUX_CAPABILITY_VERSION_3`, <linux/capability.h>.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

/// A step of confinement that failed. The process does not run then.
#[derive(thiserror::Error, Debug)]
#[error("confining the process: {step}")]
pub(crate) struct SandboxError {
    step: &'static str,
    #[source]
    source: io::Error,
}

/// Descriptors that the engine may have.
const ENGINE_FILES: u64 = 65_536;

/// As many as the host lets it have, before it is confined.
pub(crate) fn engine_files() -> io::Result<u64> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(hard.min(ENGINE_FILES))
}

/// Confines the engine for good. `broker`: the parent, whose death ends us. `user`: what it is from
/// now on. `start_threads` starts the threads that it is to have: without privileges, and under the
/// same filters as soon as this returns. None can be started later.
pub(crate) fn enter<T>(
    broker: Pid,
    user: u32,
    start_threads: impl FnOnce() -> io::Result<T>,
) -> Result<T, SandboxError> {
    let filters = filter::compile()?;
    give_up_privileges(broker, user, ENGINE_FILES)?;
    let threads = start_threads().map_err(|source| SandboxError {
        step: "starting the threads that write files",
        source,
    })?;
    filters.apply()?;
    Ok(threads)
}

/// Leaves the calling process without privileges. `files`: how many descriptors it may have.
fn give_up_privileges(broker: Pid, user: u32, files: u64) -> Result<(), SandboxError> {
    prctl("no_new_privs", libc::PR_SET_NO_NEW_PRIVS, 1)?;
    limit_resources(files)?;
    drop_bounding_set(0)?;
    become_user(user)?;
    keep_capabilities(0)?;
    // After the change of user, which clears both.
    prctl("dumpable", libc::PR_SET_DUMPABLE, 0)?;
    prctl(
        "parent death signal",
        libc::PR_SET_PDEATHSIG,
        Signal::SIGKILL as libc::c_ulong,
    )?;
    if getppid() != broker {
        return Err(SandboxError {
            step: "the broker is gone already",
            source: io::ErrorKind::BrokenPipe.into(),
        });
    }
    Ok(())
}

/// What the broker needs while it serves: devices, their programs, routes and neighbours
/// (`CAP_NET_ADMIN`), a flow log to be opened again wherever it lies (`CAP_DAC_OVERRIDE`), the end of
/// processes that have users of their own (`CAP_KILL`), and others in their place, which give up what
/// they are started with (`CAP_SETGID`, `CAP_SETUID`, `CAP_SETPCAP`). Programs and maps are made
/// before, and what is made needs no `CAP_BPF`. Numbers from <linux/capability.h>.
const BROKER_KEEPS: [u32; 6] = [1, 5, 6, 7, 8, 12];

/// Gives up every capability that the broker does not need while it serves. It stays root to the
/// files it owns.
pub(crate) fn limit_broker() -> Result<(), SandboxError> {
    let set = |numbers: &[u32]| numbers.iter().fold(0u64, |set, n| set | 1 << n);
    let keep = set(&BROKER_KEEPS);
    prctl("no_new_privs", libc::PR_SET_NO_NEW_PRIVS, 1)?;
    drop_bounding_set(keep)?;
    keep_capabilities(keep)
}

fn limit_resources(files: u64) -> Result<(), SandboxError> {
    let limit = |step, resource, most| {
        let (_, hard) = getrlimit(resource).map_err(failed(step))?;
        let most = hard.min(most);
        setrlimit(resource, most, most).map_err(failed(step))
    };
    limit("RLIMIT_CORE", Resource::RLIMIT_CORE, 0)?;
    limit("RLIMIT_NOFILE", Resource::RLIMIT_NOFILE, files)?;
    limit("RLIMIT_MSGQUEUE", Resource::RLIMIT_MSGQUEUE, 0)?;
    limit("RLIMIT_STACK", Resource::RLIMIT_STACK, 8 << 20)
}

fn drop_bounding_set(keep: u64) -> Result<(), SandboxError> {
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

fn become_user(user: u32) -> Result<(), SandboxError> {
    if !geteuid().is_root() {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    setgroups(&[]).map_err(failed("supplementary groups"))?;
    setresgid(gid, gid, gid).map_err(failed("group"))?;
    setresuid(uid, uid, uid).map_err(failed("user"))
}

/// Leaves at most these capabilities, of those there are.
fn keep_capabilities(keep: u64) -> Result<(), SandboxError> {
    // version, pid (0: this thread); then effective, permitted, inheritable for each 32
    let header = [CAPABILITY_VERSION, 0];
    let mut sets = [0u32; 6];
    let failed = || SandboxError {
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

fn prctl(
    step: &'static str,
    option: libc::c_int,
    argument: libc::c_ulong,
) -> Result<(), SandboxError> {
    let zero: libc::c_ulong = 0;
    // SAFETY: the options used here take numbers only.
    let rc = unsafe { libc::prctl(option, argument, zero, zero, zero) };
    if rc < 0 {
        return Err(SandboxError {
            step,
            source: io::Error::last_os_error(),
        });
    }
    Ok(())
}

fn failed(step: &'static str) -> impl Fn(nix::Error) -> SandboxError {
    move |e| SandboxError {
        step,
        source: e.into(),
    }
}

#[cfg(test)]
#[path = "sandbox_test.rs"]
mod tests;
