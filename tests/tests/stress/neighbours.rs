//! Two `slipgate attach` in one namespace share maps and uplink. What happens to one is not the
//! other's business.

use std::{
    net::IpAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World,
    clients::tcp,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::UPLINK,
    world_ipv6::SERVER6,
};

use super::{
    BOTH_SERVERS, WAIT, eventually, in_turn,
    scene::{assert_empty, await_death, maps, roomy_guest},
    traffic::{Stream, expect_whole, paced},
};

/// Before a lost SYN would be sent again (RFC 6298: a second).
const NO_SYN_LOST: Duration = Duration::from_millis(950);

#[test]
fn two_processes_and_one_is_killed() {
    begin!();
    let world = World::new().unwrap();
    world.give_ipv6().unwrap();
    let pins = PinDir::new().unwrap();
    let guest = |tap: &str| roomy_guest(&world, GuestConfig::new(tap));
    let attach = |tap| {
        let args = ["--tap", tap, "--uplink", UPLINK, "--ipv6", "nat"];
        Slipgate::attach(&world.host, &pins, &args)
    };
    let (guest_a, guest_b) = (guest("tapa"), guest("tapb"));
    let mut a = attach("tapa").unwrap();
    let mut b = attach("tapb").unwrap();
    let maps = maps(&world, &pins);
    let net = &world.net;
    let echo = BOTH_SERVERS.map(|ip| TcpServer::start(net, (ip, 7000), TcpService::Echo).unwrap());
    let close =
        BOTH_SERVERS.map(|ip| TcpServer::start(net, (ip, 7001), TcpService::Close).unwrap());
    let udp = UdpServer::start(net, (SERVER6, 7002), UdpService::Echo).unwrap();
    let start = |guest: &Guest| {
        let pause = Duration::from_millis(4);
        echo.each_ref()
            .map(|echo| Stream::start(guest, echo.address(), 4_000, pause))
    };
    let (streams_a, streams_b) = (start(&guest_a), start(&guest_b));
    let progress = |streams: &[Stream; 2]| streams.iter().for_each(Stream::expect_progress);
    let connects_at_once = |slipgate: &Slipgate, guest: &Guest| {
        for number in 0..20 {
            let close = in_turn(&close, number).address();
            let took = guest.run(|| tcp::connect_close(close, WAIT)).unwrap();
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
    progress(&streams_a);
    progress(&streams_b);
    let briefly = Duration::from_millis(300);
    for close in &close {
        let refused = guest_a.run(|| tcp::connect_outcome(close.address(), briefly));
        assert!(
            matches!(refused, Ok(tcp::ConnectOutcome::TimedOut(_))),
            "{refused:?}"
        );
    }

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
    progress(&streams_b);
    b = b.again().unwrap();
    connects_at_once(&b, &guest_b);

    // The other leaves in order while the first is dead: what the dead one left stays, and works.
    a.kill_broker().unwrap();
    await_death(&mut a);
    streams_b.into_iter().for_each(Stream::finish);
    assert!(b.stop().unwrap().success(), "{}", b.stderr());
    progress(&streams_a);
    a = a.again().unwrap();
    connects_at_once(&a, &guest_a);
    progress(&streams_a);
    streams_a.into_iter().for_each(Stream::finish);
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
    world.give_ipv6().unwrap();
    let pins = PinDir::new().unwrap();
    let guest = |tap: &str| roomy_guest(&world, GuestConfig::new(tap));
    let attach = |tap| {
        let mut args = vec!["--tap", tap, "--uplink", UPLINK, "--ipv6", "nat"];
        args.extend(FLAGS);
        Slipgate::attach(&world.host, &pins, &args).unwrap()
    };
    let (guest_a, guest_b) = (guest("tapa"), guest("tapb"));
    let (a, _b) = (attach("tapa"), attach("tapb"));
    let net = &world.net;
    let close =
        BOTH_SERVERS.map(|ip| TcpServer::start(net, (ip, 7001), TcpService::Close).unwrap());
    let start =
        |port| BOTH_SERVERS.map(|ip| UdpServer::start(net, (ip, port), UdpService::Echo).unwrap());
    let (udp_a, udp_b) = (start(7002), start(7003));
    let fill = |guest: &Guest, servers: &[UdpServer<IpAddr>; 2], flows: u16| {
        guest.run(|| {
            for port in 20_000..20_000 + flows {
                // Half of them by each family.
                let to = in_turn(servers, port.into()).address();
                let any = if to.is_ipv4() { "0.0.0.0" } else { "::" };
                let socket = std::net::UdpSocket::bind((any, port)).unwrap();
                // What was refused before may be told to any socket that sends.
                let _ = socket.send_to(b"one", to);
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
    let connect = |guest: &Guest| {
        for close in &close {
            guest
                .run(|| tcp::connect_close(close.address(), WAIT))
                .unwrap();
        }
    };
    connect(&guest_b);
    eventually("all that is left", || {
        fill(&guest_b, &udp_b, 2_000);
        flows_of("tapb") == 1_024
    });
    a.run(&["cut", "tapa"]).unwrap();
    eventually("what the other had", || {
        fill(&guest_b, &udp_b, 2_000);
        flows_of("tapb") >= 2_000
    });
    connect(&guest_a);
}
