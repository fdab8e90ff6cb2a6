//! Attacks on forwards by a neighbour on the uplink's link, or by a sender with forged sources.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Capture, LinkSender,
    clients::{tcp, udp, udp::UdpOutcome},
    frame::{FrameBuilder, Packet, tcp_flags},
    kernel_view,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    streams::Receipt,
    world::WORLD_LINK,
};

use crate::{
    Cell, GATEWAY_MAC, GUEST_MAC, Stand, WAIT, eventually,
    matrix::{at, matrix},
};

matrix! {
    a_forward_of_loopback_is_the_hosts_alone: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "every client of a forward is relayed (exec.md)";
    a_forged_client_of_a_forward_opens_no_way_out: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "every client of a forward is relayed (exec.md)";
    a_flood_of_forged_syns_shuts_no_client_of_a_forward_out: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "every client of a forward is relayed (exec.md)";
}

fn syn(from: (impl Into<IpAddr>, u16), to: (impl Into<IpAddr>, u16)) -> FrameBuilder {
    FrameBuilder::tcp(at(from.0, from.1), at(to.0, to.1))
        .flags(tcp_flags::SYN)
        .numbers(5, 0)
}

/// Returns the remotes to which, or from which, a captured device sent or received on this port.
fn senders_to(capture: &Capture, port: u16) -> Vec<IpAddr> {
    let frames = capture.frames();
    let packets = frames
        .iter()
        .filter_map(|frame| Packet::of_ethernet(&frame.bytes));
    packets
        .filter(|packet| packet.destination.port() == port)
        .map(|packet| packet.source.ip())
        .collect()
}

fn a_forward_of_loopback_is_the_hosts_alone(cell: Cell) {
    let [tcp_alone, udp_alone] = [
        ("tcp", at(cell.loopback(), 9090), 90),
        ("udp", at(cell.loopback(), 9091), 91),
    ]
    .map(|(protocol, of_host, port)| format!("{protocol}:{of_host}:{port}"));
    let forwards = [&tcp_alone, &udp_alone, "tcp:8080:80", "udp:5353:5300"];
    let args = forwards.map(|forward| ["--forward", forward]);
    let stand = Stand::with_known_guest(cell, args.as_flattened());
    let (host, pins) = (&stand.world.host, stand.slipgate.pins());
    let map = if cell.is_ipv6() {
        "FORWARDS6"
    } else {
        "FORWARDS"
    };
    let keys = kernel_view::dump(host, pins, map).unwrap();
    assert_eq!(keys.len(), 2, "{keys:?}");
    let neighbour = LinkSender::new(&stand.world).unwrap();
    let arrivals = Capture::keeping(&stand.guest.ns, "eth0").unwrap();
    let client = (cell.router(), 50_000);
    let loopbacks = match cell.is_ipv6() {
        true => vec![cell.loopback()],
        false => vec![cell.loopback(), Ipv4Addr::new(127, 8, 8, 8).into()],
    };
    for loopback in loopbacks {
        for port in [9090, 8080] {
            neighbour.send(&syn(client, (loopback, port))).unwrap();
        }
        for port in [9091, 5353] {
            let datagram = FrameBuilder::udp(at(client.0, client.1), at(loopback, port));
            neighbour.send(&datagram.payload(b"x")).unwrap();
        }
    }
    // What is sent to the host's address arrives, behind all that.
    let host_at = |port| at(cell.host(), port);
    neighbour.send(&syn(client, (cell.host(), 8080))).unwrap();
    let datagram = FrameBuilder::udp(at(client.0, client.1), host_at(5353)).payload(b"x");
    neighbour.send(&datagram).unwrap();
    eventually("both arrive at the guest", || {
        let tcp = senders_to(&arrivals, 80).contains(&client.0);
        (tcp && senders_to(&arrivals, 5300).contains(&client.0)).then_some(())
    });
    let came = [90, 91, 80, 5300].map(|port| senders_to(&arrivals, port).len());
    assert_eq!(came, [0, 0, 1, 1]);
    assert_eq!(stand.slipgate.flows().unwrap().len(), 2);

    // The host itself comes by its own socket.
    let (ns, guest) = (&stand.guest.ns, cell.guest());
    let _server = TcpServer::start(ns, (guest, 90), TcpService::Streams).unwrap();
    let _echo = UdpServer::start(ns, (guest, 91), UdpService::Echo).unwrap();
    let down = host
        .run(|| tcp::download(at(cell.loopback(), 9090), 1 << 20, 1, WAIT))
        .unwrap();
    assert_eq!(down.receipt, Receipt::expected(1 << 20, 1));
    let sent = host
        .run(|| udp::probe(at(cell.loopback(), 9091), b"x", WAIT))
        .unwrap();
    assert!(matches!(sent, UdpOutcome::Answered(_)), "{sent:?}");
}

fn a_forged_client_of_a_forward_opens_no_way_out(cell: Cell) {
    let host = cell.host();
    for (default, goes_out) in [("deny", false), ("allow", true)] {
        let args = ["--default", default, "--forward", "tcp:8080:80"];
        let stand = Stand::with_known_guest(cell, &args);
        let neighbour = LinkSender::new(&stand.world).unwrap();
        let world = Capture::keeping(&stand.world.net, WORLD_LINK).unwrap();
        let guest = Capture::keeping(&stand.guest.ns, "eth0").unwrap();
        let server = (cell.server(), 7000);
        neighbour.send(&syn(server, (host, 8080))).unwrap();
        eventually("the forged SYN arrives", || {
            senders_to(&guest, 80).contains(&server.0).then_some(())
        });
        for isn in [5, 77] {
            let own = syn((cell.guest(), 80), server).macs(GUEST_MAC, GATEWAY_MAC);
            let (vnet, frame) = own.numbers(isn, 0).build();
            stand.guest.inject(vnet, &frame).unwrap();
        }
        let syns = || {
            let frames = world.frames();
            let packets = frames
                .iter()
                .filter_map(|frame| Packet::of_ethernet(&frame.bytes));
            let to_server = packets.filter(|packet| packet.destination == at(server.0, server.1));
            to_server
                .filter(|packet| packet.tcp_flags() == Some(tcp_flags::SYN))
                .count()
        };
        if goes_out {
            eventually("the guest's own SYNs go out", || {
                (syns() == 2).then_some(())
            });
        } else {
            eventually("both are refused", || {
                (stand.refused("default_deny") == 2).then_some(())
            });
            assert_eq!(syns(), 0);
        }
        // From where no client is nobody comes in, whatever the packet says.
        let (never, private) = strangers(cell);
        for source in never.iter().chain([&private]) {
            neighbour
                .send(&syn((*source, 50_000), (host, 8080)))
                .unwrap();
        }
        eventually("who comes from a private network arrives", || {
            senders_to(&guest, 80).contains(&private).then_some(())
        });
        let came = senders_to(&guest, 80);
        assert!(
            never.iter().all(|source| !came.contains(source)),
            "{came:?}"
        );
        assert_eq!(stand.refused("protected"), never.len() as u64);
    }
}

/// Addresses from which no client comes, and one of a private network.
fn strangers(cell: Cell) -> (Vec<IpAddr>, IpAddr) {
    let (never, private): (&[&str], _) = match cell.is_ipv6() {
        false => (
            &[
                "10.0.2.2",
                "10.0.2.3",
                "10.0.2.77",
                "169.254.169.254",
                "169.254.1.1",
                "240.0.0.1",
                "0.0.0.1",
            ],
            "192.168.9.9",
        ),
        true => (
            &[
                "fd73:6c69:7067::1",
                "fd73:6c69:7067::77",
                "fd00:ec2::254",
                "fe80::77",
                "::ffff:192.0.2.1",
                "::1",
            ],
            "fd09::9",
        ),
    };
    let never = never.iter().map(|text| text.parse().unwrap());
    (never.collect(), private.parse().unwrap())
}

/// The address of the Internet's behind which nobody is, by number.
fn nobody(cell: Cell, number: u64) -> IpAddr {
    let number = number as u32;
    let [_, high, middle, low] = number.to_be_bytes();
    let ipv6 = Ipv6Addr::new(0x2a0b, 0, 0, 0, 0, 0, (number >> 16) as u16, number as u16);
    cell.family
        .choose(Ipv4Addr::new(11, high, middle, low), ipv6)
}

/// Forged SYNs a second.
const FLOOD: u64 = 300;
/// Time that a client has to connect: four SYNs. With many more, luck alone would do.
const SERVED_WITHIN: Duration = Duration::from_secs(10);

fn a_flood_of_forged_syns_shuts_no_client_of_a_forward_out(cell: Cell) {
    // The world's share of the flows is full after 5 s; then its rate is a quarter of the flood.
    for rate in ["2000", "100"] {
        let args = ["--forward", "tcp:8080:80", "--max-flows", "2000"];
        let args = [&args[..], &["--new-flows-per-second", rate]].concat();
        let stand = Stand::with_known_guest(cell, &args);
        let inside = (cell.guest(), 80);
        let server = TcpServer::start(&stand.guest.ns, inside, TcpService::Close).unwrap();
        let forward = at(cell.host(), 8080);
        let neighbour = LinkSender::new(&stand.world).unwrap();
        let (over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        let connected = std::thread::scope(|scope| {
            scope.spawn(|| {
                let begun = Instant::now();
                while !over.load(Relaxed) {
                    let number = sent.load(Relaxed);
                    let due = begun + Duration::from_nanos(number * 1_000_000_000 / FLOOD);
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                    let source = nobody(cell, number);
                    let forged = syn((source, 999), (forward.ip(), forward.port()));
                    neighbour.send(&forged).unwrap();
                    sent.store(number + 1, Relaxed);
                }
            });
            std::thread::sleep(Duration::from_secs(8));
            let clients: Vec<_> = (0..60)
                .map(|_| {
                    std::thread::sleep(Duration::from_millis(100));
                    let net = &stand.world.net;
                    scope.spawn(|| net.run(|| tcp::connect_close(forward, SERVED_WITHIN)))
                })
                .collect();
            let ended = clients.into_iter().map(|client| client.join().unwrap());
            let connected = ended.filter(Result::is_ok).count();
            over.store(true, Relaxed);
            connected
        });
        let forged = sent.load(Relaxed);
        println!("rate {rate}: {connected} of 60 connected, {forged} forged");
        assert!(forged > 12 * FLOOD, "{forged}");
        assert!(connected >= 57, "{connected} of 60 at a rate of {rate}");
        assert!(server.accepted() >= connected as u64);
    }
}
