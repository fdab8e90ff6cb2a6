//! The proxy: processes every question of every guest, from its arrival to its reply.
//!
//! Questions wait in *exchanges*, one per distinct question, however many guests ask it. Both are
//! bounded, per VM and in all: a VM over its own bound is refused, and when all exchanges are
//! taken, a VM that holds fewer takes one of the VM that holds most.
use std::{
    collections::{HashMap, VecDeque},
    net::{IpAddr, SocketAddr},
};

use rand::rngs::StdRng;
use slipgate_abi::{DropReason, Protocol, VmId};
use slipgate_model::OpenQuestion;

use super::{
    answer::Answer,
    cache::Cache,
    exchange::{Exchange, Progress, Surroundings},
    in_flight::{InFlight, Waiter},
    journal::{Journal, ReplyKind},
    message::Rcode,
    no_ipv6,
    policy::{ExtendedError, NamePolicy},
    query::{Key, Query, QueryError},
    reply::{self, Asked},
    resolvers::{Candidates, Resolvers, Silent},
    upstream::{self, Ways},
};
use crate::{
    datagram::headers_len,
    packet::Version,
    poll::{Poller, Readiness},
    quota::TokenBucket,
    record::{Question, Source},
    stats::Tally,
    vm::VmNet,
};

/// Bounds of the proxy's resources.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Most questions of one VM without a reply.
    pub waiting_per_vm: usize,
    /// Most distinct questions in flight, of all VMs, up to 4096. Each has at most two sockets.
    pub exchanges: usize,
    /// Most answers in the cache.
    pub cache_entries: usize,
    /// Most memory of the cached answers, bytes.
    pub cache_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            waiting_per_vm: 64,
            exchanges: 256,
            cache_entries: 16_384,
            cache_bytes: 16 << 20,
        }
    }
}

/// A guest that asks.
#[derive(Clone, Copy, Debug)]
pub struct Guest<'a> {
    /// The guest's VM, with its addresses and policy.
    pub vm: &'a VmNet,
    /// Whether its flows reach anything by IPv6 now: only then are IPv6 addresses looked up.
    pub has_ipv6: bool,
    /// How its questions leave.
    pub ways: &'a dyn Ways,
}

/// Transport by which a question came and its reply returns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Origin {
    /// The question came in a UDP datagram.
    Udp {
        /// Address and port of the guest.
        guest: SocketAddr,
        /// Address that the guest asked, which is the reply's source.
        server: IpAddr,
    },
    /// The question came over a TCP connection that the relay terminates.
    Tcp {
        /// The relay's identifier of the connection.
        connection: u64,
    },
}

/// Reply to a guest's question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// Id of the VM.
    pub vm: VmId,
    /// Transport by which the reply returns.
    pub origin: Origin,
    /// The DNS message, without the length prefix of TCP.
    pub message: Vec<u8>,
}

/// Forwarding DNS proxy for all VMs.
pub struct Proxy {
    limits: Limits,
    /// Resolvers of the host, for policies without resolvers of their own.
    host: Vec<SocketAddr>,
    silent: Silent,
    policy: Box<dyn NamePolicy>,
    cache: Cache,
    in_flight: InFlight,
    replies: VecDeque<Reply>,
    journal: Journal,
    /// Rate of each VM that has a limit, questions per second, and its token bucket.
    rates: HashMap<VmId, (u32, TokenBucket)>,
    rng: StdRng,
    scratch: Box<[u8]>,
    key: Vec<u8>,
    mismatched: u64,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxy")
            .field("host", &self.host)
            .field("in_flight", &self.in_flight.len())
            .field("cached", &self.cache.len())
            .finish_non_exhaustive()
    }
}

impl Proxy {
    /// A proxy. `resolvers` are the host's, of which the first eight are used. They are asked in
    /// this order for VMs whose policy has none of its own.
    pub fn new(resolvers: &[SocketAddr], limits: Limits, policy: Box<dyn NamePolicy>) -> Self {
        Self {
            host: resolvers.to_vec(),
            silent: Silent::default(),
            policy,
            cache: Cache::new(limits.cache_entries, limits.cache_bytes),
            in_flight: InFlight::new(limits.exchanges),
            replies: VecDeque::new(),
            journal: Journal::default(),
            rates: HashMap::new(),
            rng: rand::make_rng(),
            scratch: vec![0; usize::from(u16::MAX)].into(),
            key: Vec::new(),
            mismatched: 0,
            limits,
        }
    }

    /// Replaces the host's resolvers, also for questions in flight.
    pub fn set_resolvers(&mut self, resolvers: &[SocketAddr]) {
        self.host = resolvers.to_vec();
    }

    /// Starts or stops keeping a record of each question for [`Proxy::next_record`].
    pub fn keep_records(&mut self, keep: bool) {
        self.journal.set_open(keep);
    }

    /// Record of the next question that was answered or refused; `None` if there is none.
    pub fn next_record(&mut self) -> Option<Question> {
        self.journal.next()
    }

    /// Processes a question. [`Proxy::next_reply`] returns its reply, now or later.
    ///
    /// # Errors
    /// The drop reason to count if there will be no reply.
    pub fn query(
        &mut self,
        guest: Guest<'_>,
        origin: Origin,
        message: &[u8],
        poller: &Poller,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let vm = guest.vm;
        let query = match Query::parse(message) {
            Ok(query) => query,
            Err(QueryError::NotAQuery) => return Err(DropReason::ServiceReject),
            Err(QueryError::Answer(rcode)) => {
                vm.stats.tally(Tally::DnsQuery, 1);
                self.answer_unaccepted(vm, origin, message, rcode, now_ns);
                return Ok(());
            }
        };
        let asked = match origin {
            Origin::Udp { server, .. } => {
                let headers = headers_len(Version::of(server));
                Asked::by_udp(&query, usize::from(vm.mtu).saturating_sub(headers))
            }
            Origin::Tcp { .. } => Asked::by_tcp(&query),
        };
        let mut key = std::mem::take(&mut self.key);
        query.write_key(self.policy.answer_policy(vm.id).view, &mut key);
        let waiter = Waiter {
            vm: vm.id,
            has_ipv6: guest.has_ipv6,
            stats: vm.stats,
            origin,
            asked,
            message: match origin {
                Origin::Udp { .. } => message.into(),
                Origin::Tcp { .. } => Box::default(),
            },
            since_ns: now_ns,
        };
        let taken = match self.is_over_rate(vm, now_ns) {
            true => {
                let error = self.policy.over_rate(vm.id, vm.dns_per_second);
                self.refuse(&waiter, Key(&key), &error, now_ns);
                Ok(())
            }
            false => self.take((waiter, guest.ways), Key(&key), poller, now_ns),
        };
        self.key = key;
        if taken.is_ok() {
            vm.stats.tally(Tally::DnsQuery, 1);
        }
        taken
    }

    /// The next reply that is ready; `None` if there is none.
    pub fn next_reply(&mut self) -> Option<Reply> {
        self.replies.pop_front()
    }

    /// Continues with a socket that is ready (a token of [`Dns`](crate::poll::Subsystem::Dns)).
    pub fn on_ready(&mut self, readiness: Readiness, poller: &Poller, now_ns: u64) {
        if let Some(index) = self.in_flight.by_token(readiness.token.key) {
            self.drive(index, poller, now_ns, Exchange::on_ready);
        }
    }

    /// Time at which [`Proxy::on_timer`] is due, ns; `None` if no question is in flight.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        self.in_flight.first_deadline().map(|(at, _)| at)
    }

    /// Continues questions whose deadline has come.
    pub fn on_timer(&mut self, poller: &Poller, now_ns: u64) {
        while let Some((at, index)) = self.in_flight.first_deadline() {
            if at > now_ns {
                return;
            }
            self.drive(index, poller, now_ns, Exchange::on_timer);
        }
    }

    /// Removes the questions of a VM that is gone.
    pub fn forget(&mut self, vm: VmId) {
        self.in_flight.forget(vm);
        // What is in the journal stays: it has happened.
        self.rates.remove(&vm);
        self.replies.retain(|r| r.vm != vm);
    }

    /// The questions by UDP that have no reply, for a successor.
    pub fn open_questions(&self) -> impl Iterator<Item = OpenQuestion> {
        self.in_flight.waiters().filter_map(|waiter| {
            let Origin::Udp { guest, server } = waiter.origin else {
                return None;
            };
            Some(OpenQuestion {
                vm: waiter.vm,
                guest: Some(guest.ip()),
                guest_port: guest.port(),
                server,
                message: waiter.message.to_vec(),
            })
        })
    }

    /// Number of distinct questions in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Number of answers in the cache.
    pub fn cached(&self) -> usize {
        self.cache.len()
    }

    /// Number of datagrams to a question's socket that did not answer it, mostly forgeries.
    pub fn mismatched(&self) -> u64 {
        self.mismatched
    }

    /// Counts a question against the VM's rate. Returns whether it exceeds the rate.
    fn is_over_rate(&mut self, vm: &VmNet, now_ns: u64) -> bool {
        let per_second = vm.dns_per_second;
        if per_second == 0 {
            return false;
        }
        let full = || (per_second, TokenBucket::new(per_second, per_second));
        let (known, bucket) = self.rates.entry(vm.id).or_insert_with(full);
        if *known != per_second {
            (*known, *bucket) = full();
        }
        !bucket.take(now_ns)
    }

    /// Answers a message that is not accepted as a query with this code. It counts against the VM's
    /// rate as any question does.
    fn answer_unaccepted(
        &mut self,
        vm: &VmNet,
        origin: Origin,
        message: &[u8],
        rcode: Rcode,
        now_ns: u64,
    ) {
        let error = self
            .is_over_rate(vm, now_ns)
            .then(|| self.policy.over_rate(vm.id, vm.dns_per_second));
        let rcode = error.as_ref().map_or(rcode, |error| error.rcode);
        self.journal
            .note_unaccepted((vm.id, &vm.stats), origin, message, rcode, error, now_ns);
        self.push(vm.id, origin, reply::to_unreadable(message, rcode));
    }

    fn take(
        &mut self,
        (waiter, ways): (Waiter, &dyn Ways),
        key: Key<'_>,
        poller: &Poller,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let verdict = self.policy.question(waiter.vm, key.name(), key.qtype());
        if let Err(error) = verdict {
            self.refuse(&waiter, key, &error, now_ns);
            return Ok(());
        }
        if !waiter.has_ipv6
            && let Some(answer) = no_ipv6::answer(key)
        {
            let from = (&answer, 0, Source::Policy);
            let (policy, journal) = (&mut *self.policy, &mut self.journal);
            let message = answered(policy, journal, &waiter, key, from, now_ns);
            self.push(waiter.vm, waiter.origin, message);
            return Ok(());
        }
        if let Some((answer, age_s)) = self.cache.get(key.0, now_ns) {
            waiter.stats.tally(Tally::DnsCacheHit, 1);
            let from = (answer, age_s, Source::Cache);
            let (policy, journal) = (&mut *self.policy, &mut self.journal);
            let message = answered(policy, journal, &waiter, key, from, now_ns);
            self.push(waiter.vm, waiter.origin, message);
            return Ok(());
        }
        let full = self.in_flight.waiting_of(waiter.vm) >= self.limits.waiting_per_vm;
        let joins = match self.in_flight.find(key.0) {
            // A retransmission waits already.
            Some((_, waiting)) if waiting.iter().any(|w| w.is_same_as(&waiter)) => return Ok(()),
            Some((index, _)) => Some(index),
            None => None,
        };
        if full {
            return self.turn_away(&waiter, key, DropReason::OverRate, now_ns);
        }
        if let Some(index) = joins {
            self.in_flight.join(index, waiter);
            return Ok(());
        }
        let verdict = self.policy.lookup(waiter.vm, key, now_ns);
        if let Err(error) = verdict {
            self.refuse(&waiter, key, &error, now_ns);
            return Ok(());
        }
        if let Some(ended) = self.in_flight.make_room(waiter.vm) {
            for waiter in &ended.waiting {
                self.fail(waiter, ended.exchange.key(), now_ns);
            }
        }
        let ways = self.ways_of(waiter.vm, ways);
        match self.in_flight.begin(key.0, (waiter, ways), now_ns) {
            Ok(index) => {
                self.drive(index, poller, now_ns, Exchange::ask);
                Ok(())
            }
            Err(waiter) => self.turn_away(&waiter, key, DropReason::EngineBusy, now_ns),
        }
    }

    /// Returns the ways of a VM's question to those of its resolvers that it can reach; `None`: it leaves
    /// as the host's own do.
    fn ways_of(&self, vm: VmId, ways: &dyn Ways) -> Option<upstream::Known> {
        if ways.are_hosts(vm) {
            return None;
        }
        let own = match self.policy.resolvers(vm) {
            Resolvers::These(list) => list,
            Resolvers::Host | Resolvers::Nobody => Vec::new(),
        };
        // The host's too: another policy may lead it there while it is in flight.
        let all = own.iter().chain(&self.host);
        // Rules of the host may lead a datagram and a connection elsewhere.
        let each = all.flat_map(|to| [(*to, Protocol::Udp), (*to, Protocol::Tcp)]);
        let reached = each.filter_map(|(to, by)| Some(((to, by), ways.way(vm, to, by)?)));
        Some(reached.collect())
    }

    fn drive(
        &mut self,
        index: u16,
        poller: &Poller,
        now_ns: u64,
        step: fn(&mut Exchange, &mut Surroundings<'_>) -> Progress,
    ) {
        let Some(vm) = self.in_flight.vm_of(index) else {
            return;
        };
        let resolvers = self.policy.resolvers(vm);
        let list = match &resolvers {
            Resolvers::Host => &self.host[..],
            Resolvers::These(list) => list,
            Resolvers::Nobody => &[],
        };
        let mut with = Surroundings {
            poller,
            resolvers: Candidates::new(list, &mut self.silent),
            rng: &mut self.rng,
            scratch: &mut self.scratch,
            mismatched: &mut self.mismatched,
            now_ns,
        };
        let answer = match self.in_flight.step(index, &mut with, step) {
            Progress::Waiting => return,
            Progress::Answered(answer) => Some(answer),
            Progress::Failed => None,
        };
        let Some(live) = self.in_flight.end(index) else {
            return;
        };
        let key = live.exchange.key();
        let is_unreached = answer.is_none() && live.exchange.reaches_none_of(list);
        let source = live.exchange.answered_by();
        let source = source.map_or(Source::Nobody, Source::Upstream);
        let answer_policy = self.policy.answer_policy(live.vm);
        let answer = answer.map(|a| match answer_policy.strips_ech {
            true => a.without_ech(key),
            false => a,
        });
        for waiter in &live.waiting {
            // Its policy is another by now: this one's resolvers do not answer for it.
            if self.policy.answer_policy(waiter.vm).view != answer_policy.view {
                self.fail(waiter, key, now_ns);
                continue;
            }
            // By TCP nothing is truncated: the whole answer was not to be had.
            let by_tcp = matches!(waiter.origin, Origin::Tcp { .. });
            match answer.as_ref().filter(|a| !(by_tcp && a.is_truncated())) {
                Some(answer) => {
                    let from = (answer, 0, source);
                    let (policy, journal) = (&mut *self.policy, &mut self.journal);
                    let message = answered(policy, journal, waiter, key, from, now_ns);
                    self.push(waiter.vm, waiter.origin, message);
                }
                None if is_unreached => {
                    let no_route = ExtendedError::no_route();
                    self.fail_with(waiter, key, Some(&no_route), now_ns);
                }
                None => self.fail(waiter, key, now_ns),
            }
        }
        if let Some(answer) = answer {
            self.cache.insert(live.vm, key.0, answer, now_ns);
        }
    }

    /// Handles a question for which there is no room: a datagram is dropped, and the guest will ask
    /// again; over TCP the reply is SERVFAIL.
    fn turn_away(
        &mut self,
        waiter: &Waiter,
        key: Key<'_>,
        reason: DropReason,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        match waiter.origin {
            Origin::Udp { .. } => Err(reason),
            Origin::Tcp { .. } => {
                self.fail(waiter, key, now_ns);
                Ok(())
            }
        }
    }

    fn refuse(&mut self, waiter: &Waiter, key: Key<'_>, error: &ExtendedError, now_ns: u64) {
        let (policy, outcome) = (&*self.policy, ReplyKind::Refused(error));
        self.journal
            .note(policy, waiter, key, outcome, Source::Policy, now_ns);
        let message = reply::refused(&waiter.asked, key, error);
        self.push(waiter.vm, waiter.origin, message);
    }

    fn fail(&mut self, waiter: &Waiter, key: Key<'_>, now_ns: u64) {
        self.fail_with(waiter, key, None, now_ns);
    }

    /// Answers SERVFAIL, with a reason if there is one to tell.
    fn fail_with(
        &mut self,
        waiter: &Waiter,
        key: Key<'_>,
        reason: Option<&ExtendedError>,
        now_ns: u64,
    ) {
        waiter.stats.tally(Tally::DnsFailure, 1);
        let (policy, outcome) = (&*self.policy, ReplyKind::Failed);
        self.journal
            .note(policy, waiter, key, outcome, Source::Nobody, now_ns);
        let message = match reason {
            Some(error) => reply::refused(&waiter.asked, key, error),
            None => reply::from_rcode(&waiter.asked, key, Rcode::ServFail),
        };
        self.push(waiter.vm, waiter.origin, message);
    }

    fn push(&mut self, vm: VmId, origin: Origin, message: Vec<u8>) {
        self.replies.push_back(Reply {
            vm,
            origin,
            message,
        });
    }
}

/// The reply to one waiter, from an answer that is `age_s` seconds old. Addresses are opened before
/// the guest can learn of them.
fn answered(
    policy: &mut dyn NamePolicy,
    journal: &mut Journal,
    waiter: &Waiter,
    key: Key<'_>,
    (answer, age_s, source): (&Answer, u32, Source),
    now_ns: u64,
) -> Vec<u8> {
    let without_hints;
    let keeps_hints = waiter.has_ipv6 || no_ipv6::validates(key);
    let answer = match keeps_hints || !answer.has_services() {
        true => answer,
        false => {
            without_hints = answer.clone().without_ipv6_hints(key);
            &without_hints
        }
    };
    let verdict = policy.answer(waiter.vm, key.name(), answer, age_s, now_ns);
    let outcome = match &verdict {
        Err(error) => ReplyKind::Refused(error),
        Ok(()) => ReplyKind::Answered(answer, age_s),
    };
    journal.note(policy, waiter, key, outcome, source, now_ns);
    match verdict {
        Err(error) => reply::refused(&waiter.asked, key, &error),
        Ok(()) => {
            let ceiling_s = policy.answer_policy(waiter.vm).ttl_ceiling_s;
            reply::from_answer(&waiter.asked, answer, age_s, ceiling_s)
        }
    }
}

#[cfg(test)]
#[path = "proxy_test.rs"]
mod tests;
