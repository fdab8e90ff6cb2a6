//! VMs whose policies name a routing table, a VRF or a mark: their flows leave by these routes.
use std::{
    io::{ErrorKind, Read as _},
    net::{IpAddr, Ipv4Addr, TcpStream},
    path::Path,
    process::Command,
};

use serde_json::{Value, json};
use slipgate_testbed::{
    Guest,
    clients::{
        dns, tcp,
        tcp::{ConnectOutcome, EchoSession},
    },
    dns_wire::Record,
    flow_log, left_out, require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    world::{SERVER, UPLINK},
};

use crate::{
    BRIEFLY, Cell, DNS, WAIT,
    api::Stand,
    eventually,
    matrix::{at, cells, matrix, pings},
    stand::{SECOND, add_second_ipv6, add_second_uplink},
};

matrix! {
    flows_of_a_policy_leave_by_the_routes_of_its_table_or_not_at_all: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    flows_go_on_by_a_table_that_leads_where_they_leave: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    flows_go_on_by_a_table_that_leads_into_their_tunnel_without_l2: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    flows_of_a_policy_leave_as_the_hosts_rules_say_of_its_mark: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    flows_of_a_policy_leave_by_its_vrf: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    a_forward_is_reached_at_the_addresses_of_its_vms_routes_only: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    an_uplink_leaves_its_routes_of_a_table_only: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
}

/// The second uplink is one by which only the table 100 leads to the world.
fn default(cell: Cell) -> String {
    format!("default via {} dev up1 table 100", cell.second_router())
}

/// Has the host change a route or a rule of the cell's family.
fn ip(stand: &Stand, what: &str) {
    let family = if stand.cell.is_ipv6() { "-6" } else { "-4" };
    let host = &stand.world().host;
    host.ip(&format!("{family} {what}")).unwrap();
}

/// Gives the host a second uplink to the world by the cell's families, without a route.
fn add_second(stand: &Stand) {
    add_second_uplink(stand.world());
    if stand.cell.is_ipv6() {
        add_second_ipv6(stand.world());
    }
}

fn echo(stand: &Stand) -> TcpServer<IpAddr> {
    let at = (stand.cell.server(), 7000);
    TcpServer::start(&stand.world().net, at, TcpService::Echo).unwrap()
}

fn connected(guest: &Guest, echo: &TcpServer<IpAddr>) -> TcpStream {
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
fn source(guest: &Guest, echo: &TcpServer<IpAddr>) -> IpAddr {
    drop(connected(guest, echo));
    echo.peers().last().unwrap().ip()
}

fn is_refused(guest: &Guest, echo: &TcpServer<IpAddr>) -> bool {
    let outcome = guest.run(|| tcp::connect_outcome(echo.address(), BRIEFLY));
    !matches!(outcome.unwrap(), ConnectOutcome::Connected(_))
}

fn why(stand: &Stand) -> Value {
    let server = stand.cell.server();
    let path = format!("/v1/vms/a/why?address={server}&port=7000");
    stand.ask("GET", &path, None).1
}

/// A daemon with the VM `a`, whose policy is `tunnel`, and `b` without one.
fn stand(cell: Cell, egress: &str) -> (Stand, Guest, Guest) {
    stand_with(cell, egress, &[])
}

fn stand_with(cell: Cell, egress: &str, flags: &[&str]) -> (Stand, Guest, Guest) {
    let stand = Stand::of(cell, flags);
    add_second(&stand);
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
fn comes_from(guest: &Guest, echo: &TcpServer<IpAddr>, address: IpAddr) {
    eventually(&format!("flows from {address}"), || {
        guest.run(|| tcp::connect(echo.address(), BRIEFLY)).ok()?;
        (echo.peers().last()?.ip() == address).then_some(())
    });
}

fn flows_of_a_policy_leave_by_the_routes_of_its_table_or_not_at_all(cell: Cell) {
    let scratch = tempfile::tempdir().unwrap();
    let log = scratch.path().join("flows.jsonl").display().to_string();
    let (stand, guest, other) = stand_with(cell, "egress.table = 100", &["--flow-log", &log]);
    let host = &stand.world().host;
    let echo = echo(&stand);
    // The table is empty: nothing leaves by main instead.
    assert!(is_refused(&guest, &echo));
    let told = why(&stand);
    assert_eq!(told["refusal"], "no_route", "{told}");
    let outcome = told["outcome"].as_str().unwrap();
    assert!(outcome.contains("no route of table 100"), "{told}");
    assert_eq!(source(&other, &echo), cell.host());

    ip(&stand, &format!("route add {}", default(cell)));
    comes_from(&guest, &echo, cell.second_address());
    let told = why(&stand);
    let via = told["via"].as_str().unwrap();
    let expected = format!("{} by {} ", cell.second_address(), cell.second_router());
    assert!(via.starts_with(&expected), "{told}");
    assert_eq!(source(&other, &echo), cell.host());
    let mut stream = connected(&guest, &echo);

    // Without its route a live flow goes on where it is, and none is opened.
    ip(&stand, &format!("route del {}", default(cell)));
    eventually("the refusal", || is_refused(&guest, &echo).then_some(()));
    exchange(&guest, &mut stream);
    let (_, stats) = stand.ask("GET", "/v1/stats", None);
    assert!(stats.to_string().contains("no_route"), "{stats}");
    // A route that refuses says so.
    ip(&stand, "route add blackhole default table 100");
    eventually("the route", || {
        let told = why(&stand);
        told["outcome"]
            .as_str()?
            .contains("Blackhole")
            .then_some(())
    });
    ip(&stand, "route del blackhole default table 100");

    // The device comes again, with another number.
    host.ip(&format!("link del {SECOND}")).unwrap();
    add_second(&stand);
    ip(&stand, &format!("route add {}", default(cell)));
    comes_from(&guest, &echo, cell.second_address());

    // By other routes than before, a flow that can't keep its address ends.
    let mut stream = connected(&guest, &echo);
    put_egress(&stand, "");
    let local = stream.local_addr().unwrap().to_string();
    let ended = guest.run(|| stream.read(&mut [0; 16]));
    let kind = ended.map_err(|error| error.kind());
    assert_eq!(kind, Err(ErrorKind::ConnectionReset));
    eventually("its record", || {
        let records = flow_log::records(log.as_ref()).unwrap();
        let is_its = |record: &Value| record.to_string().contains(&local);
        let ended = |record: &Value| is_its(record) && record["end"] == "uplink";
        records.iter().any(ended).then_some(())
    });
    assert_eq!(source(&guest, &echo), cell.host());
}

/// Name of the file of flow records in a test's directory.
const FLOW_LOG: &str = "flows.jsonl";

/// The reason of the record of the flow that a guest's socket had.
fn recorded_end(log: &Path, stream: &TcpStream) -> String {
    let guest = stream.local_addr().unwrap().to_string();
    eventually("its record", || {
        let records = flow_log::records(log).unwrap();
        let end = records
            .iter()
            .find(|it| it["event"] == "flow_end" && it["guest"] == guest.as_str())?;
        Some(end["end"].as_str()?.to_owned())
    })
}

/// Ends by an RST.
fn is_reset(guest: &Guest, stream: &mut TcpStream) {
    let ended = guest.run(|| stream.read(&mut [0; 16]));
    let kind = ended.map_err(|error| error.kind());
    assert_eq!(kind, Err(ErrorKind::ConnectionReset));
}

fn flows_go_on_by_a_table_that_leads_where_they_leave(cell: Cell) {
    let scratch = tempfile::tempdir().unwrap();
    let log = scratch.path().join(FLOW_LOG);
    let stand = Stand::of(cell, &["--flow-log", &log.display().to_string()]);
    cell.add_second_uplink(stand.world());
    let by = format!("via {} dev {SECOND}", cell.second_router());
    go_on_by_a_table(&stand, &log, SECOND, &by);
}

fn flows_go_on_by_a_table_that_leads_into_their_tunnel_without_l2(cell: Cell) {
    let (world, flags) = cell.world_without_l2();
    let scratch = tempfile::tempdir().unwrap();
    let log = scratch.path().join(FLOW_LOG);
    let flow_log = log.display().to_string();
    let flags = [flags, &["--flow-log", &flow_log]].concat();
    let stand = Stand::in_world(cell, world, SECOND, &flags);
    go_on_by_a_table(&stand, &log, UPLINK, &format!("dev {UPLINK}"));
}

/// A policy names `device` as its uplink, and then the table 100, which leads there `by` it.
fn go_on_by_a_table(stand: &Stand, log: &Path, device: &str, by: &str) {
    let by_uplink = format!("egress.uplink = \"{device}\"");
    let by_table = "egress.table = 100";
    let (echo, guest) = (echo(stand), stand.guest("tap0"));
    eventually("the device", || {
        let text = format!("default = \"allow\"\n{by_uplink}\n");
        (stand.put_policy("/v1/policies/tunnel", &text) < 300).then_some(())
    });
    let body = json!({ "tap": "tap0", "policy": "tunnel" });
    let (status, vm) = stand.ask("PUT", "/v1/vms/a", Some(body));
    assert!(matches!(status, 200 | 201), "{status} {vm}");
    let mut stream = connected(&guest, &echo);
    let own = echo.peers().last().unwrap().ip();

    // Nobody has followed the table until now. There and back again, and without a pause.
    ip(stand, &format!("route add default {by} table 100"));
    for egress in [by_table, &by_uplink, by_table] {
        put_egress(stand, egress);
        exchange(&guest, &mut stream);
    }
    assert_eq!(source(&guest, &echo), own);
    // Main is not asked any more.
    let of_main = defaults_by(stand, device);
    ip(stand, &format!("route del default {by} {of_main}"));
    comes_from(&guest, &echo, own);
    exchange(&guest, &mut stream);

    // By its uplink alone, main's other default route says that there is no way by it.
    ip(stand, &format!("route add default {by} {of_main}"));
    put_egress(stand, &by_uplink);
    comes_from(&guest, &echo, own);
    exchange(&guest, &mut stream);
    ip(stand, &format!("route del default {by} {of_main}"));
    is_reset(&guest, &mut stream);
    assert_eq!(recorded_end(log, &stream), "route");
    put_egress(stand, by_table);
    assert_eq!(source(&guest, &echo), own);
}

/// The metric of the host's default route by a device, as `metric N`; empty: it has none.
fn defaults_by(stand: &Stand, device: &str) -> String {
    let family = if stand.cell.is_ipv6() { "-6" } else { "-4" };
    let mut command = Command::new("ip");
    command.args([family, "route", "show", "default", "dev", device]);
    let shown = stand.world().host.output(command).unwrap().stdout;
    let shown = String::from_utf8(shown).unwrap();
    let mut words = shown
        .split_whitespace()
        .skip_while(|word| *word != "metric");
    words.next().map_or(String::new(), |_| {
        format!("metric {}", words.next().unwrap())
    })
}

fn flows_of_a_policy_leave_as_the_hosts_rules_say_of_its_mark(cell: Cell) {
    let (stand, guest, other) = stand(cell, "egress.mark = 0x17");
    let echo = echo(&stand);
    ip(&stand, &format!("route add {}", default(cell)));
    // No rule is about the mark: as the kernel would, by main.
    comes_from(&guest, &echo, cell.host());
    ip(&stand, "rule add fwmark 0x10/0x30 lookup 100 priority 90");
    comes_from(&guest, &echo, cell.second_address());
    assert_eq!(source(&other, &echo), cell.host());
    let told = why(&stand);
    let explanation = told["explanation"].as_str().unwrap();
    assert!(explanation.contains("those of mark 0x17"), "{told}");

    // Of rules by what is not looked at the kernel is asked; rules about other marks decide nothing.
    ip(&stand, "rule add fwmark 0x20/0x20 unreachable priority 70");
    assert_eq!(source(&guest, &echo), cell.second_address());
    ip(
        &stand,
        "rule add ipproto tcp dport 7000 lookup main priority 80",
    );
    comes_from(&guest, &echo, cell.host());
    let told = why(&stand);
    let explanation = told["explanation"].as_str().unwrap();
    assert!(explanation.contains("The kernel was asked"), "{told}");
    assert!(explanation.contains("rule 80"), "{told}");
    ip(&stand, "rule del priority 80");
    comes_from(&guest, &echo, cell.second_address());

    // As wg-quick has it: main without its default route, then the tunnel's table for all others.
    ip(&stand, "rule del priority 90");
    comes_from(&guest, &echo, cell.host());
    ip(
        &stand,
        "rule add lookup main suppress_prefixlength 0 priority 91",
    );
    ip(&stand, "rule add not fwmark 51820 lookup 100 priority 92");
    comes_from(&guest, &echo, cell.second_address());
    assert_eq!(source(&other, &echo), cell.host(), "the table main alone");
}

fn flows_of_a_policy_leave_by_its_vrf(cell: Cell) {
    let (stand, guest, other) = stand(cell, "");
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
    if cell.is_ipv6() {
        // The kernel takes them away with the device's entry.
        let address = cell.second_address();
        ip(&stand, &format!("addr add {address}/64 dev {SECOND} nodad"));
    }
    let router = cell.second_router();
    ip(
        &stand,
        &format!("route add default via {router} dev up1 vrf blue"),
    );
    eventually("the VRF", || {
        let text = "default = \"allow\"\negress.table = \"blue\"\n";
        (stand.put_policy("/v1/policies/tunnel", text) == 200).then_some(())
    });
    comes_from(&guest, &echo, cell.second_address());
    assert_eq!(source(&other, &echo), cell.host());
    // Without the VRF nothing leaves.
    host.ip("link del blue").unwrap();
    eventually("its end", || is_refused(&guest, &echo).then_some(()));
}

#[test]
fn questions_of_a_policys_vms_leave_by_its_routes_too() {
    require_root_and_tun!();
    let by_table = "egress.table = 100\ndns.resolvers = [\"203.0.113.10\"]";
    let (stand, guest, _other) = stand(cells::hybrid_ipv4, by_table);
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
    ip(&stand, &format!("route add {}", default(stand.cell)));
    host.ip("rule add oif up1 lookup 100 priority 50").unwrap();
    host.ip(&format!("route add blackhole {SERVER}/32"))
        .unwrap();
    eventually("an answer", || (ask() == (0, Some(told))).then_some(()));
    assert!(server.udp_queries(NAME) > 0);
}

fn a_forward_is_reached_at_the_addresses_of_its_vms_routes_only(cell: Cell) {
    let (stand, guest, _other) = stand(cell, "egress.table = 100");
    let net = &stand.world().net;
    ip(&stand, &format!("route add {}", default(cell)));
    let forwards = json!({ "forwards": ["tcp:8080:80"] });
    let (status, said) = stand.ask("PATCH", "/v1/vms/a", Some(forwards));
    assert_eq!(status, 200, "{said}");
    // It shows its address, to which the forward leads.
    assert!(pings(&guest, cell.gateway(), WAIT));
    let _echo = TcpServer::start(&guest.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    let at_second = at(cell.second_address(), 8080);
    let mut stream = eventually("the forward", || {
        net.run(|| tcp::connect(at_second, BRIEFLY)).ok()
    });
    EchoSession::new(&mut stream).round(10_000).unwrap();
    // Its answers would leave by the other device.
    let at_main = net.run(|| tcp::connect_outcome(at(cell.host(), 8080), BRIEFLY));
    let at_main = at_main.unwrap();
    assert!(
        matches!(at_main, ConnectOutcome::TimedOut(_)),
        "{at_main:?}"
    );
    let (_, stats) = stand.ask("GET", "/v1/stats", None);
    let refused = stats["vms"][0]["refused"]["no_route"].as_u64();
    assert!(refused.is_some_and(|count| count > 0), "{stats}");
}

fn an_uplink_leaves_its_routes_of_a_table_only(cell: Cell) {
    let both = "egress.table = 100\negress.uplink = \"up1\"";
    let (stand, guest, _other) = stand(cell, both);
    let host = &stand.world().host;
    let echo = echo(&stand);
    let router = cell.router();
    let by_first = format!("route add default via {router} dev {UPLINK} table 100 metric 9");
    ip(&stand, &by_first);
    assert!(is_refused(&guest, &echo));
    ip(&stand, &format!("route add {} metric 99", default(cell)));
    comes_from(&guest, &echo, cell.second_address());
    host.ip(&format!("link del {SECOND}")).unwrap();
    eventually("its end", || is_refused(&guest, &echo).then_some(()));
    add_second(&stand);
    ip(&stand, &format!("route add {} metric 99", default(cell)));
    comes_from(&guest, &echo, cell.second_address());
    let second = cell.second_address();
    assert!(echo.peers().iter().all(|peer| peer.ip() == second));
}
