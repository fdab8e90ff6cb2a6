//! A full table refuses new flows, visibly, and affects no established one. A guest that floods
//! does not delay another one's first packet.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World,
    clients::{IcmpError, tcp, tcp::EchoSession, udp, udp::UdpOutcome},
    frame::{FrameBuilder, Mac, tcp_flags},
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    slipgate::FlowRow,
    world::{GATEWAY_MAC, SERVER_2, UPLINK},
    world_ipv6::{GUEST6, SERVER6_2},
};

use super::{
    BOTH_SERVERS, GUEST, WAIT, at, eventually, in_turn,
    scene::{Scene, roomy_guest},
    traffic::{Stream, expect_whole, paced},
};

/// Before a lost SYN would be sent again (RFC 6298: a second).
const NO_SYN_LOST: Duration = Duration::from_millis(950);
/// For what the engine may see to first: a VM's 512 frames on their way, some microseconds each.
const A_TURN: Duration = Duration::from_millis(3);
const ROUNDS: usize = 10;
const GUEST_MAC: Mac = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];
/// 802.1Q: what bears it is dropped before anything else is looked at.
const VLAN_TAG: [u8; 4] = [0x81, 0, 0, 7];

#[test]
fn ports_that_are_used_up_refuse_and_harm_nobody() {
    begin!();
    const PORTS: usize = 16;
    const REFUSED: usize = 3;
    let mut scene = Scene::new(&["--nat-ports", "61000-61015"]);
    let start = |ip: IpAddr| {
        let server = TcpServer::start(&scene.world.net, (ip, 7000), TcpService::Echo);
        server.unwrap()
    };
    // Of each family they are as many.
    let servers = BOTH_SERVERS.map(start);
    let others = [SERVER_2.into(), SERVER6_2.into()].map(start);
    let connect = |server: &TcpServer<IpAddr>| {
        let to = server.address();
        scene.guest.run(|| tcp::connect(to, WAIT)).unwrap()
    };
    let mut open: Vec<_> = (0..PORTS)
        .flat_map(|_| servers.each_ref().map(connect))
        .collect();
    for server in &servers {
        for _ in 0..REFUSED {
            let refused = scene.guest.run(|| tcp::expect_refused(server.address()));
            refused.unwrap();
        }
    }
    // A port is used again for another server.
    let mut beside = others.each_ref().map(connect);
    let all_work = |open: &mut [std::net::TcpStream]| {
        for stream in open {
            let mut session = EchoSession::new(stream);
            scene.guest.run(|| session.round(10_000)).unwrap();
        }
    };
    all_work(&mut open);
    all_work(&mut beside);
    // One that has ended makes room, once nothing of it can be under way any more.
    open.truncate(open.len() - servers.len());
    eventually("the ends of the connections", || {
        let flows = scene.slipgate.flows().unwrap();
        let silent = |flow: &&FlowRow| flow.state == "closed" && flow.idle_ms > 400;
        flows.iter().filter(silent).count() == servers.len()
    });
    open.extend(servers.each_ref().map(connect));
    all_work(&mut open);
    let stats = scene.slipgate.stats().unwrap();
    let refused = &stats["total"]["refused"]["ports_exhausted"];
    assert_eq!(*refused, servers.len() * REFUSED, "{stats:#}");
    for server in &servers {
        assert_eq!(server.accepted(), PORTS as u64 + 1);
    }
    drop((open, beside));
    scene.detach();
}

#[test]
fn a_full_table_refuses_and_harms_nobody() {
    begin!();
    const SLOTS: u16 = 1_024;
    const FIRST_PORT: u16 = 20_000;
    let mut scene = Scene::new(&["--flow-table", "1024", "--new-flows-per-second", "100000"]);
    let net = &scene.world.net;
    let start = |ip| TcpServer::start(net, (ip, 7000), TcpService::Echo).unwrap();
    let echo = BOTH_SERVERS.map(start);
    let start = |ip| UdpServer::start(net, (ip, 7002), UdpService::Echo).unwrap();
    let datagrams = BOTH_SERVERS.map(start);
    let streams = echo
        .each_ref()
        .map(|echo| Stream::start(&scene.guest, echo.address(), 10_000, Duration::ZERO));
    let steady = datagrams.each_ref().map(|datagrams| {
        let (span, interval) = (Duration::from_secs(4), Duration::from_millis(4));
        paced(&scene.guest, datagrams.address(), span, interval)
    });
    let live = || scene.slipgate.flows().unwrap().len();
    eventually("all four flows", || live() == 4);
    // Each datagram is from a port of its own. Sent until no more flow gets in.
    let fill = || {
        // Below the range of ephemeral ports: no later socket is on one of these flows.
        for port in FIRST_PORT..FIRST_PORT + SLOTS {
            // Half of them by each family.
            let to = in_turn(&datagrams, port.into()).address();
            let any = if to.is_ipv4() { "0.0.0.0" } else { "::" };
            let socket = std::net::UdpSocket::bind((any, port)).unwrap();
            // What was refused before may be told to any socket that sends.
            let _ = socket.send_to(b"one", to);
        }
    };
    eventually("a full table", || {
        scene.guest.run(fill);
        live() == usize::from(SLOTS)
    });
    let prohibited = [IcmpError::PROHIBITED, IcmpError::PROHIBITED6];
    for (server, prohibited) in datagrams.iter().zip(prohibited) {
        let probe = || udp::probe(server.address(), b"one more", Duration::from_millis(500));
        eventually("an answer within the rate of answers", || {
            let outcome = scene.guest.run(probe).unwrap();
            match outcome {
                UdpOutcome::Refused(error, _) => {
                    assert_eq!(error, prohibited);
                    true
                }
                UdpOutcome::TimedOut => false,
                UdpOutcome::Answered(_) => panic!("admitted to a full table"),
            }
        });
    }
    for echo in &echo {
        eventually("a refusal by RST", || {
            let refused = scene.guest.run(|| tcp::expect_refused(echo.address()));
            refused.is_ok()
        });
    }
    streams.iter().for_each(Stream::expect_progress);
    for steady in steady {
        expect_whole(&steady.join().unwrap());
    }
    streams.iter().for_each(Stream::expect_progress);
    let stats = scene.slipgate.stats().unwrap();
    let refused = stats["total"]["refused"]["table_full"].as_u64();
    assert!(refused > Some(0), "{stats:#}");
    assert_eq!(live(), usize::from(SLOTS));
    assert_eq!(echo.each_ref().map(TcpServer::accepted), [1, 1]);
    streams.into_iter().for_each(Stream::finish);
    scene.detach();
    assert_eq!(scene.records().len(), usize::from(SLOTS));
}

/// A frame that the engine has to look at, a new one each time, by each family in turn.
fn flood_frame(kind: &str, number: u64) -> FrameBuilder {
    let port = 1_024 + (number % 60_000) as u16;
    let guest = at(
        *in_turn::<IpAddr>(&[GUEST.into(), GUEST6.into()], port.into()),
        port,
    );
    let server = |port_there| at(*in_turn(&BOTH_SERVERS, port.into()), port_there);
    let built = match kind {
        "syn" => FrameBuilder::tcp(guest, server(9))
            .flags(tcp_flags::SYN)
            .numbers(number as u32, 0),
        "dns" => FrameBuilder::udp(guest, server(53)).payload(&[0xaa; 40]),
        _ => FrameBuilder::udp(guest, server(1 + (number / 60_000) as u16)).payload(b"flood"),
    };
    // To everybody it would go no further than the kernel.
    built.macs(GUEST_MAC, GATEWAY_MAC)
}

#[test]
fn a_flood_of_one_delays_no_other() {
    begin!();
    let world = World::new().unwrap();
    world.give_ipv6().unwrap();
    let pins = PinDir::new().unwrap();
    let bad = Guest::new(&world, GuestConfig::new("tapbad").hand_made()).unwrap();
    let good = roomy_guest(&world, GuestConfig::new("tapgood"));
    let flags = ["--tap", "tapbad", "--tap", "tapgood", "--uplink", UPLINK];
    let flags = [&flags[..], &["--ipv6", "nat"]].concat();
    let mut slipgate = Slipgate::attach(&world.host, &pins, &flags).unwrap();
    let start = |ip| TcpServer::start(&world.net, (ip, 7001), TcpService::Close).unwrap();
    let close = BOTH_SERVERS.map(start);
    for kind in ["syn", "udp", "dns"] {
        let (stop, tagged) = (AtomicBool::new(false), AtomicBool::new(false));
        let sent = Arc::new(AtomicU64::new(0));
        // Beside what the kernel drops at once, and beside what the engine is to look at, in turn.
        let mut times = [Vec::new(), Vec::new()];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(SeqCst) {
                    let number = sent.fetch_add(1, SeqCst);
                    let (vnet, mut frame) = flood_frame(kind, number).build();
                    if tagged.load(SeqCst) {
                        frame.splice(12..12, VLAN_TAG);
                    }
                    bad.inject(vnet, &frame).unwrap();
                }
            });
            eventually("the flood", || sent.load(SeqCst) > 5_000);
            for _ in 0..ROUNDS {
                for (harmless, times) in [true, false].into_iter().zip(&mut times) {
                    tagged.store(harmless, SeqCst);
                    std::thread::sleep(Duration::from_millis(30));
                    times.extend((0..10).map(|number| {
                        let close = in_turn(&close, number).address();
                        good.run(|| tcp::connect_close(close, WAIT).unwrap())
                    }));
                }
            }
            stop.store(true, SeqCst);
        });
        times.iter_mut().for_each(|times| times.sort());
        let [harmless, flooded] = times;
        let half = |times: &[Duration]| times[times.len() / 2];
        let (before, median, worst) = (half(&harmless), half(&flooded), flooded[flooded.len() - 1]);
        let sent = sent.load(SeqCst);
        println!(
            "{kind}: {sent} frames of a flood; beside it p50 {median:?}, worst {worst:?}; beside \
             what is dropped at once p50 {before:?}"
        );
        assert!(worst < NO_SYN_LOST, "{kind}: a SYN was lost: {flooded:?}");
        assert!(
            median < before * 3 + A_TURN,
            "{kind}: {flooded:?} beside the flood, {harmless:?} beside what is dropped at once"
        );
    }
    let stats = slipgate.stats().unwrap();
    let of = |name: &str| {
        let vms = stats["vms"].as_array().unwrap();
        vms.iter().find(|vm| vm["vm"] == name).unwrap().clone()
    };
    let (bad_stats, good_stats) = (of("tapbad"), of("tapgood"));
    println!(
        "{}; {}",
        bad_stats["drops"], bad_stats["engine"]["from_guest"]
    );
    // It came to the engine, and it was a flood: it met a limit.
    let to_engine = bad_stats["engine"]["from_guest"]["packets"].as_u64();
    assert!(to_engine > Some(1_000), "{bad_stats:#}");
    // And the other one met none.
    let tagged = bad_stats["drops"]["tagged"]["packets"].as_u64();
    let limited = super::books::dropped_in_all(&bad_stats) - tagged.unwrap_or(0);
    assert!(limited > 1_000, "{bad_stats:#}");
    assert_eq!(
        super::books::dropped_in_all(&good_stats),
        0,
        "{good_stats:#}"
    );
    assert_eq!(good_stats["lost_after_redirect"], 0, "{good_stats:#}");
    assert!(slipgate.stop().unwrap().success());
}
