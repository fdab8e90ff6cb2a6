//! Egress by name: a destination that is not allowed by name is neither resolved nor reached,
//! whatever the guest does, and would be without the rules. The servers' view decides.

use std::{
    fs::{self, Permissions},
    net::IpAddr,
    os::unix::fs::PermissionsExt as _,
    time::Duration,
};

use slipgate_testbed::{
    Guest, GuestConfig, World, WorldConfig,
    clients::{dns, tcp},
    dns_wire::{Record, Reply, types},
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    skipped,
    slipgate::{self, Start},
    world::SERVER,
};

use crate::{
    Cell, Stand, WAIT,
    matrix::{at, matrix},
};

matrix! {
    a_pinned_address_is_refused_until_its_name_was_asked_for: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_denied_name_reaches_no_resolver_whichever_is_asked_by_udp_or_tcp: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    aaaa_is_empty_at_once_while_no_resolver_answers_and_refused_where_the_name_is: [hybrid_ipv4, user_ipv4],
        without [hybrid_ipv6, user_ipv6]: "a guest with IPv6 asks for AAAA as for A";
    an_alias_to_a_denied_name_and_a_rebinding_answer_are_refused: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    an_answer_that_udp_truncates_comes_by_tcp: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_second_vm_does_not_ride_on_the_first_ones_answer: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each VM has an engine of its own, which has no other's answers";
    what_dns_opened_outlives_engine_broker_and_an_upgrade_to_another_build: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "flows, and what DNS has opened, end with the engine (exec.md)";
    dns_over_tls_is_refused_whatever_a_broad_rule_opens: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_deny_file_may_have_names: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

const REFUSED: u8 = 5;
/// Slipgate's own resolver is of IPv4, whatever the guest is.
const RESOLVER: [&str; 2] = ["--dns", "203.0.113.10"];
const POLICY: [&str; 6] = [
    "--dns",
    "203.0.113.10",
    "--default",
    "deny",
    "--allow",
    "*.example.test:7000/tcp",
];
const RULE: &str = "--allow *.example.test:7000/tcp";

fn zone(cell: Cell) -> Zone {
    let second = cell.server_2();
    let address = |ip: IpAddr, ttl| Answer::address(ip, ttl);
    let text = |four: &str, six: &str| {
        let ip: IpAddr = if cell.is_ipv6() { six } else { four }.parse().unwrap();
        address(ip, 300)
    };
    let evil = Record::of_address(second, 300).of("evil.test");
    let elsewhere = vec![Record::cname("evil.test", 300), evil];
    Zone::from([
        ("api.example.test".into(), address(second, 300)),
        ("zero.example.test".into(), address(second, 0)),
        ("evil.test".into(), address(second, 300)),
        ("alias.example.test".into(), Answer::records(elsewhere)),
        ("private.example.test".into(), text("10.0.0.1", "fd09::1")),
        (
            "metadata.example.test".into(),
            text("169.254.169.254", "fd00:ec2::254"),
        ),
        ("host.example.test".into(), text("127.0.0.1", "::1")),
    ])
}

struct Servers {
    dns: DnsServer,
    tcp: TcpServer<IpAddr>,
    other_port: TcpServer<IpAddr>,
}

fn serve(world: &World, cell: Cell) -> Servers {
    let tcp =
        |port| TcpServer::start(&world.net, (cell.server_2(), port), TcpService::Echo).unwrap();
    Servers {
        dns: DnsServer::start(&world.net, (SERVER, 53), zone(cell)).unwrap(),
        tcp: tcp(7000),
        other_port: tcp(7001),
    }
}

/// Runs `check` with the policy off, then on; its argument says which.
fn off_and_on(cell: Cell, check: impl Fn(&mut Stand, &Servers, bool)) {
    for (args, on) in [(&RESOLVER[..], false), (&POLICY[..], true)] {
        let mut stand = Stand::of(cell, args);
        let servers = serve(&stand.world, cell);
        check(&mut stand, &servers, on);
    }
}

fn connects(stand: &Stand, port: u16) {
    let to = at(stand.cell.server_2(), port);
    stand.run(|| tcp::connect(to, WAIT)).unwrap();
}

fn refused(stand: &Stand, port: u16) {
    let to = at(stand.cell.server_2(), port);
    stand.run(|| tcp::expect_refused(to)).unwrap();
}

/// The code of the answer to a question by UDP.
fn code(stand: &Stand, server: IpAddr, name: &str) -> u8 {
    ask(stand, &stand.guest, server, name).code
}

fn ask(stand: &Stand, guest: &Guest, server: IpAddr, name: &str) -> Reply {
    let question = stand.cell.question(name);
    let found = guest.run(|| dns::ask_udp(at(server, 53), &question, WAIT));
    found.unwrap().reply
}

fn a_pinned_address_is_refused_until_its_name_was_asked_for(cell: Cell) {
    off_and_on(cell, |stand, servers, on| {
        if !on {
            connects(stand, 7000);
            connects(stand, 7001);
            return;
        }
        refused(stand, 7000);
        assert_eq!(servers.tcp.accepted(), 0);
        let (passes, said) = stand
            .slipgate
            .why("tap0", "api.example.test:7000", "tcp")
            .unwrap();
        assert!(passes && said.contains("when the guest asks"), "{said}");
        assert_eq!(code(stand, cell.dns(), "API.example.test"), 0);
        let mut stream = stand
            .run(|| tcp::connect(servers.tcp.address(), WAIT))
            .unwrap();
        tcp::EchoSession::new(&mut stream).round(1000).unwrap();
        refused(stand, 7001);
        assert_eq!(servers.other_port.accepted(), 0);

        let remote = servers.tcp.address().to_string();
        for host in ["api.example.test:7000", &remote] {
            let (passes, said) = stand.slipgate.why("tap0", host, "tcp").unwrap();
            assert!(passes && said.contains(RULE), "{host}: {said}");
            assert!(said.contains("api.example.test"), "{host}: {said}");
        }
        let (passes, said) = stand.slipgate.why("tap0", "evil.test:7000", "tcp").unwrap();
        assert!(!passes && said.contains("not resolved"), "{said}");
        let listed = stand.slipgate.run(&["flows", "--json"]).unwrap().stdout;
        let listed: serde_json::Value = serde_json::from_slice(&listed).unwrap();
        assert_eq!(listed[0]["dns_name"], "api.example.test", "{listed}");
        assert_eq!(listed[0]["rule"], RULE, "{listed}");
        drop(stream);
        stand.slipgate.stop().unwrap();
        let mut records = stand.records();
        records.retain(|record| record["remote"] == remote);
        let record = &records[0];
        assert_eq!(record["dns_name"], "api.example.test", "{record}");
        assert_eq!(record["rule_text"], RULE, "{record}");
    });
}

fn a_denied_name_reaches_no_resolver_whichever_is_asked_by_udp_or_tcp(cell: Cell) {
    off_and_on(cell, |stand, servers, on| {
        let expected = if on { REFUSED } else { 0 };
        for server in [cell.dns(), cell.resolver_elsewhere()] {
            assert_eq!(code(stand, server, "evil.test"), expected, "{server}");
            let question = cell.question("evil.test");
            let by_tcp = stand.run(|| dns::ask_tcp(at(server, 53), &question, WAIT));
            assert_eq!(by_tcp.unwrap().reply.code, expected, "{server}");
        }
        let seen = servers.dns.udp_queries("evil.test") + servers.dns.tcp_queries("evil.test");
        assert_eq!(seen, u64::from(!on));
        // The resolver itself can't be reached by another way than ours.
        let elsewhere = cell.resolver_elsewhere();
        assert_eq!(code(stand, elsewhere, "api.example.test"), 0);
        if on {
            let stats = stand.slipgate.stats().unwrap();
            let names = &stats["vms"][0]["names"];
            assert_eq!(names["refused_names"], 4, "{names}");
            assert_eq!(names["refused_by"][0]["rule"], "--default deny", "{names}");
            assert_eq!(names["refused_by"][0]["last"], "evil.test", "{names}");
            assert_eq!(names["open"], 1, "{names}");
        }
    });
}

/// Time after which a question that no resolver answers is over.
const UNANSWERED_AFTER: Duration = Duration::from_secs(5);

fn aaaa_is_empty_at_once_while_no_resolver_answers_and_refused_where_the_name_is(cell: Cell) {
    off_and_on(cell, |stand, servers, on| {
        servers.dns.set("api.example.test", Answer::silence());
        for (name, denied) in [("api.example.test", false), ("evil.test", true)] {
            let question = dns::question(name, types::AAAA);
            let server = at(cell.resolver_elsewhere(), 53);
            let found = stand.run(|| dns::ask_udp(server, &question, WAIT));
            let found = found.unwrap();
            let expected = if on && denied { REFUSED } else { 0 };
            assert_eq!(found.reply.code, expected, "{name}");
            assert!(found.reply.records.is_empty(), "{found:?}");
            assert!(found.took < UNANSWERED_AFTER / 2, "{found:?}");
            assert_eq!(servers.dns.udp_queries(name), 0, "{name}");
        }
    });
}

fn an_alias_to_a_denied_name_and_a_rebinding_answer_are_refused(cell: Cell) {
    off_and_on(cell, |stand, servers, on| {
        let names = ["alias", "private", "metadata", "host"];
        for name in names {
            let name = format!("{name}.example.test");
            let expected = if on { REFUSED } else { 0 };
            assert_eq!(code(stand, cell.dns(), &name), expected, "{name}");
            // Once more, from the cache.
            assert_eq!(code(stand, cell.dns(), &name), expected, "{name}");
            assert_eq!(servers.dns.udp_queries(&name), 1, "{name}");
        }
        if on {
            refused(stand, 7000);
            assert_eq!(servers.tcp.accepted(), 0);
            let stats = stand.slipgate.stats().unwrap();
            let counted = &stats["vms"][0]["names"];
            assert_eq!(counted["refused_chains"], 2, "{counted}");
            assert_eq!(counted["rebinding"], 6, "{counted}");
            // An answer with TTL 0 opens for the connection at hand.
            assert_eq!(code(stand, cell.dns(), "zero.example.test"), 0);
        }
        connects(stand, 7000);
    });
}

fn an_answer_that_udp_truncates_comes_by_tcp(cell: Cell) {
    let stand = Stand::of(cell, &RESOLVER);
    let record = |at: u8| {
        let ip = match cell.server() {
            IpAddr::V4(ip) => IpAddr::from((u32::from(ip) + u32::from(at)).to_be_bytes()),
            IpAddr::V6(ip) => IpAddr::from((u128::from(ip) + u128::from(at)).to_be_bytes()),
        };
        Record::of_address(ip, 300)
    };
    let long = Answer::records((0..100).map(record).collect()).truncated();
    let zone = Zone::from([("long.test".to_owned(), long)]);
    let _names = DnsServer::start(&stand.world.net, (SERVER, 53), zone).unwrap();
    let question = cell.question("long.test");
    for server in [cell.dns(), cell.resolver_elsewhere()] {
        let by_udp = ask(&stand, &stand.guest, server, "long.test");
        assert!(by_udp.truncated, "{by_udp:?}");
        let by_tcp = stand.run(|| dns::ask_tcp(at(server, 53), &question, WAIT));
        let reply = by_tcp.unwrap().reply;
        assert_eq!((reply.code, reply.records.len()), (0, 100), "{server}");
    }
}

fn a_second_vm_does_not_ride_on_the_first_ones_answer(cell: Cell) {
    for (args, on) in [(&RESOLVER[..], false), (&POLICY[..], true)] {
        let neighbour = [GuestConfig::new("tap1")];
        let stand = Stand::of_several(cell, WorldConfig::default(), &[], &neighbour, args);
        let servers = serve(&stand.world, cell);
        let asks = |guest: &Guest| {
            let reply = ask(&stand, guest, cell.dns(), "api.example.test");
            assert_eq!(reply.records[0].ip(), Some(cell.server_2()));
        };
        let connect = |guest: &Guest| guest.run(|| tcp::connect(servers.tcp.address(), WAIT));
        let (first, second) = (&stand.guest, &stand.neighbours[0]);
        asks(first);
        drop(connect(first).unwrap());
        if on {
            second
                .run(|| tcp::expect_refused(servers.tcp.address()))
                .unwrap();
            asks(second);
            assert_eq!(
                servers.dns.udp_queries("api.example.test"),
                1,
                "from the cache"
            );
        }
        drop(connect(second).unwrap());
    }
}

/// [`POLICY`], and all stays in place when it stops.
const STAYS: [&str; 8] = [
    "--dns",
    "203.0.113.10",
    "--default",
    "deny",
    "--allow",
    "*.example.test:7000/tcp",
    "--on-exit",
    "keep",
];

fn what_dns_opened_outlives_engine_broker_and_an_upgrade_to_another_build(cell: Cell) {
    let other = match slipgate::another_build() {
        Ok(binary) => Start {
            binary: Some(binary),
            ..Start::default()
        },
        Err(why) => return skipped!("{why}"),
    };
    let mut stand = Stand::of(cell, &STAYS);
    let servers = serve(&stand.world, cell);
    refused(&stand, 7000);
    assert_eq!(code(&stand, cell.dns(), "api.example.test"), 0);
    connects(&stand, 7000);
    // The broker starts another one.
    stand.slipgate.kill_engine().unwrap();
    connects(&stand, 7000);
    // Both are gone at once.
    stand.slipgate.kill_both().unwrap();
    stand.again();
    connects(&stand, 7000);
    // An upgrade, and back: it stops and leaves all in place, and another build takes over.
    for start in [other, Start::default()] {
        stand.slipgate.stop().unwrap();
        stand.slipgate = stand.slipgate.again_as(&start).unwrap();
        let runs = fs::read_link(format!("/proc/{}/exe", stand.slipgate.broker_pid())).unwrap();
        let asked_for = start.binary.map_or_else(slipgate::binary, Ok).unwrap();
        assert_eq!(runs, fs::canonicalize(asked_for).unwrap());
        let said = stand.says("of a predecessor");
        assert!(!said.contains("without an orderly stop"), "{said}");
        connects(&stand, 7000);
        refused(&stand, 7001);
    }
    assert_eq!(servers.other_port.accepted(), 0);
    let asked = servers.dns.udp_queries("api.example.test");
    assert_eq!(asked, 1, "nobody asked again");
    let stats = stand.slipgate.stats().unwrap();
    assert_eq!(stats["vms"][0]["names"]["open"], 1, "{stats}");
}

fn dns_over_tls_is_refused_whatever_a_broad_rule_opens(cell: Cell) {
    let broad = [&POLICY[..], &["--allow", cell.everything()]].concat();
    let one = cell.servers("853/tcp");
    let meant = [&broad[..], &["--allow", &one]].concat();
    for (args, passes) in [(&RESOLVER[..], true), (&broad, false), (&meant, true)] {
        let stand = Stand::of(cell, args);
        let serve = |port| {
            let net = &stand.world.net;
            TcpServer::start(net, (cell.server_2(), port), TcpService::Echo).unwrap()
        };
        let (tls, _other) = (serve(853), serve(854));
        if passes {
            connects(&stand, 853);
            continue;
        }
        // The control.
        connects(&stand, 854);
        refused(&stand, 853);
        assert_eq!(tls.accepted(), 0);
        assert_eq!(stand.refused("dns_elsewhere"), 1);
        let (passes, said) = stand
            .slipgate
            .why("tap0", &tls.address().to_string(), "tcp")
            .unwrap();
        assert!(!passes && said.contains("DNS elsewhere"), "{said}");
        for name in ["dns.google", "use-application-dns.net"] {
            assert_ne!(code(&stand, cell.dns(), name), 0, "{name}");
        }
    }
}

fn a_deny_file_may_have_names(cell: Cell) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.txt");
    let lines = "# names and addresses\n192.0.2.0/24\n2001:db8:bad::/48\n*.example.test\n";
    fs::write(&file, lines).unwrap();
    // As a user without privileges, too.
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let file = file.display().to_string();
    let stand = Stand::of(cell, &["--dns", "203.0.113.10", "--deny-file", &file]);
    let servers = serve(&stand.world, cell);
    assert_eq!(code(&stand, cell.dns(), "api.example.test"), REFUSED);
    assert_eq!(servers.dns.udp_queries("api.example.test"), 0);
    assert_eq!(code(&stand, cell.dns(), "evil.test"), 0, "the control");
}
