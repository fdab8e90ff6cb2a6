//! The proxy: every question of every guest, from its arrival to its reply.
//!
//! Questions wait in *exchanges*, one per distinct question, however many guests ask it. Both are
//! bounded, per VM and in all: a VM over its own bound is refused, and when all exchanges are
//! taken, a VM below its share takes one of the VM that holds most.
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    net::{Ipv4Addr, SocketAddr},
};

use rand::rngs::StdRng;
use slipgate_abi::DropReason;

use super::{
    cache::Cache,
    exchange::{Exchange, Progress, Surroundings},
    message::{Answer, Key, Query, QueryError, Rcode},
    policy::{NamePolicy, NameVerdict},
    reply::{self, Asked},
    resolvers::Resolvers,
};
use crate::{
    poll::{Poller, Readiness, Subsystem, Token},
    stats::{Tally, VmStats},
    vm::VmNet,
};

/// Bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Questions of one VM without a reply.
    pub waiting_per_vm: usize,
    /// Distinct questions in flight, of all VMs; each has at most two sockets. At most 4096.
    pub exchanges: usize,
    /// Answers kept.
    pub cache_entries: usize,
    /// Memory for them, bytes.
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

/// How a question came, and so how its reply goes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Origin {
    /// In a datagram.
    Udp {
        /// From this port of the guest.
        guest_port: u16,
        /// To this address, which the reply comes from.
        server: Ipv4Addr,
    },
    /// Over a TCP connection that the relay ends.
    Tcp {
        /// The relay's name for it.
        connection: u64,
    },
}

/// A reply for a guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// The VM's id.
    pub vm: u32,
    /// Where to.
    pub origin: Origin,
    /// The DNS message, without TCP's length.
    pub message: Vec<u8>,
}

/// The forwarding proxy.
pub struct Proxy {
    limits: Limits,
    resolvers: Resolvers,
    policy: Box<dyn NamePolicy>,
    cache: Cache,
    slots: Vec<Slot>,
    free: Vec<u16>,
    by_question: HashMap<Box<[u8]>, u16>,
    deadlines: BTreeSet<(u64, u16)>,
    loads: HashMap<u32, Load>,
    replies: VecDeque<Reply>,
    rng: StdRng,
    scratch: Box<[u8]>,
    key: Vec<u8>,
    mismatched: u64,
}

/// Room for one exchange. The generation tells events of an earlier one apart.
#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    live: Option<Live>,
}

#[derive(Debug)]
struct Live {
    exchange: Exchange,
    /// The VM in whose share it counts: the first of those waiting.
    vm: u32,
    since_ns: u64,
    waiting: Vec<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    vm: u32,
    stats: VmStats,
    origin: Origin,
    asked: Asked,
}

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    waiting: usize,
    exchanges: usize,
}

const INDEX_BITS: u32 = 12;

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxy")
            .field("resolvers", &self.resolvers)
            .field("in_flight", &self.by_question.len())
            .field("cached", &self.cache.len())
            .finish_non_exhaustive()
    }
}

impl Proxy {
    /// A proxy that asks these resolvers, in this order (the first eight of them).
    pub fn new(resolvers: &[SocketAddr], limits: Limits, policy: Box<dyn NamePolicy>) -> Self {
        let exchanges = limits.exchanges.min(1 << INDEX_BITS);
        Self {
            resolvers: Resolvers::new(resolvers),
            policy,
            cache: Cache::new(limits.cache_entries, limits.cache_bytes),
            slots: (0..exchanges).map(|_| Slot::default()).collect(),
            free: (0..exchanges as u16).rev().collect(),
            by_question: HashMap::new(),
            deadlines: BTreeSet::new(),
            loads: HashMap::new(),
            replies: VecDeque::new(),
            rng: rand::make_rng(),
            scratch: vec![0; usize::from(u16::MAX)].into(),
            key: Vec::new(),
            mismatched: 0,
            limits,
        }
    }

    /// Asks other resolvers from now on; questions in flight go on.
    pub fn set_resolvers(&mut self, resolvers: &[SocketAddr]) {
        self.resolvers = Resolvers::new(resolvers);
    }

    /// Takes a question. Its reply comes out of [`Proxy::next_reply`], now or later.
    ///
    /// # Errors
    /// The reason to count when there will be no reply.
    pub fn query(
        &mut self,
        vm: &VmNet,
        origin: Origin,
        message: &[u8],
        poller: &Poller,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let query = match Query::parse(message) {
            Ok(query) => query,
            Err(QueryError::NotAQuery) => return Err(DropReason::ServiceReject),
            Err(QueryError::Answer(rcode)) => {
                vm.stats.tally(Tally::DnsQuery, 1);
                self.push(vm.id, origin, reply::to_unreadable(message, rcode));
                return Ok(());
            }
        };
        let asked = match origin {
            Origin::Udp { .. } => Asked::by_udp(&query, usize::from(vm.mtu).saturating_sub(28)),
            Origin::Tcp { .. } => Asked::by_tcp(&query),
        };
        let mut key = std::mem::take(&mut self.key);
        query.write_key(&mut key);
        let waiter = Waiter { vm: vm.id, stats: vm.stats, origin, asked };
        let taken = self.take(waiter, Key(&key), poller, now_ns);
        self.key = key;
        if taken.is_ok() {
            vm.stats.tally(Tally::DnsQuery, 1);
        }
        taken
    }

    /// The next reply that is ready.
    pub fn next_reply(&mut self) -> Option<Reply> {
        self.replies.pop_front()
    }

    /// Goes on with a socket that is ready (a [`Subsystem::Dns`] token).
    pub fn on_ready(&mut self, readiness: Readiness, poller: &Poller, now_ns: u64) {
        let index = readiness.token.key & ((1 << INDEX_BITS) - 1);
        let generation = readiness.token.key >> INDEX_BITS;
        if self.slots.get(index as usize).is_some_and(|s| s.generation == generation) {
            self.drive(index as u16, poller, now_ns, Exchange::on_ready);
        }
    }

    /// When [`Proxy::on_timer`] is due, ns.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        self.deadlines.first().map(|&(at, _)| at)
    }

    /// Goes on with what has waited long enough.
    pub fn on_timer(&mut self, poller: &Poller, now_ns: u64) {
        while let Some(&(at, index)) = self.deadlines.first() {
            if at > now_ns {
                return;
            }
            self.drive(index, poller, now_ns, Exchange::on_timer);
        }
    }

    /// Forgets what a VM waits for; it is gone.
    pub fn forget(&mut self, vm: u32) {
        for index in 0..self.slots.len() as u16 {
            let Some(live) = &mut self.slots[usize::from(index)].live else { continue };
            live.waiting.retain(|w| w.vm != vm);
            match live.waiting.first().map(|w| w.vm) {
                None => drop(self.end(index)),
                Some(heir) if live.vm == vm => {
                    live.vm = heir;
                    self.loads.entry(heir).or_default().exchanges += 1;
                }
                Some(_) => {}
            }
        }
        self.loads.remove(&vm);
        self.replies.retain(|r| r.vm != vm);
    }

    /// Distinct questions in flight.
    pub fn in_flight(&self) -> usize {
        self.by_question.len()
    }

    /// Answers kept.
    pub fn cached(&self) -> usize {
        self.cache.len()
    }

    /// Datagrams that came to a question's socket and did not answer it: forgeries, mostly.
    pub fn mismatched(&self) -> u64 {
        self.mismatched
    }

    fn take(
        &mut self,
        waiter: Waiter,
        key: Key<'_>,
        poller: &Poller,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let rcode = match self.policy.question(waiter.vm, key.name(), key.qtype()) {
            NameVerdict::Allow => None,
            NameVerdict::Refuse => Some(Rcode::Refused),
            NameVerdict::NxDomain => Some(Rcode::NxDomain),
        };
        if let Some(rcode) = rcode {
            self.push(waiter.vm, waiter.origin, reply::from_rcode(&waiter.asked, key, rcode));
            return Ok(());
        }
        if let Some((answer, age_s)) = self.cache.get(key.0, now_ns) {
            waiter.stats.tally(Tally::DnsCacheHit, 1);
            let reply = answered(&mut *self.policy, &waiter, key, answer, age_s);
            self.replies.push_back(reply);
            return Ok(());
        }
        let load = self.loads.get(&waiter.vm).copied().unwrap_or_default();
        if let Some(&index) = self.by_question.get(key.0) {
            let Some(live) = &mut self.slots[usize::from(index)].live else { return Ok(()) };
            let again = |w: &Waiter| {
                (w.vm, w.origin, w.asked.id) == (waiter.vm, waiter.origin, waiter.asked.id)
            };
            // A retransmission waits already.
            if live.waiting.iter().any(again) {
                return Ok(());
            }
            if load.waiting >= self.limits.waiting_per_vm {
                return self.turn_away(waiter, key, DropReason::OverRate);
            }
            self.loads.entry(waiter.vm).or_default().waiting += 1;
            live.waiting.push(waiter);
            return Ok(());
        }
        if load.waiting >= self.limits.waiting_per_vm {
            return self.turn_away(waiter, key, DropReason::OverRate);
        }
        if self.free.is_empty() {
            self.make_room(load);
        }
        let Some(index) = self.free.pop() else {
            return self.turn_away(waiter, key, DropReason::EngineBusy);
        };
        self.begin(index, waiter, key, poller, now_ns);
        Ok(())
    }

    fn begin(&mut self, index: u16, waiter: Waiter, key: Key<'_>, poller: &Poller, now_ns: u64) {
        let slot = &mut self.slots[usize::from(index)];
        let token = Token {
            subsystem: Subsystem::Dns,
            key: slot.generation << INDEX_BITS | u32::from(index),
        };
        let exchange = Exchange::new(key.0, token, now_ns);
        self.deadlines.insert((exchange.next_ns(), index));
        let load = self.loads.entry(waiter.vm).or_default();
        load.waiting += 1;
        load.exchanges += 1;
        slot.live =
            Some(Live { exchange, vm: waiter.vm, since_ns: now_ns, waiting: vec![waiter] });
        self.by_question.insert(key.0.into(), index);
        self.drive(index, poller, now_ns, Exchange::ask);
    }

    fn drive(
        &mut self,
        index: u16,
        poller: &Poller,
        now_ns: u64,
        step: fn(&mut Exchange, &mut Surroundings<'_>) -> Progress,
    ) {
        let Some(live) = &mut self.slots[usize::from(index)].live else {
            return;
        };
        let before_ns = live.exchange.next_ns();
        let progress = step(
            &mut live.exchange,
            &mut Surroundings {
                poller,
                resolvers: &mut self.resolvers,
                rng: &mut self.rng,
                scratch: &mut self.scratch,
                mismatched: &mut self.mismatched,
                now_ns,
            },
        );
        let answer = match progress {
            Progress::Waiting => {
                let next_ns = live.exchange.next_ns();
                if next_ns != before_ns {
                    self.deadlines.remove(&(before_ns, index));
                    self.deadlines.insert((next_ns, index));
                }
                return;
            }
            Progress::Answered(answer) => Some(answer),
            Progress::Failed => None,
        };
        let Some(live) = self.end(index) else { return };
        let key = live.exchange.key();
        for waiter in &live.waiting {
            // By TCP nothing is truncated: the whole answer was not to be had.
            let by_tcp = matches!(waiter.origin, Origin::Tcp { .. });
            match answer.as_ref().filter(|a| !(by_tcp && a.is_truncated())) {
                Some(answer) => {
                    let reply = answered(&mut *self.policy, waiter, key, answer, 0);
                    self.replies.push_back(reply);
                }
                None => self.fail(waiter, key),
            }
        }
        if let Some(answer) = answer {
            self.cache.insert(live.vm, key.0, answer, now_ns);
        }
    }

    /// Takes an exchange out, its sockets with it.
    fn end(&mut self, index: u16) -> Option<Live> {
        let slot = &mut self.slots[usize::from(index)];
        let live = slot.live.take()?;
        slot.generation = (slot.generation + 1) & (u32::MAX >> INDEX_BITS);
        self.free.push(index);
        self.by_question.remove(live.exchange.key().0);
        self.deadlines.remove(&(live.exchange.next_ns(), index));
        for waiter in &live.waiting {
            self.unload(waiter.vm, Load { waiting: 1, exchanges: 0 });
        }
        self.unload(live.vm, Load { waiting: 0, exchanges: 1 });
        Some(live)
    }

    fn unload(&mut self, vm: u32, by: Load) {
        if let Some(load) = self.loads.get_mut(&vm) {
            load.waiting = load.waiting.saturating_sub(by.waiting);
            load.exchanges = load.exchanges.saturating_sub(by.exchanges);
            if load.waiting == 0 && load.exchanges == 0 {
                self.loads.remove(&vm);
            }
        }
    }

    /// Ends the oldest exchange of the VM that has most, for a VM that has less than its share.
    /// One that other VMs wait for too is left alone.
    fn make_room(&mut self, asking: Load) {
        let vms = self.loads.len() + usize::from(asking.waiting == 0);
        let most = self.loads.iter().max_by_key(|(_, load)| load.exchanges);
        let Some((&most, load)) = most else { return };
        if asking.exchanges >= self.slots.len() / vms || load.exchanges <= asking.exchanges + 1 {
            return;
        }
        let oldest = (0..self.slots.len() as u16)
            .filter_map(|i| Some((i, self.slots[usize::from(i)].live.as_ref()?)))
            .filter(|(_, l)| l.vm == most && l.waiting.iter().all(|w| w.vm == most))
            .min_by_key(|(_, l)| l.since_ns)
            .map(|(i, _)| i);
        if let Some(live) = oldest.and_then(|index| self.end(index)) {
            for waiter in &live.waiting {
                self.fail(waiter, live.exchange.key());
            }
        }
    }

    /// No room for a question: a datagram is dropped, the guest will ask again; TCP gets SERVFAIL.
    fn turn_away(
        &mut self,
        waiter: Waiter,
        key: Key<'_>,
        reason: DropReason,
    ) -> Result<(), DropReason> {
        match waiter.origin {
            Origin::Udp { .. } => Err(reason),
            Origin::Tcp { .. } => {
                self.fail(&waiter, key);
                Ok(())
            }
        }
    }

    fn fail(&mut self, waiter: &Waiter, key: Key<'_>) {
        waiter.stats.tally(Tally::DnsFailure, 1);
        let message = reply::from_rcode(&waiter.asked, key, Rcode::ServFail);
        self.push(waiter.vm, waiter.origin, message);
    }

    fn push(&mut self, vm: u32, origin: Origin, message: Vec<u8>) {
        self.replies.push_back(Reply { vm, origin, message });
    }
}

fn answered(
    policy: &mut dyn NamePolicy,
    waiter: &Waiter,
    key: Key<'_>,
    answer: &Answer,
    age_s: u32,
) -> Reply {
    let mut addresses = answer.addresses().map(|(a, ttl)| (a, ttl.saturating_sub(age_s)));
    policy.answer(waiter.vm, key.name(), &mut addresses);
    let message = reply::from_answer(&waiter.asked, answer, age_s);
    Reply { vm: waiter.vm, origin: waiter.origin, message }
}

#[cfg(test)]
#[path = "proxy_test.rs"]
mod tests;
