//! The API process's seccomp filters: it takes connections, reads and writes them, talks to the
//! broker, and nothing else. It opens no file, makes no socket and reaches no map but by memory
//! that it has already, for reading.
use nix::unistd::Pid;
use slipgate_broker::privileges::ConfinementError;

use super::{
    give_up_privileges,
    rules::{Filters, of_a_loop},
};

/// Descriptors that it may have: connections, and a few.
const FILES: u64 = 256;

/// System calls that the event loop needs besides [`BY_ITSELF`](super::rules::BY_ITSELF), with any
/// arguments.
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
    libc::SYS_getsockopt,
    libc::SYS_close,
    // a large message, in a file of memory
    libc::SYS_lseek,
    libc::SYS_fstat,
    // waiting
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
];

/// Older forms that only this architecture has.
#[cfg(target_arch = "x86_64")]
const ALWAYS_HERE: &[libc::c_long] = &[libc::SYS_epoll_wait];
#[cfg(not(target_arch = "x86_64"))]
const ALWAYS_HERE: &[libc::c_long] = &[];

/// Confines the calling process for good. `broker`: the parent, whose death ends this process.
/// `user`: the user that the process becomes.
pub(crate) fn enter(broker: Pid, user: u32) -> Result<(), ConfinementError> {
    let filters = Filters::compile(of_a_loop(ALWAYS.iter().chain(ALWAYS_HERE)))?;
    give_up_privileges(broker, user, FILES)?;
    filters.apply()
}

#[cfg(test)]
#[path = "api_test.rs"]
mod tests;
