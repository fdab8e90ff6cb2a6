//! VMs whose policies name a routing table, a VRF or a mark: their flows leave by these routes.
use std::{
    io::{ErrorKind, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
};

use serde_json::{Value, json};
use slipgate_testbed::{
    Guest,
    clients::{
        dns, tcp,
        tcp::{ConnectOutcome, EchoSession},
    },
    dns_wire::Record,
    left_out, require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    world::{HOST, ROUTER, SERVER, UPLINK},
    world_ipv6::{HOST6, SERVER6, enable},
};

use crate::{
    BRIEFLY, DNS, GUEST, WAIT,
    api::Stand,
    at, eventually,
    stand::{SECOND, SECOND_ADDRESS, add_second_uplink, give_ipv6},
};

/// The second uplink is one by which only the table 100 leads to the world.
const DEFAULT: &str = "default via 198.18.1.1 dev up1 table 100";

fn echo(stand: &Stand) -> TcpServer {
    TcpServer::start(&stand.world().net, (SERVER, 7000), TcpService::Echo).unwrap()
}

fn connected(guest: &Guest, echo: &TcpServer) -> TcpStream {
    let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    exchange(guest, &mut stream);
    stream
}

fn exchange(guest: &Guest, stream: &mut TcpStream) {
    guest
        .run(|| EchoSession::new(stream).round(10_000))
        .unwrap();
}

/// The address from which the server sees a new connection of the guest.
fn source(guest: &Guest, echo: &TcpServer) -> Ipv4Addr {
    drop(connected(guest, echo));
    *echo.peers().last().unwrap().ip()
}

fn is_refused(guest: &Guest, echo: &TcpServer) -> bool {
    let outcome = guest.run(|| tcp::connect_outcome(echo.address(), BRIEFLY));
    !matches!(outcome.unwrap(), ConnectOutcome::Connected(_))
}

fn why(stand: &Stand) -> Value {
    let path = format!("/v1/vms/a/why?address={SERVER}&port=7000");
    stand.ask("GET", &path, None).1
}

/// A daemon with the VM `a`, whose policy is `tunnel`, and `b` without one.
fn stand(egress: &str) -> (Stand, Guest, Guest) {
    stand_with(egress, &[])
}

fn stand_with(egress: &str, flags: &[&str]) -> (Stand, Guest, Guest) {
    let stand = Stand::with(flags);
    add_second_uplink(stand.world());
    let guests = (stand.guest("tap0"), stand.guest("tap1"));
    put_egress(&stand, egress);
    for (name, body) in [
        ("a", json!({ "tap": "tap0", "policy": "tunnel" })),
        ("b", json!({ "tap": "tap1" })),
    ] {
        let (status, vm) = stand.ask("PUT", &format!("/v1/vms/{name}"), Some(body));
        assert!(matches!(status, 200 | 201), "{status} {vm}");
    }
    (stand, guests.0, guests.1)
}

fn put_egress(stand: &Stand, egress: &str) {
    let text = format!("default = \"allow\"\n{egress}\n");
    let (status, said) = stand.put_text("/v1/policies/tunnel", &text);
    assert!(matches!(status, 200 | 201), "{status} {said}");
}

/// Waits until a new connection of the guest has this source.
fn comes_from(guest: &Guest, echo: &TcpServer, address: Ipv4Addr) {
    eventually(&format!("flows from {address}"), || {
        guest.run(|| tcp::connect(echo.address(), BRIEFLY)).ok()?;
        (*echo.peers().last()?.ip() == address).then_some(())
    });
}

#[test]
fn flows_of_a_policy_leave_by_the_routes_of_its_table_or_not_at_all() {
    require_root_and_tun!();
    let scratch = tempfile::tempdir().unwrap();
    let log = scratch.path().join("flows.jsonl").display().to_string();
    let (stand, guest, other) = stand_with("egress.table = 100", &["--flow-log", &log]);
    let host = &stand.world().host;
    let echo = echo(&stand);
    // The table is empty: nothing leaves by main instead.
    assert!(is_refused(&guest, &echo));
    let told = why(&stand);
    assert_eq!(told["refusal"], "no_route", "{told}");
    let outcome = told["outcome"].as_str().unwrap();
    assert!(outcome.contains("no route of table 100"), "{told}");
    assert_eq!(source(&other, &echo), HOST);

    host.ip(&format!("route add {DEFAULT}")).unwrap();
    comes_from(&guest, &echo, SECOND_ADDRESS);
    let told = why(&stand);
    let via = told["via"].as_str().unwrap();
    assert!(via.starts_with("198.18.1.2 by 198.18.1.1 "), "{told}");
    assert_eq!(source(&other, &echo), HOST);
    let mut stream = connected(&guest, &echo);

    // Without its route a live flow goes on where it is, and none is opened.
    host.ip(&format!("route del {DEFAULT}")).unwrap();
    eventually("the refusal", || is_refused(&guest, &echo).then_some(()));
    exchange(&guest, &mut stream);
    let (_, stats) = stand.ask("GET", "/v1/stats", None);
    assert!(stats.to_string().contains("no_route"), "{stats}");
    // A route that refuses says so.
    host.ip("route add blackhole default table 100").unwrap();
    eventually("the route", || {
        let told = why(&stand);
        told["outcome"]
            .as_str()?
            .contains("Blackhole")
            .then_some(())
    });
    host.ip("route del blackhole default table 100").unwrap();

    // The device comes again, with another number.
    host.ip(&format!("link del {SECOND}")).unwrap();
    add_second_uplink(stand.world());
    host.ip(&format!("route add {DEFAULT}")).unwrap();
    comes_from(&guest, &echo, SECOND_ADDRESS);

    // By other routes than before, a flow that can't keep its address ends.
    let mut stream = connected(&guest, &echo);
    put_egress(&stand, "");
    let local = stream.local_addr().unwrap().to_string();
    let ended = guest.run(|| stream.read(&mut [0; 16]));
    let kind = ended.map_err(|error| error.kind());
    assert_eq!(kind, Err(ErrorKind::ConnectionReset));
    eventually("its record", || {
        let log = std::fs::read_to_string(&log).unwrap();
        let records = log.lines().map(serde_json::from_str::<Value>);
        let mut records = records.filter_map(Result::ok);
        let is_its = |record: &Value| record.to_string().contains(&local);
        records
            .any(|record| is_its(&record) && record["end"] == "uplink")
            .then_some(())
    });
    assert_eq!(source(&guest, &echo), HOST);
}

#[test]
fn flows_of_a_policy_leave_as_the_hosts_rules_say_of_its_mark() {
    require_root_and_tun!();
    let (stand, guest, other) = stand("egress.mark = 0x17");
    let host = &stand.world().host;
    let echo = echo(&stand);
    host.ip(&format!("route add {DEFAULT}")).unwrap();
    // No rule is about the mark: as the kernel would, by main.
    comes_from(&guest, &echo, HOST);
    host.ip("rule add fwmark 0x10/0x30 lookup 100 priority 90")
        .unwrap();
    comes_from(&guest, &echo, SECOND_ADDRESS);
    assert_eq!(source(&other, &echo), HOST);
    let told = why(&stand);
    let explanation = told["explanation"].as_str().unwrap();
    assert!(explanation.contains("those of mark 0x17"), "{told}");

    // Rules by what is not looked at decide nothing, rules about other marks neither.
    host.ip("rule add fwmark 0x20/0x20 unreachable priority 70")
        .unwrap();
    assert_eq!(source(&guest, &echo), SECOND_ADDRESS);
    host.ip("rule add ipproto tcp dport 7000 lookup main priority 80")
        .unwrap();
    eventually("the rule", || {
        let told = why(&stand);
        told["outcome"].as_str()?.contains("rule 80").then_some(())
    });
    assert!(is_refused(&guest, &echo));
    host.ip("rule del priority 80").unwrap();
    comes_from(&guest, &echo, SECOND_ADDRESS);

    // As wg-quick has it: main without its default route, then the tunnel's table for all others.
    host.ip("rule del priority 90").unwrap();
    comes_from(&guest, &echo, HOST);
    host.ip("rule add lookup main suppress_prefixlength 0 priority 91")
        .unwrap();
    host.ip("rule add not fwmark 51820 lookup 100 priority 92")
        .unwrap();
    comes_from(&guest, &echo, SECOND_ADDRESS);
    assert_eq!(source(&other, &echo), HOST, "the table main alone");
}

#[test]
fn flows_of_a_policy_leave_by_its_vrf() {
    require_root_and_tun!();
    let (stand, guest, other) = stand("");
    let host = &stand.world().host;
    let echo = echo(&stand);
    let (status, said) = stand.put_text(
        "/v1/policies/tunnel",
        "default = \"allow\"\negress.table = \"blue\"\n",
    );
    assert_eq!(status, 422, "{said}");
    assert!(said.to_string().contains("no VRF of that name"), "{said}");
    if host.ip("link add blue type vrf table 200").is_err() {
        return left_out!("the kernel has no VRFs");
    }
    host.ip("link set blue up").unwrap();
    host.ip(&format!("link set {SECOND} master blue")).unwrap();
    host.ip("route add default via 198.18.1.1 dev up1 vrf blue")
        .unwrap();
    eventually("the VRF", || {
        let text = "default = \"allow\"\negress.table = \"blue\"\n";
        (stand.put_policy("/v1/policies/tunnel", text) == 200).then_some(())
    });
    comes_from(&guest, &echo, SECOND_ADDRESS);
    assert_eq!(source(&other, &echo), HOST);
    // Without the VRF nothing leaves.
    host.ip("link del blue").unwrap();
    eventually("its end", || is_refused(&guest, &echo).then_some(()));
}

#[test]
fn questions_of_a_policys_vms_leave_by_its_routes_too() {
    require_root_and_tun!();
    let by_table = "egress.table = 100\ndns.resolvers = [\"203.0.113.10\"]";
    let (stand, guest, _other) = stand(by_table);
    let (host, net) = (&stand.world().host, &stand.world().net);
    const NAME: &str = "www.example.test";
    let told = Ipv4Addr::new(198, 51, 100, 7);
    let server = DnsServer::start(net, (SERVER, 53), Zone::default()).unwrap();
    server.set(NAME, Answer::a(told, 0));
    let ask = || {
        let found = guest.run(|| dns::query_udp(at(DNS, 53), NAME, WAIT));
        let reply = found.unwrap().reply;
        (reply.code, reply.records.first().and_then(Record::address))
    };
    // The table has no route: the resolver, which main leads to, is not asked.
    assert_eq!(ask(), (2, None));
    assert_eq!(server.udp_queries(NAME), 0);
    // Main leads there no more, and the table does. A rule has the kernel ask it for sockets that
    // are bound to the device.
    host.ip(&format!("route add {DEFAULT}")).unwrap();
    host.ip("rule add oif up1 lookup 100 priority 50").unwrap();
    host.ip(&format!("route add blackhole {SERVER}/32"))
        .unwrap();
    eventually("an answer", || (ask() == (0, Some(told))).then_some(()));
    assert!(server.udp_queries(NAME) > 0);
}

#[test]
fn flows_of_ipv6_leave_by_the_routes_of_the_table_too() {
    require_root_and_tun!();
    const SECOND_ADDRESS6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x2, 0, 0, 0, 0, 2);
    let (stand, guest, other) = stand_with("egress.table = 100", &["--ipv6", "nat"]);
    let world = stand.world();
    world.give_ipv6().unwrap();
    enable(&world.host, &[SECOND]).unwrap();
    enable(&world.net, &["w1"]).unwrap();
    let address = format!("-6 addr add {SECOND_ADDRESS6}/64 dev {SECOND} nodad");
    world.host.ip(&address).unwrap();
    world
        .net
        .ip("-6 addr add 2001:db8:2::1/64 dev w1 nodad")
        .unwrap();
    [&guest, &other].into_iter().for_each(give_ipv6);
    let echo =
        TcpServer::start(&world.net, (IpAddr::from(SERVER6), 7000), TcpService::Echo).unwrap();
    let peer = |guest: &Guest| -> Option<IpAddr> {
        let seen = echo.peers().len();
        guest.run(|| tcp::connect(echo.address(), BRIEFLY)).ok()?;
        let accepted = || echo.peers().get(seen).map(SocketAddr::ip);
        Some(eventually("its peer", accepted))
    };
    eventually("IPv6 by main", || (peer(&other)? == HOST6).then_some(()));
    assert_eq!(peer(&guest), None, "the table has no route");
    world
        .host
        .ip("-6 route add default via 2001:db8:2::1 dev up1 table 100")
        .unwrap();
    eventually("IPv6 by the table", || {
        (peer(&guest)? == SECOND_ADDRESS6).then_some(())
    });
    assert_eq!(peer(&other), Some(IpAddr::from(HOST6)));
}

#[test]
fn a_forward_is_reached_at_the_addresses_of_its_vms_routes_only() {
    require_root_and_tun!();
    let (stand, guest, _other) = stand("egress.table = 100");
    let (host, net) = (&stand.world().host, &stand.world().net);
    host.ip(&format!("route add {DEFAULT}")).unwrap();
    let forwards = json!({ "forwards": ["tcp:8080:80"] });
    let (status, said) = stand.ask("PATCH", "/v1/vms/a", Some(forwards));
    assert_eq!(status, 200, "{said}");
    let _echo = TcpServer::start(&guest.ns, (GUEST, 80), TcpService::Echo).unwrap();
    let at_second = at(SECOND_ADDRESS, 8080);
    let mut stream = eventually("the forward", || {
        net.run(|| tcp::connect(at_second, BRIEFLY)).ok()
    });
    EchoSession::new(&mut stream).round(10_000).unwrap();
    // Its answers would leave by the other device.
    let at_main = net.run(|| tcp::connect_outcome(at(HOST, 8080), BRIEFLY));
    let at_main = at_main.unwrap();
    assert!(
        matches!(at_main, ConnectOutcome::TimedOut(_)),
        "{at_main:?}"
    );
    let (_, stats) = stand.ask("GET", "/v1/stats", None);
    let refused = stats["vms"][0]["refused"]["no_route"].as_u64();
    assert!(refused.is_some_and(|count| count > 0), "{stats}");
}

#[test]
fn an_uplink_leaves_its_routes_of_a_table_only() {
    require_root_and_tun!();
    let both = "egress.table = 100\negress.uplink = \"up1\"";
    let (stand, guest, _other) = stand(both);
    let host = &stand.world().host;
    let echo = echo(&stand);
    host.ip(&format!(
        "route add default via {ROUTER} dev {UPLINK} table 100 metric 9"
    ))
    .unwrap();
    assert!(is_refused(&guest, &echo));
    host.ip(&format!("route add {DEFAULT} metric 99")).unwrap();
    comes_from(&guest, &echo, SECOND_ADDRESS);
    host.ip(&format!("link del {SECOND}")).unwrap();
    eventually("its end", || is_refused(&guest, &echo).then_some(()));
    add_second_uplink(stand.world());
    host.ip(&format!("route add {DEFAULT} metric 99")).unwrap();
    comes_from(&guest, &echo, SECOND_ADDRESS);
    assert!(echo.peers().iter().all(|peer| *peer.ip() == SECOND_ADDRESS));
}
