//! Streams through a VM's rate: a simulated clock and guest, and the kernel's own loopback.
use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream},
};

use nix::sys::epoll::{EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use slipgate_abi::{
    DropReason, Rate, RateLimits, VmRates,
    segment::{self, Segments},
    tcp::Flags,
};
use slipgate_model::FlowTuple;

use super::*;
use crate::{
    fake::packets::{ack, syn, tcp},
    packet::{Ip, Packet, Transport, Version},
    port::{ETHERNET_LEN, VirtioNetHdr, single},
    sockets::{Delivered, L3_START, no_space, watch},
    tcp::{Connection, Segment, Stream, before},
};

const RATE: u64 = 2_000_000;
const FIRST: u32 = 100;
const OURS: u32 = 5_000;
const PORT: u16 = 40_000;
const START_NS: u64 = 1_000_000_000;
const STEP_NS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
const HEADERS_LEN: usize = 40;
const DATA: [u8; 8_000] = [7; 8_000];
/// Segments of a stream that a guest's link carries in a step.
const SEGMENTS_PER_STEP: usize = 64;

/// A guest: what it has of each stream, and what the limits let pass.
struct Guest {
    limits: RateRef,
    now_ns: u64,
    streams: Vec<OfGuest>,
    /// Packets that the limit dropped.
    dropped: u64,
    /// L3 bytes that passed to it.
    came: u64,
    worst_debt_ns: u64,
}

/// A stream at its guest.
#[derive(Clone, Copy)]
struct OfGuest {
    next: u32,
    acknowledged: u32,
    edge: u32,
    sent: u32,
    received: u64,
    has_end: bool,
    owes: bool,
}

impl ToGuest for Guest {
    fn has_room(&mut self) -> bool {
        true
    }

    fn deliver(&mut self, vnet: VirtioNetHdr, frame: &mut [u8]) -> Delivered {
        let packet = Packet::parse(Ip::parse(&frame[L3_START..]).unwrap()).unwrap();
        let Transport::Tcp(segment) = packet.transport else {
            panic!("no segment");
        };
        let l3_len = frame.len() - L3_START;
        let segments = match vnet.gso_type {
            VirtioNetHdr::GSO_NONE => single(l3_len),
            _ => {
                let headers_len = u32::from(vnet.hdr_len) - ETHERNET_LEN as u32;
                segment::count(l3_len as u32, headers_len, vnet.gso_size.into())
            }
        };
        if self
            .limits
            .take(Direction::Rx, segments, self.now_ns)
            .is_err()
        {
            self.dropped += segments.packets;
            return Delivered::Dropped;
        }
        self.came += segments.bytes;
        let debt_ns = self.limits.byte_debt_ns(Direction::Rx, self.now_ns);
        self.worst_debt_ns = self.worst_debt_ns.max(debt_ns);
        let payload = packet.ip.payload().len() - segment.header_len;
        let stream = &mut self.streams[usize::from(segment.destination - PORT)];
        if segment.flags & Flags::SYN != 0 {
            stream.next = segment.sequence.wrapping_add(1);
        }
        if payload > 0 || segment.flags & Flags::FIN != 0 {
            assert_eq!(segment.sequence, stream.next, "nothing is lost");
            stream.next = stream.next.wrapping_add(payload as u32);
            stream.received += payload as u64;
            stream.owes = true;
        }
        if segment.flags & Flags::FIN != 0 {
            stream.next = stream.next.wrapping_add(1);
            stream.has_end = true;
        }
        let edge = segment.acknowledgement.wrapping_add(segment.window.into());
        stream.acknowledged = segment.acknowledgement;
        if before(stream.edge, edge) {
            stream.edge = edge;
        }
        Delivered::Yes
    }

    no_space!();

    fn lost(&mut self, reason: DropReason, _: VirtioNetHdr, len: usize) {
        panic!("{reason:?}: {len} bytes");
    }

    fn not_sent(&mut self, _: &FlowTuple, reason: DropReason, len: usize) {
        panic!("{reason:?}: {len} bytes");
    }

    fn gateway(&self, version: Version) -> Option<IpAddr> {
        Some(version.unspecified())
    }

    fn limits(&self) -> Option<RateRef> {
        self.limits.get().is_limited().then_some(self.limits)
    }
}

/// Streams of a guest to servers that take, or send, as much as they can.
struct Scene {
    sockets: Sockets,
    epoll: Epoll,
    guest: Guest,
    servers: Vec<TcpStream>,
    is_ipv6: bool,
    /// Bytes that servers have read.
    heard: Vec<u64>,
}

fn rates(tx: u64, rx: u64) -> VmRates {
    let of = |bytes_per_second| Rate {
        bytes_per_second,
        ..Rate::default()
    };
    VmRates {
        tx: of(tx),
        rx: of(rx),
        ..VmRates::default()
    }
}

impl Scene {
    fn new(is_ipv6: bool, streams: usize, of: VmRates) -> Self {
        let limits = Box::leak(Box::<RateLimits>::default());
        // SAFETY: a valid row that lives as long as the process.
        let limits = unsafe { RateRef::new(limits) };
        limits.set(of);
        let mut scene = Self {
            sockets: Sockets::new(false, 1_500, 1 << 20),
            epoll: Epoll::new(EpollCreateFlags::empty()).unwrap(),
            guest: Guest {
                limits,
                now_ns: START_NS,
                streams: Vec::new(),
                dropped: 0,
                came: 0,
                worst_debt_ns: 0,
            },
            servers: Vec::new(),
            is_ipv6,
            heard: Vec::new(),
        };
        for _ in 0..streams {
            scene.open();
        }
        scene
    }

    /// Ends of a stream.
    fn ends(&self, nth: usize) -> ((IpAddr, u16), (IpAddr, u16)) {
        let (from, to): (IpAddr, IpAddr) = match self.is_ipv6 {
            false => (
                Ipv4Addr::new(192, 0, 2, 1).into(),
                Ipv4Addr::new(198, 51, 100, 7).into(),
            ),
            true => (
                Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
                Ipv6Addr::new(0x2001, 0xdb8, 7, 0, 0, 0, 0, 7).into(),
            ),
        };
        ((from, PORT + nth as u16), (to, 80))
    }

    fn open(&mut self) {
        let nth = self.servers.len();
        let (from, to) = self.ends(nth);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        server.set_nonblocking(true).unwrap();
        let socket = listener.accept().unwrap().0;
        socket.set_nonblocking(true).unwrap();
        self.guest.streams.push(OfGuest {
            next: 0,
            acknowledged: FIRST + 1,
            edge: FIRST + 1,
            sent: FIRST + 1,
            received: 0,
            has_end: false,
            owes: false,
        });
        let opener = syn(from, to, FIRST);
        let packet = Packet::parse(Ip::parse(&opener).unwrap()).unwrap();
        let Transport::Tcp(header) = packet.transport else {
            panic!("no segment");
        };
        let segment = Segment::read(&header, packet.ip.payload());
        let tuple = packet.tuple(FlowTuple::WORLD, Direction::Tx).unwrap();
        let connection = Connection::new(packet.ip.version(), &segment, OURS);
        let stream = Stream::new(connection, socket.into());
        let key = self.sockets.add(tuple, Kind::Stream(Box::new(stream)));
        let now_ns = self.guest.now_ns;
        let both = EpollFlags::EPOLLOUT;
        self.sockets.ready(key, both, &mut self.guest, now_ns);
        self.servers.push(server);
        self.heard.push(0);
        self.guest_sends_now(&ack(from, to, 0, FIRST + 1, OURS + 1));
        let Kind::Stream(stream) = &self.sockets.endpoints[&key].socket else {
            panic!("no stream");
        };
        let flags = EpollFlags::EPOLLIN
            | EpollFlags::EPOLLOUT
            | EpollFlags::EPOLLRDHUP
            | EpollFlags::EPOLLET;
        watch(&self.epoll, stream.socket().unwrap(), key, flags).unwrap();
        self.work();
    }

    /// A packet of the guest, which the limit may drop. Returns whether it passed.
    fn guest_sends_now(&mut self, bytes: &[u8]) -> bool {
        let now_ns = self.guest.now_ns;
        let segments: Segments = single(bytes.len());
        if self
            .guest
            .limits
            .take(Direction::Tx, segments, now_ns)
            .is_err()
        {
            self.guest.dropped += 1;
            return false;
        }
        let debt_ns = self.guest.limits.byte_debt_ns(Direction::Tx, now_ns);
        self.guest.worst_debt_ns = self.guest.worst_debt_ns.max(debt_ns);
        let packet = Packet::parse(Ip::parse(bytes).unwrap()).unwrap();
        let how = (VirtioNetHdr::default(), false);
        let Self {
            sockets,
            epoll,
            guest,
            ..
        } = self;
        sockets.take(&packet, how, epoll, guest, now_ns);
        true
    }

    fn work(&mut self) {
        let Self {
            sockets,
            epoll,
            guest,
            ..
        } = self;
        for _ in 0..1_000 {
            if !sockets.work(epoll, guest, guest.now_ns) {
                return;
            }
        }
        panic!("there is always more");
    }

    /// What the kernel says, what is due, and what servers have heard.
    fn turn(&mut self) {
        let mut events = [EpollEvent::empty(); 16];
        let heard = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap();
        let now_ns = self.guest.now_ns;
        for event in &events[..heard] {
            let (key, flags) = (event.data() as u32, event.events());
            self.sockets.ready(key, flags, &mut self.guest, now_ns);
        }
        self.work();
        let mut buffer = vec![0; 1 << 16];
        for (server, heard) in self.servers.iter_mut().zip(&mut self.heard) {
            while let Ok(len @ 1..) = server.read(&mut buffer) {
                *heard += len as u64;
            }
        }
    }

    /// The guest acknowledges what it has.
    fn acknowledge(&mut self) {
        for nth in 0..self.guest.streams.len() {
            let stream = &mut self.guest.streams[nth];
            if std::mem::take(&mut stream.owes) {
                let (sent, next) = (stream.sent, stream.next);
                let (from, to) = self.ends(nth);
                self.guest_sends_now(&ack(from, to, 0, sent, next));
            }
        }
    }

    /// The guest sends as much as its windows permit, but no more than its link carries in a step: a
    /// window that no rate holds is never used up.
    fn guest_sends(&mut self) {
        self.guest_sends_segments(SEGMENTS_PER_STEP);
    }

    /// The guest sends so many segments of each stream, or as many as its windows permit.
    fn guest_sends_segments(&mut self, most: usize) {
        for nth in 0..self.guest.streams.len() {
            self.guest_sends_of(nth, most);
        }
    }

    /// The guest sends so many segments of one stream, or as many as its window permits.
    fn guest_sends_of(&mut self, nth: usize, most: usize) {
        let (from, to) = self.ends(nth);
        for _ in 0..most {
            let OfGuest {
                sent, edge, next, ..
            } = self.guest.streams[nth];
            let window = edge.wrapping_sub(sent) as usize;
            if !before(sent, edge) {
                break;
            }
            let data = &DATA[..window.min(1_460)];
            let segment = tcp(from, to, Flags::ACK, sent, next, &[], data);
            assert!(self.guest_sends_now(&segment), "a window leads to no drop");
            self.guest.streams[nth].sent = sent.wrapping_add(data.len() as u32);
            self.turn();
        }
    }

    /// Servers send as much as their sockets take.
    fn servers_send(&mut self) {
        for server in &mut self.servers {
            while let Ok(1..) = server.write(&DATA) {}
        }
    }

    /// Runs for this long.
    fn run(&mut self, ns: u64, up: bool) {
        let until_ns = self.guest.now_ns + ns;
        while self.guest.now_ns < until_ns {
            match up {
                true => self.guest_sends(),
                false => self.servers_send(),
            }
            self.turn();
            self.acknowledge();
            self.work();
            self.guest.now_ns += STEP_NS;
        }
    }

    fn is_shut(&mut self, nth: usize) -> bool {
        match self.servers[nth].read(&mut [0]) {
            Ok(0) => true,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                false
            }
            Ok(_) => panic!("all was read"),
        }
    }
}

/// Payload that a rate carries in a time, at most, with segments of this size.
fn assert_share(payload: u64, segment: usize, rate: u64, ns: u64) {
    let part = (segment + HEADERS_LEN) as f64 / segment as f64;
    let share = payload as f64 * part / (rate as f64 * ns as f64 / 1e9);
    assert!((0.95..1.06).contains(&share), "{share} of the rate");
}

#[test]
fn a_stream_to_the_guest_has_its_rate_and_nothing_is_dropped() {
    for is_ipv6 in [false, true] {
        // The guest's segments have up to 9,000 bytes: 45 ms of the lowest rate.
        for rate in [200_000, RATE, 50 * RATE] {
            let mut scene = Scene::new(is_ipv6, 1, rates(0, rate));
            scene.run(2_000_000_000, false);
            assert_eq!(scene.guest.dropped, 0);
            let share = scene.guest.came as f64 / (rate as f64 * 2.0);
            // The guest's window is 29,200 bytes, and a step a millisecond.
            if rate <= RATE {
                assert!((0.95..1.05).contains(&share), "{share} of {rate}");
            }
            // A datagram would pass at any time, without a wait.
            let worst_ns = scene.guest.worst_debt_ns;
            assert!(worst_ns < 70_000_000, "{worst_ns} ns at {rate}");
            if rate >= RATE {
                assert!(worst_ns < 26_000_000, "{worst_ns} ns at {rate}");
            }
        }
    }
}

#[test]
fn a_stream_of_the_guest_has_its_rate_and_nothing_is_dropped() {
    for is_ipv6 in [false, true] {
        for rate in [20_000, 200_000, RATE, 10 * RATE] {
            let mut scene = Scene::new(is_ipv6, 1, rates(rate, 0));
            scene.run(2_000_000_000, true);
            assert_eq!(scene.guest.dropped, 0);
            assert!(scene.guest.worst_debt_ns < 200_000_000);
            if rate >= RATE {
                assert_share(scene.heard[0], 1_460, rate, 2_000_000_000);
                assert!(scene.guest.worst_debt_ns < 70_000_000);
            }
        }
    }
}

#[test]
fn streams_share_a_rate_within_a_tenth() {
    for up in [false, true] {
        let mut scene = Scene::new(false, 2, rates(RATE, RATE));
        scene.run(2_000_000_000, up);
        assert_eq!(scene.guest.dropped, 0);
        let shares = match up {
            true => [scene.heard[0], scene.heard[1]],
            false => [0, 1].map(|nth| scene.guest.streams[nth].received),
        };
        let (least, most) = (shares[0].min(shares[1]), shares[0].max(shares[1]));
        assert!(most - least <= most / 10, "{shares:?}");
        assert!(least > RATE * 8 / 10, "{shares:?}");
    }
}

#[test]
fn of_many_streams_none_starves_and_one_that_begins_late_has_its_part() {
    for up in [false, true] {
        let mut scene = Scene::new(false, 12, rates(RATE, RATE));
        scene.run(1_000_000_000, up);
        for _ in 0..4 {
            scene.open();
        }
        let moved = |scene: &Scene| -> Vec<u64> {
            match up {
                true => scene.heard.clone(),
                false => scene.guest.streams.iter().map(|it| it.received).collect(),
            }
        };
        let before = moved(&scene);
        scene.run(2_000_000_000, up);
        let all = moved(&scene);
        let all: Vec<u64> = all.iter().zip(&before).map(|(all, it)| all - it).collect();
        let (least, most) = (*all.iter().min().unwrap(), *all.iter().max().unwrap());
        assert!(least > RATE * 2 / 16 * 7 / 10, "{all:?}");
        assert!(most < RATE * 2 / 16 * 13 / 10, "{all:?}");
        assert_eq!(scene.guest.dropped, 0);
    }
}

#[test]
fn a_stream_that_waits_holds_up_neither_its_other_way_nor_packets() {
    let mut scene = Scene::new(false, 2, rates(0, RATE / 10));
    scene.run(300_000_000, false);
    assert!(scene.sockets.has_waiting());
    let before = scene.heard.clone();
    for _ in 0..20 {
        // While both wait for the way to the guest. Acknowledgements go that way, too.
        scene.guest_sends_segments(1);
        scene.guest.now_ns += STEP_NS;
    }
    assert!(scene.sockets.has_waiting());
    assert_eq!((scene.heard.len(), before.len()), (2, 2));
    for (heard, before) in scene.heard.iter().zip(before) {
        assert_eq!(heard - before, 20 * 1_460);
    }
    for stream in &scene.guest.streams {
        assert_eq!(stream.acknowledged, stream.sent, "each at once");
    }
}

#[test]
fn there_is_a_timer_only_while_somebody_waits() {
    for up in [false, true] {
        let mut scene = Scene::new(false, 2, rates(RATE, RATE));
        assert_eq!(scene.sockets.pace.due_ns(), None);
        scene.run(100_000_000, up);
        let now_ns = scene.guest.now_ns;
        let due_ns = scene.sockets.pace.due_ns().expect("they wait");
        // It is no earlier than something can be done.
        assert!(due_ns >= now_ns, "{due_ns} at {now_ns}");
        assert!(due_ns < now_ns + 10_000_000, "{due_ns} at {now_ns}");
        // Everybody falls silent, so what is in the kernel's queues is the last.
        for _ in 0..20_000 {
            if scene.sockets.pace.is_idle() {
                break;
            }
            scene.turn();
            scene.acknowledge();
            scene.guest.now_ns += STEP_NS;
        }
        assert!(scene.sockets.pace.is_idle());
        assert_eq!(scene.sockets.pace.due_ns(), None);
    }
}

#[test]
fn a_row_that_one_round_empties_leaves_no_timer() {
    let mut scene = Scene::new(false, 1, rates(RATE, RATE));
    let row = &mut scene.sockets.pace.to_guest;
    // Of sockets that are gone.
    row.keys
        .extend((0..TURNS_AT_ONCE).map(|nth| 1_000_000 + nth as u32));
    row.due_ns = Some(scene.guest.now_ns);
    scene.work();
    assert!(scene.sockets.pace.is_idle());
    assert_eq!(scene.sockets.pace.due_ns(), None);
}

#[test]
fn a_rate_that_changes_or_ends_holds_at_once() {
    for up in [false, true] {
        // Slow enough that a quantum is seconds.
        let mut scene = Scene::new(false, 1, rates(500, 500));
        scene.run(100_000_000, up);
        let bytes = |scene: &Scene| match up {
            true => scene.heard[0],
            false => scene.guest.streams[0].received,
        };
        let before = bytes(&scene);
        assert!(before < 20_000);
        scene.guest.limits.set(rates(RATE, RATE));
        scene.run(1_000_000_000, up);
        let moved = bytes(&scene) - before;
        assert!((RATE * 8 / 10..RATE * 11 / 10).contains(&moved), "{moved}");
        // Without a limit it is as fast as it gets.
        scene.guest.limits.set(rates(0, 0));
        scene.run(200_000_000, up);
        let without = bytes(&scene) - before - moved;
        assert!(without > RATE, "{without}");
        assert!(scene.sockets.pace.is_idle());
        // And one begins under a stream that had none.
        scene.guest.limits.set(rates(RATE, RATE));
        let before = bytes(&scene);
        scene.run(1_000_000_000, up);
        let moved = bytes(&scene) - before;
        assert!((RATE * 8 / 10..RATE * 12 / 10).contains(&moved), "{moved}");
    }
}

#[test]
fn the_end_behind_bytes_that_wait_arrives() {
    let mut scene = Scene::new(false, 1, rates(RATE, RATE));
    let sent = (0..30).map(|_| scene.servers[0].write(&DATA).unwrap() as u64);
    let sent: u64 = sent.sum();
    scene.servers[0].shutdown(Shutdown::Write).unwrap();
    let until_ns = scene.guest.now_ns + 500_000_000;
    while scene.guest.now_ns < until_ns && !scene.guest.streams[0].has_end {
        scene.turn();
        scene.acknowledge();
        scene.guest.now_ns += STEP_NS;
    }
    let took_ns = scene.guest.now_ns - START_NS;
    assert_eq!(scene.guest.streams[0].received, sent);
    assert!(scene.guest.streams[0].has_end);
    assert!(took_ns > 80_000_000, "{took_ns} ns");
    // The guest's own end, with its window closed.
    scene.guest_sends();
    assert!(scene.sockets.pace.due_ns().is_some());
    let OfGuest { sent, next, .. } = scene.guest.streams[0];
    let (from, to) = scene.ends(0);
    assert!(!scene.is_shut(0));
    assert!(scene.guest_sends_now(&ack(from, to, Flags::FIN, sent, next)));
    scene.turn();
    scene
        .sockets
        .do_put_off(&scene.epoll, &mut scene.guest, START_NS);
    assert!(scene.is_shut(0));
}

#[test]
fn a_stream_that_is_cut_while_it_waits_leaves_the_row_to_others() {
    for up in [false, true] {
        let mut scene = Scene::new(false, 2, rates(RATE, RATE));
        scene.run(200_000_000, up);
        assert!(!scene.sockets.pace.is_idle());
        let (from, to) = scene.ends(0);
        let opener = syn(from, to, FIRST);
        let packet = Packet::parse(Ip::parse(&opener).unwrap()).unwrap();
        let cut = packet.tuple(FlowTuple::WORLD, Direction::Tx).unwrap();
        let now_ns = scene.guest.now_ns;
        scene.sockets.sweep(now_ns, |tuple| *tuple != cut);
        assert_eq!(scene.sockets.len(), 1);
        // The guest hears nothing more of it.
        scene.guest.streams[0].edge = scene.guest.streams[0].sent;
        let before = match up {
            true => scene.heard[1],
            false => scene.guest.streams[1].received,
        };
        scene.run(1_000_000_000, up);
        let after = match up {
            true => scene.heard[1],
            false => scene.guest.streams[1].received,
        };
        let moved = after - before;
        assert!((RATE * 9 / 10..RATE * 11 / 10).contains(&moved), "{moved}");
    }
}

#[test]
fn what_short_streams_were_allowed_and_did_not_send_is_not_lost_to_a_long_one() {
    let mut scene = Scene::new(false, 1, rates(RATE, 0));
    let start_ns = scene.guest.now_ns;
    for nth in 1..=50 {
        // A short one every 20 ms sends a request of 200 bytes, and is reset.
        scene.open();
        let (from, to) = scene.ends(nth);
        let request = tcp(from, to, Flags::ACK, FIRST + 1, OURS + 1, &[], &DATA[..200]);
        scene.guest_sends_now(&request);
        for step in 0..20 {
            scene.turn();
            if step == 10 {
                let end = tcp(from, to, Flags::RST, FIRST + 201, 0, &[], &[]);
                scene.guest_sends_now(&end);
            }
            scene.guest_sends_of(0, SEGMENTS_PER_STEP);
            scene.guest.now_ns += STEP_NS;
        }
    }
    let ns = scene.guest.now_ns - start_ns;
    let share = scene.heard[0] as f64 / (RATE as f64 * ns as f64 / 1e9);
    assert!(share > 0.9, "{share} of the rate");
    assert_eq!(scene.guest.dropped, 0);
}

#[test]
fn a_first_window_is_nothing_that_a_turn_has_used() {
    let mut scene = Scene::new(false, 1, rates(RATE, 0));
    scene.run(SECOND / 10, true);
    // The other one has used all of the rate.
    scene.open();
    let mut endpoints = scene.sockets.endpoints.values();
    assert!(endpoints.any(|endpoint| endpoint.allowed == 0));
    let used_until_ns = scene.sockets.pace.from_guest.used_until_ns;
    let (from, to) = scene.ends(1);
    let end = tcp(from, to, Flags::RST, FIRST + 1, 0, &[], &[]);
    scene.guest_sends_now(&end);
    scene.work();
    assert_eq!(scene.sockets.len(), 1);
    assert_eq!(scene.sockets.pace.from_guest.used_until_ns, used_until_ns);
}

#[test]
fn a_row_has_few_keys_of_streams_that_have_ended() {
    const STREAMS: usize = 16;
    const LEFT: u16 = 3;
    for up in [false, true] {
        let mut scene = Scene::new(false, STREAMS, rates(RATE, RATE));
        for _ in 0..50 {
            match up {
                true => scene.guest_sends(),
                false => scene.servers_send(),
            }
            scene.turn();
        }
        let row = |scene: &Scene| match up {
            true => scene.sockets.pace.from_guest.keys.len(),
            false => scene.sockets.pace.to_guest.keys.len(),
        };
        assert!(row(&scene) > STREAMS / 2, "{} wait", row(&scene));
        let now_ns = scene.guest.now_ns;
        let lives = |tuple: &FlowTuple| tuple.local_port < PORT + LEFT;
        scene.sockets.sweep(now_ns, lives);
        assert_eq!(scene.sockets.len(), usize::from(LEFT));
        let waiting = row(&scene);
        assert!(waiting <= 2 * usize::from(LEFT), "{waiting} keys");
        // Those that are there go on.
        for stream in &mut scene.guest.streams[usize::from(LEFT)..] {
            stream.edge = stream.sent;
            stream.owes = false;
        }
        let moved = |scene: &Scene, nth: usize| match up {
            true => scene.heard[nth],
            false => scene.guest.streams[nth].received,
        };
        let before: Vec<u64> = (0..usize::from(LEFT))
            .map(|nth| moved(&scene, nth))
            .collect();
        scene.run(1_000_000_000, up);
        for (nth, before) in before.iter().enumerate() {
            let moved = moved(&scene, nth) - before;
            assert!(moved > RATE / 6, "{moved} of stream {nth}");
        }
        scene.sockets.sweep(scene.guest.now_ns + SECOND, |_| false);
        assert!(scene.sockets.is_empty() && scene.sockets.pace.is_idle());
    }
}

#[test]
fn a_probe_of_a_window_that_the_rate_holds_is_answered_at_once_and_opens_nothing() {
    for is_ipv6 in [false, true] {
        let mut scene = Scene::new(is_ipv6, 1, rates(RATE / 10, 0));
        // Its window is used up, and the rate's time too.
        for _ in 0..20 {
            scene.guest_sends();
        }
        assert!(!scene.sockets.pace.is_idle());
        let (from, to) = scene.ends(0);
        let OfGuest {
            sent, edge, next, ..
        } = scene.guest.streams[0];
        assert_eq!(sent, edge, "it has no window");
        let heard = scene.heard[0];
        // As Linux probes, by a byte that was acknowledged, and by the next byte.
        let before_next = ack(from, to, 0, sent.wrapping_sub(1), next);
        let next_byte = tcp(from, to, Flags::ACK, sent, next, &[], &[7]);
        for probe in [before_next, next_byte] {
            scene.guest.streams[0].acknowledged = 0;
            assert!(scene.guest_sends_now(&probe));
            scene.turn();
            let OfGuest {
                acknowledged, edge, ..
            } = scene.guest.streams[0];
            assert_eq!((acknowledged, edge), (sent, sent), "answered, and no more");
        }
        assert_eq!(scene.heard[0], heard);
        scene.run(1_000_000_000, true);
        let moved = scene.heard[0] - heard;
        let expected = RATE / 10 * 8 / 10..RATE / 10 * 11 / 10;
        assert!(expected.contains(&moved), "{moved} bytes");
        assert_eq!(scene.guest.dropped, 0);
    }
}

#[test]
fn a_stream_is_not_given_up_while_what_it_sends_again_waits_for_the_rate() {
    // A segment is a quarter of an hour of it: longer than all waits for an answer together.
    let mut scene = Scene::new(false, 1, rates(0, 10));
    let first = scene.guest.streams[0].next;
    scene.servers[0].write_all(&DATA).unwrap();
    while scene.guest.streams[0].received == 0 {
        scene.turn();
        scene.guest.now_ns += STEP_NS;
    }
    // It is lost.
    let stream = &mut scene.guest.streams[0];
    (stream.next, stream.received, stream.owes) = (first, 0, false);
    let sent_ns = scene.guest.now_ns;
    while scene.guest.streams[0].received == 0 {
        assert_eq!(scene.sockets.len(), 1, "it was given up");
        let due_ns = scene.sockets.due_ns().expect("something is due");
        scene.guest.now_ns = scene.guest.now_ns.max(due_ns) + STEP_NS;
        scene.work();
    }
    let waited_s = (scene.guest.now_ns - sent_ns) / SECOND;
    assert!(waited_s > 600, "{waited_s} s");
    // The guest's silence counts from then on.
    scene.guest.limits.set(rates(0, RATE));
    while scene.sockets.len() == 1 {
        let due_ns = scene.sockets.due_ns().expect("something is due");
        scene.guest.now_ns = scene.guest.now_ns.max(due_ns) + STEP_NS;
        let stream = &mut scene.guest.streams[0];
        (stream.next, stream.owes) = (first, false);
        scene.work();
        scene.sockets.sweep(scene.guest.now_ns, |_| true);
        assert!((scene.guest.now_ns - sent_ns) / SECOND < 3_600, "never");
    }
}

#[test]
fn datagrams_above_the_rate_leave_streams_a_part_of_it() {
    let mut scene = Scene::new(false, 1, rates(0, RATE));
    let until_ns = scene.guest.now_ns + 1_000_000_000;
    while scene.guest.now_ns < until_ns {
        // A port sends what waits before it looks at datagrams.
        scene.servers_send();
        let now_ns = scene.guest.now_ns;
        let Scene {
            sockets,
            epoll,
            guest,
            ..
        } = &mut scene;
        if sockets.has_waiting() {
            sockets.send_in_turns(epoll, guest, now_ns);
        }
        while guest
            .limits
            .take(Direction::Rx, single(1_000), now_ns)
            .is_ok()
        {}
        scene.turn();
        scene.acknowledge();
        scene.guest.now_ns += STEP_NS;
    }
    let received = scene.guest.streams[0].received;
    assert!(received > RATE / 20, "{received}");
}

#[test]
fn no_limit_means_no_row_and_an_open_window() {
    let mut scene = Scene::new(false, 1, rates(0, 0));
    scene.run(50_000_000, false);
    scene.run(50_000_000, true);
    assert!(scene.sockets.pace.is_idle() && scene.sockets.pace.due_ns().is_none());
    assert!(scene.sockets.pace.from_guest.keys.capacity() == 0);
    assert!(scene.guest.streams[0].received > RATE / 10);
    assert!(scene.heard[0] > RATE / 10);
}
