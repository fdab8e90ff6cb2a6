//! A full table refuses new flows, visibly, and affects no established one. A guest that floods
//! does not delay another one's first packet.

use std::{
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
    world::{SERVER, SERVER_2, UPLINK},
};

use super::{
    GUEST, WAIT, at, eventually,
    scene::{Scene, roomy_guest},
    traffic::{Stream, expect_whole, paced},
};

/// Before a lost SYN would be sent again (RFC 6298: a second).
const NO_SYN_LOST: Duration = Duration::from_millis(950);
/// For what the engine may see to first: a VM's 512 frames on their way, some microseconds each.
const A_TURN: Duration = Duration::from_millis(3);
const ROUNDS: usize = 10;
const GUEST_MAC: Mac = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];
const GATEWAY_MAC: Mac = [0x02, 0x53, 0x4c, 0x47, 0x00, 0x01];
/// 802.1Q: what bears it is dropped before anything else is looked at.
const VLAN_TAG: [u8; 4] = [0x81, 0, 0, 7];

#[test]
fn ports_that_are_used_up_refuse_and_harm_nobody() {
    begin!();
    const PORTS: usize = 16;
    let mut scene = Scene::new(&["--nat-ports", "61000-61015"]);
    let start = |address| TcpServer::start(&scene.world.net, (address, 7000), TcpService::Echo);
    let (server, other) = (start(SERVER).unwrap(), start(SERVER_2).unwrap());
    let connect = |server: &TcpServer| {
        let to = server.address();
        scene.guest.run(|| tcp::connect(to, WAIT)).unwrap()
    };
    let mut open: Vec<_> = (0..PORTS).map(|_| connect(&server)).collect();
    for _ in 0..3 {
        let refused = scene.guest.run(|| tcp::expect_refused(server.address()));
        refused.unwrap();
    }
    // A port is used again for another server.
    let mut beside = connect(&other);
    let all_work = |open: &mut Vec<std::net::TcpStream>| {
        for stream in open {
            let mut session = EchoSession::new(stream);
            scene.guest.run(|| session.round(10_000)).unwrap();
        }
    };
    all_work(&mut open);
    scene
        .guest
        .run(|| EchoSession::new(&mut beside).round(10_000))
        .unwrap();
    // One that has ended makes room, once nothing of it can be under way any more.
    drop(open.pop());
    eventually("the end of the connection", || {
        let flows = scene.slipgate.flows().unwrap();
        let silent = |flow: &FlowRow| flow.state == "closed" && flow.idle_ms > 400;
        flows.iter().any(silent)
    });
    open.push(connect(&server));
    all_work(&mut open);
    let stats = scene.slipgate.stats().unwrap();
    assert_eq!(stats["total"]["refused"]["ports_exhausted"], 3, "{stats:#}");
    assert_eq!(server.accepted(), PORTS as u64 + 1);
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
    let echo = TcpServer::start(net, (SERVER, 7000), TcpService::Echo).unwrap();
    let datagrams = UdpServer::start(net, (SERVER, 7002), UdpService::Echo).unwrap();
    let stream = Stream::start(&scene.guest, echo.address(), 10_000, Duration::ZERO);
    let steady = paced(
        &scene.guest,
        datagrams.address(),
        Duration::from_secs(4),
        Duration::from_millis(2),
    );
    let live = || scene.slipgate.flows().unwrap().len();
    eventually("both flows", || live() == 2);
    // Each datagram is from a port of its own. Sent until no more flow gets in.
    let fill = || {
        // Below the range of ephemeral ports: no later socket is on one of these flows.
        for port in FIRST_PORT..FIRST_PORT + SLOTS {
            let socket = std::net::UdpSocket::bind(("0.0.0.0", port)).unwrap();
            // What was refused before may be told to any socket that sends.
            let _ = socket.send_to(b"one", datagrams.address());
        }
    };
    eventually("a full table", || {
        scene.guest.run(fill);
        live() == usize::from(SLOTS)
    });
    let probe = || udp::probe(datagrams.address(), b"one more", Duration::from_millis(500));
    eventually("an answer within the rate of answers", || {
        let outcome = scene.guest.run(probe).unwrap();
        match outcome {
            UdpOutcome::Refused(error, _) => {
                assert_eq!(error, IcmpError::PROHIBITED);
                true
            }
            UdpOutcome::TimedOut => false,
            UdpOutcome::Answered(_) => panic!("admitted to a full table"),
        }
    });
    eventually("a refusal by RST", || {
        let refused = scene.guest.run(|| tcp::expect_refused(echo.address()));
        refused.is_ok()
    });
    stream.expect_progress();
    expect_whole(&steady.join().unwrap());
    stream.expect_progress();
    let stats = scene.slipgate.stats().unwrap();
    let refused = stats["total"]["refused"]["table_full"].as_u64();
    assert!(refused > Some(0), "{stats:#}");
    assert_eq!(live(), usize::from(SLOTS));
    assert_eq!(echo.accepted(), 1);
    stream.finish();
    scene.detach();
    assert_eq!(scene.records().len(), usize::from(SLOTS));
}

/// A frame that the engine has to look at, a new one each time.
fn flood_frame(kind: &str, number: u64) -> FrameBuilder {
    let port = 1_024 + (number % 60_000) as u16;
    let built = match kind {
        "syn" => FrameBuilder::tcp(at(GUEST, port), at(SERVER, 9))
            .flags(tcp_flags::SYN)
            .numbers(number as u32, 0),
        "dns" => FrameBuilder::udp(at(GUEST, port), at(SERVER, 53)).payload(&[0xaa; 40]),
        _ => FrameBuilder::udp(at(GUEST, port), at(SERVER, 1 + (number / 60_000) as u16))
            .payload(b"flood"),
    };
    // To everybody it would go no further than the kernel.
    built.macs(GUEST_MAC, GATEWAY_MAC)
}

#[test]
fn a_flood_of_one_delays_no_other() {
    begin!();
    let world = World::new().unwrap();
    let pins = PinDir::new().unwrap();
    let bad = Guest::new(&world, GuestConfig::new("tapbad").hand_made()).unwrap();
    let good = roomy_guest(&world, GuestConfig::new("tapgood"));
    let flags = ["--tap", "tapbad", "--tap", "tapgood", "--uplink", UPLINK];
    let mut slipgate = Slipgate::attach(&world.host, &pins, &flags).unwrap();
    let close = TcpServer::start(&world.net, (SERVER, 7001), TcpService::Close).unwrap();
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
                    let connect = || tcp::connect_close(close.address(), WAIT).unwrap();
                    times.extend((0..10).map(|_| good.run(connect)));
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
