//! A daemon takes over from another under traffic, and nothing is lost: no packet of an established
//! flow, no first packet, no question.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World,
    clients::dns,
    dns_wire::{Reply, types},
    servers::{Answer, DnsServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    slipgate::{Start, another_build},
    world::{SERVER, UPLINK},
    world_ipv6::GATEWAY6,
};

use super::{
    BOTH_HOSTS, BOTH_SERVERS, WAIT, at, below, eventually, in_turn, random, rounds,
    store::Store,
    traffic::{Churn, Stream, expect_whole, paced},
};

/// Resolver at the gateway, by each family.
const DNS: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(10, 0, 2, 3)), IpAddr::V6(GATEWAY6)];
/// Interval of the questions by each family.
const ASKS_EVERY: Duration = Duration::from_millis(50);
/// Questions by each without an answer at which no more are asked: a VM may have 64 open, and on a
/// slow machine a change takes seconds.
const OPEN_AT_MOST: usize = 30;
/// Every so many questions one is for a name that the resolver answers late.
const LATE_ONES: usize = 4;
const LATE: Duration = Duration::from_millis(150);
/// Time that a guest's own resolver would wait for an answer.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// How it goes from one daemon to the next.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Another starts with `--take-over` while the first serves.
    TakeOver,
    /// The first is stopped, and a service manager passes what it left to the second.
    ServiceManager,
}

/// Questions on one socket, without repetition.
struct Questions {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(usize, usize, Duration)>,
}

impl Questions {
    fn start(guest: &Guest, resolver: IpAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = stop.clone();
        let thread = guest.ns.thread("questions", move || {
            let any = if resolver.is_ipv4() {
                "0.0.0.0:0"
            } else {
                "[::]:0"
            };
            let socket = UdpSocket::bind(any).unwrap();
            socket.connect(at(resolver, 53)).unwrap();
            let mut open: Vec<(u16, Instant)> = Vec::new();
            let (mut asked, mut last, mut longest) = (0, None, Duration::ZERO);
            while last.is_none_or(|at: Instant| at.elapsed() < ANSWERED_WITHIN && !open.is_empty())
            {
                if last.is_none() && open.len() < OPEN_AT_MOST {
                    let name = match asked % LATE_ONES {
                        0 => format!("late{asked}.test"),
                        _ => format!("unknown{asked}.test"),
                    };
                    let mut question = dns::question(&name, types::A);
                    question.id = asked as u16;
                    socket.send(&question.to_bytes()).unwrap();
                    open.push((question.id, Instant::now()));
                    asked += 1;
                }
                if last.is_none() && theirs.load(SeqCst) {
                    last = Some(Instant::now());
                }
                let next = Instant::now() + ASKS_EVERY;
                while let Some(left) = next.checked_duration_since(Instant::now())
                    && !left.is_zero()
                {
                    socket.set_read_timeout(Some(left)).unwrap();
                    let mut buffer = [0; 4096];
                    let Ok(len) = socket.recv(&mut buffer) else {
                        continue;
                    };
                    let reply = Reply::parse(&buffer[..len]).unwrap();
                    open.retain(|(id, since)| {
                        let is_it = *id == reply.question.id;
                        if is_it {
                            longest = longest.max(since.elapsed());
                        }
                        !is_it
                    });
                }
            }
            (asked, open.len(), longest)
        });
        Self { stop, thread }
    }

    /// Ends it. Returns how many there were, how many were not answered, and the longest wait.
    fn finish(self) -> (usize, usize, Duration) {
        self.stop.store(true, SeqCst);
        self.thread.join().unwrap()
    }
}

const LOOPBACKS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// Connections of the host itself to a forward: none is refused.
fn host_connects(world: &World, port: u16, stop: Arc<AtomicBool>) -> JoinHandle<usize> {
    world.host.thread("host", move || {
        let mut connections = 0;
        while !stop.load(SeqCst) {
            let loopback = *in_turn(&LOOPBACKS, connections);
            match TcpStream::connect(at(loopback, port)) {
                Ok(_) => connections += 1,
                // The engine that relayed it has ended already.
                Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
                Err(e) => panic!("after {connections} connections: {e}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        connections
    })
}

/// Returns the drops of the engine port's queue.
fn dropped_by_port(world: &World, daemon: &Slipgate) -> u64 {
    let port = daemon.engine_port();
    let shown = world.host.ip(&format!("-s -j link show {port}")).unwrap();
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    shown[0]["stats64"]["tx"]["dropped"].as_u64().unwrap()
}

#[test]
fn nothing_is_lost_when_another_daemon_takes_over() {
    hand_over(Way::TakeOver);
}

#[test]
fn nothing_is_lost_when_a_service_manager_starts_the_next_daemon() {
    hand_over(Way::ServiceManager);
}

fn hand_over(way: Way) {
    begin!();
    let mut random = random();
    let world = World::new().unwrap();
    world.give_ipv6().unwrap();
    let net = &world.net;
    let late = |number| {
        (
            format!("late{number}.test"),
            Answer::a(SERVER, 60).delayed(LATE),
        )
    };
    let zone: Zone = (0..60_000).step_by(LATE_ONES).map(late).collect();
    let resolver = DnsServer::start(net, (SERVER, 53), zone).unwrap();
    let tcp = |service: TcpService, port| {
        BOTH_SERVERS.map(|ip| TcpServer::start(net, (ip, port), service.clone()).unwrap())
    };
    let (echo, close) = (tcp(TcpService::Echo, 7000), tcp(TcpService::Close, 7001));
    let udp = BOTH_SERVERS.map(|ip| UdpServer::start(net, (ip, 7002), UdpService::Echo).unwrap());
    let guest = Guest::new(&world, GuestConfig::new("tap0")).unwrap();
    guest.give_ipv6().unwrap();
    let any = IpAddr::from(Ipv6Addr::UNSPECIFIED);
    let _inside = TcpServer::start(&guest.ns, (any, 80), TcpService::Echo).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let api = scratch.path().join("api.sock").display().to_string();
    let dns = resolver.address().to_string();
    let args = ["--uplink", UPLINK, "--dns", &dns, "--api", &api];
    let args = [&args[..], &["--ipv6", "nat"]].concat();
    let store = Store::new();
    let pins = PinDir::new().unwrap();
    let start = |other: bool| {
        let program = other.then(|| another_build().ok()).flatten();
        match way {
            Way::ServiceManager => store.start(program),
            Way::TakeOver => Start {
                binary: program,
                ..Start::default()
            },
        }
    };
    let mut daemon = Slipgate::serve_as(&start(false), &world.host, &pins, &args).unwrap();
    let forward = "tcp:8080:80";
    let add = ["vm", "add", "a", "--tap", "tap0", "--forward", forward];
    daemon.run(&add).unwrap();

    let pause = Duration::from_millis;
    let streams = echo.each_ref().map(|echo| {
        let to = echo.address();
        let bulk = Stream::start(&guest, to, 100_000, pause(10));
        [bulk, Stream::start(&guest, to, 1_000, pause(4))]
    });
    let streams: Vec<Stream> = streams.into_iter().flatten().collect();
    let churn = close
        .each_ref()
        .map(|close| Churn::start(&guest, close.address(), pause(20)));
    // A forward leads to an address of the guest's that was seen: the streams have shown both.
    let questions = DNS.map(|resolver| Questions::start(&guest, resolver));
    let stop = Arc::new(AtomicBool::new(false));
    let of_host = host_connects(&world, 8080, stop.clone());
    let from_world = {
        let stop = stop.clone();
        world.net.thread("world", move || {
            let (mut connections, mut slow) = (0, 0);
            while !stop.load(SeqCst) {
                let began = Instant::now();
                let host = *in_turn(&BOTH_HOSTS, connections);
                TcpStream::connect_timeout(&at(host, 8080), WAIT).unwrap();
                connections += 1;
                slow += usize::from(began.elapsed() > Duration::from_millis(900));
                std::thread::sleep(Duration::from_millis(10));
            }
            (connections, slow)
        })
    };
    let dropped = dropped_by_port(&world, &daemon);
    for round in 0..rounds() {
        let (span, interval) = (Duration::from_secs(4), Duration::from_millis(4));
        let datagrams = udp
            .each_ref()
            .map(|udp| paced(&guest, udp.address(), span, interval));
        eventually("the flows of datagrams", || {
            let flows = daemon.flows().unwrap();
            let sent = flows
                .iter()
                .filter(|flow| flow.proto == "udp" && flow.idle_ms < 500);
            sent.count() >= 2
        });
        std::thread::sleep(Duration::from_micros(below(&mut random, 300_000)));
        let began = Instant::now();
        let other = round % 2 == 0;
        let mut args = args.to_vec();
        // Other programs, which have to be loaded, and where there is one another build.
        args.extend(other.then_some("--bpf-log"));
        daemon = match way {
            Way::TakeOver => {
                args.push("--take-over");
                let next = Slipgate::serve_as(&start(other), &world.host, &pins, &args).unwrap();
                eventually("the end of the first daemon", || !daemon.broker_runs());
                next
            }
            Way::ServiceManager => {
                assert!(daemon.stop().unwrap().success());
                // The port, the forward by each family, the API.
                assert_eq!(store.len(), 4);
                let next = Slipgate::serve_as(&start(other), &world.host, &pins, &args).unwrap();
                eventually("the store's being empty", || store.len() == 0);
                next
            }
        };
        println!("round {round}: {:?}", began.elapsed());
        streams.iter().for_each(Stream::expect_progress);
        for datagrams in datagrams {
            expect_whole(&datagrams.join().unwrap());
        }
    }
    let [(asked, unanswered, longest), by_ipv6] = questions.map(Questions::finish);
    stop.store(true, SeqCst);
    let of_host = of_host.join().unwrap();
    let (from_world, slow) = from_world.join().unwrap();
    let connections = churn.map(|churn| churn.finish(&[]));
    streams.into_iter().for_each(Stream::finish);
    println!(
        "{asked} questions, the longest {longest:?}, by IPv6 {by_ipv6:?}; connections: \
         {connections:?} of the guest, \
         {of_host} of the host, {from_world} of the world ({slow} slow)"
    );
    let stats = daemon.stats().unwrap();
    assert_eq!(unanswered, 0, "of {asked} questions; {stats}");
    assert_eq!(by_ipv6.1, 0, "of {} questions by IPv6; {stats}", by_ipv6.0);
    assert_eq!(
        dropped_by_port(&world, &daemon),
        dropped,
        "dropped by the port"
    );
    let lost = stats["vms"][0]["lost_after_redirect"].as_u64();
    assert_eq!(lost, Some(0), "{stats}");
    let drops = &stats["vms"][0]["drops"];
    // Segments of relayed connections, which end with the engine.
    let names: Vec<_> = drops.as_object().unwrap().keys().collect();
    assert!(names.iter().all(|name| *name == "no_flow"), "{drops}");
}
