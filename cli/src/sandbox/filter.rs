//! The engine's seccomp filters: the system calls of its event loop.
use seccompiler::SeccompRule;
use slipgate_broker::privileges::ConfinementError;

use super::rules::{
    CONNECTIONS, Compiled, EPOLL, Filters, Rules, equal, masked, of_a_loop, open_file, rule,
};

/// Commands of bpf(2): look up, update, delete, next key, look up a batch, delete a batch; nothing
/// that loads, attaches or makes. Numbers from `enum bpf_cmd`, <linux/bpf.h>.
const BPF_COMMANDS: [u64; 6] = [1, 2, 3, 4, 24, 27];

/// Calls besides [`CONNECTIONS`] and [`EPOLL`], with any arguments.
const MORE: &[libc::c_long] = &[
    libc::SYS_connect,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    libc::SYS_getsockname,
    libc::SYS_epoll_create1,
];

/// `is_userspace`: of an engine whose sockets carry the guest's flows.
pub(super) fn compile(is_userspace: bool) -> Result<Filters, ConfinementError> {
    Filters::compile(allow_list(is_userspace))
}

fn allow_list(is_userspace: bool) -> Compiled<Rules> {
    let mut rules = of_a_loop(CONNECTIONS.iter().chain(EPOLL).chain(MORE))?;
    let mut only = |call, alternatives: Vec<SeccompRule>| {
        rules.insert(call, alternatives);
    };

    only(libc::SYS_newfstatat, open_file(3)?);
    // As in every loop, and how much a connection's queues hold.
    only(
        libc::SYS_ioctl,
        vec![
            rule([equal(1, libc::FIONBIO)?])?,
            rule([equal(1, libc::TIOCOUTQ)?])?,
            rule([equal(1, libc::TIOCINQ)?])?,
        ],
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
    if is_userspace {
        // Ping sockets, by which echo requests go.
        for (family, icmp) in [
            (libc::AF_INET, libc::IPPROTO_ICMP),
            (libc::AF_INET6, libc::IPPROTO_ICMPV6),
        ] {
            sockets.push(rule([
                equal(0, family as u64)?,
                masked(1, 0xf, libc::SOCK_DGRAM as u64)?,
                equal(2, icmp as u64)?,
            ])?);
        }
        only(libc::SYS_bind, Vec::new());
        // Many datagrams of a flow's socket at once.
        only(libc::SYS_recvmmsg, Vec::new());
        // Whether a file of memory that slipgate's own VMM passes keeps its length.
        // And how much a pipe between two sockets takes.
        let commands = [libc::F_GETFD, libc::F_GET_SEALS, libc::F_SETPIPE_SZ]
            .map(|c| rule([equal(1, c as u64)?]));
        only(
            libc::SYS_fcntl,
            commands.into_iter().collect::<Compiled<_>>()?,
        );
        // Bytes between a client of a forward and a socket of a command's namespace.
        only(libc::SYS_pipe2, Vec::new());
        only(libc::SYS_splice, Vec::new());
    }
    only(libc::SYS_socket, sockets);
    if is_userspace {
        // Its maps are memory of its own.
        return Ok(rules);
    }

    let commands = BPF_COMMANDS.iter().map(|&c| rule([equal(0, c)?]));
    only(libc::SYS_bpf, commands.collect::<Compiled<_>>()?);

    Ok(rules)
}
