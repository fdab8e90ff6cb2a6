//! Refused traffic is refused at once, with the rule's name, and would pass without the rule.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use slipgate_testbed::{
    WorldConfig,
    clients::{IcmpError, icmp, tcp, tcp::ConnectOutcome, udp, udp::UdpOutcome},
    servers::{TcpServer, TcpService, UdpServer, UdpService},
};

use crate::{
    BRIEFLY, Cell, Stand, WAIT, eventually,
    matrix::{at, matrix},
};

matrix! {
    a_denied_destination_is_refused_by_rst_and_icmp_and_the_rule_is_named: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    rules_tell_ports_and_protocols_apart_and_the_first_match_wins: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    private_and_link_local_destinations_are_opened_by_a_rule_only: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    the_host_itself_is_out_of_reach: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_vm_has_no_more_flows_than_it_may_and_keeps_those_it_has: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    new_flows_above_the_rate_are_refused_and_later_ones_are_not: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_port_that_refuses_can_be_tried_for_ever: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

struct Servers((TcpServer<IpAddr>, UdpServer<IpAddr>));

fn serve(stand: &Stand, address: impl Into<IpAddr>) -> Servers {
    let (net, address) = (&stand.world.net, address.into());
    Servers((
        TcpServer::start(net, (address, 7000), TcpService::Echo).unwrap(),
        UdpServer::start(net, (address, 7000), UdpService::Echo).unwrap(),
    ))
}

fn all_pass(stand: &Stand, address: impl Into<IpAddr>) {
    let address = address.into();
    let service = SocketAddr::new(address, 7000);
    stand.run(|| {
        let connected = tcp::connect_outcome(service, WAIT).unwrap();
        assert!(
            matches!(connected, ConnectOutcome::Connected(_)),
            "{address}: {connected:?}"
        );
        let sent = udp::probe(service, b"x", WAIT).unwrap();
        assert!(
            matches!(sent, UdpOutcome::Answered(_)),
            "{address}: {sent:?}"
        );
        match address {
            IpAddr::V4(address) => {
                let ping = icmp::ping(address, 1, 10, WAIT).unwrap();
                assert_eq!(ping.replies.len(), 1, "{address}: {ping:?}");
            }
            IpAddr::V6(address) => assert!(icmp::ping6(address, 10, WAIT).unwrap().is_some()),
        }
    });
}

fn all_refused(stand: &Stand, address: impl Into<IpAddr>) {
    let address = address.into();
    let service = SocketAddr::new(address, 7000);
    let prohibited = stand.cell.prohibited();
    stand.run(|| {
        tcp::expect_refused(service).unwrap();
        let sent = udp::probe(service, b"x", WAIT).unwrap();
        assert!(
            matches!(sent, UdpOutcome::Refused(error, took) if error == prohibited && took < WAIT / 2),
            "{address}: {sent:?}"
        );
        match address {
            IpAddr::V4(address) => {
                let ping = icmp::ping(address, 1, 10, WAIT).unwrap();
                let kinds: Vec<IcmpError> = ping.errors.iter().map(|(error, _)| *error).collect();
                assert_eq!(kinds, [prohibited], "{address}: {ping:?}");
            }
            // The guest's kernel makes "prohibited" this error.
            IpAddr::V6(address) => {
                let error = icmp::ping6(address, 10, WAIT).unwrap_err();
                assert_eq!(error.os_error(), Some(libc::EACCES), "{error}");
            }
        }
    });
}

fn a_denied_destination_is_refused_by_rst_and_icmp_and_the_rule_is_named(cell: Cell) {
    let (first, second) = (cell.server(), cell.server_2());
    let service = SocketAddr::new(second, 7000).to_string();
    let free = Stand::of(cell, &[]);
    let _servers = serve(&free, second);
    all_pass(&free, second);
    assert_eq!(free.refused("rule"), 0);
    assert!(free.slipgate.why("tap0", &service, "tcp").unwrap().0);
    drop(free);

    let denied = second.to_string();
    let rule = format!("--deny {denied}");
    let stand = Stand::of(cell, &["--deny", &denied]);
    let servers = serve(&stand, second);
    let _others = serve(&stand, first);
    all_refused(&stand, second);
    assert_eq!(servers.0.0.accepted(), 0);
    assert_eq!(servers.0.1.datagrams(), 0);
    all_pass(&stand, first);
    assert_eq!((stand.refused("rule"), stand.dropped("refused")), (3, 3));
    let total = stand.total();
    let by = &total["refused_by"];
    assert_eq!(by.as_array().unwrap().len(), 1, "{by}");
    assert_eq!(by[0]["flows"], 3);
    let text = by[0]["text"].as_str().unwrap();
    assert!(text.contains(&rule), "{by}");
    let shown = stand.slipgate.run(&["stats"]).unwrap().stdout;
    let shown = String::from_utf8(shown).unwrap();
    assert!(shown.contains(&format!("refused by {text}")), "{shown}");
    for proto in ["tcp", "udp", "icmp"] {
        let (passes, said) = stand.slipgate.why("tap0", &service, proto).unwrap();
        assert!(!passes && said.contains(&rule), "{proto}: {said}");
    }
}

fn rules_tell_ports_and_protocols_apart_and_the_first_match_wins(cell: Cell) {
    let ip = cell.server();
    let (denied, allowed) = (
        cell.destination(ip, "7000-7001/tcp"),
        cell.servers("7000-7999"),
    );
    let args = ["--default", "deny", "--deny", &denied, "--allow", &allowed];
    let stand = Stand::of(cell, &args);
    let _servers = serve(&stand, ip);
    let serve = |port| TcpServer::start(&stand.world.net, (ip, port), TcpService::Echo).unwrap();
    let (open, beyond) = (serve(7002), serve(8000));
    stand.run(|| {
        tcp::expect_refused(at(ip, 7000)).unwrap();
        let sent = udp::probe(at(ip, 7000), b"x", WAIT).unwrap();
        assert!(matches!(sent, UdpOutcome::Answered(_)), "{sent:?}");
        tcp::connect(open.address(), WAIT).unwrap();
        tcp::expect_refused(beyond.address()).unwrap();
    });
    assert_eq!(
        (stand.refused("rule"), stand.refused("default_deny")),
        (1, 1)
    );
    let flow = stand.flow_to(open.address());
    let rule = flow.rule.as_str().unwrap();
    assert!(rule.contains(&allowed), "{flow:?}");
}

/// Destinations on somebody's own network.
fn inside(cell: Cell) -> Vec<IpAddr> {
    let texts: &[&str] = match cell.is_ipv6() {
        false => &[
            "10.9.9.9",
            "172.16.3.4",
            "192.168.7.7",
            "169.254.169.254",
            "100.64.1.1",
        ],
        // A unique local address, metadata, a site's, a local translator's.
        true => &["fd09::9", "fd00:ec2::254", "fec0::9", "64:ff9b:1::9"],
    };
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// A stand whose world has servers inside, too.
fn stand_of_insiders(cell: Cell, args: &[&str]) -> Stand {
    let of_v4 = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => Some(*ip),
        IpAddr::V6(_) => None,
    };
    let of_v6 = |ip: &IpAddr| match ip {
        IpAddr::V4(_) => None,
        IpAddr::V6(ip) => Some(*ip),
    };
    let ips = inside(cell);
    let mut world = WorldConfig::default();
    world.server_addresses.extend(ips.iter().filter_map(of_v4));
    let more: Vec<Ipv6Addr> = ips.iter().filter_map(of_v6).collect();
    Stand::of_several(cell, world, &more, &[], args)
}

fn private_and_link_local_destinations_are_opened_by_a_rule_only(cell: Cell) {
    let inside = inside(cell);
    let stand = stand_of_insiders(cell, &[]);
    let _servers: Vec<_> = inside.iter().map(|ip| serve(&stand, *ip)).collect();
    inside.iter().for_each(|ip| all_refused(&stand, *ip));
    assert_eq!(stand.refused("protected"), 3 * inside.len() as u64);
    drop((_servers, stand));

    let args: Vec<String> = inside
        .iter()
        .flat_map(|ip| ["--allow".to_owned(), ip.to_string()])
        .collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let stand = stand_of_insiders(cell, &args);
    let _servers: Vec<_> = inside.iter().map(|ip| serve(&stand, *ip)).collect();
    inside.iter().for_each(|ip| all_pass(&stand, *ip));
    assert_eq!(stand.refused("protected"), 0);
}

fn the_host_itself_is_out_of_reach(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let (host, world) = (&stand.world.host, &stand.world.net);
    let server = TcpServer::start(host, (cell.host(), 7000), TcpService::Echo).unwrap();
    // It is there for others.
    world.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    stand.run(|| tcp::expect_refused(server.address())).unwrap();
    stand.run(|| {
        let loopback = tcp::connect_outcome(at(cell.gateway(), 7000), BRIEFLY).unwrap();
        assert!(
            !matches!(loopback, ConnectOutcome::Connected(_)),
            "the gateway is not the host"
        );
    });
    // The server's thread may be a moment behind.
    eventually("the world's connection", || {
        (server.accepted() > 0).then_some(())
    });
    assert_eq!((server.accepted(), stand.refused("protected")), (1, 1));
}

fn a_vm_has_no_more_flows_than_it_may_and_keeps_those_it_has(cell: Cell) {
    let stand = Stand::of(cell, &["--max-flows", "5"]);
    let server = echo(&stand);
    let mut open: Vec<_> = (0..5)
        .map(|_| stand.run(|| tcp::connect(server.address(), WAIT)).unwrap())
        .collect();
    stand.run(|| tcp::expect_refused(server.address())).unwrap();
    assert_eq!(stand.refused("flow_cap"), 1);
    for stream in &mut open {
        tcp::EchoSession::new(stream).round(100).unwrap();
    }
    // One that has closed makes room.
    drop(open.pop());
    eventually("room for another flow", || {
        stand.run(|| tcp::connect(server.address(), WAIT)).ok()
    });
}

fn echo(stand: &Stand) -> TcpServer<IpAddr> {
    let at = (stand.cell.server(), 7000);
    TcpServer::start(&stand.world.net, at, TcpService::Echo).unwrap()
}

fn new_flows_above_the_rate_are_refused_and_later_ones_are_not(cell: Cell) {
    let stand = Stand::of(cell, &["--new-flows-per-second", "20"]);
    let server = echo(&stand);
    let outcomes: Vec<ConnectOutcome> = stand.run(|| {
        (0..100)
            .map(|_| tcp::connect_outcome(server.address(), WAIT).unwrap())
            .collect()
    });
    let connected = |outcome: &&ConnectOutcome| matches!(outcome, ConnectOutcome::Connected(_));
    let passed = outcomes.iter().filter(connected).count() as u64;
    // As many as in a second at once, and what the time allowed meanwhile.
    assert!((20..90).contains(&passed), "{passed} of 100");
    assert!(stand.refused("flow_rate") >= 100 - passed);
    eventually("a flow at the rate", || {
        stand.run(|| tcp::connect(server.address(), WAIT)).ok()
    });
}

/// Sixteen ports, a rest of which would be over after two minutes.
fn a_port_that_refuses_can_be_tried_for_ever(cell: Cell) {
    let stand = Stand::of(cell, &["--nat-ports", "61000-61015"]);
    let server = echo(&stand);
    let connect = || stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    let mut open: Vec<_> = (0..16).map(|_| connect()).collect();
    // Nobody listens: it is the server that refuses.
    for _ in 0..40 {
        let closed = at(cell.server(), 7001);
        stand.run(|| tcp::expect_refused(closed)).unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(
        (stand.refused("ports_exhausted"), stand.dropped("refused")),
        (0, 0)
    );
    // The same for a port that has none left: what lives there does not give way.
    stand.run(|| tcp::expect_refused(server.address())).unwrap();
    assert_eq!(stand.refused("ports_exhausted"), 1);
    for stream in &mut open {
        stand
            .run(|| tcp::EchoSession::new(stream).round(100))
            .unwrap();
    }
}
