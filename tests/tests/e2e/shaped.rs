//! Rates that serve: what one TCP stream gets of a rate, and what its queue costs a ping beside it.
//!
//! The guest and the server are Linux stacks. The RTT is that of UDP echoes of the same VM during the
//! stream. `--nocapture` prints the figures.

use std::{
    fmt,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World, WorldConfig,
    clients::{tcp, udp},
    impairment::Impairment,
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    turns,
    world::{SERVER, UPLINK},
};

use crate::{
    Cell, Stand, WAIT,
    matrix::{cells, matrix},
};

matrix! {
    a_stream_gets_its_rate_and_a_short_queue_each_way: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_stream_over_a_distance_gets_its_rate: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    streams_share_a_rate_and_datagrams_above_it_stop_none: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "packets of all flows wait in one queue of the kernel's";
}

/// 100 Mb/s, L3 bytes per second.
const RATE: f64 = 12_500_000.0;
const RATES: [&str; 4] = [
    "--tx-bytes-per-second",
    "12500000",
    "--rx-bytes-per-second",
    "12500000",
];
/// Length of a full segment, bytes, and of its data by IPv4, with timestamps.
const SEGMENT_LEN: f64 = 1_500.0;
const IPV4_DATA_LEN: f64 = 1_448.0;
/// What IPv6's header is longer by, bytes.
const MORE_HEADER_LEN: f64 = 20.0;
const MEASURED_FOR: Duration = Duration::from_secs(5);
const STALL: Duration = Duration::from_secs(10);
const STREAMS: usize = 4;
/// Largest increase of the round trip by a full queue.
const MOST_INFLATION: Duration = Duration::from_millis(20);
/// A machine that runs other tests wakes a process late.
const WAKING: Duration = Duration::from_millis(8);

struct Figures {
    /// Part of the rate that the stream's packets had.
    share: f64,
    /// Round trips before the stream, and during it: medians, and the 95th hundredth.
    idle: Duration,
    loaded: Duration,
    loaded_p95: Duration,
    dropped: u64,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.3} of the rate, RTT {:.1} ms idle, {:.1} ms (p95 {:.1}) beside it, {} packets dropped",
            self.share,
            self.idle.as_secs_f64() * 1e3,
            self.loaded.as_secs_f64() * 1e3,
            self.loaded_p95.as_secs_f64() * 1e3,
            self.dropped
        )
    }
}

/// Round trips, sorted, at least one, over this time.
fn round_trips(server: &UdpServer<IpAddr>, during: Duration) -> Vec<Duration> {
    let until = Instant::now() + during;
    let mut all = Vec::new();
    while all.is_empty() || Instant::now() < until {
        if let udp::UdpOutcome::Answered(took) = udp::probe(server.address(), b"x", WAIT).unwrap() {
            all.push(took);
        }
        thread::sleep(Duration::from_millis(10));
    }
    all.sort();
    all
}

/// Part of the rate that a stream's packets had.
fn share(rate: &tcp::Rate, cell: Cell) -> f64 {
    let data_len = match cell.is_ipv6() {
        true => IPV4_DATA_LEN - MORE_HEADER_LEN,
        false => IPV4_DATA_LEN,
    };
    rate.bits_per_second() / 8.0 * SEGMENT_LEN / data_len / RATE
}

fn measure(stand: &Stand, control: &str, up: bool) -> Figures {
    stand.world.set_congestion_control(control).unwrap();
    stand.guest.ns.set_congestion_control(control).unwrap();
    let server = stand.cell.server();
    let streams = TcpServer::start(&stand.world.net, (server, 80), TcpService::Streams).unwrap();
    let echo = UdpServer::start(&stand.world.net, (server, 7), UdpService::Echo).unwrap();
    let idle = stand.run(|| round_trips(&echo, Duration::from_millis(500)));
    let dropped = stand.dropped("byte_rate");
    let address = streams.address();
    let (rate, loaded) = thread::scope(|scope| {
        let rate = scope.spawn(|| {
            stand.run(|| match up {
                true => tcp::rate_up(address, MEASURED_FOR, STALL).unwrap(),
                false => tcp::rate_down(address, MEASURED_FOR, STALL).unwrap(),
            })
        });
        // The stream has reached the rate.
        thread::sleep(Duration::from_millis(500));
        let during = MEASURED_FOR - Duration::from_secs(1);
        let loaded = stand.run(|| round_trips(&echo, during));
        (rate.join().unwrap(), loaded)
    });
    assert!(!rate.stalled);
    let figures = Figures {
        share: share(&rate, stand.cell),
        idle: idle[idle.len() / 2],
        loaded: loaded[loaded.len() / 2],
        loaded_p95: loaded[loaded.len() * 95 / 100],
        dropped: stand.dropped("byte_rate") - dropped,
    };
    let way = if up { "up" } else { "down" };
    println!("{control} {way}: {figures}");
    figures
}

fn a_stream_gets_its_rate_and_a_short_queue_each_way(cell: Cell) {
    let _turn = turns::alone("it measures a stream's rate and round trips beside it");
    let stand = Stand::of(cell, &RATES);
    for way in ["tx", "rx"] {
        let limits = &stand.slipgate.stats().unwrap()["vms"][0]["limits"][way];
        assert_eq!(limits["is_shaped"], true, "{limits}");
    }
    for control in ["cubic", "reno"] {
        for up in [true, false] {
            let figures = measure(&stand, control, up);
            assert!(
                (0.95..1.02).contains(&figures.share),
                "{control} {up}: {figures}"
            );
            if !cell.is_hybrid() {
                // What waits is not dropped.
                assert_eq!(figures.dropped, 0, "{control} {up}: {figures}");
            }
            let inflation = figures.loaded.saturating_sub(figures.idle);
            assert!(inflation <= MOST_INFLATION, "{control} {up}: {figures}");
            let worst = figures.loaded_p95.saturating_sub(figures.idle);
            assert!(
                worst <= MOST_INFLATION + WAKING,
                "{control} {up}: {figures}"
            );
        }
    }
}

fn a_stream_over_a_distance_gets_its_rate(cell: Cell) {
    let _turn = turns::alone("it measures a stream's rate and round trips beside it");
    let mut guest = GuestConfig::new("tap0");
    guest.impairment = Some(Impairment {
        delay: Duration::from_millis(5),
        ..Impairment::none(1)
    });
    let stand = Stand::of_guest(cell, guest, WorldConfig::default(), &[], &[], &RATES);
    for control in ["cubic", "reno"] {
        for up in [true, false] {
            let figures = measure(&stand, control, up);
            assert!(
                (0.9..1.02).contains(&figures.share),
                "{control} {up}: {figures}"
            );
        }
    }
}

/// Part of the rate that each of several streams has, which begin together.
fn shares(stand: &Stand, address: SocketAddr, up: bool) -> Vec<f64> {
    thread::scope(|scope| {
        let measured = || {
            stand.run(|| match up {
                true => tcp::rate_up(address, MEASURED_FOR, STALL).unwrap(),
                false => tcp::rate_down(address, MEASURED_FOR, STALL).unwrap(),
            })
        };
        let streams: Vec<_> = (0..STREAMS).map(|_| scope.spawn(measured)).collect();
        let rates = streams.into_iter().map(|stream| stream.join().unwrap());
        rates.map(|rate| share(&rate, stand.cell)).collect()
    })
}

fn streams_share_a_rate_and_datagrams_above_it_stop_none(cell: Cell) {
    let _turn = turns::alone("it measures streams' parts of a rate");
    let stand = Stand::of(cell, &RATES);
    let server = cell.server();
    let streams = TcpServer::start(&stand.world.net, (server, 80), TcpService::Streams).unwrap();
    let echo = UdpServer::start(&stand.world.net, (server, 7), UdpService::Echo).unwrap();
    let before = stand.dropped("byte_rate");
    for up in [true, false] {
        let shares = shares(&stand, streams.address(), up);
        println!("up {up}: {shares:.3?}");
        let fair = 1.0 / STREAMS as f64;
        assert!(shares.iter().sum::<f64>() > 0.93, "{shares:?}");
        assert!(shares.iter().all(|share| *share > fair / 3.0), "{shares:?}");
    }
    assert_eq!(
        stand.dropped("byte_rate"),
        before,
        "what waits is not dropped"
    );
    // The server sends the guest's echo more than the rate.
    let socket = stand
        .run(|| UdpSocket::bind((cell.family.unspecified(), 0)))
        .unwrap();
    socket.send_to(b"x", echo.address()).unwrap();
    let flow = crate::eventually("the flow", || stand.flows_to(echo.address()).pop());
    let nat: SocketAddr = flow.nat.parse().unwrap();
    let ends = AtomicBool::new(false);
    let rate = thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Relaxed) {
                for _ in 0..80 {
                    let _ = echo.send_to(&[7; 1_400], nat);
                }
                thread::sleep(Duration::from_millis(3));
            }
        });
        let address = streams.address();
        let rate = stand.run(|| tcp::rate_down(address, MEASURED_FOR, STALL));
        ends.store(true, Relaxed);
        rate.unwrap()
    });
    let (share, dropped) = (share(&rate, cell), stand.dropped("byte_rate") - before);
    println!("beside datagrams: {share:.3} of the rate, {dropped} packets dropped");
    assert!(!rate.stalled && share > 0.01, "{share}");
    assert!(dropped > 1_000, "{dropped}");
}

/// Somebody else's queue at the TAP, and a device of the pacing device's name: both rates are policed,
/// as they are where the kernel can't shape, and the log says so.
#[test]
fn what_cannot_be_shaped_is_policed_and_said() {
    require_root_and_tun!();
    let _turn = turns::alone("it measures a stream's rate and round trips beside it");
    let world = World::new().unwrap();
    world.host.ip("link add sgpace0 type bridge").unwrap();
    let guest = Guest::new(&world, GuestConfig::new("tap0")).unwrap();
    let mut tc = std::process::Command::new("tc");
    tc.args("qdisc add dev tap0 root handle 7: htb".split(' '));
    world.host.output(tc).unwrap();
    let pins = PinDir::new().unwrap();
    let mut all = vec!["--tap", "tap0", "--uplink", UPLINK];
    all.extend(RATES);
    let slipgate = Slipgate::attach(&world.host, &pins, &all).unwrap();
    let said = slipgate.stderr();
    assert!(said.contains("rates from guests are policed"), "{said}");
    assert!(
        said.contains("a queueing discipline that is not slipgate's"),
        "{said}"
    );
    let server = TcpServer::start(&world.net, (SERVER, 80), TcpService::Streams).unwrap();
    for up in [true, false] {
        let rate = guest.run(|| match up {
            true => tcp::rate_up(server.address(), MEASURED_FOR, STALL).unwrap(),
            false => tcp::rate_down(server.address(), MEASURED_FOR, STALL).unwrap(),
        });
        let share = share(&rate, cells::hybrid_ipv4);
        println!("policed, up {up}: {share:.3} of the rate");
        // It holds all the same.
        assert!(share < 1.05, "{share}");
    }
}

/// Queues go with what they are for: a limit that ends, a VM, a TAP that comes back, slipgate.
#[test]
fn queues_are_made_and_given_back() {
    require_root_and_tun!();
    let stand = Stand::new(&RATES);
    let host = stand.world.host.clone();
    let queue = |device: &str| {
        let mut tc = std::process::Command::new("tc");
        tc.args(["qdisc", "show", "dev", device]);
        String::from_utf8(host.output(tc).unwrap().stdout).unwrap()
    };
    assert!(
        queue("tap0").contains("htb 5347: root"),
        "{}",
        queue("tap0")
    );
    assert!(queue("sgpace0").contains("htb 5347: root"));
    // The host's own device is as it was.
    assert!(!queue(UPLINK).contains("htb"), "{}", queue(UPLINK));
    // Somebody removes the pacing device.
    host.ip("link del sgpace0").unwrap();
    stand.says("it is made again");
    crate::eventually("the pacing device", || {
        let mut tc = std::process::Command::new("tc");
        tc.args(["class", "show", "dev", "sgpace0"]);
        let shown = host.output_with(tc, &[1]).ok()?;
        String::from_utf8(shown.stdout)
            .unwrap()
            .contains("htb 5347:")
            .then_some(())
    });
    let Stand {
        mut slipgate,
        guest,
        world,
        ..
    } = stand;
    slipgate.stop().unwrap();
    assert!(!queue("tap0").contains("htb"), "{}", queue("tap0"));
    assert!(world.host.ip("link show sgpace0").is_err());
    drop(guest);
}
