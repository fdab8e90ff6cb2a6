//! A guest's DNS connection (RFC 7766): messages with a length prefix, several at a time, answered
//! in any order.
use std::collections::VecDeque;

use slipgate_abi::tcp::Phase;
use smoltcp::socket::tcp::State;

use super::{
    Limits,
    link::{Endpoint, Link},
    stream::Fate,
};

/// Longest question accepted, bytes. A longer one ends the connection.
const MAX_QUERY_LEN: usize = 4_096;
/// Number of unanswered questions at which no more are read.
const MAX_OUTSTANDING: usize = 8;
const LENGTH_LEN: usize = 2;

#[derive(Debug)]
pub(super) struct DnsStream {
    endpoint: Endpoint,
    /// Received bytes that are not a whole message yet.
    inbox: Vec<u8>,
    /// Answers with their length prefixes that wait for room.
    outbox: VecDeque<u8>,
    outstanding: usize,
    guest_fin: bool,
    closing: bool,
    active_ns: u64,
}

impl DnsStream {
    pub(super) fn new(endpoint: Endpoint, now_ns: u64) -> Self {
        Self {
            endpoint,
            inbox: Vec::new(),
            outbox: VecDeque::new(),
            outstanding: 0,
            guest_fin: false,
            closing: false,
            active_ns: now_ns,
        }
    }

    /// Phase of the connection on the guest's side.
    pub(super) fn phase(&self) -> Phase {
        self.endpoint.phase()
    }

    /// Processes a packet of the guest, if one is given. Whole questions go to `questions`.
    pub(super) fn drive(
        &mut self,
        incoming: Option<&[u8]>,
        limits: &Limits,
        link: &mut Link<'_>,
        mut questions: impl FnMut(Vec<u8>),
    ) -> Fate {
        self.endpoint.poll(incoming, link);
        // First: what has room now makes room for questions.
        self.write(link.now_ns);
        if !self.read(link.now_ns, &mut questions) {
            return self.reset(link);
        }
        self.settle(limits, link)
    }

    /// Queues an answer. The caller must call [`DnsStream::drive`] afterwards.
    pub(super) fn answer(&mut self, message: &[u8]) {
        self.outstanding = self.outstanding.saturating_sub(1);
        if let Ok(len) = u16::try_from(message.len()) {
            self.outbox.extend(len.to_be_bytes());
            self.outbox.extend(message);
        }
    }

    /// TCP endpoint toward the guest.
    pub(super) fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    /// Time at which the connection ends unless something happens before, ns.
    pub(super) fn end_ns(&self, limits: &Limits) -> u64 {
        self.active_ns + limits.dns_idle_ns
    }

    pub(super) fn reset(&mut self, link: &mut Link<'_>) -> Fate {
        self.endpoint.abort(link);
        Fate::Reset
    }

    /// Whether another question may be read: not while answers wait for a guest that does not read
    /// them.
    fn may_ask(&self) -> bool {
        self.outstanding < MAX_OUTSTANDING && self.outbox.is_empty()
    }

    /// Reads as many questions as are allowed. Returns `false` if the data is not DNS.
    fn read(&mut self, now_ns: u64, questions: &mut impl FnMut(Vec<u8>)) -> bool {
        loop {
            while self.may_ask() {
                let Some((length, rest)) = self.inbox.split_first_chunk::<LENGTH_LEN>() else {
                    break;
                };
                let len = usize::from(u16::from_be_bytes(*length));
                if len == 0 || len > MAX_QUERY_LEN {
                    return false;
                }
                let Some(message) = rest.get(..len) else {
                    break;
                };
                questions(message.to_vec());
                self.outstanding += 1;
                self.inbox.drain(..LENGTH_LEN + len);
            }
            // What is not read stays in the window, which then closes.
            let room = (LENGTH_LEN + MAX_QUERY_LEN).saturating_sub(self.inbox.len());
            if room == 0 || !self.may_ask() {
                return true;
            }
            let socket = self.endpoint.socket();
            if !socket.can_recv() {
                return true;
            }
            let inbox = &mut self.inbox;
            let read = socket.recv(|buffer| {
                let n = buffer.len().min(room);
                inbox.extend_from_slice(&buffer[..n]);
                (n, n)
            });
            if matches!(read, Ok(0) | Err(_)) {
                return true;
            }
            self.active_ns = now_ns;
        }
    }

    fn write(&mut self, now_ns: u64) {
        let socket = self.endpoint.socket();
        while !self.outbox.is_empty() {
            match socket.send_slice(self.outbox.as_slices().0) {
                Ok(0) | Err(_) => return,
                Ok(n) => {
                    self.outbox.drain(..n);
                    self.active_ns = now_ns;
                }
            }
        }
    }

    fn settle(&mut self, limits: &Limits, link: &mut Link<'_>) -> Fate {
        let idle = link.now_ns >= self.end_ns(limits);
        let owes_nothing = self.outstanding == 0 && self.outbox.is_empty();
        let socket = self.endpoint.socket();
        self.guest_fin |= socket.state() == State::CloseWait;
        let done = self.guest_fin && !socket.can_recv();
        if idle && (self.closing || !socket.may_send()) {
            return self.reset(link);
        }
        if !self.closing && owes_nothing && (done || idle) {
            self.closing = true;
            self.active_ns = link.now_ns;
            socket.close();
        } else if idle {
            return self.reset(link);
        }
        self.endpoint.poll(None, link);
        match self.endpoint.socket().state() {
            State::Closed => Fate::Closed,
            State::TimeWait if self.endpoint.has_acknowledged(link.now_ns) => Fate::Closed,
            _ => Fate::Alive,
        }
    }
}
