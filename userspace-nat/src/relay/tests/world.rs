//! A relay, its clients and its guest, driven in turns by one thread.
use std::{
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream},
};

use slipgate_abi::Protocol;
use smoltcp::{
    iface::{Config, Interface, SocketHandle, SocketSet},
    phy::{self, Checksum, DeviceCapabilities, Medium},
    socket::tcp,
    time::Instant,
    wire::{HardwareAddress, IpAddress, IpCidr},
};

use super::super::*;
use crate::{poll::Poller, port::Frame, test_vm};

pub(super) const VM: u32 = 7;
pub(super) const MS: u64 = 1_000_000;

/// What the link does to packets, in percent.
#[derive(Clone, Copy, Default)]
pub(super) struct Impairment {
    pub(super) loss: u64,
    pub(super) duplicates: u64,
    /// Packets are late by up to this many ms, each by its own.
    pub(super) jitter_ms: u64,
}

/// One direction of the link.
struct Cable {
    impairment: Impairment,
    random: u64,
    on_the_way: Vec<(u64, Vec<u8>)>,
}

impl Cable {
    fn new(impairment: Impairment, seed: u64) -> Self {
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

    fn put(&mut self, packet: &[u8], now_ns: u64) {
        let copies = 1 + u64::from(self.below(100) < self.impairment.duplicates);
        for _ in 0..copies {
            if self.below(100) >= self.impairment.loss {
                let late_ns = self.below(self.impairment.jitter_ms + 1) * MS;
                self.on_the_way.push((now_ns + late_ns, packet.to_vec()));
            }
        }
    }

    fn take(&mut self, now_ns: u64) -> Vec<Vec<u8>> {
        let (here, still): (Vec<_>, Vec<_>) = std::mem::take(&mut self.on_the_way)
            .into_iter()
            .partition(|(at, _)| *at <= now_ns);
        self.on_the_way = still;
        here.into_iter().map(|(_, packet)| packet).collect()
    }
}

/// When one end of a connection shuts its direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Close {
    WhenSent,
    AfterPeer,
    Never,
}

/// One end of a connection, and what it saw.
#[derive(Debug)]
pub(super) struct End {
    pub(super) send: Vec<u8>,
    sent: usize,
    close: Close,
    closed: bool,
    pub(super) reads: bool,
    pub(super) received: Vec<u8>,
    pub(super) eof: bool,
    pub(super) reset: bool,
}

impl End {
    pub(super) fn new(send: Vec<u8>, close: Close) -> Self {
        Self {
            send,
            sent: 0,
            close,
            closed: false,
            reads: true,
            received: Vec::new(),
            eof: false,
            reset: false,
        }
    }

    pub(super) fn sent(&self) -> usize {
        self.sent
    }

    fn is_to_close(&self) -> bool {
        let due = match self.close {
            Close::WhenSent => true,
            Close::AfterPeer => self.eof,
            Close::Never => false,
        };
        due && !self.closed && self.sent == self.send.len()
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

    fn step(&mut self) {
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

/// A guest with a TCP stack of its own.
pub(super) struct Guest {
    interface: Interface,
    sockets: SocketSet<'static>,
    pub(super) ends: Vec<(SocketHandle, End)>,
    inbox: VecDeque<Vec<u8>>,
    outbox: Vec<Vec<u8>>,
    waiting: Vec<(u16, End)>,
    opened: std::collections::HashSet<u16>,
}

impl Guest {
    fn new() -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = 42;
        let mut queues = (VecDeque::new(), Vec::new());
        let mut device = Nic(&mut queues.0, &mut queues.1);
        let mut interface = Interface::new(config, &mut device, Instant::ZERO);
        interface.update_ip_addrs(|addrs| {
            addrs
                .push(IpCidr::new(IpAddress::v4(10, 0, 2, 15), 24))
                .unwrap();
        });
        let router = Ipv4Addr::new(10, 0, 2, 2);
        interface
            .routes_mut()
            .add_default_ipv4_route(router)
            .unwrap();
        Self {
            interface,
            sockets: SocketSet::new(Vec::new()),
            ends: Vec::new(),
            inbox: VecDeque::new(),
            outbox: Vec::new(),
            waiting: Vec::new(),
            opened: std::collections::HashSet::new(),
        }
    }

    fn add(&mut self, end: End) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; 32_768]);
        let handle = self.sockets.add(tcp::Socket::new(buffer(), buffer()));
        self.ends.push((handle, end));
        handle
    }

    /// Serves one of many connections to `port`. It listens only when its SYN comes: smoltcp gives
    /// a repeated SYN to whoever listens, before the socket whose connection it is.
    pub(super) fn serve(&mut self, port: u16, end: End) {
        self.waiting.push((port, end));
    }

    fn arrive(&mut self, packet: Vec<u8>) {
        let transport = Ipv4::parse(&packet).and_then(Packet::parse);
        if let Ok(Transport::Tcp(tcp)) = transport.map(|packet| packet.transport)
            && tcp.is_opening_syn()
            && let Some(index) = self
                .waiting
                .iter()
                .position(|(port, _)| *port == tcp.destination)
            && self.opened.insert(tcp.source)
        {
            let (port, end) = self.waiting.remove(index);
            self.listen(port, end);
        }
        self.inbox.push_back(packet);
    }

    /// Serves one connection to `port`.
    pub(super) fn listen(&mut self, port: u16, end: End) {
        let handle = self.add(end);
        self.socket(handle).listen(port).unwrap();
    }

    pub(super) fn connect(&mut self, to: SocketAddrV4, from: u16, end: End) {
        let handle = self.add(end);
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(handle);
        let remote = (IpAddress::Ipv4(*to.ip()), to.port());
        socket
            .connect(self.interface.context(), remote, from)
            .unwrap();
    }

    pub(super) fn socket(&mut self, handle: SocketHandle) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(handle)
    }

    pub(super) fn abort(&mut self, index: usize) {
        let handle = self.ends[index].0;
        self.socket(handle).abort();
    }

    fn step(&mut self, now_ns: u64) {
        let now = Instant::from_micros((now_ns / 1_000) as i64);
        let mut device = Nic(&mut self.inbox, &mut self.outbox);
        self.interface.poll(now, &mut device, &mut self.sockets);
        for (handle, end) in &mut self.ends {
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(*handle);
            let was_open = socket.is_active() || socket.is_listening();
            while end.sent < end.send.len() && socket.can_send() {
                end.sent += socket.send_slice(&end.send[end.sent..]).unwrap();
            }
            while end.reads && socket.can_recv() {
                let received = &mut end.received;
                let read = |bytes: &mut [u8]| {
                    received.extend_from_slice(bytes);
                    (bytes.len(), ())
                };
                socket.recv(read).unwrap();
            }
            end.eof |= !socket.can_recv()
                && matches!(socket.recv(|_| (0, ())), Err(tcp::RecvError::Finished));
            end.reset |= !was_open && !end.eof;
            if end.is_to_close() && socket.may_send() {
                end.closed = true;
                socket.close();
            }
        }
        self.interface.poll(
            now,
            &mut Nic(&mut self.inbox, &mut self.outbox),
            &mut self.sockets,
        );
    }
}

struct Nic<'a>(&'a mut VecDeque<Vec<u8>>, &'a mut Vec<Vec<u8>>);
struct Arrived(Vec<u8>);
struct Leaving<'a>(&'a mut Vec<Vec<u8>>);

impl phy::Device for Nic<'_> {
    type RxToken<'t>
        = Arrived
    where
        Self: 't;
    type TxToken<'t>
        = Leaving<'t>
    where
        Self: 't;

    fn receive(&mut self, _: Instant) -> Option<(Arrived, Leaving<'_>)> {
        Some((Arrived(self.0.pop_front()?), Leaving(self.1)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Leaving<'_>> {
        Some(Leaving(self.1))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = 1_500;
        // It verifies what the relay sends, and leaves its own to the device, as offloads do.
        capabilities.checksum.tcp = Checksum::Rx;
        capabilities
    }
}

impl phy::RxToken for Arrived {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(&self.0)
    }
}

impl phy::TxToken for Leaving<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, write: F) -> R {
        let mut packet = vec![0; len];
        let result = write(&mut packet);
        self.0.push(packet);
        result
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
    down: Cable,
    up: Cable,
}

impl World {
    pub(super) fn new(limits: Limits, impairment: Impairment) -> Self {
        let mut relay = Relay::new(limits);
        relay.add_vm(test_vm::vm(VM));
        Self {
            relay,
            poller: Poller::new().unwrap(),
            out: Outbox::new(64 << 20),
            now_ns: 1_000 * MS,
            guest: Guest::new(),
            to_guest: Vec::new(),
            over_limit: 0,
            down: Cable::new(impairment, 0x9e37_79b9),
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
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        self.forward(Protocol::Tcp, guest_port, listener.into());
        addr
    }

    pub(super) fn forward(
        &mut self,
        protocol: Protocol,
        guest_port: u16,
        socket: std::os::fd::OwnedFd,
    ) {
        let forward = Forward {
            vm: VM,
            protocol,
            guest_port,
            socket,
        };
        self.with(|relay, cx| relay.add_forward(forward, cx))
            .unwrap();
    }

    /// Everybody's turn, at one moment. The clock moves when there is nothing left to do in it.
    pub(super) fn step(&mut self, clients: &mut [Client]) {
        for client in clients {
            client.step();
        }
        let mut ready = Vec::new();
        self.poller.wait(Some(0), &mut ready).unwrap();
        let mut busy = !ready.is_empty();
        for readiness in ready {
            self.with(|relay, cx| relay.on_ready(readiness, cx));
        }
        self.with(|relay, cx| relay.on_timer(cx));
        for packet in self.up.take(self.now_ns) {
            busy = true;
            let taken = self.with(|relay, cx| relay.packet(VM, &packet, cx));
            self.over_limit += u32::from(taken == Taken::OverLimit);
        }
        for frame in self.out.frames() {
            let l3 = Frame::parse(frame).unwrap().l3;
            self.to_guest.push(l3.to_vec());
            self.down.put(l3, self.now_ns);
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
        if !busy {
            self.now_ns += MS;
        }
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

    /// Lets the clock run.
    pub(super) fn idle(&mut self, clients: &mut [Client], ms: u64) {
        let end_ns = self.now_ns + ms * MS;
        while self.now_ns < end_ns {
            self.step(clients);
        }
    }

    /// Asserts that no connection left a trace.
    pub(super) fn assert_empty(&self) {
        assert_eq!(self.relay.connections.len(), 0);
        assert_eq!(self.relay.deadlines.len(), 0);
        let counts = self.relay.counts(VM);
        assert_eq!((counts.streams, counts.dns_connections), (0, 0));
        let left = self.relay.entries.values();
        assert!(
            left.into_iter()
                .all(|entry| !matches!(entry, Entry::Connection(_)))
        );
    }
}

/// Bytes that tell where they are.
pub(super) fn bytes(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32)
        .map(|i| ((i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(0x85eb_ca6b)) >> 13) as u8)
        .collect()
}
