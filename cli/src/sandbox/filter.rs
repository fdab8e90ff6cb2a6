//! The engine's seccomp filters.
//!
//! Two are stacked; the kernel takes the stricter answer. The first one is the list of what the
//! event loop needs, and kills the process for anything else. The second one answers EACCES to
//! opening a file for reading, which a C library may try on its own account (time zones, memory
//! tuning) and does without.
use std::{collections::BTreeMap, io};

use seccompiler::{BpfProgram, SeccompAction, SeccompRule};

use super::{
    SandboxError,
    rules::{
        BY_ITSELF, Compiled, Rules, broken, equal, masked, no_new_code, own_signals, program, rule,
    },
};

/// Commands of bpf(2): look up, update, delete, next key, look up a batch; nothing that loads,
/// attaches or makes. Numbers from `enum bpf_cmd`, <linux/bpf.h>.
const BPF_COMMANDS: [u64; 5] = [1, 2, 3, 4, 24];

/// What the event loop needs beside [`BY_ITSELF`], whatever the arguments.
const ALWAYS: &[libc::c_long] = &[
    // frames, sockets, the channel, the flow log
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_connect,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    libc::SYS_getsockname,
    libc::SYS_fstat,
    // waiting
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
];

/// Older forms that only this architecture has.
#[cfg(target_arch = "x86_64")]
const ALWAYS_HERE: &[libc::c_long] = &[libc::SYS_epoll_wait];
#[cfg(not(target_arch = "x86_64"))]
const ALWAYS_HERE: &[libc::c_long] = &[];

/// Compiled filters. Compiling allocates, applying does not.
#[derive(Debug)]
pub(super) struct Filters {
    list: BpfProgram,
    no_open: BpfProgram,
}

impl Filters {
    pub(super) fn compile() -> Result<Self, SandboxError> {
        let list = allow_list()
            .and_then(|rules| program(rules, SeccompAction::KillProcess, SeccompAction::Allow));
        let no_open = program(
            open_calls(|| Ok(Vec::new())).map_err(broken)?,
            SeccompAction::Allow,
            SeccompAction::Errno(libc::EACCES as u32),
        );
        Ok(Self {
            list: list.map_err(broken)?,
            no_open: no_open.map_err(broken)?,
        })
    }

    pub(super) fn apply(&self) -> Result<(), SandboxError> {
        for filter in [&self.no_open, &self.list] {
            seccompiler::apply_filter_all_threads(filter).map_err(|e| SandboxError {
                step: "seccomp filter",
                source: io::Error::other(e),
            })?;
        }
        Ok(())
    }
}

/// Calls that open a file by name and have their flags in a register.
fn open_calls(rules: impl Fn() -> Compiled<Vec<SeccompRule>>) -> Compiled<Rules> {
    Ok(BTreeMap::from([(libc::SYS_openat, rules()?)]))
}

fn allow_list() -> Compiled<Rules> {
    let mut rules: Rules = BY_ITSELF
        .iter()
        .chain(ALWAYS)
        .chain(ALWAYS_HERE)
        .map(|&call| (call, Vec::new()))
        .collect();
    let mut only = |call, alternatives: Vec<SeccompRule>| {
        rules.insert(call, alternatives);
    };

    let writing = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_APPEND;
    only(
        libc::SYS_openat,
        vec![rule([masked(2, writing as u64, 0)?])?],
    );

    // Metadata of an open file, not of a name.
    let empty_path = libc::AT_EMPTY_PATH as u64;
    only(
        libc::SYS_statx,
        vec![rule([masked(2, empty_path, empty_path)?])?],
    );
    only(
        libc::SYS_newfstatat,
        vec![rule([masked(3, empty_path, empty_path)?])?],
    );

    // UDP and TCP; no packet, raw, netlink, or other socket.
    let mut sockets = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        for kind in [libc::SOCK_DGRAM, libc::SOCK_STREAM] {
            sockets.push(rule([
                equal(0, family as u64)?,
                masked(1, 0xf, kind as u64)?,
                equal(2, 0)?,
            ])?);
        }
    }
    only(libc::SYS_socket, sockets);

    let commands = BPF_COMMANDS.iter().map(|&c| rule([equal(0, c)?]));
    only(libc::SYS_bpf, commands.collect::<Compiled<_>>()?);

    // A debug build looks whether a descriptor is open before it closes it.
    let is_open = libc::F_GETFD as u64;
    only(libc::SYS_fcntl, vec![rule([equal(1, is_open)?])?]);
    only(libc::SYS_ioctl, vec![rule([equal(1, libc::FIONBIO)?])?]);

    no_new_code(&mut rules)?;
    own_signals(&mut rules)?;
    Ok(rules)
}
