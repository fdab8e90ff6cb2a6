//! A relayed TCP connection between a socket of the host and the guest.
//!
//! # Theory of operation
//! Of a forward, the kernel accepts the host's client before the connection to the guest is opened, so
//! the client sees a reset if the guest refuses or stays silent. Of the host's loopback, the service
//! has accepted before the guest's SYN is answered. From then on both are the same:
//! [`crate::tcp`]'s connection, with no buffer of its own. What the host sends waits in its socket's
//! queue until the guest has acknowledged it, and what the guest sends goes from its frame into the
//! socket's. So who is slow closes its window, and TCP slows the other side down.
//!
//! Each direction ends by itself: an end of file becomes a FIN, and a FIN `shutdown(SHUT_WR)`. A reset
//! on either side causes one on the other.
use std::{io, net::TcpStream, os::fd::AsFd};

use slipgate_abi::tcp::Phase;

use super::{
    Limits,
    link::{Link, segment_of},
};
use crate::{
    poll::{Interest, Poller, Readiness, Token},
    tcp::{self, Connection, Due, Host, Next, State, reset_by_close},
};

/// State of a connection after a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    /// The connection goes on.
    Alive,
    /// Both directions ended in order.
    Closed,
    /// One side reset the connection, or it timed out.
    Reset,
}

/// Number of bytes that a call moved. To the guest those count that it has acknowledged.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Moved {
    pub(super) to_guest: u64,
    pub(super) from_guest: u64,
}

#[derive(Debug)]
pub(super) struct Stream {
    inner: tcp::Stream,
    token: Token,
    opened_ns: u64,
    established_ns: Option<u64>,
    /// Time of the guest's last packet, ns.
    heard_ns: u64,
    /// Time since which the guest is to answer, ns.
    owed_since_ns: Option<u64>,
    /// Time at which data was last moved or acknowledged, or the state changed, ns. Packets alone are
    /// no progress.
    progress_ns: u64,
    state: State,
}

impl Stream {
    /// A connection to open to the guest, for a socket that is connected.
    pub(super) fn open(
        host: TcpStream,
        token: Token,
        poller: &Poller,
        link: &Link<'_>,
    ) -> io::Result<Self> {
        let inner = tcp::Stream::open(link.version(), host.into(), link.now_ns);
        Self::new(inner, token, poller, link)
    }

    /// A connection that the guest opened, for a socket that is connected by now: sends the SYN's
    /// answer.
    pub(super) fn accepted(
        host: TcpStream,
        connection: Connection,
        token: Token,
        poller: &Poller,
        link: &mut Link<'_>,
    ) -> io::Result<Self> {
        let inner = tcp::Stream::new(connection, host.into());
        let mut stream = Self::new(inner, token, poller, link)?;
        let ours = stream.inner.connected(link.now_ns)?;
        // The service may have greeted before the socket was watched.
        stream.inner.readable(false);
        link.tell(&ours);
        Ok(stream)
    }

    fn new(
        mut inner: tcp::Stream,
        token: Token,
        poller: &Poller,
        link: &Link<'_>,
    ) -> io::Result<Self> {
        let added = inner
            .socket()
            .map(|host| poller.add(host.as_fd(), token, Interest::Edges));
        if let Some(Err(error)) = added {
            inner.reset_peer();
            return Err(error);
        }
        inner.connection_mut().limit_mss(link.most_mss);
        Ok(Self {
            state: inner.connection().state(),
            inner,
            token,
            opened_ns: link.now_ns,
            established_ns: None,
            heard_ns: link.now_ns,
            owed_since_ns: None,
            progress_ns: link.now_ns,
        })
    }

    /// Returns the host's socket; `None` before it is made.
    #[cfg(test)]
    pub(super) fn socket(&self) -> Option<&std::os::fd::OwnedFd> {
        self.inner.socket()
    }

    /// Phase of the connection on the guest's side.
    pub(super) fn phase(&self) -> Phase {
        phase_of(self.inner.connection().state())
    }

    /// Time that the guest took to accept, µs; 0 if it has not accepted.
    pub(super) fn connect_us(&self) -> u32 {
        self.established_ns.map_or(0, |at_ns| {
            let took_ns = at_ns.saturating_sub(self.opened_ns);
            u32::try_from(took_ns / 1_000).unwrap_or(u32::MAX).max(1)
        })
    }

    /// Handles readiness of the host's socket. The caller must call [`Stream::drive`] afterwards.
    pub(super) fn on_ready(&mut self, readiness: Readiness, link: &mut Link<'_>) -> Fate {
        if readiness.failed && self.inner.failure().is_some() {
            return self.reset(link);
        }
        if readiness.readable || readiness.failed {
            self.inner.readable(readiness.hung_up);
        }
        if readiness.writable
            && let Some((header, times)) = self.inner.writable(link.now_ns)
        {
            for _ in 0..times {
                link.tell(&header);
            }
        }
        Fate::Alive
    }

    /// Processes a packet of the guest, if one is given, and sends what may be sent.
    pub(super) fn drive(
        &mut self,
        incoming: Option<&[u8]>,
        limits: &Limits,
        poller: &Poller,
        link: &mut Link<'_>,
    ) -> (Fate, Moved) {
        let mut moved = Moved::default();
        if let Some((_, segment, payload)) = incoming.and_then(segment_of) {
            let now_ns = link.now_ns;
            self.heard_ns = now_ns;
            let workspace = link.workspace();
            match self.inner.receive(&segment, payload, workspace, now_ns) {
                Ok(taken) => {
                    moved.to_guest = taken.acknowledged.into();
                    moved.from_guest = taken.delivered.into();
                    if let Some(reply) = taken.reply {
                        link.tell(&reply);
                    }
                    if taken.host == Host::Reset {
                        return (Fate::Reset, moved);
                    }
                }
                Err(_) => return (self.reset(link), moved),
            }
        } else {
            // The guest may say nothing more.
            moved.from_guest = self.inner.take_delivered().into();
        }
        if self.send(link).is_err() {
            return (self.reset(link), moved);
        }
        self.note(moved, link.now_ns);
        (self.settle(limits, poller, link), moved)
    }

    /// Time at which [`Stream::drive`] has something to send again, ns.
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.inner.connection().due_ns()
    }

    /// Time at which the connection ends unless something happens before, ns.
    pub(super) fn end_ns(&self, limits: &Limits) -> u64 {
        if self.established_ns.is_none() {
            return self.opened_ns + limits.connect_ns;
        }
        let is_half_closed = self.inner.has_hung_up() || self.guest_has_ended();
        let may_idle_ns = match is_half_closed {
            true => limits.half_closed_idle_ns,
            false => limits.stream_idle_ns,
        };
        let idle_ns = self.progress_ns + may_idle_ns;
        let silent = self.owed_since_ns.map(|since| since.max(self.heard_ns));
        silent.map_or(idle_ns, |since| idle_ns.min(since + limits.silence_ns))
    }

    /// Starts its timeouts again, after a time in which no packets could pass.
    pub(super) fn begin_timers(&mut self, now_ns: u64) {
        self.heard_ns = now_ns;
        self.progress_ns = now_ns;
        if self.established_ns.is_none() {
            self.opened_ns = now_ns;
        }
    }

    /// Ends both sides with a reset.
    pub(super) fn reset(&mut self, link: &mut Link<'_>) -> Fate {
        if self.inner.connection().state() != State::Closed {
            let header = self.inner.connection_mut().reset();
            link.tell(&header);
        }
        self.inner.reset_peer();
        Fate::Reset
    }

    /// Sends what is due, what the host's socket has, and the acknowledgement that is owed, as far as
    /// it may.
    ///
    /// # Errors
    /// The host's socket has failed, or the guest was given up and told so.
    fn send(&mut self, link: &mut Link<'_>) -> io::Result<()> {
        let is_due = self.due_ns().is_some_and(|due_ns| due_ns <= link.now_ns);
        if is_due && link.may_send() {
            match self.inner.on_time(link.now_ns) {
                Due::Nothing | Due::Resend | Due::Forget => {}
                Due::Send(header) => link.tell(&header),
                Due::GiveUp(header) => {
                    link.tell(&header);
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
        }
        while let Some(place) = self.inner.sendable(link.now_ns)
            && link.may_send()
        {
            let (mss, now_ns) = (self.inner.connection().mss(), link.now_ns);
            let (into, scratch) = link.room(place, mss);
            match self.inner.next(place.offset, into, scratch, now_ns)? {
                Next::Frame(header, len) => link.send(&header, len as usize, mss),
                Next::End(header) => link.tell(&header),
                Next::Nothing => break,
            }
        }
        if self.inner.connection().owes_acknowledgement()
            && link.may_acknowledge()
            && let Some(header) = self.inner.acknowledgement()
        {
            link.tell(&header);
        }
        Ok(())
    }

    /// Notes what the time limits are of.
    fn note(&mut self, moved: Moved, now_ns: u64) {
        let connection = self.inner.connection();
        let state = connection.state();
        self.owed_since_ns = match (connection.awaits_guest(), self.owed_since_ns) {
            (true, since) => Some(since.unwrap_or(now_ns)),
            (false, _) => None,
        };
        if moved != Moved::default() || state != self.state {
            self.progress_ns = now_ns;
        }
        self.state = state;
        let is_opening = matches!(
            state,
            State::Connecting | State::SynSent | State::SynReceived | State::Closed
        );
        if !is_opening {
            self.established_ns.get_or_insert(now_ns);
        }
    }

    fn settle(&mut self, limits: &Limits, poller: &Poller, link: &mut Link<'_>) -> Fate {
        let connection = self.inner.connection();
        match connection.state() {
            State::Closed if self.inner.socket().is_none() => return Fate::Closed,
            State::Closed => return self.reset(link),
            // The guest needs nothing more of us than an ACK.
            State::TimeWait if !connection.owes_acknowledgement() => return Fate::Closed,
            _ => {}
        }
        let is_overdue = link.now_ns >= self.end_ns(limits);
        #[cfg(test)]
        if is_overdue {
            let now_ns = link.now_ns;
            eprintln!("{:?} ends by a limit at {now_ns} ns: {self:?}", link.ends);
        }
        if is_overdue || self.wait_for_room(poller).is_err() {
            return self.reset(link);
        }
        Fate::Alive
    }

    fn wait_for_room(&mut self, poller: &Poller) -> io::Result<()> {
        if self.inner.wants_room()
            && let Some(socket) = self.inner.socket()
        {
            poller.modify(socket.as_fd(), self.token, Interest::Edges)?;
            self.inner.waits_for_room();
        }
        Ok(())
    }

    fn guest_has_ended(&self) -> bool {
        use State::{CloseWait, Closing, LastAck, TimeWait};
        let state = self.inner.connection().state();
        matches!(state, CloseWait | LastAck | Closing | TimeWait)
    }
}

/// Phase of a connection in this state, as for flows.
pub(super) fn phase_of(state: State) -> Phase {
    match state {
        State::Connecting | State::SynSent | State::SynReceived => Phase::Opening,
        State::Established | State::FinWait1 | State::FinWait2 | State::CloseWait => {
            Phase::Established
        }
        State::Closing | State::LastAck => Phase::Closing,
        State::TimeWait | State::Closed => Phase::Closed,
    }
}

/// Closes a socket so that its peer receives a reset.
pub(super) fn reset_host(host: TcpStream) {
    reset_by_close(&host.into());
}
