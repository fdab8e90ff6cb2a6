//! `kill -9` at random moments: the engine, which is replaced; the broker, and both, which are
//! outages.

use std::{
    net::{IpAddr, SocketAddr},
    ops::Range,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Result,
    clients::{
        tcp,
        tcp::{ConnectOutcome, EchoSession},
        udp,
        udp::UdpOutcome,
    },
    frame::arp,
    impairment::SplitMix64,
    pump::SeenFrame,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    slipgate::FlowRow,
    tap::VnetHdr,
    world::SERVER_2,
    world_ipv6::SERVER6_2,
};

use super::{
    BOTH_SERVERS, GATEWAY, GUEST, WAIT, at, below,
    books::Books,
    eventually, in_turn, knob, random, rounds,
    scene::{Scene, await_death},
    traffic::{Churn, Stream, expect_whole, local_address, paced},
};

const BRIEFLY: Duration = Duration::from_millis(400);
/// Connections that end while nobody serves.
const ENDING: u16 = 4;
/// Below the range of ephemeral ports.
const FIRST_PORT: u16 = 20_000;

/// The servers of one family.
struct Servers {
    echo: TcpServer<IpAddr>,
    close: TcpServer<IpAddr>,
    udp: UdpServer<IpAddr>,
}

impl Servers {
    /// Those of each family.
    fn of_both(scene: &Scene) -> [Servers; 2] {
        let net = &scene.world.net;
        BOTH_SERVERS.map(|ip| Servers {
            echo: TcpServer::start(net, (ip, 7000), TcpService::Echo).unwrap(),
            close: TcpServer::start(net, (ip, 7001), TcpService::Close).unwrap(),
            udp: UdpServer::start(net, (ip, 7002), UdpService::Echo).unwrap(),
        })
    }
}

#[test]
fn killed_at_any_moment_nothing_is_lost() {
    begin!();
    let mut random = random();
    let outage = Duration::from_secs(knob("SLIPGATE_STRESS_OUTAGE", 3));
    let mut scene = Scene::new(&[]);
    ask_often(&scene);
    let mut books = Books::open(&scene);
    let servers = Servers::of_both(&scene);
    let echo = servers.each_ref().map(|of| of.echo.address());
    let pause = |ms| Duration::from_millis(ms);
    let streams = [
        Stream::start(&scene.guest, echo[0], 256 << 10, pause(10)),
        Stream::start(&scene.guest, echo[1], 256 << 10, pause(10)),
        Stream::start(&scene.guest, echo[0], 16 << 10, pause(3)),
        Stream::start(&scene.guest, echo[1], 100, pause(200)),
    ];
    let mut idle = echo.map(|to| scene.guest.run(|| tcp::connect(to, WAIT)).unwrap());
    let idle_addresses = idle.each_ref().map(local_address);
    let churn = servers
        .each_ref()
        .map(|of| Churn::start(&scene.guest, of.close.address(), pause(30)));
    let mut outages = Vec::new();
    for round in 1..=rounds() {
        let live: Vec<SocketAddr> = streams.iter().map(|stream| stream.local).collect();
        let live = [live, idle_addresses.to_vec()].concat();
        let first = FIRST_PORT + (round as u16 - 1) * ENDING;
        let ports = first..first + ENDING;
        let random = &mut random;
        let outage = one_outage(&mut scene, &servers, &streams, &live, ports, outage, random);
        println!("round {round}: {:?} without slipgate", outage.1 - outage.0);
        outages.push(outage);
        for stream in &mut idle {
            let mut session = EchoSession::new(stream);
            scene.guest.run(|| session.round(100)).unwrap();
        }
    }
    books.kills = rounds();
    let connections = churn.map(|churn| churn.finish(&outages));
    println!("{connections:?} connections came and went");
    assert!(connections.iter().all(|of| *of as u64 > 5 * rounds()));
    streams.into_iter().for_each(Stream::finish);
    drop(idle);
    let closed = books.close(&mut scene);
    assert!(closed.records.len() > connections.iter().sum());
}

/// Nobody notices, and the books are whole: what the engine had in hand is sent again.
#[test]
fn an_engine_killed_at_any_moment_is_replaced() {
    begin!();
    /// Less than are given up.
    const KILLS: u64 = 4;
    let mut random = random();
    let mut scene = Scene::new(&[]);
    ask_often(&scene);
    let mut books = Books::open(&scene);
    let servers = Servers::of_both(&scene);
    let pause = |ms| Duration::from_millis(ms);
    let streams = servers.each_ref().map(|of| {
        let to = of.echo.address();
        let fast = Stream::start(&scene.guest, to, 256 << 10, pause(20));
        [fast, Stream::start(&scene.guest, to, 100, pause(2))]
    });
    let streams = streams.into_iter().flatten().collect::<Vec<_>>();
    let churn = servers
        .each_ref()
        .map(|of| Churn::start(&scene.guest, of.close.address(), pause(10)));
    let broker = scene.slipgate.broker_pid();
    let mut replaced = Vec::new();
    for kill in 0..KILLS {
        std::thread::sleep(Duration::from_micros(below(&mut random, 1_500_000)));
        let began = Instant::now();
        let killed = scene.slipgate.kill_engine().unwrap();
        let close = in_turn(&servers, kill as usize).close.address();
        let connect = || tcp::connect_close(close, WAIT);
        scene.guest.run(connect).unwrap();
        streams.iter().for_each(Stream::expect_progress);
        eventually("another engine", || {
            scene.slipgate.engine_pid().is_some_and(|pid| pid != killed)
        });
        replaced.push((began, Instant::now()));
    }
    assert_eq!(scene.slipgate.broker_pid(), broker);
    books.kills = KILLS;
    // A connection whose first packet the engine had in hand waits for a second.
    let connections = churn.map(|churn| churn.finish(&replaced));
    println!("{connections:?} connections came and went");
    streams.into_iter().for_each(Stream::finish);
    let closed = books.close(&mut scene);
    assert!(closed.records.len() > connections.iter().sum());
}

/// Kills, looks at what goes on and what does not, starts again, and looks at what was adopted.
fn one_outage(
    scene: &mut Scene,
    servers: &[Servers; 2],
    streams: &[Stream],
    live: &[SocketAddr],
    ports: Range<u16>,
    outage: Duration,
    random: &mut SplitMix64,
) -> (Instant, Instant) {
    let span = outage + Duration::from_secs(2);
    let interval = Duration::from_millis(10);
    let datagrams = servers
        .each_ref()
        .map(|of| paced(&scene.guest, of.udp.address(), span, interval));
    let ending: Vec<_> = ports
        .map(|port| {
            let echo = in_turn(servers, port.into()).echo.address();
            let connect = || tcp::connect_from(port, echo, WAIT);
            let mut stream = scene.guest.run(connect).unwrap();
            let mut session = EchoSession::new(&mut stream);
            scene.guest.run(|| session.round(1_000)).unwrap();
            stream
        })
        .collect();
    let ended: Vec<_> = ending.iter().map(local_address).collect();
    let known = |scene: &Scene, proto: &str| {
        let flows = scene.slipgate.flows().unwrap();
        flows.iter().filter(|flow| flow.proto == proto).count()
    };
    eventually("the flows of datagrams", || known(scene, "udp") >= 2);

    std::thread::sleep(Duration::from_micros(below(random, 700_000)));
    let before = scene.slipgate.flows().unwrap();
    let began = Instant::now();
    // An engine that is killed alone is no outage: `an_engine_killed_at_any_moment_is_replaced`.
    let victim = ["broker", "both"][below(random, 2) as usize];
    println!("kill -9: {victim}");
    match victim {
        "broker" => drop(scene.slipgate.kill_broker().unwrap()),
        _ => scene.slipgate.kill_both().unwrap(),
    }
    await_death(&mut scene.slipgate);

    drop(ending);
    let late = late_connections(scene, servers);
    nothing_new_gets_in(scene, servers);
    streams.iter().for_each(Stream::expect_progress);
    the_gateway_answers(scene);
    await_closed(scene, &ended);
    std::thread::sleep(outage.saturating_sub(began.elapsed()));
    streams.iter().for_each(Stream::expect_progress);

    scene.tear_log();
    scene.restart();
    let served = Instant::now();
    all_adopted(&before, &scene.slipgate.flows().unwrap(), live);
    streams.iter().for_each(Stream::expect_progress);
    // What was asked in the outage is answered when it is asked again.
    for connection in late {
        connection.join().unwrap().unwrap();
    }
    for of in servers {
        let connect = || tcp::connect_close(of.close.address(), WAIT);
        scene.guest.run(connect).unwrap();
    }
    for datagrams in datagrams {
        expect_whole(&datagrams.join().unwrap());
    }
    a_used_tuple_is_recorded_and_used_again(scene, servers, &ended);
    (began, served)
}

/// Has the guest send a SYN again each second and not give up: its own way, in ever longer waits
/// for two minutes, may have no SYN left for the moment after a long outage.
fn ask_often(scene: &Scene) {
    let guest = &scene.guest.ns;
    guest.sysctl("net.ipv4.tcp_syn_retries", "127").unwrap();
    // Linux 6.5; older ones wait longer.
    let _ = guest.sysctl("net.ipv4.tcp_syn_linear_timeouts", "120");
}

/// Connections asked for while nobody can admit them.
fn late_connections(scene: &Scene, servers: &[Servers; 2]) -> Vec<JoinHandle<Result<Duration>>> {
    let patience = Duration::from_secs(400);
    let start = |number| {
        let to = in_turn(servers, number).close.address();
        let connect = move || tcp::connect_close(to, patience);
        scene.guest.ns.thread("late", connect)
    };
    (0..4).map(start).collect()
}

fn nothing_new_gets_in(scene: &Scene, servers: &[Servers; 2]) {
    let others = [at(SERVER_2, 7000), at(SERVER6_2, 7000)];
    // All at once, so that the outage is no longer than its time.
    std::thread::scope(|scope| {
        for (of, other) in servers.iter().zip(others) {
            scope.spawn(move || {
                let to = of.echo.address();
                let tcp = scene.guest.run(|| tcp::connect_outcome(to, BRIEFLY));
                assert!(matches!(tcp, Ok(ConnectOutcome::TimedOut(_))), "{tcp:?}");
                let to = of.udp.address();
                let udp = scene.guest.run(|| udp::probe(to, b"anybody?", BRIEFLY));
                assert!(matches!(udp, Ok(UdpOutcome::TimedOut)), "{udp:?}");
                let refused = scene.guest.run(|| tcp::connect_outcome(other, BRIEFLY));
                let timed_out = matches!(refused, Ok(ConnectOutcome::TimedOut(_)));
                assert!(timed_out, "a packet reached the world: {refused:?}");
            });
        }
    });
}

/// ARP for the gateway is answered by the kernel's program. The question is hand-made: a guest that
/// forgets the MAC may also forget the packets that wait for it.
fn the_gateway_answers(scene: &Scene) {
    let frames = scene.guest.frames().unwrap();
    let mac = scene.guest.config().mac;
    let question = arp(1, (mac, GUEST), ([0; 6], GATEWAY));
    scene.guest.inject(VnetHdr::default(), &question).unwrap();
    let is_answer = |frame: &SeenFrame| {
        let bytes = &frame.bytes;
        bytes.len() >= 42
            && bytes[12..14] == [8, 6]
            && bytes[20..22] == [0, 2]
            && bytes[28..32] == GATEWAY.octets()
    };
    let answer = frames.wait_for(WAIT, is_answer);
    assert!(answer.is_some(), "no answer to ARP for the gateway");
}

fn await_closed(scene: &Scene, ended: &[SocketAddr]) {
    eventually("the end of connections in the outage", || {
        let flows = scene.slipgate.flows().unwrap();
        ended.iter().all(|local| {
            let local = local.to_string();
            flows
                .iter()
                .any(|flow| flow.guest == local && flow.state == "closed")
        })
    });
}

/// Each flow is there as it was, and its counts have not gone back.
fn all_adopted(before: &[FlowRow], after: &[FlowRow], live: &[SocketAddr]) {
    for local in live {
        let local = local.to_string();
        let of = |flows: &[FlowRow]| flows.iter().find(|flow| flow.guest == local).cloned();
        let (Some(was), Some(is)) = (of(before), of(after)) else {
            panic!("{local} was not adopted: before {before:?}, after {after:?}");
        };
        assert_eq!((&was.nat, "fast"), (&is.nat, is.verdict.as_str()), "{is:?}");
        assert!(is.age_ms >= was.age_ms, "{was:?} {is:?}");
        let counts = |flow: &FlowRow| [flow.tx_packets, flow.tx_bytes, flow.rx_packets];
        let mut grown = counts(&was).into_iter().zip(counts(&is));
        assert!(grown.all(|(was, is)| was <= is), "{was:?} {is:?}");
    }
}

/// A connection from the port of one that ended in the outage: the old flow is recorded for it.
fn a_used_tuple_is_recorded_and_used_again(
    scene: &Scene,
    servers: &[Servers; 2],
    ended: &[SocketAddr],
) {
    for local in ended {
        let echo = servers[usize::from(local.is_ipv6())].echo.address();
        let mut stream = scene
            .guest
            .run(|| tcp::connect_from(local.port(), echo, WAIT))
            .unwrap();
        let mut session = EchoSession::new(&mut stream);
        scene.guest.run(|| session.round(1_000)).unwrap();
        let local = local.to_string();
        eventually("the record of an ended flow", || {
            scene.records().iter().any(|record| record.guest == local)
        });
    }
}
