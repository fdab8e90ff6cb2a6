//! Where the attacks take place: a guest behind slipgate, and a world in which everything answers
//! and everything that arrives is kept.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use slipgate_testbed::{
    Capture, Direction, Guest, GuestConfig, WorldConfig, affinity,
    clients::{dns, icmp, tcp},
    dns_wire::{Question, Record, Reply, types},
    frame::Packet,
    pump::Fate,
    servers::{Answer, DnsServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    tls,
    world::WORLD_LINK,
};

use super::{
    ALL_HOSTS, ALLOWED, Arrivals, DENIED, HTTPS, Host, OFF, RESOLVER, SECOND_RESOLVER, SHARED,
    Service, at, by_hand,
};
use crate::{Cell, Stand, WAIT, eventually};

/// Loses what would not come over another router.
const ONE_MORE_HOP: &str = "table inet hop {
    chain arriving {
        type filter hook prerouting priority raw;
        ip ttl 1 drop
        ip6 hoplimit 1 drop
    }
}";

/// The port that datagrams are sent to.
pub(super) const DISCARD: u16 = 9;
/// The port of DNS over TLS.
pub(super) const DOT: u16 = 853;
/// A port that a resolver might be on to get by a filter of 53.
pub(super) const HIDDEN_DNS: u16 = 5353;

/// A guest behind slipgate, servers, and a capture on the world's link. Fields go in order.
pub(super) struct Stage {
    pub(super) stand: Stand,
    pub(super) dns: DnsServer<IpAddr>,
    capture: Capture,
    _second_dns: [DnsServer<IpAddr>; 2],
    _tcp: [TcpServer<IpAddr>; 2],
    _udp: [UdpServer<IpAddr>; 2],
}

impl Stage {
    /// Creates a stage. `policy`: slipgate's arguments besides those of every stage.
    pub(super) fn new(cell: Cell, policy: &[&str]) -> Stage {
        Self::with(cell, policy, &[])
    }

    fn with(cell: Cell, policy: &[&str], neighbours: &[GuestConfig]) -> Stage {
        let world = WorldConfig {
            server_addresses: ALL_HOSTS.map(Host::ipv4).to_vec(),
            ..WorldConfig::default()
        };
        let servers: Vec<Ipv6Addr> = ALL_HOSTS.map(Host::ipv6).to_vec();
        let ip = |host: Host| host.ip(cell.family);
        // Resolvers of slipgate's own are of IPv4, whatever the guest is.
        let upstream = RESOLVER.ipv4();
        let mut flags = vec!["--dns".to_owned(), upstream.to_string()];
        flags.extend(policy.iter().map(|flag| with_addresses(flag, cell)));
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let stand = Stand::of_several(cell, world, &servers, neighbours, &flags);
        // The guest's own stack knows nothing of the connections made by hand.
        let by_hand = |direction, _: &_, frame: &[u8]| match Packet::of_ethernet(frame) {
            Some(packet) if direction == Direction::In && by_hand::is_one(&packet) => Fate::Lose,
            _ => Fate::Pass,
        };
        stand.guest.set_filter(Some(Box::new(by_hand))).unwrap();
        let net = &stand.world.net;
        // The servers are behind one more router.
        net.nft(ONE_MORE_HOP).unwrap();
        let everywhere = cell.family.unspecified();
        let tcp = |port| TcpServer::start(net, (everywhere, port), TcpService::EchoTls).unwrap();
        let udp = |port| UdpServer::start(net, (everywhere, port), UdpService::Sink).unwrap();
        let dns = |ip, port| DnsServer::start(net, (ip, port), zone(cell)).unwrap();
        let second = ip(SECOND_RESOLVER);
        Stage {
            dns: dns(upstream.into(), 53),
            capture: Capture::keeping(net, WORLD_LINK).unwrap(),
            _second_dns: [dns(second, 53), dns(second, HIDDEN_DNS)],
            _tcp: [tcp(HTTPS), tcp(DOT)],
            _udp: [udp(HTTPS), udp(DISCARD)],
            stand,
        }
    }

    /// A host's address, of the guest's family.
    pub(super) fn ip(&self, host: Host) -> IpAddr {
        host.ip(self.stand.cell.family)
    }

    /// Returns the address and port of a service.
    pub(super) fn address(&self, service: Service) -> SocketAddr {
        SocketAddr::new(self.ip(service.host), service.port)
    }

    /// Where slipgate answers the guest's questions.
    pub(super) fn resolver(&self) -> SocketAddr {
        SocketAddr::new(self.stand.cell.dns(), 53)
    }

    /// A question for a name's addresses.
    pub(super) fn question(&self, name: &str) -> Question {
        let kind = match self.stand.cell.is_ipv6() {
            false => types::A,
            true => types::AAAA,
        };
        dns::question(name, kind)
    }

    /// Returns the packets that have arrived so far.
    pub(super) fn arrivals(&self) -> Arrivals {
        Arrivals::new(self.stand.cell.family, self.capture.frames())
    }

    /// Makes a stage with a second guest, like the first.
    pub(super) fn of_two(cell: Cell, policy: &[&str]) -> Stage {
        Self::with(cell, policy, &[GuestConfig::new("tap1")])
    }

    /// Returns when all packets that the guest has sent have arrived, or cannot arrive any more. A
    /// question by the guest comes behind it in the engine, its answer behind what the engine made
    /// of it; and a datagram of the host, from each CPU, behind that on the way to the world.
    pub(super) fn settle(&self) {
        self.settle_for(&self.stand.guest);
    }

    /// Does the same as [`Stage::settle`] for one of two guests.
    pub(super) fn settle_for(&self, guest: &Guest) {
        static SETTLED: AtomicU32 = AtomicU32::new(0);
        let number = SETTLED.fetch_add(1, Ordering::Relaxed);
        self.ask_for(guest, &format!("settled-{number}.example.test"));
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let marks = (0..cpus).map(|cpu| format!("settled {number} {cpu}"));
        let mut marks: BTreeSet<Vec<u8>> = marks.map(String::into_bytes).collect();
        for (cpu, mark) in marks.iter().enumerate() {
            self.stand.world.host.run(|| {
                affinity::pin_thread(cpu).unwrap();
                let socket = self.any_port();
                let to = self.address(at(RESOLVER, DISCARD));
                socket.send_to(mark, to).unwrap();
            });
        }
        eventually("the marks to arrive", || {
            for datagram in self.arrivals().datagrams(at(RESOLVER, DISCARD)) {
                marks.remove(&datagram);
            }
            marks.is_empty().then_some(())
        });
    }

    /// The answer about a name's addresses.
    pub(super) fn ask(&self, name: &str) -> Reply {
        self.ask_for(&self.stand.guest, name)
    }

    /// Returns the answer about a name's addresses, for one of two guests.
    pub(super) fn ask_for(&self, guest: &Guest, name: &str) -> Reply {
        let found = guest.run(|| dns::ask_udp(self.resolver(), &self.question(name), WAIT));
        found.unwrap().reply
    }

    /// The answer of some resolver, if there is one.
    pub(super) fn ask_at(&self, resolver: SocketAddr, question: &Question) -> Option<Reply> {
        let found = self.stand.run(|| dns::ask_udp(resolver, question, WAIT));
        found.ok().map(|found| found.reply)
    }

    /// Connects as any client, says `bytes`, and takes the answer ([`tls::answer_to`]). `false`: it
    /// came to nothing.
    pub(super) fn says(&self, server: Service, bytes: &[u8]) -> bool {
        self.stand.run(|| {
            let Ok(mut stream) = tcp::connect(self.address(server), WAIT) else {
                return false;
            };
            let mut echo = vec![0; bytes.len()];
            let came = stream
                .write_all(bytes)
                .and_then(|()| stream.read_exact(&mut echo));
            came.is_ok() && echo == tls::answer_to(bytes)
        })
    }

    /// Asserts that a connection goes on after its hello was let through, in hybrid mode by the kernel.
    pub(super) fn goes_on(&self, server: Service, hello: &[u8]) {
        let to = self.address(server);
        let mut stream = self.stand.run(|| tcp::connect(to, WAIT)).unwrap();
        let mut answer = vec![0; hello.len()];
        stream.write_all(hello).unwrap();
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, tls::answer_to(hello));
        if self.stand.cell.is_hybrid() {
            let guest = stream.local_addr().unwrap().to_string();
            eventually("the kernel's flow", || {
                let flows = self.stand.flows_to(to);
                let flow = flows.into_iter().find(|flow| flow.guest == guest)?;
                (flow.verdict == "fast").then_some(())
            });
        }
        tcp::EchoSession::new(&mut stream).round(10_000).unwrap();
    }

    /// Asserts that `says` succeeds and that the bytes arrive.
    pub(super) fn reaches(&self, server: Service, bytes: &[u8]) {
        assert!(self.says(server, bytes), "{server:?} is out of reach");
        self.await_stream(server, bytes);
    }

    /// Awaits that a connection has brought these bytes and no others.
    pub(super) fn await_stream(&self, server: Service, bytes: &[u8]) {
        eventually(&format!("what was said to {server:?}"), || {
            let streams = self.arrivals().streams(server);
            streams.iter().any(|stream| stream == bytes).then_some(())
        });
    }

    /// Asks for a name and reaches it.
    pub(super) fn resolves_and_reaches(&self, name: &str, server: Service) {
        let found = self.ask(name);
        let addresses: Vec<_> = found.records.iter().filter_map(Record::ip).collect();
        assert_eq!(addresses, [self.ip(server.host)], "{name}");
        self.reaches(server, format!("for {name}").as_bytes());
    }

    /// A datagram from the guest's own stack, whatever becomes of it.
    pub(super) fn sends(&self, server: Service, bytes: &[u8]) {
        self.sends_all(server, &[bytes.to_vec()]);
    }

    /// Datagrams of one flow, each after the last was decided over.
    pub(super) fn sends_all(&self, server: Service, datagrams: &[Vec<u8>]) {
        let socket = self.stand.run(|| self.any_port());
        for datagram in datagrams {
            // Without `connect` no ICMP error comes back to it.
            socket.send_to(datagram, self.address(server)).unwrap();
            self.settle();
        }
    }

    /// A socket of the guest's family, in the thread's namespace.
    fn any_port(&self) -> UdpSocket {
        UdpSocket::bind((self.stand.cell.family.unspecified(), 0)).unwrap()
    }

    /// An answer with a host's address.
    pub(super) fn answer(&self, host: Host, ttl: u32) -> Answer {
        Answer::address(self.ip(host), ttl)
    }

    /// Whether the guest's echo request is answered.
    pub(super) fn pings(&self, host: Host, patience: Duration) -> bool {
        self.stand.run(|| match self.ip(host) {
            IpAddr::V4(address) => {
                let report = icmp::ping(address, 1, 8, patience);
                report.is_ok_and(|report| !report.replies.is_empty())
            }
            IpAddr::V6(address) => {
                icmp::ping6(address, 8, patience).is_ok_and(|took| took.is_some())
            }
        })
    }
}

/// A flag with the hosts' addresses in it.
fn with_addresses(flag: &str, cell: Cell) -> String {
    let ip = |host: Host| host.ip(cell.family).to_string();
    flag.replace("{denied}", &ip(DENIED))
        .replace("{private}", &ip(Host::Private))
}

fn zone(cell: Cell) -> Zone {
    let answer = |host: Host| Answer::address(host.ip(cell.family), 300);
    Zone::from([
        ("api.example.test".into(), answer(ALLOWED)),
        ("shared.example.test".into(), answer(SHARED)),
        ("shared.evil.test".into(), answer(SHARED)),
        ("evil.test".into(), answer(DENIED)),
    ])
}

/// Something that an attack is after, in words, and how it shows among what arrived.
pub(super) type Mark = (&'static str, fn(&Arrivals) -> bool);

/// Makes an attack with the policy off, where its data must arrive, and with the policy on, where
/// none of it may arrive; then checks that the similar but allowed action still works.
pub(super) fn holds(
    cell: Cell,
    policy: &[&str],
    attack: impl Fn(&Stage) + Sync,
    marks: &[Mark],
    legitimate: impl Fn(&Stage),
) {
    holds_beside(cell, OFF, policy, attack, marks, legitimate);
}

/// [`holds`], with other arguments for the policy that is off. Each has a world of its own.
pub(super) fn holds_beside(
    cell: Cell,
    off: &[&str],
    policy: &[&str],
    attack: impl Fn(&Stage) + Sync,
    marks: &[Mark],
    legitimate: impl Fn(&Stage),
) {
    std::thread::scope(|scope| {
        let control = scope.spawn(|| succeeds(cell, off, &attack, marks));
        let stage = Stage::new(cell, policy);
        attack(&stage);
        stage.settle();
        let arrivals = stage.arrivals();
        for (what, arrived) in marks {
            assert!(!arrived(&arrivals), "{what} got through:\n{arrivals}");
        }
        legitimate(&stage);
        if let Err(panic) = control.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

fn succeeds(cell: Cell, off: &[&str], attack: impl Fn(&Stage), marks: &[Mark]) {
    let stage = Stage::new(cell, off);
    attack(&stage);
    for (what, arrived) in marks {
        eventually(&format!("{what}, with the policy off"), || {
            arrived(&stage.arrivals()).then_some(())
        });
    }
}
