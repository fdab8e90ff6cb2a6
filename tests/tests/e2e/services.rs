//! DHCP, DNS, how the gateway is found, and its echo.

use std::{net::IpAddr, time::Duration};

use slipgate_testbed::{
    GUEST_DEVICE, GuestConfig, WorldConfig,
    clients::{dns, icmp, tcp},
    dhcp,
    dns_wire::Record,
    require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    world::SERVER,
};

use crate::{
    Cell, DNS, GATEWAY, GUEST, Stand, WAIT, eventually,
    matrix::{at, matrix},
};

matrix! {
    every_resolver_is_ours_answers_are_kept_and_a_slow_one_delays_nobody: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    with_the_engine_dead_the_gateway_is_found_and_flows_go_on_and_none_opens: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "flows end with the engine, and slipgate with both (exec.md)";
}

#[test]
fn a_lease_is_given_and_renewed() {
    require_root_and_tun!();
    let guest = GuestConfig::new("tap0").unconfigured();
    let stand = Stand::with(WorldConfig::default(), guest, &["--mtu", "1400"]);
    let lease = stand.guest.dhcp(WAIT).unwrap();
    assert_eq!(
        (lease.address, lease.prefix, lease.router),
        (GUEST, 24, Some(GATEWAY))
    );
    assert_eq!(
        (lease.dns.as_slice(), lease.mtu),
        ([DNS].as_slice(), Some(1400))
    );
    let mac = stand.guest.config().mac;
    let again = dhcp::renew(&stand.guest.ns, GUEST_DEVICE, mac, &lease, WAIT).unwrap();
    assert_eq!(
        (again.address, again.duration),
        (lease.address, lease.duration)
    );
    assert_eq!(stand.total()["dhcp_messages"], 3);
    let ping = stand.run(|| icmp::ping(GATEWAY, 3, 56, WAIT)).unwrap();
    assert_eq!(ping.replies.len(), 3);
    assert_eq!(stand.total()["echo_answers"], 3);
}

fn every_resolver_is_ours_answers_are_kept_and_a_slow_one_delays_nobody(cell: Cell) {
    let stand = Stand::of(cell, &["--dns", "203.0.113.10"]);
    let delay = Duration::from_secs(3);
    let [one, two] = [cell.server(), cell.server_2()];
    let zone = Zone::from([
        ("fast.test".into(), Answer::address(one, 30)),
        ("slow.test".into(), Answer::address(one, 30).delayed(delay)),
        ("big.test".into(), Answer::address(two, 30).truncated()),
        ("other.test".into(), Answer::address(two, 30)),
    ]);
    let net = &stand.world.net;
    let names = DnsServer::start(net, (SERVER, 53), zone).unwrap();
    let server = TcpServer::start(net, (one, 7000), TcpService::Close).unwrap();
    let anywhere = at(cell.resolver_elsewhere(), 53);
    let by_udp = |resolver, name: &str| dns::ask_udp(resolver, &cell.question(name), WAIT).unwrap();
    let by_tcp = |resolver, name: &str| {
        let answered = dns::ask_tcp(resolver, &cell.question(name), WAIT).unwrap();
        addresses(&answered)
    };
    stand.run(|| {
        for resolver in [at(cell.dns(), 53), anywhere, at(cell.gateway(), 53)] {
            let found = by_udp(resolver, "fast.test");
            assert_eq!(addresses(&found), [one], "{resolver}");
        }
        let none = by_udp(anywhere, "none.test");
        assert_eq!(none.reply.code, 3);
        let cut = by_udp(anywhere, "big.test").reply;
        assert!(cut.truncated || !cut.records.is_empty(), "{cut:?}");
        assert_eq!(by_tcp(at(cell.dns(), 53), "big.test"), [two]);
        assert_eq!(by_tcp(anywhere, "fast.test"), [one]);
    });
    assert_eq!(
        names.udp_queries("fast.test") + names.tcp_queries("fast.test"),
        1
    );
    let flows = stand.slipgate.flows().unwrap();
    assert!(
        !flows.iter().any(|flow| flow.remote.ends_with(":53")),
        "{flows:?}"
    );

    std::thread::scope(|scope| {
        let slow = scope.spawn(|| stand.run(|| by_udp(anywhere, "slow.test")));
        eventually("the resolver is asked", || {
            (names.udp_queries("slow.test") > 0).then_some(())
        });
        stand.run(|| by_udp(anywhere, "other.test"));
        stand
            .run(|| tcp::connect_close(server.address(), WAIT))
            .unwrap();
        assert!(!slow.is_finished(), "both are done before its answer comes");
        let slow = slow.join().unwrap();
        assert!(slow.took >= delay, "{:?}", slow.took);
        assert_eq!(addresses(&slow), [one]);
    });
    let total = stand.total();
    assert!(total["dns_cache_hits"].as_u64() >= Some(2), "{total}");
}

/// Addresses of an answer, of either family.
fn addresses(resolved: &dns::Resolved) -> Vec<IpAddr> {
    let records = resolved.reply.records.iter();
    records.filter_map(Record::ip).collect()
}

fn with_the_engine_dead_the_gateway_is_found_and_flows_go_on_and_none_opens(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let address = (cell.server(), 7000);
    let server = TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap();
    let mut stream = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    let mut session = tcp::EchoSession::new(&mut stream);
    session.round(100).unwrap();
    let nat = stand.flow_to(server.address()).nat;
    stand.slipgate.kill_both().unwrap();

    // The guest has to ask for the gateway's MAC again, and the program answers.
    stand
        .guest
        .ns
        .ip(&format!("neigh flush dev {GUEST_DEVICE}"))
        .unwrap();
    session.round(100_000).unwrap();
    let neighbours = stand
        .guest
        .ns
        .ip(&format!("neigh show dev {GUEST_DEVICE}"))
        .unwrap();
    let found = format!("{} lladdr 02:53:4c:47:00:01", cell.gateway());
    assert!(neighbours.contains(&found), "{neighbours}");
    let outcome = stand
        .run(|| tcp::connect_outcome(server.address(), crate::BRIEFLY))
        .unwrap();
    assert!(
        matches!(outcome, tcp::ConnectOutcome::TimedOut(_)),
        "{outcome:?}"
    );

    stand.again();
    session.round(1000).unwrap();
    assert_eq!(stand.flow_to(server.address()).nat, nat);
    stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    assert_eq!(stand.flows_to(server.address()).len(), 2);
}
