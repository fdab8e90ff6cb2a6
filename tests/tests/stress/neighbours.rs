//! Two `slipgate attach` in one namespace share maps and uplink. What happens to one is not the
//! other's business.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World,
    clients::tcp,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::{SERVER, UPLINK},
};

use super::{
    WAIT, eventually,
    scene::{assert_empty, await_death, maps, roomy_guest},
    traffic::{Stream, expect_whole, paced},
};

/// Before a lost SYN would be sent again (RFC 6298: a second).
const NO_SYN_LOST: Duration = Duration::from_millis(950);

#[test]
fn two_processes_and_one_is_killed() {
    begin!();
    let world = World::new().unwrap();
    let pins = PinDir::new().unwrap();
    let guest = |tap: &str| roomy_guest(&world, GuestConfig::new(tap));
    let attach = |tap| Slipgate::attach(&world.host, &pins, &["--tap", tap, "--uplink", UPLINK]);
    let (guest_a, guest_b) = (guest("tapa"), guest("tapb"));
    let mut a = attach("tapa").unwrap();
    let mut b = attach("tapb").unwrap();
    let maps = maps(&world, &pins);
    let echo = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Echo).unwrap();
    let close = TcpServer::start(&world.net, (SERVER, 7001), TcpService::Close).unwrap();
    let udp = UdpServer::start(&world.net, (SERVER, 7002), UdpService::Echo).unwrap();
    let start =
        |guest: &Guest| Stream::start(guest, echo.address(), 4_000, Duration::from_millis(2));
    let (stream_a, stream_b) = (start(&guest_a), start(&guest_b));
    let connects_at_once = |slipgate: &Slipgate, guest: &Guest| {
        for _ in 0..20 {
            let took = guest
                .run(|| tcp::connect_close(close.address(), WAIT))
                .unwrap();
            let stats = slipgate.stats().unwrap();
            assert!(took < NO_SYN_LOST, "a SYN was lost: {took:?}, {stats:#}");
        }
    };
    let span = Duration::from_secs(3);
    let datagrams = paced(&guest_b, udp.address(), span, Duration::from_millis(2));

    // One is killed: its flow goes on, and the other's VM notices nothing.
    a.kill_both().unwrap();
    await_death(&mut a);
    connects_at_once(&b, &guest_b);
    stream_a.expect_progress();
    stream_b.expect_progress();
    let briefly = Duration::from_millis(300);
    let refused = guest_a.run(|| tcp::connect_outcome(close.address(), briefly));
    assert!(
        matches!(refused, Ok(tcp::ConnectOutcome::TimedOut(_))),
        "{refused:?}"
    );

    // It comes again while the other works, and then each is killed and comes again in turn.
    let began = Instant::now();
    a = a.again().unwrap();
    println!("taken over in {:?}", began.elapsed());
    connects_at_once(&a, &guest_a);
    connects_at_once(&b, &guest_b);
    expect_whole(&datagrams.join().unwrap());
    b.kill_broker().unwrap();
    await_death(&mut b);
    connects_at_once(&a, &guest_a);
    stream_b.expect_progress();
    b = b.again().unwrap();
    connects_at_once(&b, &guest_b);

    // The other leaves in order while the first is dead: what the dead one left stays, and works.
    a.kill_broker().unwrap();
    await_death(&mut a);
    stream_b.finish();
    assert!(b.stop().unwrap().success(), "{}", b.stderr());
    stream_a.expect_progress();
    a = a.again().unwrap();
    connects_at_once(&a, &guest_a);
    stream_a.expect_progress();
    stream_a.finish();
    assert!(a.stop().unwrap().success(), "{}", a.stderr());
    assert_eq!(pins.pins(), Vec::<PathBuf>::new());
    assert_empty(&maps);
    let links = world.host.ip("-br link").unwrap();
    assert!(!links.contains("sgport"), "{links}");
}

/// Four chunks of 1,024 slots, three of which one process may have.
#[test]
fn what_one_process_had_of_the_table_the_other_gets_when_its_flows_have_ended() {
    begin!();
    const FLAGS: [&str; 6] = [
        "--flow-table",
        "4096",
        "--max-flows",
        "4096",
        "--new-flows-per-second",
        "100000",
    ];
    let world = World::new().unwrap();
    let pins = PinDir::new().unwrap();
    let guest = |tap: &str| roomy_guest(&world, GuestConfig::new(tap));
    let attach = |tap| {
        let mut args = vec!["--tap", tap, "--uplink", UPLINK];
        args.extend(FLAGS);
        Slipgate::attach(&world.host, &pins, &args).unwrap()
    };
    let (guest_a, guest_b) = (guest("tapa"), guest("tapb"));
    let (a, _b) = (attach("tapa"), attach("tapb"));
    let close = TcpServer::start(&world.net, (SERVER, 7001), TcpService::Close).unwrap();
    let start = |port| UdpServer::start(&world.net, (SERVER, port), UdpService::Echo).unwrap();
    let (udp_a, udp_b) = (start(7002), start(7003));
    let fill = |guest: &Guest, server: &UdpServer, flows: u16| {
        guest.run(|| {
            for port in 20_000..20_000 + flows {
                let socket = std::net::UdpSocket::bind(("0.0.0.0", port)).unwrap();
                // What was refused before may be told to any socket that sends.
                let _ = socket.send_to(b"one", server.address());
            }
        });
    };
    let flows_of = |vm: &str| {
        let flows = a.flows().unwrap();
        flows.iter().filter(|flow| flow.vm == vm).count()
    };
    eventually("all that one may have", || {
        fill(&guest_a, &udp_a, 4_000);
        flows_of("tapa") == 3_072
    });
    let connect = || guest_b.run(|| tcp::connect_close(close.address(), WAIT));
    connect().unwrap();
    eventually("all that is left", || {
        fill(&guest_b, &udp_b, 2_000);
        flows_of("tapb") == 1_024
    });
    a.run(&["cut", "tapa"]).unwrap();
    eventually("what the other had", || {
        fill(&guest_b, &udp_b, 2_000);
        flows_of("tapb") >= 2_000
    });
    guest_a
        .run(|| tcp::connect_close(close.address(), WAIT))
        .unwrap();
}
