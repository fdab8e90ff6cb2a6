//! Seccomp filters of the processes that serve clients: each takes connections, reads and writes
//! them, talks to the broker, and nothing else. It opens no file, makes no socket and reaches no
//! map but by memory that it has already, for reading.
use nix::unistd::Pid;
use slipgate_broker::privileges::ConfinementError;

use super::{
    give_up_privileges,
    rules::{CONNECTIONS, EPOLL, Filters, of_a_loop},
};

/// A process that serves clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Server {
    /// The process that answers Prometheus.
    Metrics,
    /// A process that answers clients of the API.
    Api,
}

/// Confines the calling process for good. `broker`: the parent, whose death ends this process.
/// `user`: the user that the process becomes.
pub(crate) fn enter(server: Server, broker: Pid, user: u32) -> Result<(), ConfinementError> {
    // Descriptors are connections, and a few; a client of the API may pass one more, and its event
    // loop is a library's.
    let (descriptors, more) = match server {
        Server::Metrics => (64, Vec::new()),
        Server::Api => (384, [EPOLL, &[libc::SYS_getsockopt]].concat()),
    };
    let always = CONNECTIONS.iter().chain(&more);
    let filters = Filters::compile(of_a_loop(always))?;
    give_up_privileges(broker, user, descriptors)?;
    filters.apply()
}

#[cfg(test)]
#[path = "servers_test.rs"]
mod tests;
