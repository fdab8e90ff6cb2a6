//! The engine's seccomp filters: what its event loop needs.
use seccompiler::SeccompRule;
use slipgate_broker::privileges::ConfinementError;

use super::rules::{Compiled, Filters, Rules, equal, masked, of_a_loop, rule};

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

pub(super) fn compile() -> Result<Filters, ConfinementError> {
    Filters::compile(allow_list())
}

fn allow_list() -> Compiled<Rules> {
    let mut rules = of_a_loop(ALWAYS.iter().chain(ALWAYS_HERE))?;
    let mut only = |call, alternatives: Vec<SeccompRule>| {
        rules.insert(call, alternatives);
    };

    let empty_path = libc::AT_EMPTY_PATH as u64;
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

    Ok(rules)
}
