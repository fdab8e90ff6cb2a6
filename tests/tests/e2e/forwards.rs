//! Ports of the host that lead to a guest.

use std::{net::Ipv4Addr, time::Duration};

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World,
    census::Census,
    clients::{tcp, udp, udp::UdpOutcome},
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    streams::Receipt,
    world::{HOST, UPLINK},
};

use crate::{GUEST, Stand, WAIT, at};

const BYTES: u64 = 16 << 20;
const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;

#[test]
fn a_forward_from_the_uplink_runs_in_the_kernel() {
    require_root_and_tun!();
    let stand = Stand::new(&["--forward", "tcp:8080:80"]);
    let server = TcpServer::start(&stand.guest.ns, (GUEST, 80), TcpService::Streams).unwrap();
    let census = Census::start(&stand.guest).unwrap();
    let before = stand.port_frames();
    let net = &stand.world.net;
    let down = net
        .run(|| tcp::download(at(HOST, 8080), BYTES, 1, WAIT))
        .unwrap();
    assert_eq!(down.receipt, Receipt::expected(BYTES, 1));
    net.run(|| tcp::upload(at(HOST, 8080), BYTES, 2, WAIT))
        .unwrap();
    let sent = census.finish(&stand.guest).unwrap();
    // A SYN each from the world, and the guest's answer to who it is.
    let due = 2 + sent.for_the_engine();
    assert!(sent.data > 100, "{sent:?}");
    assert_eq!(stand.port_frames() - before, due, "{sent:?}");
    // The guest sees who connects.
    assert!(
        server
            .peers()
            .iter()
            .all(|peer| *peer.ip() == Ipv4Addr::new(198, 18, 0, 1))
    );
    let flows = stand.slipgate.flows().unwrap();
    assert_eq!(flows.len(), 2, "{flows:?}");
    for flow in &flows {
        assert_eq!(
            (flow.guest.as_str(), flow.nat.as_str()),
            ("10.0.2.15:80", "198.18.0.2:8080")
        );
        assert!(
            flow.rule.as_str().unwrap().contains("tcp:8080:80"),
            "{flow:?}"
        );
        assert!(flow.tx_bytes + flow.rx_bytes > BYTES, "{flow:?}");
    }
    // A port beside it leads nowhere.
    net.run(|| tcp::expect_refused(at(HOST, 8081))).unwrap();
}

#[test]
fn a_forward_from_the_host_itself_is_relayed() {
    require_root_and_tun!();
    let stand = Stand::new(&["--forward", "tcp:8080:80", "--forward", "udp:5353:5300"]);
    let _server = TcpServer::start(&stand.guest.ns, (GUEST, 80), TcpService::Streams).unwrap();
    let _echo = UdpServer::start(&stand.guest.ns, (GUEST, 5300), UdpService::Echo).unwrap();
    let host = &stand.world.host;
    for address in [LOOPBACK, HOST] {
        let down = host
            .run(|| tcp::download(at(address, 8080), BYTES, 1, WAIT))
            .unwrap();
        assert_eq!(down.receipt, Receipt::expected(BYTES, 1), "{address}");
        host.run(|| tcp::upload(at(address, 8080), BYTES, 2, WAIT))
            .unwrap();
        let sent = host
            .run(|| udp::probe(at(address, 5353), b"x", WAIT))
            .unwrap();
        assert!(
            matches!(sent, UdpOutcome::Answered(_)),
            "{address}: {sent:?}"
        );
    }
}

#[test]
fn datagrams_and_ranges_are_forwarded() {
    require_root_and_tun!();
    let stand = Stand::new(&[
        "--forward",
        "udp:5353:5300",
        "--forward",
        "tcp:9000-9003:7000-7003",
    ]);
    let echo = UdpServer::start(&stand.guest.ns, (GUEST, 5300), UdpService::Echo).unwrap();
    let greet = |port: u16| {
        let service = TcpService::Greet(port.to_be_bytes().to_vec());
        TcpServer::start(&stand.guest.ns, (GUEST, port), service).unwrap()
    };
    let _servers = [7000, 7003].map(greet);
    let net = &stand.world.net;
    let pace = Duration::from_millis(1);
    let report = net
        .run(|| udp::paced(at(HOST, 5353), 200, 500, pace, WAIT))
        .unwrap();
    assert_eq!((report.received, report.corrupt), (200, 0), "{report:?}");
    assert_eq!(echo.datagrams(), 200);
    let greeting = |port| {
        use std::io::Read;
        let mut said = Vec::new();
        let mut stream = net.run(|| tcp::connect(at(HOST, port), WAIT)).unwrap();
        stream.read_to_end(&mut said).unwrap();
        said
    };
    assert_eq!(greeting(9000), 7000u16.to_be_bytes());
    assert_eq!(greeting(9003), 7003u16.to_be_bytes());
    net.run(|| tcp::expect_refused(at(HOST, 9004))).unwrap();
}

#[test]
fn a_port_that_is_taken_is_said_to_be_and_by_whom() {
    require_root_and_tun!();
    let world = World::new().unwrap();
    let _guest = Guest::new(&world, GuestConfig::new("tap0")).unwrap();
    let pins = PinDir::new().unwrap();
    let args = [
        "--tap",
        "tap0",
        "--uplink",
        UPLINK,
        "--forward",
        "tcp:8080:80",
    ];
    let taken = TcpServer::start(&world.host, (HOST, 8080), TcpService::Echo).unwrap();
    let Err(error) = Slipgate::attach(&world.host, &pins, &args) else {
        panic!("it took a port that is taken");
    };
    let said = error.to_string();
    assert!(
        said.contains("8080") && said.contains(&std::process::id().to_string()),
        "{said}"
    );
    drop(taken);
    Slipgate::attach(&world.host, &pins, &args).unwrap();
}
