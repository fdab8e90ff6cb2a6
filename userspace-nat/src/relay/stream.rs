//! A forwarded TCP connection between a socket of the host and the guest.
//!
//! # Theory of operation
//! The kernel accepts the host's client before the connection to the guest is opened, so the client
//! sees a reset if the guest refuses or stays silent. From then on each [`Stream::drive`] copies
//! available data directly between the socket and smoltcp's buffers. There are no other buffers:
//! when the guest is slow its window closes, the host's socket is no longer read, and TCP slows the
//! client down. The same holds in the other direction.
//!
//! Each direction ends by itself. After the client's end of file and all data before it, the relay
//! sends FIN. After the guest's FIN and all data before it, the relay calls `shutdown(SHUT_WR)`. A
//! reset on either side causes one on the other.
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    os::fd::AsFd,
};

use nix::sys::socket::{setsockopt, sockopt};
use slipgate_abi::tcp::Phase;
use smoltcp::socket::tcp::State;

use super::{
    Limits,
    link::{Endpoint, Link},
};
use crate::poll::{Interest, Poller, Readiness, Token};

/// Rounds of copying per call, limited so that one connection does not delay the others.
const ROUNDS: usize = 4;

/// State of a connection after a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    /// The connection continues.
    Alive,
    /// Both directions ended in order.
    Closed,
    /// One side reset the connection, or it timed out.
    Reset,
}

/// Number of bytes that a call moved.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Moved {
    pub(super) to_guest: u64,
    pub(super) from_guest: u64,
}

#[derive(Debug)]
pub(super) struct Stream {
    endpoint: Endpoint,
    /// Socket of the host; `None` once both directions have ended.
    host: Option<TcpStream>,
    token: Token,
    /// Events registered with the poller; `None` if the socket is not registered.
    interest: Option<Interest>,
    readable: bool,
    writable: bool,
    established: bool,
    established_ns: u64,
    /// Whether the client will send no more data.
    host_ended: bool,
    /// Whether the guest will send no more data.
    guest_fin: bool,
    /// Whether the client was informed of that.
    guest_ended: bool,
    opened_ns: u64,
}

impl Stream {
    /// A stream for a socket of the host, which must be non-blocking and connected.
    pub(super) fn new(
        host: TcpStream,
        endpoint: Endpoint,
        token: Token,
        poller: &Poller,
        now_ns: u64,
    ) -> io::Result<Self> {
        poller.add(host.as_fd(), token, Interest::None)?;
        Ok(Self {
            endpoint,
            host: Some(host),
            token,
            interest: Some(Interest::None),
            readable: true,
            writable: true,
            established: false,
            established_ns: 0,
            host_ended: false,
            guest_fin: false,
            guest_ended: false,
            opened_ns: now_ns,
        })
    }

    /// Phase of the connection on the guest's side.
    pub(super) fn phase(&self) -> Phase {
        self.endpoint.phase()
    }

    /// Time that the guest took to accept, µs; 0 if it has not accepted.
    pub(super) fn connect_us(&self) -> u32 {
        let took_ns = self.established_ns.saturating_sub(self.opened_ns);
        let took_us = u32::try_from(took_ns / 1_000).unwrap_or(0);
        if self.established { took_us.max(1) } else { 0 }
    }

    /// Records readiness of the host's socket. The caller must call [`Stream::drive`] afterwards.
    pub(super) fn on_ready(
        &mut self,
        readiness: Readiness,
        poller: &Poller,
        link: &mut Link<'_>,
    ) -> Fate {
        self.readable |= readiness.readable;
        self.writable |= readiness.writable;
        let Some(host) = &self.host else {
            return Fate::Alive;
        };
        if !readiness.failed {
            return Fate::Alive;
        }
        if !self.guest_ended || !matches!(host.take_error(), Ok(None)) {
            return self.reset(link);
        }
        // A hang-up without error: both sides have shut down, what the client sent is still to be
        // read. The poller would report it until then.
        if self.interest.take().is_some() && poller.remove(host.as_fd()).is_err() {
            return self.reset(link);
        }
        self.readable = true;
        Fate::Alive
    }

    /// Processes a packet of the guest, if one is given, and copies available data.
    pub(super) fn drive(
        &mut self,
        incoming: Option<&[u8]>,
        limits: &Limits,
        poller: &Poller,
        link: &mut Link<'_>,
    ) -> (Fate, Moved) {
        let mut moved = Moved::default();
        self.endpoint.poll(incoming, link);
        for _ in 0..ROUNDS {
            let before = moved;
            if self.copy(&mut moved).is_err() {
                return (self.reset(link), moved);
            }
            self.endpoint.poll(None, link);
            if moved == before {
                break;
            }
        }
        (self.settle(limits, poller, link), moved)
    }

    /// TCP endpoint toward the guest.
    pub(super) fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    /// Time at which the connection ends unless something happens before, ns.
    pub(super) fn end_ns(&self, limits: &Limits) -> u64 {
        if !self.established {
            return self.opened_ns + limits.connect_ns;
        }
        let may_idle_ns = if self.host_ended || self.guest_fin {
            limits.half_closed_idle_ns
        } else {
            limits.stream_idle_ns
        };
        let idle = self.endpoint.idle_since_ns() + may_idle_ns;
        self.endpoint
            .silent_since_ns()
            .map_or(idle, |since| idle.min(since + limits.silence_ns))
    }

    /// Starts its timeouts again, after a time in which no packets could pass.
    pub(super) fn begin_timers(&mut self, now_ns: u64) {
        self.endpoint.begin_timers(now_ns);
        if !self.established {
            self.opened_ns = now_ns;
        }
    }

    /// Ends both sides with a reset.
    pub(super) fn reset(&mut self, link: &mut Link<'_>) -> Fate {
        self.endpoint.abort(link);
        if let Some(host) = self.host.take() {
            reset_host(host);
        }
        Fate::Reset
    }

    /// Copies data once in both directions.
    ///
    /// # Errors
    /// If the host's socket has failed.
    fn copy(&mut self, moved: &mut Moved) -> io::Result<()> {
        let Some(host) = &mut self.host else {
            return Ok(());
        };
        let socket = self.endpoint.socket();
        if self.readable && !self.host_ended && socket.can_send() {
            match socket.send(|buffer| divide(host.read(buffer))) {
                Ok(Ok(0)) => {
                    self.host_ended = true;
                    socket.close();
                }
                Ok(Ok(n)) => moved.to_guest += n as u64,
                Ok(Err(error)) if is_transient(&error) => self.readable = false,
                Ok(Err(error)) => return Err(error),
                Err(_) => {}
            }
        }
        if self.writable && socket.can_recv() {
            match socket.recv(|buffer| divide(host.write(buffer))) {
                Ok(Ok(n)) => moved.from_guest += n as u64,
                Ok(Err(error)) if is_transient(&error) => self.writable = false,
                Ok(Err(error)) => return Err(error),
                Err(_) => {}
            }
        }
        Ok(())
    }

    fn settle(&mut self, limits: &Limits, poller: &Poller, link: &mut Link<'_>) -> Fate {
        let socket = self.endpoint.socket();
        let state = socket.state();
        // The guest reset what it had asked for, and smoltcp would have it ask again.
        if state == State::Listen {
            return self.reset(link);
        }
        // A SYN without an acknowledgement of ours (a simultaneous open) establishes nothing.
        let opening = matches!(state, State::SynSent | State::SynReceived | State::Closed);
        if !self.established && !opening {
            self.established = true;
            self.established_ns = link.now_ns;
        }
        self.guest_fin |= matches!(
            state,
            State::CloseWait | State::LastAck | State::Closing | State::TimeWait
        );
        if self.guest_fin && !self.guest_ended && !socket.can_recv() {
            self.guest_ended = true;
            if let Some(host) = &self.host
                && host.shutdown(Shutdown::Write).is_err()
            {
                return self.reset(link);
            }
        }
        let both_ended = self.guest_ended && self.host_ended;
        if both_ended {
            self.host = None;
        }
        match state {
            State::Closed if both_ended => return Fate::Closed,
            State::Closed => return self.reset(link),
            // The guest needs nothing more of us than an ACK.
            State::TimeWait if both_ended && self.endpoint.has_acknowledged(link.now_ns) => {
                return Fate::Closed;
            }
            _ => {}
        }
        let overdue = link.now_ns >= self.end_ns(limits);
        if overdue || self.update_interest(poller).is_err() {
            return self.reset(link);
        }
        Fate::Alive
    }

    fn update_interest(&mut self, poller: &Poller) -> io::Result<()> {
        let (Some(host), Some(registered)) = (&self.host, self.interest) else {
            return Ok(());
        };
        let socket = self.endpoint.socket();
        let read = !self.host_ended && socket.can_send();
        let write = socket.can_recv();
        let wanted = match (read, write) {
            (true, true) => Interest::Both,
            (true, false) => Interest::Read,
            (false, true) => Interest::Write,
            (false, false) => Interest::None,
        };
        if wanted != registered {
            poller.modify(host.as_fd(), self.token, wanted)?;
            self.interest = Some(wanted);
        }
        Ok(())
    }
}

/// Closes a socket so that its peer receives a reset.
pub(super) fn reset_host(host: TcpStream) {
    let at_once = nix::libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    // If it fails the peer sees an orderly end instead, which is all that can be done for it.
    let _ = setsockopt(&host, sockopt::Linger, &at_once);
}

/// Number of bytes used, and the result, as smoltcp's closures require.
fn divide(result: io::Result<usize>) -> (usize, io::Result<usize>) {
    (*result.as_ref().unwrap_or(&0), result)
}

fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
