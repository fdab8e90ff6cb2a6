//! The metrics process's seccomp filters: it takes connections, reads and writes them, talks to the
//! broker, and nothing else. It opens no file, makes no socket and reaches no map but by memory
//! that it has already, for reading.
use std::io;

use nix::unistd::Pid;
use seccompiler::SeccompAction;

use super::{
    SandboxError, give_up_privileges,
    rules::{
        BY_ITSELF, Compiled, Rules, broken, equal, masked, no_new_code, own_signals, program, rule,
    },
};

/// Descriptors that it may have: connections, and a few.
const FILES: u64 = 64;

/// What its loop needs beside [`BY_ITSELF`], whatever the arguments.
const ALWAYS: &[libc::c_long] = &[
    // connections, the channel, stderr
    libc::SYS_accept4,
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_close,
    // a large message, in a file of memory
    libc::SYS_lseek,
    libc::SYS_fstat,
    // waiting
    libc::SYS_ppoll,
];

/// Older forms that only this architecture has.
#[cfg(target_arch = "x86_64")]
const ALWAYS_HERE: &[libc::c_long] = &[libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const ALWAYS_HERE: &[libc::c_long] = &[];

/// Confines the calling process for good. `broker`: the parent, whose death ends us.
pub(crate) fn enter(broker: Pid) -> Result<(), SandboxError> {
    let list = allow_list()
        .and_then(|rules| program(rules, SeccompAction::KillProcess, SeccompAction::Allow));
    // A C library may open a file for reading on its own account, and does without.
    let no_open = program(
        Rules::from([(libc::SYS_openat, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EACCES as u32),
    );
    let filters = [no_open.map_err(broken)?, list.map_err(broken)?];
    give_up_privileges(broker, FILES)?;
    for filter in &filters {
        seccompiler::apply_filter_all_threads(filter).map_err(|e| SandboxError {
            step: "seccomp filter",
            source: io::Error::other(e),
        })?;
    }
    Ok(())
}

fn allow_list() -> Compiled<Rules> {
    let mut rules: Rules = BY_ITSELF
        .iter()
        .chain(ALWAYS)
        .chain(ALWAYS_HERE)
        .map(|&call| (call, Vec::new()))
        .collect();
    let writing = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_APPEND;
    let reading = rule([masked(2, writing as u64, 0)?])?;
    rules.insert(libc::SYS_openat, vec![reading]);
    let empty_path = libc::AT_EMPTY_PATH as u64;
    let open_file = rule([masked(2, empty_path, empty_path)?])?;
    rules.insert(libc::SYS_statx, vec![open_file]);
    // A debug build looks whether a descriptor is open before it closes it.
    let is_open = rule([equal(1, libc::F_GETFD as u64)?])?;
    rules.insert(libc::SYS_fcntl, vec![is_open]);
    let non_blocking = rule([equal(1, libc::FIONBIO)?])?;
    rules.insert(libc::SYS_ioctl, vec![non_blocking]);
    no_new_code(&mut rules)?;
    own_signals(&mut rules)?;
    Ok(rules)
}

#[cfg(test)]
#[path = "metrics_test.rs"]
mod tests;
