//! TCP connections: opening, failures, and closing in the background.

use alloc::{collections::VecDeque, vec::Vec};
use core::net::SocketAddr;

use smoltcp::{iface::SocketHandle, socket::tcp::State};

use super::Failure;
use crate::{
    histogram::Histogram,
    net::{
        Stack,
        ports::TIME_WAIT_NS,
        stack::{STALL_NS, timestamp_ms},
        steering::IcmpError,
    },
    platform::{Nic, Platform},
};

/// Connection that is opening or open.
#[derive(Debug)]
pub struct Connection {
    /// Handle of the connection's socket.
    pub handle: SocketHandle,
    /// Local port of the connection.
    pub port: u16,
    /// Time at which the SYN was queued, ns.
    pub opened_ns: u64,
    /// Time of the last progress, ns.
    pub moved_ns: u64,
    /// Times of the last look and of the one before it, ns.
    looked_ns: u64,
    looked_before_ns: u64,
    /// Time after which the last progress happened, ns: that of the look before it was noticed.
    moved_after_ns: u64,
    open: bool,
    unreachable: bool,
}

/// Condition of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The SYN is not answered yet.
    Opening,
    /// The connection has just become open.
    Opened,
    /// The connection is open, or half closed.
    Open,
    /// The connection failed, for this reason.
    Failed(Failure),
}

/// Reason why a connection can't be opened now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// All sockets are still closing.
    ForSocket,
    /// All ports are in use or in TIME-WAIT.
    ForPort,
}

/// Sockets for a CPU's connections. They are reused, with their buffers.
pub struct Pool {
    /// Closed sockets first, then those in TIME-WAIT, the oldest first. In TIME-WAIT they answer a
    /// repeated FIN until they are needed.
    free: VecDeque<SocketHandle>,
    closing: Vec<(SocketHandle, u16)>,
}

impl Pool {
    /// Returns a pool of `count` sockets with these buffer sizes.
    pub fn new<P: Platform, N: Nic>(
        stack: &mut Stack<'_, P, N>,
        count: usize,
        receive_bytes: usize,
        send_bytes: usize,
    ) -> Self {
        Pool {
            free: (0..count)
                .map(|_| stack.add_tcp(receive_bytes, send_bytes))
                .collect(),
            closing: Vec::with_capacity(count),
        }
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// No socket or no port is free.
    pub fn open<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        server: SocketAddr,
    ) -> Result<Connection, Wait> {
        let handle = *self.free.front().ok_or(Wait::ForSocket)?;
        let now_ns = stack.now_ns();
        let port = stack.ports.take(now_ns).ok_or(Wait::ForPort)?;
        self.free.pop_front();
        let socket = stack
            .sockets
            .get_mut::<smoltcp::socket::tcp::Socket>(handle);
        socket.set_tsval_generator(Some(timestamp_ms));
        // The call fails only for port 0 and the addresses 0.0.0.0 and ::. The socket stays closed then, and
        // the connection counts as refused.
        let _ = socket.connect(stack.interface.context(), server, port);
        Ok(Connection {
            handle,
            port,
            opened_ns: now_ns,
            moved_ns: now_ns,
            looked_ns: now_ns,
            looked_before_ns: now_ns,
            moved_after_ns: now_ns,
            open: false,
            unreachable: false,
        })
    }

    /// Closes a finished connection in the background: a FIN follows the queued data.
    pub fn close<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        connection: Connection,
    ) {
        stack.tcp(connection.handle).close();
        self.closing.push((connection.handle, connection.port));
    }

    /// Aborts a failed connection, with a RST if the peer still has the connection.
    pub fn abort<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        connection: Connection,
    ) {
        stack.tcp(connection.handle).abort();
        self.closing.push((connection.handle, connection.port));
    }

    /// Takes back the sockets and ports of connections that are closed by now.
    pub fn reap<P: Platform, N: Nic>(&mut self, stack: &mut Stack<'_, P, N>) {
        let mut at = 0;
        while let Some((handle, port)) = self.closing.get(at).copied() {
            let socket = stack.tcp(handle);
            match socket.state() {
                // An aborted one has its RST to send first.
                State::Closed if socket.remote_endpoint().is_none() => {
                    self.free.push_front(handle);
                    stack.ports.give_back(port, 0);
                }
                State::TimeWait => {
                    self.free.push_back(handle);
                    let free_at_ns = stack.now_ns() + TIME_WAIT_NS;
                    stack.ports.give_back(port, free_at_ns);
                }
                _ => {
                    at += 1;
                    continue;
                }
            }
            self.closing.swap_remove(at);
        }
    }

    /// Returns whether no connection is closing any more.
    pub fn is_quiet(&self) -> bool {
        self.closing.is_empty()
    }

    /// Removes all sockets. All connections must be finished.
    pub fn remove<P: Platform, N: Nic>(self, stack: &mut Stack<'_, P, N>) {
        let rest_until_ns = stack.now_ns() + TIME_WAIT_NS;
        for (handle, port) in self.closing {
            stack.sockets.remove(handle);
            stack.ports.give_back(port, rest_until_ns);
        }
        for handle in self.free {
            stack.sockets.remove(handle);
        }
    }
}

impl Connection {
    /// Returns the connection's condition. The time to open is recorded in `took` once, when the
    /// connection becomes open.
    pub fn condition<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        took: &mut Histogram,
    ) -> Condition {
        self.look(stack.now_ns());
        let state = stack.tcp(self.handle).state();
        match state {
            _ if self.unreachable => Condition::Failed(Failure::Unreachable),
            State::SynSent | State::SynReceived => Condition::Opening,
            State::Closed => Condition::Failed(self.why_closed(stack.now_ns())),
            _ if self.open => Condition::Open,
            _ => {
                self.open = true;
                self.moved_ns = stack.now_ns();
                took.record(self.moved_ns - self.opened_ns);
                Condition::Opened
            }
        }
    }

    fn look(&mut self, now_ns: u64) {
        if self.moved_ns >= self.looked_ns {
            self.moved_after_ns = self.looked_before_ns;
        }
        self.looked_before_ns = self.looked_ns;
        self.looked_ns = now_ns;
    }

    /// A socket does not say whether it timed out or was reset. It counts its time from the last packet,
    /// which came at some time between two looks.
    fn why_closed(&self, now_ns: u64) -> Failure {
        // The stack's clock has microseconds.
        match now_ns.saturating_sub(self.moved_after_ns) + 1000 >= STALL_NS {
            true => Failure::TimedOut,
            false if self.open => Failure::Reset,
            false => Failure::Refused,
        }
    }
}

/// Marks the opening connections that received ICMP errors.
pub fn note_errors<'c, P: Platform, N: Nic>(
    stack: &mut Stack<'_, P, N>,
    server: SocketAddr,
    connections: impl IntoIterator<Item = &'c mut Connection>,
) {
    const TCP: u8 = 6;
    let ours = |error: &IcmpError| {
        error.protocol == TCP && error.is_unreachable() && error.remote == server
    };
    let errors = stack.device.take_errors().filter(ours);
    // Without an error there is no allocation.
    let ports: Vec<u16> = errors.map(|error| error.port).collect();
    if ports.is_empty() {
        return;
    }
    for connection in connections {
        connection.unreachable |= !connection.open && ports.contains(&connection.port);
    }
}

#[cfg(test)]
#[path = "connection_test.rs"]
mod tests;
