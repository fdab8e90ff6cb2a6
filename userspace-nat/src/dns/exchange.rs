//! One query to the upstream resolvers, with its retries.
//!
//! # Theory of operation
//! The first resolver is asked and given one second, then the next two seconds, then the next the
//! rest of five. A single resolver is asked again, by the same socket, so that a late answer to an
//! earlier datagram still counts. A resolver that refuses, fails or cannot be reached is *spent*
//! for this question: the next is asked at once. When all are spent, the question is over, with the
//! first refusal as its answer. If the resolvers change meanwhile (by a change of the policy or of
//! the host's resolvers), nothing more is sent to the former ones, and their answers are not
//! awaited: the question goes to one of the new.
//!
//! After a truncated answer, the same resolver is asked again by TCP, so that the whole answer is
//! cached and available to a guest that asks by TCP.
//!
//! A query by UDP has its name in random case ([0x20]): in addition to id and port, a forger must
//! guess a bit for each letter. After an answer with the name in another case, the resolver is
//! asked again by TCP, which is hard to forge. Only if TCP fails is that answer passed on, without
//! caching.
//!
//! [0x20]: https://datatracker.ietf.org/doc/html/draft-vixie-dnsext-dns0x20-00
use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::AsFd,
};

use rand::{RngExt, rngs::StdRng};
use slipgate_abi::{IfIndex, Protocol};

use super::{
    answer::{Answer, AnswerError},
    message::HEADER_LEN,
    name::Name,
    query::Key,
    reply,
    resolvers::Candidates,
    upstream::{self, Tcp, Way},
};
use crate::{
    clock::SECOND_NS,
    poll::{Interest, Poller, Token},
};

/// Duration of the first, the second and each further try, ns.
const TRY_NS: [u64; 3] = [SECOND_NS, 2 * SECOND_NS, 2 * SECOND_NS];
/// Longest duration of a question, ns, except for a TCP retry at the end.
const TOTAL_NS: u64 = 5 * SECOND_NS;
/// Longest duration of a try by TCP, ns.
const TCP_NS: u64 = 2 * SECOND_NS;
/// Most sockets of one question: that of the present try and that of the one before.
pub(super) const MAX_SOCKETS: usize = 2;
/// Most datagrams read from one socket before others are served.
const BURST: usize = 16;

/// A question in flight: its attempts and their state.
#[derive(Debug)]
pub(super) struct Exchange {
    key: Box<[u8]>,
    token: Token,
    /// How it leaves to the resolvers that there were when it came, those that it can reach; `None`: as
    /// the host's own do, to any.
    ways: Option<upstream::Known>,
    attempts: Vec<Attempt>,
    spent: Vec<SocketAddr>,
    last: Option<SocketAddr>,
    tries: usize,
    over_ns: u64,
    next_ns: u64,
    /// A truncated answer or a refusal, used if no better answer comes.
    fallback: Option<Answer>,
    /// Resolver that gave the final answer.
    answered_by: Option<SocketAddr>,
}

#[derive(Debug)]
struct Attempt {
    to: SocketAddr,
    id: u16,
    /// The name in the case in which it was sent.
    name: Box<[u8]>,
    socket: Socket,
}

#[derive(Debug)]
enum Socket {
    Udp(UdpSocket),
    Tcp(Tcp),
}

/// State of the proxy that an exchange uses.
#[derive(Debug)]
pub(super) struct Surroundings<'a> {
    pub(super) poller: &'a Poller,
    pub(super) resolvers: Candidates<'a>,
    pub(super) rng: &'a mut StdRng,
    pub(super) scratch: &'a mut [u8],
    /// Counter of datagrams that answered no question asked on their socket.
    pub(super) mismatched: &'a mut u64,
    pub(super) now_ns: u64,
}

/// State of a question after a step.
#[derive(Debug)]
pub(super) enum Progress {
    /// The question waits until [`Exchange::next_ns`].
    Waiting,
    /// The question was answered, or has the best refusal if no resolver answered.
    Answered(Answer),
    /// No resolver has answered.
    Failed,
}

/// Result of reading from one attempt.
enum AttemptResult {
    Waiting,
    Answered(Answer),
    Truncated(Answer),
    /// The answer has the name in another case than the query.
    Recased(Answer),
    Refused(Answer),
    Failed,
}

impl Exchange {
    /// A question for which no resolver was asked yet.
    pub(super) fn new(
        key: &[u8],
        token: Token,
        ways: Option<upstream::Known>,
        now_ns: u64,
    ) -> Self {
        Self {
            key: key.into(),
            token,
            ways,
            attempts: Vec::new(),
            spent: Vec::new(),
            last: None,
            tries: 0,
            over_ns: now_ns + TOTAL_NS,
            next_ns: now_ns,
            fallback: None,
            answered_by: None,
        }
    }

    /// Cache key of the question.
    pub(super) fn key(&self) -> Key<'_> {
        Key(&self.key)
    }

    /// Resolver that answered; `None` before an answer.
    pub(super) fn answered_by(&self) -> Option<SocketAddr> {
        self.answered_by
    }

    /// Time at which [`Exchange::on_timer`] is due, ns.
    pub(super) fn next_ns(&self) -> u64 {
        self.next_ns
    }

    /// Sends the query to the next resolver.
    pub(super) fn ask(&mut self, with: &mut Surroundings<'_>) -> Progress {
        loop {
            let link_to = |to| self.link_to(to);
            let resolvers = &with.resolvers;
            let Some(to) = resolvers.next(&self.spent, self.last, link_to, with.now_ns) else {
                return self.end();
            };
            self.last = Some(to);
            if self.send(to, with).is_err() {
                self.give_up_on(to);
                continue;
            }
            let patience = TRY_NS[self.tries.min(TRY_NS.len() - 1)];
            self.tries += 1;
            self.next_ns = (with.now_ns + patience).min(self.over_ns);
            return Progress::Waiting;
        }
    }

    /// Continues after readiness of a socket.
    pub(super) fn on_ready(&mut self, with: &mut Surroundings<'_>) -> Progress {
        self.forget_others(&with.resolvers);
        let mut i = 0;
        while i < self.attempts.len() {
            let attempt = &mut self.attempts[i];
            let to = attempt.to;
            let asked = (to, link_to(&self.ways, to));
            match attempt.progress(Key(&self.key), self.token, with) {
                AttemptResult::Waiting => {
                    i += 1;
                    continue;
                }
                AttemptResult::Answered(answer) => {
                    with.resolvers.answered(asked);
                    self.answered_by = Some(to);
                    return Progress::Answered(answer);
                }
                AttemptResult::Truncated(answer) => {
                    with.resolvers.answered(asked);
                    self.fallback = Some(answer);
                    self.answered_by = Some(to);
                    self.attempts.remove(i);
                    if self.ask_by_tcp(to, with).is_err() {
                        self.give_up_on(to);
                    }
                }
                AttemptResult::Recased(answer) => {
                    // The true answer may still come to the socket, and is the better one.
                    if self.fallback.is_none() {
                        self.fallback = Some(answer);
                        self.answered_by = Some(to);
                    }
                    let asks_by_tcp = |a: &Attempt| matches!(a.socket, Socket::Tcp(_));
                    if !self.attempts.iter().any(asks_by_tcp) && self.ask_by_tcp(to, with).is_err()
                    {
                        self.give_up_on(to);
                    }
                }
                AttemptResult::Refused(answer) => {
                    with.resolvers.answered(asked);
                    if self.fallback.is_none() {
                        self.fallback = Some(answer);
                        self.answered_by = Some(to);
                    }
                    self.give_up_on(to);
                }
                AttemptResult::Failed => self.give_up_on(to),
            }
            // The attempts have changed: look at them all again. Each change spends a resolver,
            // adds the one TCP attempt or takes a datagram in, so this ends.
            i = 0;
        }
        let current_lives = self.attempts.iter().any(|a| Some(a.to) == self.last);
        if current_lives {
            Progress::Waiting
        } else {
            self.ask(with)
        }
    }

    /// Continues when [`Exchange::next_ns`] has come.
    pub(super) fn on_timer(&mut self, with: &mut Surroundings<'_>) -> Progress {
        self.forget_others(&with.resolvers);
        if let Some(last) = self.last.filter(|last| with.resolvers.has(*last)) {
            let asked = (last, self.link_to(last));
            with.resolvers.was_silent(asked, with.now_ns);
            if self
                .attempts
                .iter()
                .any(|a| a.to == last && matches!(a.socket, Socket::Tcp(_)))
            {
                self.give_up_on(last);
            }
        }
        if with.now_ns >= self.over_ns {
            self.end()
        } else {
            self.ask(with)
        }
    }

    /// Removes attempts at resolvers that are no longer candidates, and their answers.
    fn forget_others(&mut self, now: &Candidates<'_>) {
        self.attempts.retain(|attempt| now.has(attempt.to));
        if self.answered_by.is_some_and(|by| !now.has(by)) {
            self.answered_by = None;
            self.fallback = None;
        }
    }

    fn end(&mut self) -> Progress {
        self.attempts.clear();
        self.fallback
            .take()
            .map_or(Progress::Failed, Progress::Answered)
    }

    fn give_up_on(&mut self, to: SocketAddr) {
        self.attempts.retain(|a| a.to != to);
        if !self.spent.contains(&to) {
            self.spent.push(to);
        }
    }

    fn send(&mut self, to: SocketAddr, with: &mut Surroundings<'_>) -> io::Result<()> {
        for attempt in &self.attempts {
            if let (true, Socket::Udp(socket)) = (attempt.to == to, &attempt.socket) {
                let query = reply::query(attempt.id, Key(&self.key), &attempt.name);
                return sent(socket.send(&query));
            }
        }
        let id = with.rng.random();
        let name = in_random_case(Key(&self.key).name(), with.rng);
        let socket = upstream::udp(to, self.way_to(to, Protocol::Udp)?)?;
        with.poller.add(&socket, self.token, Interest::Read)?;
        sent(socket.send(&reply::query(id, Key(&self.key), &name)))?;
        self.keep(Attempt {
            to,
            id,
            name,
            socket: Socket::Udp(socket),
        });
        Ok(())
    }

    fn ask_by_tcp(&mut self, to: SocketAddr, with: &mut Surroundings<'_>) -> io::Result<()> {
        let id = with.rng.random();
        let name: Box<[u8]> = Key(&self.key).name().0.into();
        let tcp = Tcp::open(
            to,
            self.way_to(to, Protocol::Tcp)?,
            &reply::query(id, Key(&self.key), &name),
        )?;
        with.poller.add(&tcp, self.token, tcp.interest())?;
        self.keep(Attempt {
            to,
            id,
            name,
            socket: Socket::Tcp(tcp),
        });
        self.last = Some(to);
        self.next_ns = with.now_ns + TCP_NS;
        self.over_ns = self.over_ns.max(self.next_ns);
        Ok(())
    }

    /// Returns the way to a resolver by UDP or TCP.
    ///
    /// # Errors
    /// None leads there, or the resolver is one since the question came.
    fn way_to(&self, to: SocketAddr, by: Protocol) -> io::Result<Way> {
        let Some(ways) = &self.ways else {
            return Ok(Way::default());
        };
        let mut ways = ways.iter();
        let way = ways.find(|(known, _)| *known == (to, by));
        way.map(|(_, way)| *way)
            .ok_or_else(|| io::ErrorKind::NetworkUnreachable.into())
    }

    /// Link by which a resolver is asked: first by UDP.
    fn link_to(&self, to: SocketAddr) -> Option<IfIndex> {
        link_to(&self.ways, to)
    }

    /// Whether no route led to any of these resolvers when the question came.
    pub(super) fn reaches_none_of(&self, resolvers: &[SocketAddr]) -> bool {
        !resolvers.is_empty()
            && resolvers
                .iter()
                .all(|to| self.way_to(*to, Protocol::Udp).is_err())
    }

    fn keep(&mut self, attempt: Attempt) {
        if self.attempts.len() == MAX_SOCKETS {
            self.attempts.remove(0);
        }
        self.attempts.push(attempt);
    }
}

fn link_to(ways: &Option<upstream::Known>, to: SocketAddr) -> Option<IfIndex> {
    let way = ways
        .as_ref()?
        .iter()
        .find(|(known, _)| *known == (to, Protocol::Udp));
    way.and_then(|(_, way)| way.link)
}

/// The name, given in lower case, with each letter in a random case.
fn in_random_case(name: Name<'_>, rng: &mut StdRng) -> Box<[u8]> {
    let mut mixed: Box<[u8]> = name.0.into();
    let mut bits: u64 = 0;
    for (at, octet) in mixed.iter_mut().enumerate() {
        if at % 64 == 0 {
            bits = rng.random();
        }
        // Length octets are below 'A'.
        if bits & 1 << (at % 64) != 0 {
            octet.make_ascii_uppercase();
        }
    }
    mixed
}

/// Whether the name in a message's question has the case in which it was sent. Also true if there
/// is no question.
fn has_name(message: &[u8], name: &[u8]) -> bool {
    let question = message.get(HEADER_LEN..);
    question.is_none_or(|q| q.is_empty() || q.starts_with(name))
}

/// Treats a full send buffer as a lost datagram: the next try follows in time.
fn sent(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() != io::ErrorKind::WouldBlock => Err(e),
        _ => Ok(()),
    }
}

impl Attempt {
    fn progress(
        &mut self,
        key: Key<'_>,
        token: Token,
        with: &mut Surroundings<'_>,
    ) -> AttemptResult {
        match &mut self.socket {
            Socket::Udp(socket) => {
                for _ in 0..BURST {
                    let len = match socket.recv(with.scratch) {
                        Ok(len) => len,
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                        Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                        // Port unreachable, network down: nobody there.
                        Err(_) => return AttemptResult::Failed,
                    };
                    match Answer::parse(&with.scratch[..len], self.id, key) {
                        Err(AnswerError::Mismatch) => *with.mismatched += 1,
                        Err(AnswerError::Malformed) => return AttemptResult::Failed,
                        Ok(answer) if answer.is_truncated() => {
                            return AttemptResult::Truncated(answer);
                        }
                        Ok(answer) if !has_name(&with.scratch[..len], &self.name) => {
                            *with.mismatched += 1;
                            return AttemptResult::Recased(answer.not_kept());
                        }
                        Ok(answer) => return judged(answer),
                    }
                }
                AttemptResult::Waiting
            }
            Socket::Tcp(tcp) => {
                let before = tcp.interest();
                match tcp.progress(with.scratch) {
                    Ok(None) => {
                        let after = tcp.interest();
                        let moved = before == after
                            || with.poller.modify(tcp.as_fd(), token, after).is_ok();
                        if moved {
                            AttemptResult::Waiting
                        } else {
                            AttemptResult::Failed
                        }
                    }
                    Ok(Some(message)) => match Answer::parse(&message, self.id, key) {
                        Ok(answer) if !answer.is_truncated() => judged(answer),
                        _ => AttemptResult::Failed,
                    },
                    Err(_) => AttemptResult::Failed,
                }
            }
        }
    }
}

/// Outcome of an answer by its code. FORMERR, SERVFAIL, NOTIMP and REFUSED concern the resolver,
/// not the name, so another may answer better.
fn judged(answer: Answer) -> AttemptResult {
    match answer.rcode() {
        1 | 2 | 4 | 5 => AttemptResult::Refused(answer),
        _ => AttemptResult::Answered(answer),
    }
}

#[cfg(test)]
#[path = "exchange_test.rs"]
mod tests;
