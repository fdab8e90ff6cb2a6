//! TCP connections: opening, how they fail, and closing in the background.

use alloc::{collections::VecDeque, vec::Vec};
use core::net::SocketAddrV4;

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

/// A connection that is opening or open.
#[derive(Debug)]
pub struct Connection {
    /// Its socket.
    pub handle: SocketHandle,
    /// Its local port.
    pub port: u16,
    /// When its SYN was queued.
    pub opened_ns: u64,
    /// When something last moved on it.
    pub moved_ns: u64,
    open: bool,
    unreachable: bool,
}

/// How a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The SYN is not answered yet.
    Opening,
    /// It has become open just now.
    Opened,
    /// It is open, or half closed.
    Open,
    /// It failed.
    Failed(Failure),
}

/// Why a connection can't be opened now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// All sockets are closing still.
    ForSocket,
    /// All ports are in use or in TIME-WAIT.
    ForPort,
}

/// Sockets for a CPU's connections: used again and again, each with its buffers.
pub struct Pool {
    /// Closed ones in front, behind them those in TIME-WAIT, the oldest first. There, they answer
    /// a FIN that comes twice until they are needed.
    free: VecDeque<SocketHandle>,
    closing: Vec<(SocketHandle, u16)>,
}

impl Pool {
    /// `count` sockets with buffers of such sizes.
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

    /// Begins a connection.
    pub fn open<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        server: SocketAddrV4,
    ) -> Result<Connection, Wait> {
        let handle = *self.free.front().ok_or(Wait::ForSocket)?;
        let now_ns = stack.now_ns();
        let port = stack.ports.take(now_ns).ok_or(Wait::ForPort)?;
        self.free.pop_front();
        let socket = stack
            .sockets
            .get_mut::<smoltcp::socket::tcp::Socket>(handle);
        socket.set_tsval_generator(Some(timestamp_ms));
        let remote = (*server.ip(), server.port());
        // It can't fail but for port 0 and the address 0.0.0.0; then the socket stays closed, and
        // the connection is seen as refused.
        let _ = socket.connect(stack.interface.context(), remote, port);
        Ok(Connection {
            handle,
            port,
            opened_ns: now_ns,
            moved_ns: now_ns,
            open: false,
            unreachable: false,
        })
    }

    /// Closes a connection that is over, in the background: after what is queued comes a FIN.
    pub fn close<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        connection: Connection,
    ) {
        stack.tcp(connection.handle).close();
        self.closing.push((connection.handle, connection.port));
    }

    /// Ends a connection that failed, by RST if there is still somebody to send it to.
    pub fn abort<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        connection: Connection,
    ) {
        stack.tcp(connection.handle).abort();
        self.closing.push((connection.handle, connection.port));
    }

    /// Takes back the sockets and ports of what is closed by now.
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

    /// Whether nothing is closing any more.
    pub fn is_quiet(&self) -> bool {
        self.closing.is_empty()
    }

    /// Removes all sockets; connections must be over.
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
    /// How it is. What opening took is recorded once, when it has become open.
    pub fn condition<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        took: &mut Histogram,
    ) -> Condition {
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

    fn why_closed(&self, now_ns: u64) -> Failure {
        // The stack's clock has microseconds.
        match now_ns.saturating_sub(self.moved_ns) + 1000 >= STALL_NS {
            true => Failure::TimedOut,
            false if self.open => Failure::Reset,
            false => Failure::Refused,
        }
    }
}

/// Tells the connections that are opening of the ICMP errors that came.
pub fn note_errors<'c, P: Platform, N: Nic>(
    stack: &mut Stack<'_, P, N>,
    server: SocketAddrV4,
    connections: impl IntoIterator<Item = &'c mut Connection>,
) {
    const TCP: u8 = 6;
    const UNREACHABLE: u8 = 3;
    let ours = |error: &IcmpError| {
        error.protocol == TCP && error.kind == UNREACHABLE && error.remote == server
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
