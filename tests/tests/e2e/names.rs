//! Egress by name: a destination that is not allowed by name is neither resolved nor reached,
//! whatever the guest does, and would be without the rules. The servers' view decides.

use std::{fs, net::Ipv4Addr, time::Duration};

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World,
    clients::{dns, tcp},
    dns_wire::{Record, types},
    require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    skipped,
    slipgate::{self, Start},
    world::{SERVER, SERVER_2, UPLINK},
};

use crate::{DNS, Stand, WAIT, at};

const REFUSED: u8 = 5;
const RESOLVER: [&str; 2] = ["--dns", "203.0.113.10"];
const POLICY: [&str; 6] = [
    "--dns",
    "203.0.113.10",
    "--default",
    "deny",
    "--allow",
    "*.example.test:7000/tcp",
];
/// Some resolver of the world's.
const ANOTHER: Ipv4Addr = Ipv4Addr::new(8, 8, 8, 8);

fn zone() -> Zone {
    let bare = |address: [u8; 4]| Answer::a(address.into(), 300);
    let evil = Record::a(SERVER_2, 300).of("evil.test");
    let elsewhere = vec![Record::cname("evil.test", 300), evil];
    Zone::from([
        ("api.example.test".into(), Answer::a(SERVER_2, 300)),
        ("zero.example.test".into(), Answer::a(SERVER_2, 0)),
        ("evil.test".into(), Answer::a(SERVER_2, 300)),
        ("alias.example.test".into(), Answer::records(elsewhere)),
        ("private.example.test".into(), bare([10, 0, 0, 1])),
        ("metadata.example.test".into(), bare([169, 254, 169, 254])),
        ("host.example.test".into(), bare([127, 0, 0, 1])),
    ])
}

struct Servers {
    dns: DnsServer,
    tcp: TcpServer,
    other_port: TcpServer,
}

fn serve(world: &World) -> Servers {
    let tcp = |port| TcpServer::start(&world.net, (SERVER_2, port), TcpService::Echo).unwrap();
    Servers {
        dns: DnsServer::start(&world.net, (SERVER, 53), zone()).unwrap(),
        tcp: tcp(7000),
        other_port: tcp(7001),
    }
}

/// Runs `check` with the policy off, then on; its argument says which.
fn off_and_on(check: impl Fn(&mut Stand, &Servers, bool)) {
    for (args, on) in [(&RESOLVER[..], false), (&POLICY[..], true)] {
        let mut stand = Stand::new(args);
        let servers = serve(&stand.world);
        check(&mut stand, &servers, on);
    }
}

fn connects(stand: &Stand, port: u16) {
    stand
        .run(|| tcp::connect(at(SERVER_2, port), WAIT))
        .unwrap();
}

fn refused(stand: &Stand, port: u16) {
    stand
        .run(|| tcp::expect_refused(at(SERVER_2, port)))
        .unwrap();
}

/// The code of the answer to a question by UDP.
fn code(stand: &Stand, server: Ipv4Addr, name: &str) -> u8 {
    let found = stand.run(|| dns::query_udp(at(server, 53), name, WAIT));
    found.unwrap().reply.code
}

#[test]
fn a_pinned_address_is_refused_until_its_name_was_asked_for() {
    require_root_and_tun!();
    off_and_on(|stand, servers, on| {
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
        assert_eq!(code(stand, DNS, "API.example.test"), 0);
        let mut stream = stand
            .run(|| tcp::connect(servers.tcp.address(), WAIT))
            .unwrap();
        tcp::EchoSession::new(&mut stream).round(1000).unwrap();
        refused(stand, 7001);
        assert_eq!(servers.other_port.accepted(), 0);

        let rule = "--allow *.example.test:7000/tcp";
        for host in ["api.example.test:7000", "203.0.113.20:7000"] {
            let (passes, said) = stand.slipgate.why("tap0", host, "tcp").unwrap();
            assert!(passes && said.contains(rule), "{host}: {said}");
            assert!(said.contains("api.example.test"), "{host}: {said}");
        }
        let (passes, said) = stand.slipgate.why("tap0", "evil.test:7000", "tcp").unwrap();
        assert!(!passes && said.contains("not resolved"), "{said}");
        let listed = stand.slipgate.run(&["flows", "--json"]).unwrap().stdout;
        let listed: serde_json::Value = serde_json::from_slice(&listed).unwrap();
        assert_eq!(listed[0]["dns_name"], "api.example.test", "{listed}");
        assert_eq!(listed[0]["rule"], rule, "{listed}");
        drop(stream);
        stand.slipgate.stop().unwrap();
        let mut records = stand.records();
        records.retain(|record| record["remote"] == "203.0.113.20:7000");
        let record = &records[0];
        assert_eq!(record["dns_name"], "api.example.test", "{record}");
        assert_eq!(record["rule_text"], rule, "{record}");
    });
}

#[test]
fn a_denied_name_reaches_no_resolver_whichever_is_asked_by_udp_or_tcp() {
    require_root_and_tun!();
    off_and_on(|stand, servers, on| {
        let expected = if on { REFUSED } else { 0 };
        for server in [DNS, ANOTHER] {
            assert_eq!(code(stand, server, "evil.test"), expected, "{server}");
            let by_tcp = stand.run(|| dns::query_tcp(at(server, 53), "evil.test", WAIT));
            assert_eq!(by_tcp.unwrap().reply.code, expected, "{server}");
        }
        let seen = servers.dns.udp_queries("evil.test") + servers.dns.tcp_queries("evil.test");
        assert_eq!(seen, u64::from(!on));
        // The resolver itself can't be reached by another way than ours.
        assert_eq!(code(stand, ANOTHER, "api.example.test"), 0);
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

#[test]
fn aaaa_is_empty_at_once_while_no_resolver_answers_and_refused_where_the_name_is() {
    require_root_and_tun!();
    off_and_on(|stand, servers, on| {
        servers.dns.set("api.example.test", Answer::silence());
        for (name, denied) in [("api.example.test", false), ("evil.test", true)] {
            let question = dns::question(name, types::AAAA);
            let found = stand.run(|| dns::ask_udp(at(ANOTHER, 53), &question, WAIT));
            let found = found.unwrap();
            let expected = if on && denied { REFUSED } else { 0 };
            assert_eq!(found.reply.code, expected, "{name}");
            assert!(found.reply.records.is_empty(), "{found:?}");
            // Half of the time after which a resolver is asked again.
            assert!(found.took < Duration::from_millis(500), "{found:?}");
            assert_eq!(servers.dns.udp_queries(name), 0, "{name}");
        }
    });
}

#[test]
fn an_alias_to_a_denied_name_and_a_rebinding_answer_are_refused() {
    require_root_and_tun!();
    off_and_on(|stand, servers, on| {
        let names = ["alias", "private", "metadata", "host"];
        for name in names {
            let name = format!("{name}.example.test");
            let expected = if on { REFUSED } else { 0 };
            assert_eq!(code(stand, DNS, &name), expected, "{name}");
            // Once more, from the cache.
            assert_eq!(code(stand, DNS, &name), expected, "{name}");
            assert_eq!(servers.dns.udp_queries(&name), 1, "{name}");
        }
        if on {
            refused(stand, 7000);
            assert_eq!(servers.tcp.accepted(), 0);
            let stats = stand.slipgate.stats().unwrap();
            let counted = &stats["vms"][0]["names"];
            assert_eq!(counted["refused_chains"], 2, "{counted}");
            assert_eq!(counted["rebinding"], 6, "{counted}");
        } else {
            connects(stand, 7000);
        }
    });
}

#[test]
fn an_answer_with_ttl_0_opens_for_the_connection_at_hand() {
    require_root_and_tun!();
    off_and_on(|stand, _servers, on| {
        if on {
            refused(stand, 7000);
        }
        assert_eq!(code(stand, DNS, "zero.example.test"), 0);
        connects(stand, 7000);
    });
}

#[test]
fn a_second_vm_does_not_ride_on_the_first_ones_answer() {
    require_root_and_tun!();
    for (args, on) in [(&RESOLVER[..], false), (&POLICY[..], true)] {
        let world = World::new().unwrap();
        let servers = serve(&world);
        let guests = ["tap0", "tap1"].map(|tap| Guest::new(&world, GuestConfig::new(tap)).unwrap());
        let pins = PinDir::new().unwrap();
        let mut all = vec!["--tap", "tap0", "--tap", "tap1", "--uplink", UPLINK];
        all.extend(args);
        let _slipgate = Slipgate::attach(&world.host, &pins, &all).unwrap();
        let ask = |guest: &Guest| {
            let found = guest.run(|| dns::query_udp(at(DNS, 53), "api.example.test", WAIT));
            assert_eq!(found.unwrap().addresses(), [SERVER_2]);
        };
        let connect = |guest: &Guest| guest.run(|| tcp::connect(servers.tcp.address(), WAIT));
        ask(&guests[0]);
        drop(connect(&guests[0]).unwrap());
        if on {
            guests[1]
                .run(|| tcp::expect_refused(servers.tcp.address()))
                .unwrap();
            ask(&guests[1]);
            assert_eq!(
                servers.dns.udp_queries("api.example.test"),
                1,
                "from the cache"
            );
        }
        drop(connect(&guests[1]).unwrap());
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

#[test]
fn what_dns_opened_outlives_engine_broker_and_an_upgrade_to_another_build() {
    require_root_and_tun!();
    let other = match slipgate::another_build() {
        Ok(binary) => Start {
            binary: Some(binary),
            ..Start::default()
        },
        Err(why) => return skipped!("{why}"),
    };
    let mut stand = Stand::new(&STAYS);
    let servers = serve(&stand.world);
    refused(&stand, 7000);
    assert_eq!(code(&stand, DNS, "api.example.test"), 0);
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

#[test]
fn dns_over_tls_is_refused_whatever_a_broad_rule_opens() {
    require_root_and_tun!();
    let broad = [&POLICY[..], &["--allow", "0.0.0.0/0"]].concat();
    let meant = [&broad[..], &["--allow", "203.0.113.0/24:853/tcp"]].concat();
    for (args, passes) in [(&RESOLVER[..], true), (&broad, false), (&meant, true)] {
        let stand = Stand::new(args);
        let tls = TcpServer::start(&stand.world.net, (SERVER_2, 853), TcpService::Echo).unwrap();
        let other = TcpServer::start(&stand.world.net, (SERVER_2, 854), TcpService::Echo).unwrap();
        if passes {
            connects(&stand, 853);
            continue;
        }
        stand
            .run(|| tcp::connect(other.address(), WAIT))
            .expect("the control");
        refused(&stand, 853);
        assert_eq!(tls.accepted(), 0);
        assert_eq!(stand.refused("dns_elsewhere"), 1);
        let (passes, said) = stand
            .slipgate
            .why("tap0", &format!("{SERVER_2}:853"), "tcp")
            .unwrap();
        assert!(!passes && said.contains("DNS elsewhere"), "{said}");
        for name in ["dns.google", "use-application-dns.net"] {
            assert_ne!(code(&stand, DNS, name), 0, "{name}");
        }
    }
}

#[test]
fn a_deny_file_may_have_names() {
    require_root_and_tun!();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.txt");
    std::fs::write(
        &file,
        "# names and addresses\n192.0.2.0/24\n*.example.test\n",
    )
    .unwrap();
    let file = file.display().to_string();
    let stand = Stand::new(&["--dns", "203.0.113.10", "--deny-file", &file]);
    let servers = serve(&stand.world);
    assert_eq!(code(&stand, DNS, "api.example.test"), REFUSED);
    assert_eq!(servers.dns.udp_queries("api.example.test"), 0);
    assert_eq!(code(&stand, DNS, "evil.test"), 0, "the control");
}
