//! A relay, its clients and its guest, driven in turns by one thread.
use std::{
    collections::HashMap,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use slipgate_abi::{Protocol, RuleIndex, Vm6, Vm6Ref, VmId};

use super::{
    super::*,
    guest::{End, Guest},
    host_sockets,
};
use crate::{
    datagram::Datagram,
    fake,
    poll::Poller,
    port::{Frame, Outbox, single},
    test_vm,
};

pub(super) const VM: VmId = VmId::new(7);
pub(super) const MS: u64 = 1_000_000;
/// Real time after which what is under way between the host's sockets is stuck: the kernel sends again
/// after 200 ms, and the machine may be busy.
pub(super) const STUCK: Duration = Duration::from_secs(30);
/// Real time between two looks at it, ns.
const LOOK_NS: u64 = 50_000;

/// Faults of the link. Shares of packets are in percent.
#[derive(Clone, Copy, Default)]
pub(super) struct Impairment {
    pub(super) loss: u64,
    pub(super) duplicates: u64,
    /// A byte behind the IPv4 header is changed, toward the relay only.
    pub(super) garbled: u64,
    /// Packets are late by up to this many ms, each by its own.
    pub(super) jitter_ms: u64,
}

/// One direction of the link.
pub(super) struct Cable {
    impairment: Impairment,
    random: u64,
    on_the_way: Vec<(u64, Vec<u8>)>,
}

impl Cable {
    pub(super) fn new(impairment: Impairment, seed: u64) -> Self {
        Self {
            impairment,
            random: seed | 1,
            on_the_way: Vec::new(),
        }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % bound
    }

    pub(super) fn put(&mut self, packet: &[u8], now_ns: u64) {
        let copies = 1 + u64::from(self.below(100) < self.impairment.duplicates);
        for _ in 0..copies {
            if self.below(100) >= self.impairment.loss {
                let late_ns = self.below(self.impairment.jitter_ms + 1) * MS;
                let mut packet = packet.to_vec();
                if self.below(100) < self.impairment.garbled {
                    let at = 20 + self.below(packet.len().min(60) as u64 - 20) as usize;
                    packet[at] = self.below(256) as u8;
                }
                self.on_the_way.push((now_ns + late_ns, packet));
            }
        }
    }

    /// Time at which the next packet arrives, ns.
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.on_the_way.iter().map(|(at_ns, _)| *at_ns).min()
    }

    pub(super) fn take(&mut self, now_ns: u64) -> Vec<Vec<u8>> {
        let (here, still): (Vec<_>, Vec<_>) = std::mem::take(&mut self.on_the_way)
            .into_iter()
            .partition(|(at, _)| *at <= now_ns);
        self.on_the_way = still;
        here.into_iter().map(|(_, packet)| packet).collect()
    }
}

/// A client on the host.
pub(super) struct Client {
    pub(super) stream: TcpStream,
    pub(super) end: End,
}

impl Client {
    pub(super) fn connect(to: SocketAddr, end: End) -> Self {
        let stream = TcpStream::connect(to).unwrap();
        stream.set_nonblocking(true).unwrap();
        Self { stream, end }
    }

    /// The other way round: a service of the host that has accepted.
    pub(super) fn accept(listener: &TcpListener, end: End) -> Option<Self> {
        let (stream, _) = listener.accept().ok()?;
        stream.set_nonblocking(true).unwrap();
        Some(Self { stream, end })
    }

    /// Closes its socket, which is a reset if it was told so.
    pub(super) fn close(&mut self) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        other.set_nonblocking(true).unwrap();
        self.stream = other;
        (self.end.reads, self.end.closed) = (false, true);
        self.end.sent = self.end.send.len();
    }

    pub(super) fn step(&mut self) {
        let end = &mut self.end;
        let mut buffer = [0; 16_384];
        while end.sent < end.send.len() && !end.reset {
            match self.stream.write(&end.send[end.sent..]) {
                Ok(n) => end.sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(_) => end.reset = true,
            }
        }
        while end.reads && !end.eof && !end.reset {
            match self.stream.read(&mut buffer) {
                Ok(0) => end.eof = true,
                Ok(n) => end.received.extend_from_slice(&buffer[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(_) => end.reset = true,
            }
        }
        if end.is_to_close() {
            end.closed = true;
            // A reset may have come first; the reads tell.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }
}

pub(super) struct World {
    pub(super) relay: Relay,
    pub(super) poller: Poller,
    pub(super) out: Outbox,
    pub(super) now_ns: u64,
    pub(super) guest: Guest,
    /// Packets for the guest since the last look, whatever became of them.
    pub(super) to_guest: Vec<Vec<u8>>,
    pub(super) over_limit: u32,
    /// Packets of the guest's that were no connection's.
    pub(super) strays: u32,
    /// Packets of the guest's in the last step, and to it.
    pub(super) last_step: (usize, usize),
    /// Ports of the gateway that lead to the host's loopback.
    pub(super) leads: HashMap<u16, u16>,
    /// Whether the VM is frozen: nothing passes.
    pub(super) frozen: bool,
    /// Since when the kernel has had to carry something, with nothing else to do.
    waits_since: Option<Instant>,
    /// By how much the clock moves at most when nothing is due before, ns.
    pub(super) most_jump_ns: u64,
    down: Cable,
    up: Cable,
}

impl World {
    pub(super) fn new(limits: Limits, impairment: Impairment) -> Self {
        let mut relay = Relay::new(limits);
        relay.add_vm(test_vm::vm(VM.get()), None);
        Self::of(relay, impairment)
    }

    /// A world whose guest has IPv6, too, and no address that it was heard from.
    pub(super) fn with_ipv6(limits: Limits) -> (Self, Vm6Ref) {
        let row = Box::leak(Box::new(Vm6::OFF));
        // SAFETY: the row is leaked, so it stays.
        let row = unsafe { Vm6Ref::new(row) };
        let mut relay = Relay::new(limits);
        relay.add_vm(test_vm::vm6(VM.get()), Some(row));
        (Self::of(relay, Impairment::default()), row)
    }

    /// Has the link's faults come otherwise.
    pub(super) fn reseed(&mut self, seed: u64) {
        self.down.random ^= seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) << 1;
        self.up.random ^= seed.wrapping_mul(0xbf58_476d_1ce4_e5b9) << 1;
    }

    fn of(relay: Relay, impairment: Impairment) -> Self {
        Self {
            relay,
            poller: Poller::new().unwrap(),
            out: Outbox::new(64 << 20),
            now_ns: 1_000 * MS,
            guest: Guest::new(),
            to_guest: Vec::new(),
            over_limit: 0,
            strays: 0,
            last_step: (0, 0),
            leads: HashMap::new(),
            frozen: false,
            waits_since: None,
            most_jump_ns: MS,
            down: Cable::new(
                Impairment {
                    garbled: 0,
                    ..impairment
                },
                0x9e37_79b9,
            ),
            up: Cable::new(impairment, 0x7f4a_7c15),
        }
    }

    pub(super) fn with<R>(&mut self, call: impl FnOnce(&mut Relay, &mut Context<'_>) -> R) -> R {
        let mut cx = Context {
            now_ns: self.now_ns,
            out: &mut self.out,
            poller: &self.poller,
        };
        call(&mut self.relay, &mut cx)
    }

    /// A forwarded TCP port on loopback.
    pub(super) fn forward_tcp(&mut self, guest_port: u16) -> SocketAddr {
        self.forward_tcp_at("127.0.0.1", guest_port)
    }

    /// A forwarded TCP port of this address.
    pub(super) fn forward_tcp_at(&mut self, host: &str, guest_port: u16) -> SocketAddr {
        let listener = TcpListener::bind((host, 0)).unwrap();
        let addr = listener.local_addr().unwrap();
        self.forward(Protocol::Tcp, guest_port, listener.into());
        addr
    }

    pub(super) fn forward(&mut self, protocol: Protocol, guest_port: u16, socket: OwnedFd) {
        let forward = Forward {
            vm: VM,
            protocol,
            guest_port,
            rule: RuleIndex::new(7),
            socket,
        };
        self.with(|relay, cx| relay.add_forward(forward, cx))
            .unwrap();
    }

    /// Everybody's turn, at one moment. The clock moves when there is nothing left to do in it, and
    /// nothing under way between the host's sockets, which takes real time.
    pub(super) fn step(&mut self, clients: &mut [Client]) {
        for client in &mut *clients {
            client.step();
        }
        self.relay.begin_turn();
        let mut ready = Vec::new();
        self.poller.wait(Some(0), &mut ready).unwrap();
        let mut busy = !ready.is_empty();
        for readiness in ready.drain(..) {
            self.with(|relay, cx| relay.on_ready(readiness, cx));
        }
        let frozen = self.frozen;
        self.with(|relay, cx| relay.on_timer(&|_| frozen, cx));
        self.last_step = (0, 0);
        for packet in self.up.take(self.now_ns) {
            busy = true;
            self.last_step.0 += 1;
            if self.frozen {
                continue;
            }
            let taken = self.offer(&packet);
            self.over_limit += u32::from(taken == Taken::OverLimit);
            self.strays += u32::from(taken == Taken::No);
        }
        for frame in self.out.frames() {
            let frame = Frame::parse(frame).unwrap();
            for packet in fake::segments(frame.vnet, frame.l3) {
                self.last_step.1 += 1;
                if !self.frozen {
                    self.down.put(&packet, self.now_ns);
                }
                self.to_guest.push(packet);
            }
        }
        self.out.clear();
        for packet in self.down.take(self.now_ns) {
            self.guest.arrive(packet);
        }
        self.guest.step(self.now_ns);
        for packet in std::mem::take(&mut self.guest.outbox) {
            busy = true;
            self.up.put(&packet, self.now_ns);
        }
        if busy {
            self.waits_since = None;
        } else if self.is_under_way(clients) {
            let since = *self.waits_since.get_or_insert_with(Instant::now);
            assert!(since.elapsed() < STUCK, "{:?}", self.relay.entries);
            self.poller.wait(Some(LOOK_NS), &mut ready).unwrap();
            for readiness in ready {
                self.with(|relay, cx| relay.on_ready(readiness, cx));
            }
        } else {
            self.waits_since = None;
            self.now_ns = self.next_ns();
        }
    }

    /// The time at which something happens next, or at which to look again.
    fn next_ns(&mut self) -> u64 {
        let (soonest, latest) = (self.now_ns + MS, self.now_ns + self.most_jump_ns);
        if soonest >= latest {
            return soonest;
        }
        let due = [
            self.relay.next_deadline_ns(false),
            self.guest.due_ns(self.now_ns),
            self.up.due_ns(),
            self.down.due_ns(),
        ];
        let due_ns = due.into_iter().flatten().min().unwrap_or(latest);
        due_ns.clamp(soonest, latest)
    }

    /// Whether the kernel has something to carry between a client's socket and one of the relay's.
    fn is_under_way(&self, clients: &[Client]) -> bool {
        let own = self.relay.entries.values().flat_map(|entry| match entry {
            Entry::Connection(connection) => match &connection.kind {
                Kind::Stream(stream) | Kind::Loopback { stream, .. } => {
                    [stream.socket().map(AsFd::as_fd), None]
                }
                _ => [None, None],
            },
            Entry::Spliced(spliced) => spliced.sockets().map(|it| it.map(AsFd::as_fd)),
            _ => [None, None],
        });
        let own = own.flatten();
        let clients = clients.iter().map(|client| client.stream.as_fd());
        host_sockets::is_anything_under_way(own.chain(clients))
    }

    /// A port of the gateway that leads to a service on the host's loopback.
    pub(super) fn lead(&mut self, port: u16) -> TcpListener {
        self.lead_at("127.0.0.1", port)
    }

    /// The same at this address of the host.
    pub(super) fn lead_at(&mut self, host: &str, port: u16) -> TcpListener {
        let listener = TcpListener::bind((host, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        self.leads
            .insert(port, listener.local_addr().unwrap().port());
        listener
    }

    /// Gives the relay a packet of the guest, as who lets in what is listed.
    pub(super) fn offer(&mut self, packet: &[u8]) -> Taken {
        let segments = single(packet.len());
        let taken = self.with(|relay, cx| relay.packet(VM, packet, segments, cx));
        let to = Ip::parse(packet)
            .and_then(Packet::parse)
            .ok()
            .and_then(|packet| packet.transport.ports());
        let Some(&host_port) = to.and_then(|(_, port)| self.leads.get(&port)) else {
            return taken;
        };
        if taken != Taken::No {
            return taken;
        }
        let opening = Opening {
            host_port,
            rule: "host_loopback".into(),
        };
        self.with(|relay, cx| relay.open_loopback(VM, packet, segments, &opening, cx))
    }

    /// Datagrams for the guest from sockets that are ready soon, with source and destination.
    pub(super) fn datagrams(&mut self) -> Vec<(SocketAddr, SocketAddr, Vec<u8>)> {
        let mut ready = Vec::new();
        self.poller.wait(Some(20 * MS), &mut ready).unwrap();
        for readiness in ready {
            self.with(|relay, cx| relay.on_ready(readiness, cx));
        }
        let frames = self.out.frames().map(|frame| {
            let datagram = Datagram::parse(Frame::parse(frame).unwrap().l3).unwrap();
            (datagram.from, datagram.to, datagram.payload.to_vec())
        });
        let frames = frames.collect();
        self.out.clear();
        frames
    }

    /// Steps until `done`, or for the given time on the clock.
    pub(super) fn run(
        &mut self,
        clients: &mut [Client],
        most_ms: u64,
        mut done: impl FnMut(&mut Self, &[Client]) -> bool,
    ) {
        let end_ns = self.now_ns + most_ms * MS;
        while !done(self, clients) {
            assert!(
                self.now_ns < end_ns,
                "not done after {most_ms} ms: {:?}",
                self.relay.entries
            );
            self.step(clients);
        }
    }

    /// From now on nothing gets through.
    pub(super) fn fall_silent(&mut self) {
        self.lose(100);
    }

    /// From now on so many of a hundred packets are lost, each way.
    pub(super) fn lose(&mut self, percent: u64) {
        self.down.impairment.loss = percent;
        self.up.impairment.loss = percent;
    }

    /// Lets the clock run.
    pub(super) fn idle(&mut self, clients: &mut [Client], ms: u64) {
        let end_ns = self.now_ns + ms * MS;
        while self.now_ns < end_ns {
            self.step(clients);
        }
    }

    /// Asserts that no connection left a trace.
    pub(super) fn assert_empty(&self) {
        assert_eq!(self.relay.connections.len(), 0, "{:?}", self.relay.entries);
        assert_eq!(self.relay.deadlines.len(), 0);
        let counts = self.relay.counts(VM);
        assert_eq!((counts.streams, counts.dns_connections), (0, 0));
        assert_eq!((counts.loopback_streams, counts.loopback_exchanges), (0, 0));
        assert_eq!(self.relay.exchanges.len(), 0);
        let live = self.relay.live(0).count();
        assert_eq!(live, counts.associations as usize);
        assert_eq!(live as u64, counts.begun - counts.ended);
        let left = self.relay.entries.values();
        assert!(left.into_iter().all(|entry| !matches!(
            entry,
            Entry::Connection(_) | Entry::Exchange(_) | Entry::Spliced(_) | Entry::Inside(_)
        )));
    }
}

/// Bytes that tell where they are.
pub(super) fn bytes(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32)
        .map(|i| ((i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(0x85eb_ca6b)) >> 13) as u8)
        .collect()
}
