//! DHCP, DNS, ARP and the gateway's echo.

use std::{net::Ipv4Addr, time::Duration};

use slipgate_testbed::{
    GUEST_DEVICE, GuestConfig, WorldConfig,
    clients::{dns, icmp, tcp},
    dhcp, require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    world::{SERVER, SERVER_2},
};

use crate::{DNS, GATEWAY, GUEST, Stand, WAIT, at, eventually};

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

#[test]
fn every_resolver_is_ours_answers_are_kept_and_a_slow_one_delays_nobody() {
    require_root_and_tun!();
    let stand = Stand::new(&["--dns", "203.0.113.10"]);
    let delay = Duration::from_secs(3);
    let slow = Answer::a(SERVER, 30).delayed(delay);
    let zone = Zone::from([
        ("fast.test".into(), Answer::a(SERVER, 30)),
        ("slow.test".into(), slow),
        ("big.test".into(), Answer::a(SERVER_2, 30).truncated()),
        ("other.test".into(), Answer::a(SERVER_2, 30)),
    ]);
    let names = DnsServer::start(&stand.world.net, (SERVER, 53), zone).unwrap();
    let server = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Close).unwrap();
    let anywhere = at(Ipv4Addr::new(8, 8, 8, 8), 53);
    stand.run(|| {
        for resolver in [at(DNS, 53), anywhere, at(GATEWAY, 53)] {
            let found = dns::query_udp(resolver, "fast.test", WAIT).unwrap();
            assert_eq!(found.addresses(), [SERVER], "{resolver}");
        }
        let none = dns::query_udp(anywhere, "none.test", WAIT).unwrap();
        assert_eq!(none.reply.code, 3);
        let cut = dns::query_udp(anywhere, "big.test", WAIT).unwrap().reply;
        assert!(cut.truncated || !cut.records.is_empty(), "{cut:?}");
        let whole = dns::query_tcp(at(DNS, 53), "big.test", WAIT).unwrap();
        assert_eq!(whole.addresses(), [SERVER_2]);
        let by_tcp = dns::query_tcp(anywhere, "fast.test", WAIT).unwrap();
        assert_eq!(by_tcp.addresses(), [SERVER]);
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
        let slow = scope.spawn(|| stand.run(|| dns::query_udp(anywhere, "slow.test", WAIT)));
        eventually("the resolver is asked", || {
            (names.udp_queries("slow.test") > 0).then_some(())
        });
        stand
            .run(|| dns::query_udp(anywhere, "other.test", WAIT))
            .unwrap();
        stand
            .run(|| tcp::connect_close(server.address(), WAIT))
            .unwrap();
        assert!(!slow.is_finished(), "both are done before its answer comes");
        let slow = slow.join().unwrap().unwrap();
        assert!(slow.took >= delay, "{:?}", slow.took);
        assert_eq!(slow.addresses(), [SERVER]);
    });
    let total = stand.total();
    assert!(total["dns_cache_hits"].as_u64() >= Some(2), "{total}");
}

#[test]
fn with_the_engine_dead_the_gateway_answers_arp_and_flows_go_on_and_none_opens() {
    require_root_and_tun!();
    let mut stand = Stand::new(&[]);
    let server = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Echo).unwrap();
    let mut stream = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    let mut session = tcp::EchoSession::new(&mut stream);
    session.round(100).unwrap();
    let nat = stand.flow_to(server.address()).nat;
    stand.slipgate.kill_both().unwrap();

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
    assert!(neighbours.contains("10.0.2.2 lladdr"), "{neighbours}");
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
