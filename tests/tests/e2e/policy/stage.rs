//! Where the attacks take place: a guest behind slipgate, and a world in which everything answers
//! and everything that arrives is kept.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    sync::atomic::{AtomicU32, Ordering},
};

use slipgate_testbed::{
    Capture, Direction, Guest, GuestConfig, WorldConfig, affinity,
    clients::{dns, tcp},
    dns_wire::{Question, Record, Reply},
    frame::Packet,
    pump::Fate,
    servers::{Answer, DnsServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    tls,
    world::WORLD_LINK,
};

use super::{
    ALLOWED, Arrivals, DENIED, HTTPS, OFF, PRIVATE, RESOLVER, SECOND_RESOLVER, SHARED, by_hand,
};
use crate::{DNS, Stand, WAIT, at, eventually};

/// Loses what would not come over another router.
const ONE_MORE_HOP: &str = "table ip hop {
    chain arriving {
        type filter hook prerouting priority raw;
        ip ttl 1 drop
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
    pub(super) dns: DnsServer,
    capture: Capture,
    _second_dns: [DnsServer; 2],
    _tcp: [TcpServer; 2],
    _udp: [UdpServer; 2],
}

impl Stage {
    /// Creates a stage. `policy`: slipgate's arguments besides those of every stand.
    pub(super) fn new(policy: &[&str]) -> Stage {
        Self::with(policy, &[])
    }

    fn with(policy: &[&str], neighbours: &[GuestConfig]) -> Stage {
        let world = WorldConfig {
            server_addresses: vec![RESOLVER, ALLOWED, DENIED, SHARED, SECOND_RESOLVER, PRIVATE],
            ..WorldConfig::default()
        };
        let stand = Stand::beside(world, GuestConfig::new("tap0"), neighbours, policy);
        // The guest's own stack knows nothing of the connections made by hand.
        let by_hand = |direction, _: &_, frame: &[u8]| match Packet::parse_ethernet(frame) {
            Some(packet) if direction == Direction::In && by_hand::is_one(&packet) => Fate::Lose,
            _ => Fate::Pass,
        };
        stand.guest.set_filter(Some(Box::new(by_hand))).unwrap();
        let net = &stand.world.net;
        // The servers are behind one more router.
        net.nft(ONE_MORE_HOP).unwrap();
        let everywhere = Ipv4Addr::UNSPECIFIED;
        let tcp = |port| TcpServer::start(net, (everywhere, port), TcpService::EchoTls).unwrap();
        let udp = |port| UdpServer::start(net, (everywhere, port), UdpService::Sink).unwrap();
        let dns = |address, port| DnsServer::start(net, (address, port), zone()).unwrap();
        Stage {
            dns: dns(RESOLVER, 53),
            capture: Capture::keeping(net, WORLD_LINK).unwrap(),
            _second_dns: [dns(SECOND_RESOLVER, 53), dns(SECOND_RESOLVER, HIDDEN_DNS)],
            _tcp: [tcp(HTTPS), tcp(DOT)],
            _udp: [udp(HTTPS), udp(DISCARD)],
            stand,
        }
    }

    /// Returns the packets that have arrived so far.
    pub(super) fn arrivals(&self) -> Arrivals {
        Arrivals::new(self.capture.frames())
    }

    /// Makes a stage with a second guest, like the first.
    pub(super) fn of_two(policy: &[&str]) -> Stage {
        Self::with(policy, &[GuestConfig::new("tap1")])
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
                let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                socket.send_to(mark, at(RESOLVER, DISCARD)).unwrap();
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
        let found = guest.run(|| dns::query_udp(at(DNS, 53), name, WAIT));
        found.unwrap().reply
    }

    /// The answer of some resolver, if there is one.
    pub(super) fn ask_at(&self, resolver: SocketAddrV4, question: &Question) -> Option<Reply> {
        let found = self.stand.run(|| dns::ask_udp(resolver, question, WAIT));
        found.ok().map(|found| found.reply)
    }

    /// Connects as any client, says `bytes`, and takes the answer ([`tls::answer_to`]). `false`: it
    /// came to nothing.
    pub(super) fn says(&self, server: SocketAddrV4, bytes: &[u8]) -> bool {
        self.stand.run(|| {
            let Ok(mut stream) = tcp::connect(server, WAIT) else {
                return false;
            };
            let mut echo = vec![0; bytes.len()];
            let came = stream
                .write_all(bytes)
                .and_then(|()| stream.read_exact(&mut echo));
            came.is_ok() && echo == tls::answer_to(bytes)
        })
    }

    /// Asserts that `says` succeeds and that the bytes arrive.
    pub(super) fn reaches(&self, server: SocketAddrV4, bytes: &[u8]) {
        assert!(self.says(server, bytes), "{server} is out of reach");
        self.await_stream(server, bytes);
    }

    /// Awaits that a connection has brought these bytes and no others.
    pub(super) fn await_stream(&self, server: SocketAddrV4, bytes: &[u8]) {
        eventually(&format!("what was said to {server}"), || {
            let streams = self.arrivals().streams(server);
            streams.iter().any(|stream| stream == bytes).then_some(())
        });
    }

    /// Asks for a name and reaches it.
    pub(super) fn resolves_and_reaches(&self, name: &str, server: SocketAddrV4) {
        let found = self.ask(name);
        let addresses: Vec<_> = found.records.iter().filter_map(Record::address).collect();
        assert_eq!(addresses, [*server.ip()], "{name}");
        self.reaches(server, format!("for {name}").as_bytes());
    }

    /// A datagram from the guest's own stack, whatever becomes of it.
    pub(super) fn sends(&self, server: SocketAddrV4, bytes: &[u8]) {
        self.sends_all(server, &[bytes.to_vec()]);
    }

    /// Datagrams of one flow, each after the last was decided over.
    pub(super) fn sends_all(&self, server: SocketAddrV4, datagrams: &[Vec<u8>]) {
        let socket = self.stand.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
        for datagram in datagrams {
            // Without `connect` no ICMP error comes back to it.
            socket.send_to(datagram, server).unwrap();
            self.settle();
        }
    }
}

fn zone() -> Zone {
    Zone::from([
        ("api.example.test".into(), Answer::a(ALLOWED, 300)),
        ("shared.example.test".into(), Answer::a(SHARED, 300)),
        ("shared.evil.test".into(), Answer::a(SHARED, 300)),
        ("evil.test".into(), Answer::a(DENIED, 300)),
    ])
}

/// Something that an attack is after, in words, and how it shows among what arrived.
pub(super) type Mark = (&'static str, fn(&Arrivals) -> bool);

/// Makes an attack with the policy off, where its data must arrive, and with the policy on, where
/// none of it may arrive; then checks that the similar but allowed action still works.
pub(super) fn holds(
    policy: &[&str],
    attack: impl Fn(&Stage) + Sync,
    marks: &[Mark],
    legitimate: impl Fn(&Stage),
) {
    holds_beside(OFF, policy, attack, marks, legitimate);
}

/// [`holds`], with other arguments for the policy that is off. Each has a world of its own.
pub(super) fn holds_beside(
    off: &[&str],
    policy: &[&str],
    attack: impl Fn(&Stage) + Sync,
    marks: &[Mark],
    legitimate: impl Fn(&Stage),
) {
    std::thread::scope(|scope| {
        let control = scope.spawn(|| succeeds(off, &attack, marks));
        let stage = Stage::new(policy);
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

fn succeeds(off: &[&str], attack: impl Fn(&Stage), marks: &[Mark]) {
    let stage = Stage::new(off);
    attack(&stage);
    for (what, arrived) in marks {
        eventually(&format!("{what}, with the policy off"), || {
            arrived(&stage.arrivals()).then_some(())
        });
    }
}
