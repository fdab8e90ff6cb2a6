//! Two `slipgate attach` in one namespace share maps and uplink. What happens to one is not the
//! other's business.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World,
    clients::tcp,
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::{SERVER, UPLINK},
};

use super::{
    WAIT,
    scene::{assert_empty, await_death, maps, roomy_guest},
    traffic::{Stream, expect_whole, paced},
};

/// Before a lost SYN would be sent again (RFC 6298: a second).
const NO_SYN_LOST: Duration = Duration::from_millis(950);

#[test]
fn two_processes_and_one_is_killed() {
    require_root_and_tun!();
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
