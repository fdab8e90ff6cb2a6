//! Traps of the datapath that others have fallen into, each with the control that shows that it is
//! one.

use std::{
    fs,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Guest, GuestConfig, NetNs, PinDir, Slipgate, World, WorldConfig,
    clients::{icmp, tcp, udp, udp::UdpOutcome},
    ethtool,
    frame::FrameBuilder,
    kernel_view, require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::{SERVER, SERVER_2, UPLINK},
};

use crate::{GATEWAY_MAC, GUEST_MAC, Stand, WAIT, at, datagram, eventually};

const FLOOD: u64 = 3_000;
/// Time between the checks of what TAPs and their programs are.
const CHECKED_EVERY: Duration = Duration::from_secs(10);

#[test]
fn the_host_itself_sends_nothing_out_of_the_engine_port() {
    require_root_and_tun!();
    let world = World::new().unwrap();
    for scope in ["all", "default"] {
        let key = format!("net.ipv6.conf.{scope}.disable_ipv6");
        world.host.sysctl(&key, "0").unwrap();
    }
    let _guest = Guest::new(&world, GuestConfig::new("tap0")).unwrap();
    let _other = Guest::new(&world, GuestConfig::new("tap9")).unwrap();
    world.host.ip("link set tap9 up").unwrap();
    let pins = PinDir::new().unwrap();
    let args = ["--tap", "tap0", "--uplink", UPLINK];
    let slipgate = Slipgate::attach(&world.host, &pins, &args).unwrap();
    std::thread::sleep(Duration::from_millis(1_500));
    let sent = |device: &str| kernel_view::frames_sent(&world.host, device).unwrap();
    assert!(
        sent("tap9") > 0,
        "an ordinary TAP is sent frames by its own host"
    );
    assert_eq!(sent(slipgate.engine_port()), 0);
}

#[test]
fn a_host_that_forwards_forwards_nothing_of_a_guest_by_itself() {
    require_root_and_tun!();
    let world = WorldConfig {
        ip_forward: true,
        ..Default::default()
    };
    let stand = Stand::with(world, GuestConfig::new("tap0"), &[]);
    let host = &stand.world.host;
    let forwards = |ns: &NetNs, device: &str| {
        let path = format!("/proc/sys/net/ipv4/conf/{device}/forwarding");
        ns.run(|| fs::read_to_string(path))
            .unwrap()
            .trim()
            .to_owned()
    };
    assert_eq!(forwards(host, UPLINK), "1", "the host does forward");
    assert_eq!(forwards(host, "tap0"), "0");
    assert_eq!(forwards(host, stand.slipgate.engine_port()), "0");
    let ping = stand.run(|| icmp::ping(SERVER, 1, 10, WAIT)).unwrap();
    assert_eq!(ping.replies.len(), 1);
}

/// A world with two guests, and slipgate for both.
fn two_guests(args: &[&str]) -> (Slipgate, [Guest; 2], World) {
    let world = World::new().unwrap();
    let guests = ["tap0", "tap1"].map(|tap| Guest::new(&world, GuestConfig::new(tap)).unwrap());
    let pins = PinDir::new().unwrap();
    let mut all = vec!["--tap", "tap0", "--tap", "tap1", "--uplink", UPLINK];
    all.extend(args);
    let slipgate = Slipgate::attach(&world.host, &pins, &all).unwrap();
    (slipgate, guests, world)
}

#[test]
fn one_guests_flood_costs_itself_credit_and_delays_no_other_guest() {
    require_root_and_tun!();
    let args = ["--new-flows-per-second", "100000"];
    let (mut slipgate, [flooding, other], world) = two_guests(&args);
    let sink = UdpServer::start(&world.net, (SERVER, 7), UdpService::Sink).unwrap();
    let echo = UdpServer::start(&world.net, (SERVER_2, 7), UdpService::Echo).unwrap();
    let warm = other
        .run(|| udp::probe(echo.address(), b"x", WAIT))
        .unwrap();
    assert!(matches!(warm, UdpOutcome::Answered(_)), "{warm:?}");

    // The engine holds its breath, so that everything piles up before it.
    let engine = slipgate.engine_pid().unwrap();
    let signal = |signal| slipgate_testbed::signal(engine, signal);
    signal(libc::SIGSTOP);
    for number in 0..FLOOD {
        let port = 10_000 + number as u16;
        let (vnet, frame) = datagram(port, sink.address()).build();
        flooding.inject(vnet, &frame).unwrap();
    }
    let probes: Vec<_> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..5)
            .map(|_| {
                scope.spawn(|| {
                    other
                        .run(|| udp::probe(echo.address(), b"x", WAIT))
                        .unwrap()
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(200));
        signal(libc::SIGCONT);
        asking
            .into_iter()
            .map(|probe| probe.join().unwrap())
            .collect()
    });
    for probe in &probes {
        assert!(matches!(probe, UdpOutcome::Answered(_)), "{probes:?}");
    }
    let of = |vm: usize| slipgate.stats().unwrap()["vms"][vm].take();
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
    let flooded = eventually("the whole flood is accounted for", || {
        let vm = of(0);
        let counted = number(&vm["kernel"]["tx_packets"])
            + number(&vm["drops"]["no_credit"]["packets"])
            + number(&vm["lost_after_redirect"]);
        (counted == FLOOD).then_some(vm)
    });
    assert!(
        number(&flooded["drops"]["no_credit"]["packets"]) > 1_000,
        "{flooded}"
    );
    assert_eq!(
        number(&flooded["kernel"]["tx_packets"]),
        sink.datagrams(),
        "{flooded}"
    );
    let calm = of(1);
    assert_eq!(calm["drops"], serde_json::json!({}), "{calm}");
    // And it has its credit back.
    let after = flooding
        .run(|| udp::probe(echo.address(), b"x", WAIT))
        .unwrap();
    assert!(matches!(after, UdpOutcome::Answered(_)), "{after:?}");
}

/// At once, not with the next of the periodic checks.
#[test]
fn the_guard_comes_and_goes_as_the_vmm_changes_offloads() {
    require_root_and_tun!();
    let stand = Stand::with(WorldConfig::default(), GuestConfig::new("tap0"), &[]);
    let host = &stand.world.host;
    for (offloads, has_guard) in [(true, false), (false, true), (true, false)] {
        ethtool::set_offloads(host, "tap0", offloads).unwrap();
        let since = Instant::now();
        eventually("the guard", || {
            let link = host.ip("link show tap0").unwrap();
            (link.contains("xdp") == has_guard).then_some(())
        });
        assert!(since.elapsed() < CHECKED_EVERY / 2, "{has_guard}");
    }
}

/// The kernel waits for a grace period when the first guard comes to a TAP and when the last one goes.
#[test]
fn a_daemon_holds_a_guard_before_any_tap_has_one() {
    require_root_and_tun!();
    let world = World::new().unwrap();
    for (xdp, held) in [("auto", 1), ("off", 0)] {
        let pins = PinDir::new().unwrap();
        let args = ["--uplink", UPLINK, "--xdp", xdp];
        let slipgate = Slipgate::serve(&world.host, &pins, &args).unwrap();
        let descriptors = fs::read_dir(format!("/proc/{}/fdinfo", slipgate.broker_pid())).unwrap();
        let is_guard = |path: &fs::DirEntry| {
            fs::read_to_string(path.path()).is_ok_and(|info| info.contains("link_type:\txdp"))
        };
        let guards = descriptors.flatten().filter(is_guard).count();
        assert_eq!(guards, held, "--xdp {xdp}");
    }
}

#[test]
fn the_guard_drops_early_and_lets_honest_frames_by() {
    require_root_and_tun!();
    let guest = GuestConfig {
        offloads: false,
        ..GuestConfig::new("tap0")
    };
    let args = ["--xdp", "on", "--deny", "203.0.113.20"];
    let stand = Stand::with(WorldConfig::default(), guest, &args);
    let link = stand.world.host.ip("link show tap0").unwrap();
    assert!(link.contains("xdp"), "{link}");
    let server = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    let spoofed = FrameBuilder::udp("10.0.2.77:5000", server.address()).payload(b"x");
    let spoofed = spoofed.macs(GUEST_MAC, GATEWAY_MAC);
    let tagged = datagram(5001, at(SERVER, 7)).vlan(7);
    for (reason, frame) in [("spoofed", spoofed), ("tagged", tagged)] {
        let (vnet, frame) = frame.build();
        stand.guest.inject(vnet, &frame).unwrap();
        eventually(reason, || (stand.dropped(reason) == 1).then_some(()));
    }
    stand.run(|| {
        // The first of them is still answered.
        tcp::expect_refused(at(SERVER_2, 7000)).unwrap();
        tcp::download(server.address(), 8 << 20, 1, WAIT).unwrap();
        tcp::upload(server.address(), 8 << 20, 1, WAIT).unwrap();
    });
    // A flood of denied packets ends at the guard, nearly all of it.
    let before = stand.port_frames();
    for _ in 0..FLOOD {
        let (vnet, frame) = datagram(6000, at(SERVER_2, 9)).build();
        stand.guest.inject(vnet, &frame).unwrap();
    }
    let mut drops = serde_json::Value::Null;
    let settled = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        drops = stand.total()["drops"].take();
        let of = |reason: &str| drops[reason]["packets"].as_u64().unwrap_or(0);
        of("denied") + of("refused") == FLOOD + 1
    });
    assert!(settled, "each denied packet is counted once: {drops}");
    let handed_over = stand.port_frames() - before;
    assert!(
        handed_over < FLOOD / 10,
        "{handed_over} of {FLOOD} went to the engine"
    );
}
