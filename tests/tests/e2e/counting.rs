//! slipgate's counts equal the packets that passed, on both sides of it and with any offload, and
//! no data frame of an established flow leaves the kernel.

use std::net::{IpAddr, SocketAddr};

use slipgate_testbed::{
    Capture, GUEST_DEVICE, GuestConfig, WorldConfig,
    accounting::{Counts, FlowKey},
    census::Census,
    clients::{dns, icmp, tcp, udp},
    dhcp, kernel_view, require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    world::{SERVER, UPLINK},
};

use crate::{Cell, DNS, Stand, WAIT, at, matrix::matrix, stand::counts};

matrix! {
    captures_at_guest_and_uplink_agree_with_the_flows_with_offloads: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the engine ends the guest's connections: the segments at the uplink are the host's";
    captures_at_guest_and_uplink_agree_with_the_flows_without_offloads: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the engine ends the guest's connections: the segments at the uplink are the host's";
    ping_is_a_flow_and_counted: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

const BULK: u64 = 64 << 20;

#[test]
fn the_engine_gets_openings_dns_and_dhcp_and_not_one_data_frame() {
    require_root_and_tun!();
    let stand = Stand::with(
        WorldConfig::default(),
        GuestConfig::new("tap0").unconfigured(),
        &["--dns", "203.0.113.10"],
    );
    let net = &stand.world.net;
    let zone = Zone::from([("a.test".into(), Answer::a(SERVER, 60))]);
    let _names = DnsServer::start(net, (SERVER, 53), zone).unwrap();
    let server = TcpServer::start(net, (SERVER, 7000), TcpService::Streams).unwrap();
    let echo = UdpServer::start(net, (SERVER, 7), UdpService::Echo).unwrap();
    let guest = &stand.guest;

    let census = Census::start(guest).unwrap();
    let before = stand.handed_over();
    let lease = guest.dhcp(WAIT).unwrap();
    stand.run(|| {
        dns::query_udp(at(DNS, 53), "a.test", WAIT).unwrap();
        tcp::download(server.address(), BULK, 1, WAIT).unwrap();
        tcp::upload(server.address(), BULK, 2, WAIT).unwrap();
    });
    dhcp::renew(&guest.ns, GUEST_DEVICE, guest.config().mac, &lease, WAIT).unwrap();
    let sent = census.finish(guest).unwrap();
    assert!(
        sent.data > 1_000 && sent.syn == 2 && sent.dns == 1 && sent.dhcp == 3,
        "{sent:?}"
    );
    let due = before + sent.for_the_engine();
    assert_eq!(stand.handed_over(), due, "{sent:?}");

    // The count is able to see data: what opens a UDP flow is data, and goes to the engine.
    stand
        .run(|| udp::probe(echo.address(), b"x", WAIT))
        .unwrap();
    assert_eq!(stand.handed_over(), due + 1);
}

#[test]
fn live_flows_print_by_name() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let server = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Echo).unwrap();
    let mut stream = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    tcp::EchoSession::new(&mut stream).round(1000).unwrap();
    let std::net::SocketAddr::V4(local) = stream.local_addr().unwrap() else {
        unreachable!("the guest has IPv4 only")
    };
    let (host, pins) = (&stand.world.host, stand.slipgate.pins());
    let slot = kernel_view::slot_by_name(host, pins, local, server.address()).unwrap();
    let flow = stand.flow_to(server.address());
    let slot: String = slot.replace('"', "");
    for named in [
        "verdict: Fast".to_owned(),
        "protocol: Tcp".to_owned(),
        format!("guest_port: {}", local.port()),
        "remote_port: 7000".to_owned(),
        format!("tx_packets: {}", flow.tx_packets),
        format!("rx_bytes: {}", flow.rx_bytes),
    ] {
        assert!(slot.contains(&named), "`{named}` is not in {slot}");
    }
    assert!(flow.tx_bytes > 1000 && flow.rx_bytes > 1000, "{flow:?}");
}

/// One flow's counts at the guest, at the uplink and in slipgate.
fn agree(stand: &Stand, captures: (Capture, Capture), protocol: u8, remote: SocketAddr) {
    // Retransmits and last ACKs settle.
    std::thread::sleep(std::time::Duration::from_millis(100));
    let (at_guest, at_uplink) = (captures.0.finish().unwrap(), captures.1.finish().unwrap());
    let flow = stand.flow_to(remote);
    let key = |local: &str| FlowKey {
        protocol,
        source: local.parse().unwrap(),
        destination: remote,
    };
    let (inside, outside) = (key(&flow.guest), key(&flow.nat));
    let of = |counts: Counts| (counts.packets, counts.bytes);
    let guest = [
        of(at_guest.sent.of(inside)),
        of(at_guest.received.of(inside.reversed())),
    ];
    let uplink = [
        of(at_uplink.sent.of(outside)),
        of(at_uplink.received.of(outside.reversed())),
    ];
    assert_eq!(counts(&flow), guest, "slipgate and the guest");
    assert_eq!(counts(&flow), uplink, "slipgate and the uplink");
    assert!(guest[0].0 > 0 && guest[1].0 > 0, "{guest:?}");
}

fn captures_agree(cell: Cell, offloads: bool) {
    let world = WorldConfig {
        offloads,
        ..Default::default()
    };
    let guest = GuestConfig {
        offloads,
        ..GuestConfig::new("tap0")
    };
    let stand = Stand::of_guest(cell, guest, world, &[], &[], &[]);
    // The pump is slower than the kernel. What a full queue loses after translation is the link's
    // to count, not the flow's.
    stand
        .world
        .host
        .ip("link set tap0 txqueuelen 100000")
        .unwrap();
    let net = &stand.world.net;
    let server = cell.server();
    let tcp_servers = [7000, 7001]
        .map(|port| TcpServer::start(net, (server, port), TcpService::Streams).unwrap());
    let echo = UdpServer::start(net, (server, 7), UdpService::Echo).unwrap();
    let burst = UdpService::Burst {
        count: 20,
        size: 1200,
    };
    let burst = UdpServer::start(net, (server, 8), burst).unwrap();
    let capture = || {
        let at_guest = Capture::start(&stand.guest.ns, GUEST_DEVICE).unwrap();
        (at_guest, Capture::start(&stand.world.host, UPLINK).unwrap())
    };

    let watching = capture();
    let up = tcp_servers[0].address();
    stand.run(|| tcp::upload(up, BULK / 4, 1, WAIT)).unwrap();
    agree(&stand, watching, 6, up);

    let watching = capture();
    let down = tcp_servers[1].address();
    stand
        .run(|| tcp::download(down, BULK / 4, 2, WAIT))
        .unwrap();
    agree(&stand, watching, 6, down);

    let watching = capture();
    let report = stand
        .run(|| udp::burst(echo.address(), 30, 1000, WAIT))
        .unwrap();
    assert_eq!((report.received, report.corrupt), (30, 0), "{report:?}");
    agree(&stand, watching, 17, echo.address());

    let watching = capture();
    let report = stand
        .run(|| udp::ask_burst(burst.address(), 20, 1200, WAIT))
        .unwrap();
    assert_eq!((report.received, report.corrupt), (20, 0), "{report:?}");
    agree(&stand, watching, 17, burst.address());
}

fn captures_at_guest_and_uplink_agree_with_the_flows_with_offloads(cell: Cell) {
    captures_agree(cell, true);
}

fn captures_at_guest_and_uplink_agree_with_the_flows_without_offloads(cell: Cell) {
    captures_agree(cell, false);
}

fn ping_is_a_flow_and_counted(cell: Cell) {
    const COUNT: u16 = 10;
    let stand = Stand::of(cell, &[]);
    stand.run(|| match cell.server() {
        IpAddr::V4(ip) => {
            let report = icmp::ping(ip, COUNT, 100, WAIT).unwrap();
            let came = (report.replies.len(), report.corrupt);
            assert_eq!(came, (usize::from(COUNT), 0), "{report:?}");
        }
        IpAddr::V6(ip) => {
            for _ in 0..COUNT {
                assert!(icmp::ping6(ip, 100, WAIT).unwrap().is_some());
            }
        }
    });
    let flows = stand.slipgate.flows().unwrap();
    let ping = flows.iter().find(|flow| flow.proto == "icmp").unwrap();
    // Headers of IP and of the echo, and the payload.
    let packet_bytes = if cell.is_ipv6() { 40 } else { 20 } + 8 + 100;
    let each_way = (u64::from(COUNT), u64::from(COUNT) * packet_bytes);
    assert_eq!(counts(ping), [each_way; 2], "{ping:?}");
}
