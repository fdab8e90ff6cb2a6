//! Connections of forwards between a socket of the host and one in the guest's network namespace.
//!
//! # Theory of operation
//! The guest of `slipgate exec` has TCP of this very kernel. So a client of a forward needs no TCP of the
//! engine's: its connection is continued by a socket of the guest's namespace ([`super::namespace`]) to
//! the guest's own address, and the engine passes the bytes on without seeing them ([`super::pipe`]). The
//! forward's rule, the limits, records and counts are those of any relayed connection. There are no
//! packets to count: bytes count as the segments that the guest's link would have carried them in, with
//! those that open and close the connection. Acknowledgements do not count.
//!
//! If the guest's TCP refuses, the connection goes by the TAP after all: a service may listen on that
//! device only. It goes that way from the beginning if no socket of the namespace is ready, and while
//! `--pcap` or a capture of the VM wants packets.
//!
//! All that reaches the guest is done in the connection's turn ([`super::turns`]), so that connections
//! take turns, and a frozen VM's wait.
use std::{io, net::TcpStream};

use slipgate_abi::{segment, segment::Segments, tcp::Phase};

use super::{
    Entry, Limits, PAUSED_CHECK_NS, Relay, Served,
    pipe::{Direction, Moved, Pipes},
    stream,
};
use crate::{
    packet::Version,
    poll::{Context, Readiness},
    port::single,
    record::RelayedFlow,
    tcp::headers_len,
};

mod opening;

/// Descriptors that such a connection may take besides the client's socket: the other socket, and two
/// pipes. Spliced ones together take half of [`Limits::sockets`] at most, so that some are left for those
/// that go by the TAP, and for the host's loopback.
pub(super) const MORE_SOCKETS: u32 = 5;
/// Time after which a connection for which there was no pipe tries again, ns.
const NO_PIPE_NS: u64 = 100_000_000;
/// Packets as which one call that moves bytes counts in the VM's turn.
const PACKETS_PER_CALL: usize = 16;

/// A client of a forward, and the connection inside for it.
#[derive(Debug)]
pub(super) struct Spliced {
    pub(super) flow: RelayedFlow,
    pub(super) deadline_ns: u64,
    /// Whether it waits for its turn.
    pub(super) is_waiting: bool,
    host: TcpStream,
    state: State,
    opened_ns: u64,
    /// Time at which bytes were last moved, ns.
    progress_ns: u64,
    /// Whether a side was reset: what it had sent before is passed on, but not its end.
    has_failed: bool,
}

#[derive(Debug)]
enum State {
    /// The connection inside is not begun.
    Accepted,
    Connecting(Inside),
    Connected {
        inside: Inside,
        to_guest: Direction,
        from_guest: Direction,
    },
}

/// The socket in the guest's namespace, and the key of its entry.
#[derive(Debug)]
struct Inside {
    socket: TcpStream,
    key: u32,
}

/// How a connection stands after its turn.
enum Standing {
    Waits,
    HasMore,
    /// It has more, but there is no pipe for it.
    NoPipe,
    Closed,
    Reset,
}

impl Spliced {
    /// Key of the entry of the socket inside, if there is one.
    fn inside_key(&self) -> Option<u32> {
        match &self.state {
            State::Accepted => None,
            State::Connecting(inside) | State::Connected { inside, .. } => Some(inside.key),
        }
    }

    /// The client's socket, and the one inside.
    #[cfg(test)]
    pub(super) const fn sockets(&self) -> [Option<&TcpStream>; 2] {
        let inside = match &self.state {
            State::Accepted => None,
            State::Connecting(inside) | State::Connected { inside, .. } => Some(&inside.socket),
        };
        [Some(&self.host), inside]
    }

    pub(super) const fn phase(&self) -> Phase {
        match &self.state {
            State::Accepted | State::Connecting(_) => Phase::Opening,
            State::Connected {
                to_guest,
                from_guest,
                ..
            } if to_guest.is_over() && from_guest.is_over() => Phase::Closing,
            State::Connected { .. } => Phase::Established,
        }
    }

    /// Time at which the connection ends unless something happens before, ns.
    fn end_ns(&self, limits: &Limits) -> u64 {
        match &self.state {
            State::Accepted | State::Connecting(_) => self.opened_ns + limits.connect_ns,
            State::Connected {
                to_guest,
                from_guest,
                ..
            } => {
                let is_half_closed = to_guest.is_over() || from_guest.is_over();
                let may_idle_ns = match is_half_closed {
                    true => limits.half_closed_idle_ns,
                    false => limits.stream_idle_ns,
                };
                self.progress_ns + may_idle_ns
            }
        }
    }

    /// Starts its time limits again, after a time in which nothing could pass.
    pub(super) fn begin_timers(&mut self, now_ns: u64) {
        (self.opened_ns, self.progress_ns) = (now_ns, now_ns);
    }

    /// Notes that a socket is ready: the client's, or the one inside.
    fn note(&mut self, readiness: Readiness, is_inside: bool) {
        let State::Connected {
            inside,
            to_guest,
            from_guest,
        } = &mut self.state
        else {
            return;
        };
        let (socket, source, sink) = match is_inside {
            true => (&inside.socket, from_guest, to_guest),
            false => (&self.host, to_guest, from_guest),
        };
        // Nothing else may tell: its direction has ended, or waits for room.
        self.has_failed |=
            readiness.failed && socket.take_error().is_ok_and(|error| error.is_some());
        source.is_readable |= readiness.readable || readiness.failed;
        sink.is_writable |= readiness.writable || readiness.failed;
    }

    /// Moves bytes, by at most so many calls. `mtu`: of the guest's link.
    fn carry(
        &mut self,
        pipes: &mut Pipes,
        calls: &mut usize,
        served: &mut Served,
        now_ns: u64,
    ) -> io::Result<Standing> {
        let State::Connected {
            inside,
            to_guest,
            from_guest,
        } = &mut self.state
        else {
            return Ok(Standing::Waits);
        };
        let version = Version::of(self.flow.guest.ip());
        let headers_len = headers_len(version);
        let mss = u32::from(served.net.mtu).saturating_sub(headers_len as u32);
        let mut lacks_pipe = false;
        while (to_guest.has_more() || from_guest.has_more()) && *calls > 0 && !lacks_pipe {
            *calls -= 1;
            for (direction, from, to, is_to_guest) in [
                (&mut *to_guest, &self.host, &inside.socket, true),
                (&mut *from_guest, &inside.socket, &self.host, false),
            ] {
                if !direction.has_more() {
                    continue;
                }
                let Moved::Bytes(bytes) = direction.carry(from, to, pipes)? else {
                    lacks_pipe = true;
                    continue;
                };
                let counted = match bytes {
                    0 if direction.is_over() && self.has_failed => return Ok(Standing::Reset),
                    0 if direction.is_over() => {
                        to.shutdown(std::net::Shutdown::Write)?;
                        single(headers_len)
                    }
                    0 => continue,
                    _ => segment::count(bytes as u32 + headers_len as u32, headers_len as u32, mss),
                };
                count(&mut self.flow, served, counted, is_to_guest, now_ns);
                let direction = match is_to_guest {
                    true => slipgate_abi::Direction::Rx,
                    false => slipgate_abi::Direction::Tx,
                };
                served.net.stats.saw(direction, now_ns);
                match is_to_guest {
                    true => served.counts.bytes_to_guest += bytes,
                    false => served.counts.bytes_from_guest += bytes,
                }
                self.progress_ns = now_ns;
            }
        }
        if to_guest.is_over() && from_guest.is_over() {
            return Ok(Standing::Closed);
        }
        Ok(match to_guest.has_more() || from_guest.has_more() {
            _ if lacks_pipe => Standing::NoPipe,
            true => Standing::HasMore,
            false if self.has_failed => Standing::Reset,
            false => Standing::Waits,
        })
    }

    /// Ends both connections with a reset.
    fn reset(self) -> RelayedFlow {
        if let State::Connecting(inside) | State::Connected { inside, .. } = self.state {
            stream::reset_host(inside.socket);
        }
        stream::reset_host(self.host);
        self.flow
    }
}

/// Counts packets of a flow, in it and for its VM.
fn count(
    flow: &mut RelayedFlow,
    served: &mut Served,
    counted: Segments,
    is_to_guest: bool,
    now_ns: u64,
) {
    match is_to_guest {
        true => served.counts.received(flow, counted, now_ns),
        false => served.counts.sent(flow, counted, now_ns),
    }
}

impl Relay {
    /// Continues with a socket that is ready. `key`: of the connection.
    pub(super) fn spliced_ready(&mut self, key: u32, readiness: Readiness) {
        if let Some(Entry::Spliced(spliced)) = self.entries.get_mut(&key) {
            spliced.note(readiness, readiness.token.key != key);
            self.join(key);
        }
    }

    /// Has a connection wait until its VM is not paused any more.
    pub(super) fn pause_spliced(&mut self, key: u32, now_ns: u64) {
        self.put_off(key, now_ns + PAUSED_CHECK_NS);
    }

    /// Sets the time at which a connection is examined next.
    fn put_off(&mut self, key: u32, deadline_ns: u64) {
        if let Some(Entry::Spliced(spliced)) = self.entries.get_mut(&key) {
            self.deadlines.remove(&(spliced.deadline_ns, key));
            spliced.deadline_ns = deadline_ns;
            self.deadlines.insert((deadline_ns, key));
        }
    }

    /// Examines a connection whose deadline has come.
    pub(super) fn examine_spliced(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(Entry::Spliced(spliced)) = self.entries.get_mut(&key) else {
            return;
        };
        spliced.deadline_ns = spliced.end_ns(&self.limits);
        if spliced.deadline_ns <= cx.now_ns {
            return self.reset_spliced(key, "reset", cx.now_ns);
        }
        self.deadlines.insert((spliced.deadline_ns, key));
        self.join(key);
    }

    /// A connection's turn.
    pub(super) fn drive_spliced(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(Entry::Spliced(spliced)) = self.entries.get(&key) else {
            return;
        };
        match spliced.state {
            State::Accepted => self.connect_inside(key, cx),
            State::Connecting(_) => self.connecting_inside(key, cx),
            State::Connected { .. } => self.carry(key, cx),
        }
    }

    fn carry(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(Entry::Spliced(spliced)) = self.entries.get_mut(&key) else {
            return;
        };
        let Some(served) = self.vms.get_mut(&spliced.flow.vm) else {
            return;
        };
        let most = served.turn.left(self.turn).div_ceil(PACKETS_PER_CALL);
        let mut left = most;
        let may_idle_ns = spliced.end_ns(&self.limits) - spliced.progress_ns;
        let standing = spliced.carry(&mut self.pipes, &mut left, served, cx.now_ns);
        served
            .turn
            .spend((most - left) * PACKETS_PER_CALL, self.turn);
        match standing.unwrap_or(Standing::Reset) {
            Standing::Reset => self.reset_spliced(key, "reset", cx.now_ns),
            Standing::Closed => {
                if let Some(Spliced { flow, .. }) = self.remove_spliced(key)
                    && let Some(served) = self.vms.get_mut(&flow.vm)
                {
                    self.journal.end(&flow, "closed", served, cx.now_ns);
                }
            }
            Standing::NoPipe => self.put_off(key, cx.now_ns + NO_PIPE_NS),
            standing @ (Standing::HasMore | Standing::Waits) => {
                let end_ns = spliced.end_ns(&self.limits);
                // A half-closed one may idle for less; otherwise the deadline is put off when it comes.
                if end_ns - spliced.progress_ns != may_idle_ns {
                    self.put_off(key, end_ns);
                }
                if matches!(standing, Standing::HasMore) {
                    self.join(key);
                }
            }
        }
    }

    /// Ends a connection with a reset to both sides.
    pub(super) fn reset_spliced(&mut self, key: u32, reason: &'static str, now_ns: u64) {
        if let Some(flow) = self.remove_spliced(key).map(Spliced::reset)
            && let Some(served) = self.vms.get_mut(&flow.vm)
        {
            served.counts.streams_reset += u64::from(reason == "reset");
            self.journal.end(&flow, reason, served, now_ns);
        }
    }

    /// Removes a connection from all but the journal.
    pub(super) fn remove_spliced(&mut self, key: u32) -> Option<Spliced> {
        if !matches!(self.entries.get(&key), Some(Entry::Spliced(_))) {
            return None;
        }
        let Some(Entry::Spliced(spliced)) = self.entries.remove(&key) else {
            return None;
        };
        self.deadlines.remove(&(spliced.deadline_ns, key));
        if let Some(inside) = spliced.inside_key() {
            self.entries.remove(&inside);
        }
        if let Some(served) = self.vms.get_mut(&spliced.flow.vm) {
            served.counts.streams -= 1;
            served.counts.spliced -= 1;
        }
        Some(*spliced)
    }
}
