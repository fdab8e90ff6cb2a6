//! As `many`, of user mode's flows: the guest connects to servers, whose sockets are on the host's loopback.
use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd as _,
    time::Instant,
};

use nix::{
    errno::Errno,
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollTimeout},
};
use slipgate_abi::{Direction, DropReason, rate::RateRef};
use slipgate_model::FlowTuple;

use super::{
    super::*,
    guest::Guest,
    host_sockets,
    many::{AT_ONCE, BAD, Carrier, FATES, PATIENCE_MS, Pair, is_over, run_worlds},
    world::{Cable, Client, MS, STUCK},
};
use crate::{
    fake,
    port::{ETHERNET_LEN, VNET_LEN, VirtioNetHdr},
    sockets::{Delivered, Sockets, ToGuest, no_space},
};

const L3_START: usize = VNET_LEN + ETHERNET_LEN;
const SERVER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The guest's port of the first connection, and the server's.
const FIRST_OF_GUEST: u16 = 40_000;
const FIRST_OF_SERVER: u16 = 1_000;
/// By how much the clock moves at most when nothing is due before, ns.
const MOST_JUMP_NS: u64 = 20 * MS;

/// Packets for the guest.
#[derive(Default)]
struct Out(Vec<Vec<u8>>);

impl ToGuest for Out {
    fn has_room(&mut self) -> bool {
        true
    }

    fn deliver(&mut self, vnet: VirtioNetHdr, frame: &mut [u8]) -> Delivered {
        self.0.extend(fake::segments(vnet, &frame[L3_START..]));
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
        None
    }
}

/// A guest's flows, its link, and what there is of the world.
struct Flows {
    sockets: Sockets,
    epoll: Epoll,
    out: Out,
    guest: Guest,
    up: Cable,
    down: Cable,
    now_ns: u64,
    /// Where the servers listen, by their ports; each is connected to once.
    servers: HashMap<u16, SocketAddr>,
    waits_since: Option<Instant>,
}

impl Flows {
    fn new(seed: u32) -> Self {
        let seed = u64::from(seed);
        Self {
            sockets: Sockets::new(false, 1_500, 1 << 20),
            epoll: Epoll::new(EpollCreateFlags::empty()).unwrap(),
            out: Out::default(),
            guest: Guest::new(),
            up: Cable::new(BAD, 0x7f4a_7c15 ^ seed.wrapping_mul(0xbf58_476d_1ce4_e5b9)),
            down: Cable::new(BAD, 0x9e37_79b9 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            now_ns: 1_000 * MS,
            servers: HashMap::new(),
            waits_since: None,
        }
    }

    /// Handles events of the sockets. Returns whether there were some.
    fn hear(&mut self, wait: EpollTimeout) -> bool {
        let mut events = [EpollEvent::empty(); 64];
        let count = match self.epoll.wait(&mut events, wait) {
            Err(Errno::EINTR) => 0,
            count => count.unwrap(),
        };
        for event in &events[..count] {
            let key = event.data() as u32;
            self.sockets
                .ready(key, event.events(), &mut self.out, self.now_ns);
        }
        count > 0
    }

    /// Takes a packet of the guest's. The first SYN to a server is that of a flow which was let in.
    fn take(&mut self, bytes: &[u8]) {
        let packet = Packet::parse(Ip::parse(bytes).unwrap()).unwrap();
        let Transport::Tcp(tcp) = packet.transport else {
            panic!("no segment");
        };
        if tcp.is_opening_syn()
            && let Some(server) = self.servers.remove(&tcp.destination)
        {
            let tuple = packet.tuple(FlowTuple::WORLD, Direction::Tx).unwrap();
            let socket = TcpStream::connect(server).unwrap();
            socket.set_nonblocking(true).unwrap();
            self.sockets.host().put_claimed(tuple, socket.into());
        }
        let came = (VirtioNetHdr::default(), false);
        let (epoll, out) = (&self.epoll, &mut self.out);
        self.sockets.take(&packet, came, epoll, out, self.now_ns);
    }

    /// Everybody's turn, at one moment, as a relay's world has it.
    fn step(&mut self, clients: &mut [Client]) {
        for client in &mut *clients {
            client.step();
        }
        let mut busy = self.hear(EpollTimeout::ZERO);
        for packet in self.up.take(self.now_ns) {
            busy = true;
            self.take(&packet);
        }
        let has_more = self.sockets.work(&self.epoll, &mut self.out, self.now_ns);
        self.sockets.sweep(self.now_ns, |_| true);
        busy |= has_more;
        if !busy && self.sockets.has_put_off() {
            self.sockets
                .do_put_off(&self.epoll, &mut self.out, self.now_ns);
        }
        for packet in self.out.0.drain(..) {
            busy = true;
            self.down.put(&packet, self.now_ns);
        }
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
            assert!(since.elapsed() < STUCK, "{:?}", self.sockets);
            self.hear(EpollTimeout::from(1_u8));
        } else {
            self.waits_since = None;
            self.now_ns = self.next_ns();
        }
    }

    fn next_ns(&mut self) -> u64 {
        let due = [
            self.sockets.due_ns(),
            self.guest.due_ns(self.now_ns),
            self.up.due_ns(),
            self.down.due_ns(),
        ];
        let (soonest, latest) = (self.now_ns + MS, self.now_ns + MOST_JUMP_NS);
        let due_ns = due.into_iter().flatten().min().unwrap_or(latest);
        due_ns.clamp(soonest, latest)
    }

    /// Whether the kernel has something to carry between a server's socket and a flow's.
    fn is_under_way(&self, clients: &[Client]) -> bool {
        let own = self.sockets.streams().filter_map(|(_, socket)| socket);
        let own = own.map(|socket| socket.as_fd());
        let clients = clients.iter().map(|client| client.stream.as_fd());
        host_sockets::is_anything_under_way(own.chain(clients))
    }
}

impl Carrier for Flows {
    fn guest(&mut self) -> &mut Guest {
        &mut self.guest
    }

    fn now_ns(&self) -> u64 {
        self.now_ns
    }

    fn has_connection(&self, pair: &Pair) -> bool {
        let mut tuples = self.sockets.streams().map(|(tuple, _)| tuple);
        tuples.any(|tuple| tuple.remote_port == pair.port)
    }
}

/// Runs the connections of one world. Returns how many were whole, and how many were reset.
fn run(seed: u32) -> (usize, usize) {
    let mut flows = Flows::new(seed);
    let (mut clients, mut pairs) = (Vec::new(), Vec::new());
    for nth in 0..AT_ONCE {
        let own = seed.wrapping_mul(AT_ONCE as u32).wrapping_add(nth as u32);
        let port = FIRST_OF_SERVER + nth as u16;
        let fate = FATES[own as usize % FATES.len()];
        let mut pair = Pair::new(own, fate, port, flows.guest.ends.len());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        flows.servers.insert(port, listener.local_addr().unwrap());
        pair.listener = Some(listener);
        let to = SocketAddr::from((SERVER, port));
        let end = pair.guest_end(own);
        flows.guest.connect(to, FIRST_OF_GUEST + nth as u16, end);
        pairs.push((own, pair));
        flows.step(&mut clients);
    }
    let begun_ns = flows.now_ns;
    let end_ns = begun_ns + PATIENCE_MS * MS;
    while !is_over(&mut flows, &mut clients, &mut pairs, begun_ns) {
        assert!(flows.now_ns < end_ns, "seed {seed}: {:?}", flows.sockets);
        flows.step(&mut clients);
    }
    let mut counts = (0, 0);
    for (own, pair) in &pairs {
        let guest = &flows.guest.ends[pair.guest].1;
        let host = &clients[pair.host.unwrap()].end;
        pair.check(*own, guest, host, &mut counts);
    }
    // Nothing is left, once what is remembered of ended ones is forgotten.
    let end_ns = flows.now_ns + PATIENCE_MS * MS;
    while !flows.sockets.is_empty() || flows.sockets.has_put_off() {
        assert!(flows.now_ns < end_ns, "seed {seed}: {:?}", flows.sockets);
        flows.step(&mut clients);
    }
    assert_eq!(flows.sockets.tcp_counts().kept_bytes, 0);
    counts
}

#[test]
fn each_of_many_flows_over_a_bad_link_has_its_own_bytes() {
    run_worlds(run);
}
