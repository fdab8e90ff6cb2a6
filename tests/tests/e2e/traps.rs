//! Traps of the datapath that others have fallen into, each with the control that shows that it is
//! one.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Guest, GuestConfig, NetNs, PinDir, Slipgate, World, WorldConfig,
    clients::{tcp, udp, udp::UdpOutcome},
    ethtool,
    frame::FrameBuilder,
    kernel_view,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::UPLINK,
};

use crate::{
    Cell, GATEWAY_MAC, GUEST_MAC, Stand, WAIT, eventually,
    matrix::{at, matrix, pings},
};

matrix! {
    the_host_itself_sends_nothing_out_of_the_engine_port: [hybrid_ipv6],
        without [hybrid_ipv4]: "by IPv4 a kernel sends nothing of its own out of a device without an address",
        without [user_ipv4, user_ipv6]: "the host has no device of slipgate's there";
    a_host_that_forwards_forwards_nothing_of_a_guest_by_itself: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host has no device of slipgate's there";
    one_guests_flood_costs_itself_credit_and_delays_no_other_guest: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each VM has an engine of its own";
    the_guard_comes_and_goes_as_the_vmm_changes_offloads: [hybrid_ipv4],
        without [hybrid_ipv6]: "a TAP has one guard for both families",
        without [user_ipv4, user_ipv6]: "the engine reads the guest's frames itself";
    a_daemon_holds_a_guard_before_any_tap_has_one: [hybrid_ipv4],
        without [hybrid_ipv6]: "a TAP has one guard for both families",
        without [user_ipv4, user_ipv6]: "the engine reads the guest's frames itself";
    the_guard_drops_early_and_lets_honest_frames_by: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the engine reads the guest's frames itself";
    a_flood_of_denied_packets_ends_at_the_guard: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the engine reads the guest's frames itself";
}

const FLOOD: u64 = 3_000;
/// Time between the checks of what TAPs and their programs are.
const CHECKED_EVERY: Duration = Duration::from_secs(10);

fn the_host_itself_sends_nothing_out_of_the_engine_port(cell: Cell) {
    let world = World::new().unwrap();
    let ipv6 = cell.give(&world);
    let _guest = Guest::new(&world, GuestConfig::new("tap0")).unwrap();
    let _other = Guest::new(&world, GuestConfig::new("tap9")).unwrap();
    world.host.ip("link set tap9 up").unwrap();
    let pins = PinDir::new().unwrap();
    let args = [&["--tap", "tap0", "--uplink", UPLINK], ipv6].concat();
    let slipgate = Slipgate::attach(&world.host, &pins, &args).unwrap();
    std::thread::sleep(Duration::from_millis(1_500));
    let sent = |device: &str| kernel_view::frames_sent(&world.host, device).unwrap();
    assert!(
        sent("tap9") > 0,
        "an ordinary TAP is sent frames by its own host"
    );
    assert_eq!(sent(slipgate.engine_port()), 0);
}

fn a_host_that_forwards_forwards_nothing_of_a_guest_by_itself(cell: Cell) {
    let world = World::with(WorldConfig {
        ip_forward: true,
        ..Default::default()
    });
    let world = world.unwrap();
    let args = cell.give(&world);
    if cell.is_ipv6() {
        let all = "net.ipv6.conf.all.forwarding";
        world.host.sysctl(all, "1").unwrap();
    }
    let guest = cell.guest_at(&world, "tap0");
    let pins = PinDir::new().unwrap();
    let forwards = |device: &str| forwards(&world.host, cell, device);
    assert!(forwards(UPLINK), "the host does forward");
    assert!(forwards("tap0"), "so does it from a TAP that is not served");
    let args = [&["--tap", "tap0", "--uplink", UPLINK], args].concat();
    let slipgate = Slipgate::attach(&world.host, &pins, &args).unwrap();
    assert!(!forwards("tap0"));
    assert!(!forwards(slipgate.engine_port()));
    assert!(pings(&guest, cell.server(), WAIT));
    // Somebody turns it on for all devices.
    let turned_on: &[_] = match cell.is_ipv6() {
        false => &[("net.ipv4.ip_forward", "0"), ("net.ipv4.ip_forward", "1")],
        true => &[("net.ipv6.conf.all.disable_ipv6", "0")],
    };
    for (key, value) in turned_on {
        world.host.sysctl(key, value).unwrap();
    }
    eventually("it is off again", || {
        let devices = ["tap0", slipgate.engine_port()];
        (!devices.into_iter().any(forwards)).then_some(())
    });
}

/// Whether the kernel forwards what comes by a device.
pub(crate) fn forwards(ns: &NetNs, cell: Cell, device: &str) -> bool {
    let set = |family: &str, key: &str| {
        let path = format!("/proc/sys/net/{family}/conf/{device}/{key}");
        ns.run(|| fs::read_to_string(path)).unwrap().trim() != "0"
    };
    match cell.is_ipv6() {
        false => set("ipv4", "forwarding"),
        // Where it is disabled, nothing is received.
        true => set("ipv6", "forwarding") && !set("ipv6", "disable_ipv6"),
    }
}

/// A world with two guests, and slipgate for both.
fn two_guests(cell: Cell, args: &[&str]) -> (Slipgate, [Guest; 2], World) {
    let world = World::new().unwrap();
    let mut all = vec!["--tap", "tap0", "--tap", "tap1", "--uplink", UPLINK];
    all.extend(cell.give(&world));
    all.extend(args);
    let guests = ["tap0", "tap1"].map(|tap| cell.guest_at(&world, tap));
    let pins = PinDir::new().unwrap();
    let slipgate = Slipgate::attach(&world.host, &pins, &all).unwrap();
    (slipgate, guests, world)
}

fn one_guests_flood_costs_itself_credit_and_delays_no_other_guest(cell: Cell) {
    let args = ["--new-flows-per-second", "100000"];
    let (mut slipgate, [flooding, other], world) = two_guests(cell, &args);
    let sink = UdpServer::start(&world.net, (cell.server(), 7), UdpService::Sink).unwrap();
    let echo = UdpServer::start(&world.net, (cell.server_2(), 7), UdpService::Echo).unwrap();
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
        let (vnet, frame) = cell.datagram(port, sink.address()).build();
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
fn the_guard_comes_and_goes_as_the_vmm_changes_offloads(cell: Cell) {
    let stand = Stand::of(cell, &[]);
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
fn a_daemon_holds_a_guard_before_any_tap_has_one(cell: Cell) {
    let world = World::new().unwrap();
    let ipv6 = cell.give(&world);
    for (xdp, held) in [("auto", 1), ("off", 0)] {
        let pins = PinDir::new().unwrap();
        let args = [&["--uplink", UPLINK, "--xdp", xdp], ipv6].concat();
        let slipgate = Slipgate::serve(&world.host, &pins, &args).unwrap();
        let descriptors = fs::read_dir(format!("/proc/{}/fdinfo", slipgate.broker_pid())).unwrap();
        let is_guard = |path: &fs::DirEntry| {
            fs::read_to_string(path.path()).is_ok_and(|info| info.contains("link_type:\txdp"))
        };
        let guards = descriptors.flatten().filter(is_guard).count();
        assert_eq!(guards, held, "--xdp {xdp}");
    }
}

/// A stand whose guest's TAP has the guard, with these denied destinations.
fn guarded(cell: Cell, denied: IpAddr) -> Stand {
    let guest = GuestConfig {
        offloads: false,
        ..GuestConfig::new("tap0")
    };
    let args = ["--xdp", "on", "--deny", &denied.to_string()];
    let stand = Stand::of_guest(cell, guest, WorldConfig::default(), &[], &[], &args);
    let link = stand.world.host.ip("link show tap0").unwrap();
    assert!(link.contains("xdp"), "{link}");
    stand
}

fn the_guard_drops_early_and_lets_honest_frames_by(cell: Cell) {
    let stand = guarded(cell, cell.server_2());
    let net = &stand.world.net;
    let server = TcpServer::start(net, (cell.server(), 7000), TcpService::Streams).unwrap();
    let before = stand.handed_over();
    let foreign: SocketAddr = match cell.is_ipv6() {
        false => "10.0.2.77:5000".parse().unwrap(),
        // Of another network: a guest may use any address of its own.
        true => "[fd73:6c69:7067:1::15]:5000".parse().unwrap(),
    };
    let spoofed = FrameBuilder::udp(foreign, server.address()).payload(b"x");
    let spoofed = spoofed.macs(GUEST_MAC, GATEWAY_MAC);
    let tagged = cell.datagram(5001, at(cell.server(), 7)).vlan(7);
    for (reason, frame) in [("spoofed", spoofed), ("tagged", tagged)] {
        let (vnet, frame) = frame.build();
        stand.guest.inject(vnet, &frame).unwrap();
        eventually(reason, || (stand.dropped(reason) == 1).then_some(()));
    }
    assert_eq!(stand.handed_over(), before);
    stand.run(|| {
        tcp::expect_refused(at(cell.server_2(), 7000)).unwrap();
        tcp::download(server.address(), 8 << 20, 1, WAIT).unwrap();
        tcp::upload(server.address(), 8 << 20, 1, WAIT).unwrap();
    });
}

/// Nearly all of it.
fn a_flood_of_denied_packets_ends_at_the_guard(cell: Cell) {
    let stand = guarded(cell, cell.server_2());
    // The first of them is still answered.
    stand
        .run(|| tcp::expect_refused(at(cell.server_2(), 7000)))
        .unwrap();
    let before = stand.port_frames();
    for _ in 0..FLOOD {
        let (vnet, frame) = cell.datagram(6000, at(cell.server_2(), 9)).build();
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
