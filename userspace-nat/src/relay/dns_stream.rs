//! A guest's DNS connection (RFC 7766): messages with a length prefix, several at a time, answered
//! in any order.
use std::collections::VecDeque;

use slipgate_abi::tcp::Phase;

use super::{
    Limits,
    link::{Link, segment_of},
    stream::{Fate, phase_of},
};
use crate::tcp::{Connection, Due, Host, Segment, State};

/// Longest question accepted, bytes. A longer one ends the connection.
const MAX_QUERY_LEN: usize = 4_096;
/// Number of unanswered questions at which no more are read.
const MAX_OUTSTANDING: usize = 8;
const LENGTH_LEN: usize = 2;

#[derive(Debug)]
pub(super) struct DnsStream {
    connection: Connection,
    /// Received bytes that were not asked yet.
    inbox: Vec<u8>,
    /// Answers with their length prefixes that the guest has not acknowledged.
    outbox: VecDeque<u8>,
    outstanding: usize,
    guest_fin: bool,
    closing: bool,
    active_ns: u64,
}

impl DnsStream {
    /// A connection that the guest's SYN opens.
    pub(super) fn new(syn: &Segment, limits: &Limits, link: &mut Link<'_>) -> Self {
        let mut connection = Connection::new(link.version(), syn, rand::random());
        connection.limit_mss(link.most_mss);
        let ours = connection.connected(limits.dns_buffer as u32, link.now_ns);
        link.tell(&ours);
        Self {
            connection,
            inbox: Vec::new(),
            outbox: VecDeque::new(),
            outstanding: 0,
            guest_fin: false,
            closing: false,
            active_ns: link.now_ns,
        }
    }

    /// Phase of the connection on the guest's side.
    pub(super) fn phase(&self) -> Phase {
        phase_of(self.connection.state())
    }

    /// Processes a packet of the guest, if one is given. Whole questions go to `questions`.
    pub(super) fn drive(
        &mut self,
        incoming: Option<&[u8]>,
        limits: &Limits,
        link: &mut Link<'_>,
        mut questions: impl FnMut(Vec<u8>),
    ) -> Fate {
        if let Some((_, segment, payload)) = incoming.and_then(segment_of)
            && let Some(fate) = self.receive((&segment, payload), limits, link)
        {
            return fate;
        }
        if !self.read(limits, link.now_ns, &mut questions) {
            return self.reset(link);
        }
        self.send(limits, link);
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

    /// Time at which [`DnsStream::drive`] has something to send again, ns.
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.connection.due_ns()
    }

    /// Time at which the connection ends unless something happens before, ns.
    pub(super) fn end_ns(&self, limits: &Limits) -> u64 {
        self.active_ns + limits.dns_idle_ns
    }

    pub(super) fn reset(&mut self, link: &mut Link<'_>) -> Fate {
        if self.connection.state() != State::Closed {
            let header = self.connection.reset();
            link.tell(&header);
        }
        Fate::Reset
    }

    /// Whether another question may be read: not while answers wait for a guest that does not read
    /// them, and not behind our FIN, as their answers would be.
    fn may_ask(&self, limits: &Limits) -> bool {
        !self.closing && self.outstanding < MAX_OUTSTANDING && self.outbox.len() < limits.dns_buffer
    }

    fn receive(
        &mut self,
        (segment, payload): (&Segment, &[u8]),
        limits: &Limits,
        link: &mut Link<'_>,
    ) -> Option<Fate> {
        let received = self.connection.receive(segment, link.now_ns);
        if let Some(reply) = received.reply {
            link.tell(&reply);
        }
        match received.host {
            Host::Stays => {}
            Host::Reset => return Some(Fate::Reset),
            Host::Closes => return Some(self.ended(link)),
        }
        let bytes = received.deliver.start as usize..received.deliver.end as usize;
        let bytes = payload.get(bytes).unwrap_or_default();
        self.inbox.extend_from_slice(bytes);
        let len = bytes.len() as u32;
        self.guest_fin |= self.connection.taken(&received, len, link.now_ns);
        let acknowledged = received.acknowledged as usize;
        self.outbox.drain(..acknowledged.min(self.outbox.len()));
        // What waits for a guest that takes no answers is none of its activity.
        if len > 0 && self.may_ask(limits) || acknowledged > 0 {
            self.active_ns = link.now_ns;
        }
        None
    }

    /// Both sides have ended: acknowledges the guest's last segment, if that is owed.
    fn ended(&mut self, link: &mut Link<'_>) -> Fate {
        if self.connection.owes_acknowledgement() {
            let header = self.connection.acknowledge(0);
            link.tell(&header);
        }
        Fate::Closed
    }

    /// Room for the guest's next bytes: what is not asked yet stays in the window, which then closes.
    fn room(&self, limits: &Limits) -> u32 {
        limits.dns_buffer.saturating_sub(self.inbox.len()) as u32
    }

    /// Asks as many questions as are allowed. Returns `false` if the data is not DNS.
    fn read(&mut self, limits: &Limits, now_ns: u64, questions: &mut impl FnMut(Vec<u8>)) -> bool {
        while self.may_ask(limits) {
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
            self.active_ns = now_ns;
            self.inbox.drain(..LENGTH_LEN + len);
        }
        true
    }

    /// Sends what is due, answers, and the acknowledgement that is owed, as far as it may.
    fn send(&mut self, limits: &Limits, link: &mut Link<'_>) {
        let is_due = self.due_ns().is_some_and(|due_ns| due_ns <= link.now_ns);
        if is_due && link.may_send() {
            match self.connection.on_time(link.now_ns) {
                Due::Nothing | Due::Resend | Due::Forget => {}
                Due::Send(header) | Due::GiveUp(header) => link.tell(&header),
            }
        }
        let room = self.room(limits);
        while self.has_more() {
            let Some(place) = self.connection.sendable() else {
                self.connection.blocked(link.now_ns);
                break;
            };
            if !link.may_send() {
                break;
            }
            let mss = self.connection.mss();
            let sent = (place.offset as usize).min(self.outbox.len());
            let unsent = self.outbox.range(sent..);
            let (into, _) = link.room(place, mss);
            let mut len = 0;
            for (to, from) in into.iter_mut().zip(unsent) {
                *to = *from;
                len += 1;
            }
            if len > 0 {
                let header = self.connection.send(len as u32, Some(room), link.now_ns);
                link.send(&header, len, mss);
            } else {
                // Without `closing`, the guest has all that is behind what comes next.
                if self.closing
                    && let Some(header) = self.connection.send_fin(link.now_ns)
                {
                    link.tell(&header);
                }
                break;
            }
        }
        let opens = self.connection.is_receiving()
            && self.connection.window_left() < room / 2
            && room as usize >= limits.dns_buffer / 2;
        if (opens || self.connection.owes_acknowledgement()) && link.may_acknowledge() {
            let header = self.connection.acknowledge(room);
            link.tell(&header);
        }
    }

    /// Whether there are answers, or the end, behind what was sent, or what was lost of it.
    fn has_more(&self) -> bool {
        let under_way = self.connection.under_way() as usize;
        under_way < self.outbox.len()
            || self.closing && under_way == self.outbox.len()
            || self.connection.has_hole()
    }

    fn settle(&mut self, limits: &Limits, link: &mut Link<'_>) -> Fate {
        use State::{CloseWait, Established};
        let is_idle = link.now_ns >= self.end_ns(limits);
        let owes_nothing = self.outstanding == 0 && self.outbox.is_empty();
        let may_close = matches!(self.connection.state(), Established | CloseWait);
        if is_idle && (self.closing || !may_close) {
            return self.reset(link);
        }
        if !self.closing && owes_nothing && may_close && (self.guest_fin || is_idle) {
            self.closing = true;
            self.active_ns = link.now_ns;
            self.send(limits, link);
        } else if is_idle {
            return self.reset(link);
        }
        match self.connection.state() {
            State::Closed => Fate::Closed,
            State::TimeWait if !self.connection.owes_acknowledgement() => Fate::Closed,
            _ => Fate::Alive,
        }
    }
}
