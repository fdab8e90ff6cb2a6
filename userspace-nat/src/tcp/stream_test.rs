//! Whole connections between the state machine and another TCP stack (smoltcp's), over a link that
//! loses, repeats and reorders, with a socket that takes what it likes.
use std::{collections::VecDeque, net::SocketAddr};

use proptest::prelude::*;
use slipgate_abi::Ip4;
use smoltcp::{
    iface::{Config, Interface, SocketHandle, SocketSet},
    phy::{self, Checksum, DeviceCapabilities, Medium},
    socket::tcp,
    time::Instant,
    wire::{HardwareAddress, IpAddress, IpCidr},
};

use super::*;
use crate::{
    clock::MILLISECOND_NS,
    fake::segments,
    packet::{Ipv4, Packet, Transport, Version},
};

const GUEST: Ip4 = Ip4 {
    octets: [10, 0, 2, 15],
};
const SERVER: Ip4 = Ip4 {
    octets: [192, 0, 2, 1],
};
const GUEST_PORT: u16 = 40_000;
const SERVER_PORT: u16 = 80;

/// Faults of the link and the socket, each one in so many; 0: never.
#[derive(Clone, Copy, Debug)]
struct Faults {
    loses: u32,
    repeats: u32,
    reorders: u32,
    /// The socket takes only a part of what it is offered.
    takes_part: u32,
    /// Whether the guest's SYN permits selective acknowledgements, and has timestamps.
    sack: bool,
    times: bool,
    seed: u64,
}

thread_local! {
    /// Clock of the guest's timestamps, ms.
    static GUEST_MS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn one_in(&mut self, n: u32) -> bool {
        n != 0 && self.roll().is_multiple_of(n)
    }
}

/// A link in one direction.
#[derive(Default)]
struct Link(VecDeque<Vec<u8>>);

impl Link {
    fn carry(&mut self, packet: Vec<u8>, dice: &mut Dice, faults: Faults) {
        if dice.one_in(faults.loses) {
            return;
        }
        if dice.one_in(faults.repeats) {
            self.0.push_back(packet.clone());
        }
        self.0.push_back(packet);
        let len = self.0.len();
        if len > 1 && dice.one_in(faults.reorders) {
            self.0.swap(len - 1, len - 2);
        }
    }
}

struct Nic<'l>(&'l mut Link, &'l mut Vec<Vec<u8>>);
struct Rx(Vec<u8>);
struct Tx<'l>(&'l mut Vec<Vec<u8>>);

impl phy::Device for Nic<'_> {
    type RxToken<'t>
        = Rx
    where
        Self: 't;
    type TxToken<'t>
        = Tx<'t>
    where
        Self: 't;

    fn receive(&mut self, _: Instant) -> Option<(Rx, Tx<'_>)> {
        let packet = self.0.0.pop_front()?;
        Some((Rx(packet), Tx(self.1)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Tx<'_>> {
        Some(Tx(self.1))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = 1_500;
        // Ours are partial, where the frame is one segment.
        capabilities.checksum.tcp = Checksum::Tx;
        capabilities
    }
}

impl phy::RxToken for Rx {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

impl phy::TxToken for Tx<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut packet = vec![0; len];
        let result = f(&mut packet);
        self.0.push(packet);
        result
    }
}

/// The server, behind the host's socket: its bytes, of which some are peeked, and what it got.
struct Socket {
    sends: Vec<u8>,
    taken_out: usize,
    got: Vec<u8>,
    got_end: bool,
}

struct Run {
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    to_guest: Link,
    from_guest: Link,
    connection: Option<Connection>,
    socket: Socket,
    dice: Dice,
    faults: Faults,
    now_ns: u64,
    guest_sends: Vec<u8>,
    guest_sent: usize,
    guest_got: Vec<u8>,
    guest_closed: bool,
}

fn pattern(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32)
        .map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8)
        .collect()
}

impl Run {
    fn new(up: usize, down: usize, faults: Faults) -> Self {
        // The run before may have left a later time: timestamps that go back are refused (RFC 7323).
        GUEST_MS.set(0);
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = faults.seed;
        let (mut link, mut out) = (Link::default(), Vec::new());
        let mut interface = Interface::new(config, &mut Nic(&mut link, &mut out), Instant::ZERO);
        interface.update_ip_addrs(|all| {
            all.push(IpCidr::new(IpAddress::v4(10, 0, 2, 15), 24))
                .unwrap();
        });
        let router = std::net::Ipv4Addr::new(10, 0, 2, 2);
        interface
            .routes_mut()
            .add_default_ipv4_route(router)
            .unwrap();
        let mut sockets = SocketSet::new(Vec::new());
        let buffer = || tcp::SocketBuffer::new(vec![0; 100_000]);
        let handle = sockets.add(tcp::Socket::new(buffer(), buffer()));
        let to = (IpAddress::v4(192, 0, 2, 1), SERVER_PORT);
        if faults.times {
            let socket = sockets.get_mut::<tcp::Socket<'_>>(handle);
            socket.set_tsval_generator(Some(|| GUEST_MS.get()));
        }
        sockets
            .get_mut::<tcp::Socket<'_>>(handle)
            .connect(interface.context(), to, GUEST_PORT)
            .unwrap();
        Self {
            interface,
            sockets,
            handle,
            to_guest: Link::default(),
            from_guest: Link::default(),
            connection: None,
            socket: Socket {
                sends: pattern(down, 1),
                taken_out: 0,
                got: Vec::new(),
                got_end: false,
            },
            dice: Dice(faults.seed),
            faults,
            now_ns: 0,
            guest_sends: pattern(up, 2),
            guest_sent: 0,
            guest_got: Vec::new(),
            guest_closed: false,
        }
    }

    fn write(&mut self, header: Header, payload: std::ops::Range<usize>) {
        let mss = self.connection.as_ref().map_or(536, Connection::mss);
        let mut l3 = vec![0; header.headers_len(Version::V4)];
        l3.extend_from_slice(&self.socket.sends[payload]);
        let at = |address: Ip4, port| SocketAddr::new(address.into(), port);
        let (from, to) = (at(SERVER, SERVER_PORT), at(GUEST, GUEST_PORT));
        let vnet = write_headers(&mut l3, from, to, &header, mss);
        for packet in segments(vnet, &l3) {
            self.to_guest.carry(packet, &mut self.dice, self.faults);
        }
    }

    fn guest_turn(&mut self) {
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(self.handle);
        if socket.may_send() && self.guest_sent < self.guest_sends.len() {
            let rest = &self.guest_sends[self.guest_sent..];
            self.guest_sent += socket.send_slice(rest).unwrap();
        }
        // In LAST-ACK smoltcp 0.14.0 does not count duplicate acknowledgements (it returns before
        // that, src/socket/tcp.rs line 2048), so each loss there takes a retransmission timer, of up
        // to 60 s. After the server's FIN, a stream that may need any ends once it is acknowledged.
        let Faults {
            loses,
            reorders,
            takes_part,
            ..
        } = self.faults;
        let may_close = socket.state() != tcp::State::CloseWait
            || socket.send_queue() == 0
            || loses + reorders + takes_part == 0;
        let all_sent = self.guest_sent == self.guest_sends.len();
        if all_sent && may_close && !self.guest_closed && socket.may_send() {
            socket.close();
            self.guest_closed = true;
        }
        let mut buffer = [0; 4_096];
        while socket.can_recv() {
            let n = socket.recv_slice(&mut buffer).unwrap();
            self.guest_got.extend_from_slice(&buffer[..n]);
        }
        let mut out = Vec::new();
        let now = Instant::from_micros((self.now_ns / 1_000) as i64);
        let mut nic = Nic(&mut self.to_guest, &mut out);
        self.interface.poll(now, &mut nic, &mut self.sockets);
        for packet in out {
            self.from_guest.carry(packet, &mut self.dice, self.faults);
        }
    }

    fn our_turn(&mut self) {
        while let Some(packet) = self.from_guest.0.pop_front() {
            self.receive(&packet);
        }
        self.send();
        let Some(connection) = &mut self.connection else {
            return;
        };
        match connection.on_time(self.now_ns) {
            Due::Send(header) => self.write(header, 0..0),
            Due::GiveUp(_) => panic!("given up"),
            Due::Resend => self.send(),
            Due::Nothing | Due::Forget => {}
        }
        let Some(connection) = &mut self.connection else {
            return;
        };
        if connection.owes_acknowledgement() {
            let header = connection.acknowledge(30_000);
            self.write(header, 0..0);
        }
        let connection = self.connection.as_mut().unwrap();
        if connection.is_short_of_room() && self.dice.one_in(3) {
            let (header, times) = connection.reopen(30_000);
            for _ in 0..times {
                self.write(header, 0..0);
            }
        }
    }

    fn receive(&mut self, packet: &[u8]) {
        let packet = Packet::parse(Ipv4::parse(packet).unwrap()).unwrap();
        let Transport::Tcp(tcp) = packet.transport else {
            panic!("no TCP");
        };
        let l4 = packet.ip.payload();
        let mut segment = Segment::read(&tcp, l4);
        if !self.faults.sack {
            segment.options.sack_permitted = false;
            segment.sack = SackBlocks::default();
        }
        let payload = &l4[tcp.header_len..];
        let Some(connection) = &mut self.connection else {
            let mut connection = Connection::new(Version::V4, &segment, self.dice.roll());
            let header = connection.connected(30_000, self.now_ns);
            self.connection = Some(connection);
            return self.write(header, 0..0);
        };
        let received = connection.receive(&segment, self.now_ns);
        assert_ne!(received.host, Host::Reset);
        let offered = received.deliver.len();
        let takes = match offered > 0 && self.dice.one_in(self.faults.takes_part) {
            true => self.dice.roll() as usize % offered,
            false => offered,
        };
        let start = received.deliver.start as usize;
        self.socket
            .got
            .extend_from_slice(&payload[start..start + takes]);
        if connection.taken(&received, takes as u32, self.now_ns) {
            assert!(!self.socket.got_end, "one end");
            self.socket.got_end = true;
        }
        self.socket.taken_out += received.acknowledged as usize;
        if let Some(header) = received.reply {
            self.write(header, 0..0);
        }
    }

    fn send(&mut self) {
        while let Some(connection) = &mut self.connection
            && let Some(Sendable { offset, most, .. }) = connection.sendable()
        {
            let from = self.socket.taken_out + offset as usize;
            let to = (from + most as usize).min(self.socket.sends.len());
            let header = match to > from {
                true => Some(connection.send((to - from) as u32, None, self.now_ns)),
                false => connection.send_fin(self.now_ns),
            };
            let Some(header) = header else { return };
            self.write(header, from..to);
            if from == to {
                return;
            }
        }
        if let Some(connection) = &mut self.connection {
            connection.blocked(self.now_ns);
        }
    }

    /// Runs to the end of both directions.
    fn run(&mut self) {
        for _ in 0..200_000 {
            self.guest_turn();
            self.our_turn();
            let ended = self.connection.as_ref().is_some_and(|connection| {
                matches!(connection.state(), State::TimeWait | State::Closed)
            });
            if ended {
                // What it acknowledged last it has not read yet.
                return self.guest_turn();
            }
            // smoltcp's retransmission timer grows to 60 s: a lossy run takes some minutes of it.
            let is_idle = self.to_guest.0.is_empty();
            GUEST_MS.set((self.now_ns / MILLISECOND_NS) as u32);
            self.now_ns += if is_idle { 20 } else { 1 } * MILLISECOND_NS;
        }
        panic!(
            "no end: {:?}, {} of {} up, {} of {} down",
            self.connection,
            self.socket.got.len(),
            self.guest_sends.len(),
            self.guest_got.len(),
            self.socket.sends.len()
        );
    }
}

fn streams_are_whole(up: usize, down: usize, faults: Faults) -> Run {
    let mut run = Run::new(up, down, faults);
    run.run();
    assert!(run.socket.got == run.guest_sends, "up");
    assert!(run.socket.got_end, "the guest's end");
    assert!(run.guest_got == run.socket.sends, "down");
    run
}

const QUIET: Faults = Faults {
    loses: 0,
    repeats: 0,
    reorders: 0,
    takes_part: 0,
    sack: true,
    times: true,
    seed: 1,
};

#[test]
fn a_quiet_link_carries_both_streams() {
    streams_are_whole(1_000_000, 1_000_000, QUIET);
    streams_are_whole(0, 0, QUIET);
}

#[test]
fn a_server_that_ends_first_still_gets_the_stream() {
    for (reorders, seed) in [(0, 0), (3, 0), (3, 1), (3, 2), (3, 3)] {
        let faults = Faults {
            reorders,
            seed,
            ..QUIET
        };
        let run = streams_are_whole(100_001, 0, faults);
        let state = run.connection.unwrap().state();
        assert_eq!(state, State::TimeWait, "the server's FIN was first");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn streams_survive_a_bad_link(
        up in 0_usize..150_000,
        down in 0_usize..150_000,
        loses in prop_oneof![Just(0_u32), 5..100_u32],
        repeats in prop_oneof![Just(0_u32), 3..100_u32],
        reorders in prop_oneof![Just(0_u32), 3..100_u32],
        takes_part in prop_oneof![Just(0_u32), 2..50_u32],
        sack: bool,
        times: bool,
        seed: u64,
    ) {
        let faults = Faults { loses, repeats, reorders, takes_part, sack, times, seed };
        streams_are_whole(up, down, faults);
    }
}
