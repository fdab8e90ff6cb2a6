//! TAPs in unusual states: without a reader, or without a program.

use std::{
    fs,
    net::{SocketAddr, TcpListener, UdpSocket},
    time::Duration,
};

use slipgate_testbed::{
    Capture, Guest, GuestConfig, NetNs, PinDir, Slipgate, World, WorldConfig,
    clients::{tcp, tcp::EchoSession, udp, udp::UdpOutcome},
    frame::{FrameBuilder, Mac},
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::UPLINK,
};

use crate::{
    BRIEFLY, Cell, GUEST_MAC, Stand, WAIT, eventually,
    matrix::{at, matrix},
    stand::give_ipv6,
    traps::forwards,
};

matrix! {
    what_a_tap_without_its_vmm_loses_is_shown_and_nothing_else_breaks: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its guest has a socket in place of a TAP";
    flows_go_on_when_another_vmm_has_the_tap_with_other_offloads_and_queues: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its guest has a socket in place of a TAP";
    a_tap_that_lost_its_program_by_hand_carries_nothing: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its guest has a socket in place of a TAP";
    a_start_that_fails_leaves_nothing: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its guest has a socket in place of a TAP";
    a_second_set_of_pins_is_refused_and_harms_nobody: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "it pins nothing";
}

const LOST: u64 = 50;
const PAYLOAD: &[u8] = b"a datagram of the guest";

/// Returns two guests, on `tap0` and `tap1`.
fn two_guests(cell: Cell, world: &World) -> [Guest; 2] {
    ["tap0", "tap1"].map(|tap| cell.guest_at(world, tap))
}

/// A persistent TAP outlives its VMM. What is redirected to it meanwhile no program sees again: it
/// is the device's own count that tells.
fn what_a_tap_without_its_vmm_loses_is_shown_and_nothing_else_breaks(cell: Cell) {
    let world = World::new().unwrap();
    let ipv6 = cell.give(&world);
    world.host.ip("tuntap add tap0 mode tap vnet_hdr").unwrap();
    let [mut guest, other] = two_guests(cell, &world);
    let pins = PinDir::new().unwrap();
    let taps = ["--tap", "tap0", "--tap", "tap1", "--uplink", UPLINK];
    let args = [&taps, ipv6].concat();
    let slipgate = Slipgate::attach(&world.host, &pins, &args).unwrap();
    let bind = |ns: &NetNs, address: SocketAddr| {
        let socket = ns.run(|| UdpSocket::bind(address)).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        socket
    };
    let address = at(cell.server(), 7);
    let server = bind(&world.net, address);
    let client = bind(&guest.ns, at(cell.guest(), 5_000));
    let mut buffer = [0; 100];
    let nat = eventually("the first datagram arrives", || {
        client.send_to(b"first", address).unwrap();
        server.recv_from(&mut buffer).ok().map(|(_, nat)| nat)
    });
    let to_guest = || {
        let flows = slipgate.flows().unwrap();
        flows
            .iter()
            .find(|flow| flow.vm == "tap0")
            .unwrap()
            .rx_packets
    };
    let dropped = || {
        let stats = slipgate.stats().unwrap();
        let of = |vm: &serde_json::Value| vm["tap_tx_dropped"].as_u64();
        assert_eq!(of(&stats["vms"][1]), Some(0), "{stats}");
        assert_eq!(of(&stats["total"]), of(&stats["vms"][0]));
        of(&stats["vms"][0]).unwrap()
    };
    let index = world.host.ifindex("tap0");
    let before = dropped();

    guest.unplug();
    for _ in 0..LOST {
        server.send_to(b"into the void", nat).unwrap();
    }
    let lost = eventually("the device says what it lost", || {
        let lost = dropped() - before;
        (lost >= LOST).then_some(lost)
    });
    assert_eq!((to_guest(), lost), (LOST, LOST));
    let shown = slipgate.run(&["stats"]).unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("not taken by the TAP"), "{shown}");
    let echo = UdpServer::start(&world.net, (cell.server(), 8), UdpService::Echo).unwrap();
    let served = other
        .run(|| udp::probe(echo.address(), b"x", WAIT))
        .unwrap();
    assert!(matches!(served, UdpOutcome::Answered(_)), "{served:?}");

    // A VMM opens it again: the same device, the same flow.
    guest.plug().unwrap();
    assert_eq!(world.host.ifindex("tap0"), index);
    let mut sent = LOST;
    eventually("the flow goes on", || {
        server.send_to(b"again", nat).unwrap();
        sent += 1;
        client.recv_from(&mut buffer).ok()
    });
    // Each packet was counted in the flow, and what did not arrive by the device.
    let mut arrived = 1;
    while client.recv_from(&mut buffer).is_ok() {
        arrived += 1;
    }
    assert_eq!((to_guest(), dropped() - before), (sent, sent - arrived));
}

/// As Firecracker's and Cloud Hypervisor's machines do when they are restored: the TAP is closed and opened
/// again, with other offloads and another number of queues. It stays, or goes and comes with each VMM; its
/// flows go on, to the guest and from it.
fn flows_go_on_when_another_vmm_has_the_tap_with_other_offloads_and_queues(cell: Cell) {
    for stays in [true, false] {
        let world = World::new().unwrap();
        let ipv6 = cell.give(&world);
        let mut config = GuestConfig::new("tap0");
        if stays {
            let made = "tuntap add tap0 mode tap vnet_hdr multi_queue";
            world.host.ip(made).unwrap();
            config.queues = 4;
        }
        let mut guest = Guest::new(&world, config).unwrap();
        if cell.is_ipv6() {
            give_ipv6(&guest);
        }
        let pins = PinDir::new().unwrap();
        let forward = ["--forward", "tcp:8080:80"];
        let args = [&["--tap", "tap0", "--uplink", UPLINK], &forward[..], ipv6].concat();
        let slipgate = Slipgate::attach(&world.host, &pins, &args).unwrap();
        let echo = TcpServer::start(&world.net, (cell.server(), 7000), TcpService::Echo).unwrap();
        let held = TcpService::HeldStreams;
        let streams = TcpServer::start(&world.net, (cell.server(), 7001), held).unwrap();
        let inside = TcpServer::start(&guest.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
        let ns = guest.ns.clone();
        let forwarded = at(cell.host(), 8080);
        let connect = |ns: &NetNs, to| ns.run(|| tcp::connect(to, WAIT)).unwrap();
        let mut out: Vec<_> = (0..8).map(|_| connect(&ns, echo.address())).collect();
        let mut inward: Vec<_> = (0..4).map(|_| connect(&world.net, forwarded)).collect();
        let rounds = |all: &mut [std::net::TcpStream], bytes| {
            for stream in all {
                EchoSession::new(stream).round(bytes).unwrap();
            }
        };
        rounds(&mut out, 100_000);
        rounds(&mut inward, 100_000);
        let ids = || {
            let flows = slipgate.flows().unwrap().into_iter();
            let echoes = flows.filter(|flow| !flow.remote.ends_with(":7001"));
            echoes
                .map(|flow| flow.id)
                .collect::<std::collections::BTreeSet<_>>()
        };
        let before = ids();
        assert_eq!(before.len(), 12);

        std::thread::scope(|scope| {
            // Under way all the while, as it does not end before it is released: each byte is checked at its end.
            let bulk = scope.spawn(|| ns.run(|| tcp::upload(streams.address(), 64 << 20, 7, WAIT)));
            // A TAP that stays was made for several queues.
            let least = if stays { 2 } else { 1 };
            for (offloads, queues) in [(false, least), (true, 3), (false, 4), (true, least)] {
                eventually("the upload is under way", || {
                    (streams.open() == 1).then_some(())
                });
                guest.unplug();
                guest.plug_as(offloads, queues).unwrap();
                // One that is new is served when the broker has seen it.
                rounds(&mut out, 100_000);
                rounds(&mut inward, 100_000);
            }
            assert!(!bulk.is_finished(), "it has ended before the last one");
            streams.release();
            bulk.join().unwrap().unwrap();
        });
        assert_eq!(ids(), before, "stays: {stays}");
        // And new ones are admitted, both ways.
        rounds(&mut [connect(&ns, echo.address())], 1_000);
        rounds(&mut [connect(&world.net, forwarded)], 1_000);
        assert_eq!((echo.accepted(), inside.accepted()), (9, 5));
        assert_eq!(streams.accepted(), 1);
    }
}

/// A host that routes, and a TAP whose program somebody takes away.
fn a_tap_that_lost_its_program_by_hand_carries_nothing(cell: Cell) {
    let world = WorldConfig {
        ip_forward: true,
        ..Default::default()
    };
    let guest = GuestConfig::new("tap0").hand_made();
    let stand = Stand::of_guest(cell, guest, world, &[], &[], &[]);
    let host = &stand.world.host;
    for key in ["all.rp_filter", "tap0.rp_filter"] {
        host.sysctl(&format!("net.ipv4.conf.{key}"), "0").unwrap();
    }
    // What keeps the host from forwarding: by IPv6 it receives nothing there.
    let (key, on) = match cell.is_ipv6() {
        false => ("net.ipv4.conf.tap0.forwarding", "1"),
        true => ("net.ipv6.conf.tap0.disable_ipv6", "0"),
    };
    if cell.is_ipv6() {
        host.sysctl("net.ipv6.conf.all.forwarding", "1").unwrap();
    }
    // The broker takes back what somebody put there.
    host.sysctl(key, on).unwrap();
    eventually("forwarding is off again", || {
        (!forwards(host, cell, "tap0")).then_some(())
    });
    let to = at(cell.server(), 9);
    let broker = stand.slipgate.broker_pid();
    let signal = |signal| slipgate_testbed::signal(broker, signal);
    // As if it had come back only now, and the broker had not seen it yet.
    let forward = || {
        signal(libc::SIGSTOP);
        host.sysctl(key, on).unwrap();
    };
    let link = host.ip("-br link show tap0").unwrap();
    let mac = link.split_whitespace().nth(2).unwrap();
    let mut bytes = mac.split(':').map(|byte| u8::from_str_radix(byte, 16));
    let mac: Mac = std::array::from_fn(|_| bytes.next().unwrap().unwrap());
    let send = |port| {
        let frame = FrameBuilder::udp(at(cell.guest(), port), to).macs(GUEST_MAC, mac);
        let (vnet, frame) = frame.payload(PAYLOAD).build();
        stand.guest.inject(vnet, &frame).unwrap();
    };
    let uplink = Capture::keeping(host, UPLINK).unwrap();
    // The host has frames of its own there, such as questions for neighbours.
    let left = || {
        let all = uplink.frames().into_iter();
        all.filter(|frame| frame.sent && frame.bytes.ends_with(PAYLOAD))
            .count()
    };
    let leave = |wanted| {
        eventually("they leave", || (left() >= wanted).then_some(()));
        assert_eq!(left(), wanted);
    };
    send(5_000);
    eventually("the program sends it on", || {
        (stand.flows_to(to).len() == 1).then_some(())
    });
    leave(1);
    send(5_000);
    leave(2);
    assert_eq!(stand.dropped("unserved"), 0);

    let pins = stand.slipgate.pins();
    let pin = |name: &str| {
        let mut all = pins.pins().into_iter();
        all.find(|pin| pin.to_string_lossy().contains(name))
            .unwrap()
    };
    let mut bpftool = std::process::Command::new("bpftool");
    bpftool.args(["link", "detach", "pinned"]);
    bpftool.arg(pins.path().join(pin("/guest_egress-")));
    // The broker would attach it again within seconds.
    forward();
    host.output(bpftool).unwrap();
    for port in 5_000..5_010 {
        send(port);
    }
    std::thread::sleep(BRIEFLY);
    assert_eq!(left(), 2);
    signal(libc::SIGCONT);
    assert_eq!(stand.dropped("unserved"), 10);
    // And all other pins are no way out either.
    for pin in pins.pins() {
        fs::remove_file(pins.path().join(pin)).unwrap();
    }
    send(5_000);
    std::thread::sleep(BRIEFLY);
    assert_eq!(left(), 2);

    // It is what stands behind that holds: without it the host routes the packet, un-NATed.
    forward();
    let mut tc = std::process::Command::new("tc");
    tc.args("filter del dev tap0 ingress pref 65535".split(' '));
    host.output(tc).unwrap();
    send(5_000);
    leave(3);
    signal(libc::SIGCONT);
}

/// Of two TAPs the second one is another process's: the first one is let go, and that process goes
/// on.
fn a_start_that_fails_leaves_nothing(cell: Cell) {
    let world = World::new().unwrap();
    let ipv6 = cell.give(&world);
    let [guest, _other] = two_guests(cell, &world);
    let pins = PinDir::new().unwrap();
    let attach = |args: &[&str]| {
        let args = [&["--uplink", UPLINK], ipv6, args].concat();
        Slipgate::attach(&world.host, &pins, &args)
    };
    let left = || {
        let links = world.host.ip("-brief link show").unwrap();
        let names = links.lines().filter_map(|line| line.split(' ').next());
        (names.map(str::to_owned).collect::<Vec<_>>(), pins.pins())
    };
    let nothing = left();
    world.host.ip("link set tap1 up mtu 1400").unwrap();
    let family = if cell.is_ipv6() { "ipv6" } else { "ipv4" };
    let forwarding = format!("net.{family}.conf.tap1.forwarding");
    world.host.sysctl(&forwarding, "1").unwrap();
    let tap1 = || {
        let is_up = !world
            .host
            .ip("-brief link show dev tap1 up")
            .unwrap()
            .is_empty();
        let mtu = world
            .host
            .ip("-o link show tap1")
            .unwrap()
            .contains(" mtu 1400 ");
        (is_up, mtu, forwards(&world.host, cell, "tap1"))
    };
    let untouched = (true, true, true);
    assert_eq!(tap1(), untouched);
    let mut slipgate = attach(&["--vm", "name=a,tap=tap0"]).unwrap();
    let only_its = left();
    let mtu = ["--mtu", "1300"];
    let failed = attach(
        &[
            &mtu[..],
            &["--vm", "name=b,tap=tap1", "--vm", "name=c,tap=tap0"],
        ]
        .concat(),
    );
    assert_eq!(tap1(), untouched);
    let why = failed.err().unwrap().to_string();
    assert!(why.contains("is served already, as the VM `a`"), "{why}");
    assert_eq!(left(), only_its, "{why}");
    let rows = slipgate.stats().unwrap()["vms"].clone();
    assert_eq!(rows.as_array().unwrap().len(), 1, "{rows}");
    let echo = UdpServer::start(&world.net, (cell.server(), 8), UdpService::Echo).unwrap();
    let served = guest
        .run(|| udp::probe(echo.address(), b"x", WAIT))
        .unwrap();
    assert!(matches!(served, UdpOutcome::Answered(_)), "{served:?}");
    slipgate.stop().unwrap();
    assert_eq!(left(), nothing);

    // Nobody else is there, and a port is taken.
    let loopback = (cell.loopback(), 0);
    let taken = world.host.run(|| TcpListener::bind(loopback)).unwrap();
    let forward = format!("tcp:{}:80", taken.local_addr().unwrap());
    let of_tap1 = ["--vm", "name=b,tap=tap1", "--forward", &forward];
    let failed = attach(&[&mtu[..], &of_tap1].concat());
    let why = failed.err().unwrap().to_string();
    assert_eq!(left(), nothing, "{why}");
    assert_eq!(tap1(), untouched, "{why}");
}

/// Two sets of pins in one namespace would not know of each other's flows and ports.
fn a_second_set_of_pins_is_refused_and_harms_nobody(cell: Cell) {
    let world = World::new().unwrap();
    let ipv6 = cell.give(&world);
    let [guest, _other] = two_guests(cell, &world);
    let [pins, others] = [(); 2].map(|()| PinDir::new().unwrap());
    let attach = |pins: &PinDir, tap: &str, more: &[&str]| {
        let args = [&["--tap", tap], ipv6, more].concat();
        Slipgate::attach(&world.host, pins, &args)
    };
    let to_world = ["--uplink", UPLINK];
    let mut slipgate = attach(&pins, "tap0", &to_world).unwrap();
    let refused = |tap: &str, more: &[&str], words: &str| {
        let error = attach(&others, tap, more).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(others.pins(), Vec::<std::path::PathBuf>::new());
    };
    let root = format!("--pin-dir {}", pins.path().display());
    refused("tap1", &to_world, &root);
    refused("tap0", &to_world, &root);
    let echo = UdpServer::start(&world.net, (cell.server(), 8), UdpService::Echo).unwrap();
    let served = || {
        guest
            .run(|| udp::probe(echo.address(), b"x", WAIT))
            .unwrap()
    };
    assert!(matches!(served(), UdpOutcome::Answered(_)));
    assert!(slipgate.broker_runs());

    // Nor is another guest's TAP an uplink.
    let error = attach(&pins, "tap1", &["--uplink", "tap0"]).err().unwrap();
    let error = error.to_string();
    assert!(
        error.contains("--uplink tap0: it is the TAP of a guest"),
        "{error}"
    );

    // What a dead process left has flows, too.
    slipgate.kill_both().unwrap();
    refused("tap1", &to_world, "has left flows");
    slipgate = slipgate.again().unwrap();
    assert!(matches!(served(), UdpOutcome::Answered(_)));
    slipgate.stop().unwrap();
    let _serves = attach(&others, "tap1", &to_world).unwrap();
}
