//! VMs whose flows leave as the host's own packets would: by all its routes and rules, and by several
//! uplinks at once.
use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream},
    sync::mpsc,
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use slipgate_testbed::{
    Direction, Guest, GuestConfig, World,
    clients::{
        tcp,
        tcp::{ConnectOutcome, EchoSession},
    },
    frame::Packet,
    left_out,
    pump::Fate,
    require_root_and_tun,
    servers::{TcpServer, TcpService},
    world::{HOST, ROUTER, SERVER, SERVER_2, UPLINK},
    world_ipv6::{HOST6, ROUTER6, SERVER6, SERVER6_2, enable},
};

use crate::{
    BRIEFLY, Cell, WAIT,
    api::Stand,
    eventually,
    matrix::{cells, matrix},
    stand::{SECOND, SECOND_ADDRESS, add_second_ipv6, add_second_uplink, give_ipv6},
};

matrix! {
    flows_leave_by_what_the_hosts_routes_choose: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's kernel routes its sockets";
    a_flow_that_is_cut_within_its_handshake_is_reset: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's kernel routes its sockets";
    a_rule_that_slipgate_does_not_judge_is_the_kernels: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's kernel routes its sockets";
    a_rule_leads_to_a_vrf: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's kernel routes its sockets";
    answers_of_a_forward_leave_as_the_rules_say_of_its_address: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's kernel routes its sockets";
    the_flag_is_for_vms_whose_policy_names_no_routes: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's kernel routes its sockets";
}

const SECOND_ADDRESS6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x2, 0, 0, 0, 0, 2);
/// TCP's flag.
const ACK: u8 = 0x10;
const HOST_ROUTES: &str = "egress.routes = \"host\"";

/// A host with two uplinks. The VM `a` has the policy `tunnel`, `b` none.
struct Uplinks {
    stand: Stand,
    guest: Guest,
    other: Guest,
    cell: Cell,
}

impl Uplinks {
    fn new(cell: Cell, egress: &str, flags: &[&str]) -> Self {
        let world = World::new().unwrap();
        let mut flags = flags.to_vec();
        if cell.is_ipv6() {
            world.give_ipv6().unwrap();
            flags.extend(["--ipv6", "nat"]);
        }
        let stand = Stand::in_world(cells::hybrid_ipv4, world, UPLINK, &flags);
        let (guest, other) = (stand.guest("tap0"), stand.guest("tap1"));
        let it = Self {
            stand,
            guest,
            other,
            cell,
        };
        it.add_second();
        it.put_egress(egress);
        for (name, body) in [
            ("a", json!({ "tap": "tap0", "policy": "tunnel" })),
            ("b", json!({ "tap": "tap1" })),
        ] {
            let (status, vm) = it.stand.ask("PUT", &format!("/v1/vms/{name}"), Some(body));
            assert!(matches!(status, 200 | 201), "{status} {vm}");
        }
        if cell.is_ipv6() {
            [&it.guest, &it.other].into_iter().for_each(give_ipv6);
        }
        it
    }

    fn add_second(&self) {
        let world = self.stand.world();
        add_second_uplink(world);
        if self.cell.is_ipv6() {
            let address = SECOND_ADDRESS6.to_string();
            for (ns, device, address) in [
                (&world.host, SECOND, &*address),
                (&world.net, "w1", "2001:db8:2::1"),
            ] {
                ns.sysctl(&format!("net.ipv6.conf.{device}.accept_dad"), "0")
                    .unwrap();
                enable(ns, &[device]).unwrap();
                ns.ip(&format!("-6 addr add {address}/64 dev {device} nodad"))
                    .unwrap();
            }
        }
    }

    fn put_egress(&self, egress: &str) {
        let text = format!("default = \"allow\"\n{egress}\n");
        let (status, said) = self.stand.put_text("/v1/policies/tunnel", &text);
        assert!(matches!(status, 200 | 201), "{status} {said}");
    }

    /// `ip` of the cell's family, on the host.
    fn ip(&self, arguments: &str) {
        self.try_ip(arguments).unwrap();
    }

    fn try_ip(&self, arguments: &str) -> slipgate_testbed::Result<()> {
        let family = self.address("-4", "-6");
        let host = &self.stand.world().host;
        host.ip(&format!("{family} {arguments}")).map(drop)
    }

    fn address<T>(&self, ipv4: T, ipv6: T) -> T {
        match self.cell.is_ipv6() {
            true => ipv6,
            false => ipv4,
        }
    }

    /// The host's addresses on the first and on the second uplink.
    fn sources(&self) -> (IpAddr, IpAddr) {
        let family = self.cell.family;
        (
            family.choose(HOST, HOST6),
            family.choose(SECOND_ADDRESS, SECOND_ADDRESS6),
        )
    }

    fn servers(&self) -> (IpAddr, IpAddr) {
        let family = self.cell.family;
        (
            family.choose(SERVER, SERVER6),
            family.choose(SERVER_2, SERVER6_2),
        )
    }

    fn echo(&self, server: IpAddr, port: u16) -> TcpServer<IpAddr> {
        TcpServer::start(&self.stand.world().net, (server, port), TcpService::Echo).unwrap()
    }

    /// The second uplink's router and device, as in a route.
    fn by_second(&self) -> String {
        let router = self.address("198.18.1.1", "2001:db8:2::1");
        format!("via {router} dev {SECOND}")
    }

    fn why(&self, server: IpAddr, port: u16) -> Value {
        let path = format!("/v1/vms/a/why?address={server}&port={port}");
        self.stand.ask("GET", &path, None).1
    }

    /// Kills the engine, and waits for the next one.
    fn kill_engine(&self) {
        let engines = || self.stand.daemon.children_named("slipgate-engine");
        let before = engines();
        self.stand.signal_engine(libc::SIGKILL);
        eventually("another engine", || {
            engines()
                .iter()
                .any(|now| !before.contains(now))
                .then_some(())
        });
    }
}

fn exchange(guest: &Guest, stream: &mut TcpStream) {
    guest
        .run(|| EchoSession::new(stream).round(10_000))
        .unwrap();
}

/// A new connection, and the address from which the server sees it; `None`: there is none in time.
fn connected(
    guest: &Guest,
    echo: &TcpServer<IpAddr>,
    within: Duration,
) -> Option<(TcpStream, IpAddr)> {
    let seen = echo.peers().len();
    let stream = guest.run(|| tcp::connect(echo.address(), within)).ok()?;
    stream.set_read_timeout(Some(WAIT)).unwrap();
    stream.set_write_timeout(Some(WAIT)).unwrap();
    let peer = eventually("its peer, or its end", || {
        let peer = echo.peers().get(seen).map(SocketAddr::ip);
        // A flow that is cut since the routes have just changed may be so before the server has the third
        // packet of its handshake: no server accepts such a connection.
        let is_cut = || stream.take_error().unwrap().is_some();
        (peer.is_some() || is_cut()).then_some(peer)
    })?;
    Some((stream, peer))
}

/// Waits for a new connection that has this source.
fn comes_from(guest: &Guest, echo: &TcpServer<IpAddr>, source: IpAddr) -> TcpStream {
    eventually(&format!("flows from {source}"), || {
        let (mut stream, peer) = connected(guest, echo, BRIEFLY)?;
        (peer == source).then(|| {
            exchange(guest, &mut stream);
            stream
        })
    })
}

/// Checks that each new connection has this source from now on.
fn come_from(guest: &Guest, echo: &TcpServer<IpAddr>, source: IpAddr) {
    for _ in 0..4 {
        assert_eq!(
            connected(guest, echo, WAIT).map(|(_, peer)| peer),
            Some(source)
        );
    }
}

fn is_refused(guest: &Guest, echo: &TcpServer<IpAddr>) -> bool {
    let outcome = guest.run(|| tcp::connect_outcome(echo.address(), BRIEFLY));
    !matches!(outcome.unwrap(), ConnectOutcome::Connected(_))
}

fn assert_reset(guest: &Guest, stream: &mut TcpStream) {
    let ended = guest.run(|| stream.read(&mut [0; 16]));
    let kind = ended.map_err(|error| error.kind());
    assert_eq!(kind, Err(ErrorKind::ConnectionReset));
}

fn flows_leave_by_what_the_hosts_routes_choose(cell: Cell) {
    let it = Uplinks::new(cell, HOST_ROUTES, &[]);
    let ((first, second), (near, far)) = (it.sources(), it.servers());
    let (near, far) = (it.echo(near, 7000), it.echo(far, 7000));
    let to_far = format!("{} {}", it.servers().1, it.by_second());
    it.ip(&format!("route add {to_far}"));
    // Both uplinks at once, by the prefixes of main.
    let mut by_second = comes_from(&it.guest, &far, second);
    let mut by_first = comes_from(&it.guest, &near, first);
    // Other VMs have the one uplink.
    assert!(is_refused(&it.other, &far));
    come_from(&it.other, &near, first);
    let told = it.why(it.servers().1, 7000);
    let explanation = told["explanation"].as_str().unwrap();
    assert!(explanation.contains("those of the host (egress)"), "{told}");
    assert!(!explanation.contains("kernel was asked"), "{told}");

    it.kill_engine();
    exchange(&it.guest, &mut by_second);
    exchange(&it.guest, &mut by_first);
    drop(comes_from(&it.guest, &far, second));
    come_from(&it.guest, &far, second);
    come_from(&it.guest, &near, first);
    exchange(&it.guest, &mut by_second);

    // By the other uplink a flow would have another address.
    it.ip(&format!("route del {to_far}"));
    assert_reset(&it.guest, &mut by_second);
    drop(comes_from(&it.guest, &far, first));
    exchange(&it.guest, &mut by_first);

    // The device goes, and comes with another number.
    it.ip(&format!("route add {to_far}"));
    let mut by_second = comes_from(&it.guest, &far, second);
    it.ip(&format!("link del {SECOND}"));
    // If its address went first, the guest is told when it sends.
    let sent = it.guest.run(|| by_second.write(b"x"));
    if sent.is_ok() {
        assert_reset(&it.guest, &mut by_second);
    }
    drop(comes_from(&it.guest, &far, first));
    it.add_second();
    it.ip(&format!("route add {to_far}"));
    drop(comes_from(&it.guest, &far, second));

    // Several next hops by several links: flows are spread over both.
    let router = it.address(IpAddr::V4(ROUTER), IpAddr::V6(ROUTER6));
    it.ip(&format!(
        "route replace {} nexthop {} nexthop via {router} dev {UPLINK}",
        it.servers().1,
        it.by_second()
    ));
    drop(comes_from(&it.guest, &far, first));
    drop(comes_from(&it.guest, &far, second));
    exchange(&it.guest, &mut by_first);
}

fn a_flow_that_is_cut_within_its_handshake_is_reset(cell: Cell) {
    let it = Uplinks::new(cell, HOST_ROUTES, &[]);
    let (echo, before) = (it.echo(it.servers().1, 7000), it.echo(it.servers().1, 7001));
    let to_far = format!("{} {}", it.servers().1, it.by_second());
    it.ip(&format!("route add {to_far}"));
    let _before = comes_from(&it.guest, &before, it.sources().1);
    // The guest's ACK of the server's SYN is on its way while the route goes.
    let (go, gone) = mpsc::channel::<()>();
    let filter = move |direction, _: &_, frame: &[u8]| {
        let packet = Packet::<SocketAddr>::of_ethernet(frame);
        let is_its = |packet: &Packet<'_, SocketAddr>| packet.destination.port() == 7000;
        let flags = packet.filter(is_its).and_then(|packet| packet.tcp_flags());
        if direction == Direction::Out && flags == Some(ACK) {
            // Later ones wait for nothing: the sender is gone.
            let _ = gone.recv_timeout(WAIT);
        }
        Fate::Pass
    };
    it.guest.set_filter(Some(Box::new(filter))).unwrap();
    let connect = || tcp::connect(echo.address(), WAIT);
    let mut stream = it.guest.run(connect).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    it.ip(&format!("route del {to_far}"));
    let live = || it.stand.ask("GET", "/v1/flows?vm=a", None).1;
    eventually("the end of the flows", || {
        let flows = live();
        let is_live = |flow: &Value| flow["state"] != "ended";
        (!flows.as_array().unwrap().iter().any(is_live)).then_some(())
    });
    drop(go);
    assert_reset(&it.guest, &mut stream);
    // Its server was not told, and asks again, but not for good.
    thread::sleep(Duration::from_secs(3));
    assert_eq!(echo.peers(), []);
    assert!(connected(&it.guest, &echo, WAIT).is_some());
}

fn a_rule_that_slipgate_does_not_judge_is_the_kernels(cell: Cell) {
    let it = Uplinks::new(cell, HOST_ROUTES, &[]);
    let ((first, second), (server, _)) = (it.sources(), it.servers());
    let (one, two) = (it.echo(server, 7000), it.echo(server, 7001));
    it.ip(&format!("route add default {} table 100", it.by_second()));
    it.ip("rule add ipproto tcp dport 7000 lookup 100 priority 90");
    let mut stream = comes_from(&it.guest, &one, second);
    come_from(&it.guest, &one, second);
    let mut by_main = comes_from(&it.guest, &two, first);
    come_from(&it.other, &one, first);
    let told = it.why(server, 7000);
    let explanation = told["explanation"].as_str().unwrap();
    assert!(explanation.contains("kernel was asked"), "{told}");
    assert!(explanation.contains("rule 90"), "{told}");
    let via = told["via"].as_str().unwrap();
    assert!(via.starts_with(&format!("{second} by ")), "{told}");

    it.kill_engine();
    exchange(&it.guest, &mut stream);
    drop(comes_from(&it.guest, &one, second));
    come_from(&it.guest, &two, first);
    exchange(&it.guest, &mut stream);
    exchange(&it.guest, &mut by_main);

    // Another port in the rule, and nothing else.
    it.ip("rule del priority 90");
    it.ip("rule add ipproto tcp dport 7001 lookup 100 priority 90");
    assert_reset(&it.guest, &mut stream);
    assert_reset(&it.guest, &mut by_main);
    drop(comes_from(&it.guest, &two, second));
    drop(comes_from(&it.guest, &one, first));
    come_from(&it.guest, &two, second);
    come_from(&it.guest, &one, first);

    // A rule may refuse by the port too, and the table may be empty.
    it.ip("rule add ipproto tcp dport 7000 prohibit priority 80");
    eventually("the refusal", || is_refused(&it.guest, &one).then_some(()));
    let told = it.why(server, 7000);
    assert_eq!(told["refusal"], "no_route", "{told}");
    let outcome = told["outcome"].as_str().unwrap();
    assert!(outcome.contains("Prohibit"), "{told}");
    come_from(&it.guest, &two, second);
    // So with a mark.
    it.put_egress("egress.mark = 7");
    drop(comes_from(&it.guest, &two, second));
    it.ip("rule add fwmark 7 ipproto tcp dport 7001 lookup main priority 85");
    drop(comes_from(&it.guest, &two, first));
    assert!(is_refused(&it.guest, &one));
}

fn a_rule_leads_to_a_vrf(cell: Cell) {
    let it = Uplinks::new(cell, HOST_ROUTES, &[]);
    let ((first, second), (near, far)) = (it.sources(), it.servers());
    let (near, echo) = (it.echo(near, 7000), it.echo(far, 7000));
    if it.try_ip("link add blue type vrf table 200").is_err() {
        return left_out!("the kernel has no VRFs");
    }
    it.ip("link set blue up");
    // A change of the master takes IPv6 addresses away.
    let keep = format!("net.ipv6.conf.{SECOND}.keep_addr_on_down");
    let _ = it.stand.world().host.sysctl(&keep, "1");
    it.ip(&format!("link set {SECOND} master blue"));
    it.ip(&format!("route add default {} vrf blue", it.by_second()));
    drop(comes_from(&it.guest, &echo, first));
    it.ip(&format!("rule add to {far} lookup 200 priority 90"));
    drop(comes_from(&it.guest, &echo, second));
    come_from(&it.guest, &near, first);
    // And by the port.
    it.ip("rule del priority 90");
    drop(comes_from(&it.guest, &echo, first));
    it.ip("rule add ipproto tcp dport 7000 lookup 200 priority 90");
    drop(comes_from(&it.guest, &echo, second));
    let mut stream = comes_from(&it.guest, &near, second);
    it.ip("link del blue");
    // Nothing leads to the table any more, but main does.
    assert_reset(&it.guest, &mut stream);
    drop(comes_from(&it.guest, &echo, first));
}

fn answers_of_a_forward_leave_as_the_rules_say_of_its_address(cell: Cell) {
    let it = Uplinks::new(cell, HOST_ROUTES, &[]);
    let (first, second) = it.sources();
    let _echo = TcpServer::start(&it.guest.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    // A client by IPv6 reaches the address that the guest used last.
    let server = it.echo(it.servers().0, 7000);
    drop(comes_from(&it.guest, &server, first));
    let forwards = json!({ "forwards": ["tcp:8080:80"] });
    let (status, said) = it.stand.ask("PATCH", "/v1/vms/a", Some(forwards));
    assert_eq!(status, 200, "{said}");
    let net = &it.stand.world().net;
    // The client has an address behind the first uplink's router, by main.
    let (client, family) = (it.servers().0, it.address("-4", "-6"));
    for (host, device) in [(first, "w0"), (second, "w1")] {
        net.ip(&format!(
            "{family} route add {host} dev {device} src {client}"
        ))
        .unwrap();
    }
    let connect = |to: IpAddr| {
        let to = SocketAddr::new(to, 8080);
        let stream = net.run(|| tcp::connect(to, BRIEFLY)).ok()?;
        stream.set_read_timeout(Some(WAIT)).unwrap();
        Some(stream)
    };
    let goes_on = |stream: &mut TcpStream| net.run(|| EchoSession::new(stream).round(10_000));
    let mut by_first = eventually("the forward", || connect(first));
    goes_on(&mut by_first).unwrap();
    assert!(connect(second).is_none(), "main leads there by the first");
    it.ip(&format!("route add default {} table 100", it.by_second()));
    it.ip(&format!("rule add from {second} lookup 100 priority 90"));
    let mut by_second = eventually("the second uplink", || connect(second));
    goes_on(&mut by_second).unwrap();
    goes_on(&mut by_first).unwrap();
    // By a rule that the kernel judges as well.
    it.ip("rule add from all sport 8081 prohibit priority 80");
    goes_on(&mut by_second).unwrap();
    drop(eventually("the second uplink", || connect(second)));
    drop(eventually("the first uplink", || connect(first)));
}

fn the_flag_is_for_vms_whose_policy_names_no_routes(cell: Cell) {
    let it = Uplinks::new(
        cell,
        "egress.routes = \"uplink\"",
        &["--egress-routes", "host"],
    );
    let ((first, second), (near, far)) = (it.sources(), it.servers());
    let (near, echo) = (it.echo(near, 7000), it.echo(far, 7000));
    it.ip(&format!("route add {far} {}", it.by_second()));
    drop(comes_from(&it.other, &echo, second));
    come_from(&it.other, &near, first);
    assert!(is_refused(&it.guest, &echo));
    come_from(&it.guest, &near, first);
    it.put_egress("");
    drop(comes_from(&it.guest, &echo, second));
}

/// Gives the second uplink IPv6, with the world's server behind it, and the host a default route by it.
fn give_second_ipv6(world: &World) {
    add_second_ipv6(world);
    world
        .net
        .ip(&format!("-6 addr add {SERVER6}/128 dev lo nodad"))
        .unwrap();
    let by = format!("via 2001:db8:2::1 dev {SECOND}");
    world
        .host
        .ip(&format!("-6 route add default {by}"))
        .unwrap();
}

#[test]
fn ipv6_auto_is_on_at_the_start_where_the_hosts_routes_lead_there() {
    require_root_and_tun!();
    let world = World::new().unwrap();
    add_second_uplink(&world);
    give_second_ipv6(&world);
    let flags = ["--ipv6", "auto", "--egress-routes", "host"];
    let stand = crate::Stand::in_world(world, GuestConfig::new("tap0"), &[], &flags);
    give_ipv6(&stand.guest);
    let server = (IpAddr::from(SERVER6), 7000);
    let server = TcpServer::start(&stand.world.net, server, TcpService::Echo).unwrap();
    drop(comes_from(
        &stand.guest,
        &server,
        IpAddr::from(SECOND_ADDRESS6),
    ));
}

#[test]
fn ipv6_auto_is_on_once_the_routes_of_the_policy_lead_there() {
    require_root_and_tun!();
    let flags = ["--ipv6", "auto"];
    let it = Uplinks::new(cells::hybrid_ipv4, "egress.routes = \"uplink\"", &flags);
    let world = it.stand.world();
    give_second_ipv6(world);
    let has_it = |vm: &str| {
        let (status, vm) = it.stand.ask("GET", &format!("/v1/vms/{vm}"), None);
        assert_eq!(status, 200, "{vm}");
        !vm["guest_ipv6"].is_null()
    };
    // The uplink leads to none, and so do the routes of both.
    assert!(!has_it("a") && !has_it("b"));
    it.put_egress(HOST_ROUTES);
    eventually("IPv6 by the policy", || has_it("a").then_some(()));
    assert!(!has_it("b"));
    // By a policy that a VM gets.
    let (status, said) = it
        .stand
        .ask("PATCH", "/v1/vms/b", Some(json!({ "policy": "tunnel" })));
    assert_eq!(status, 200, "{said}");
    eventually("IPv6 by another policy", || has_it("b").then_some(()));
    give_ipv6(&it.guest);
    let server = it.echo(SERVER6.into(), 7000);
    drop(comes_from(&it.guest, &server, SECOND_ADDRESS6.into()));
    // And at a route that comes.
    let host = &world.host;
    host.ip("-6 route del default").unwrap();
    let body = json!({ "tap": "tap2", "policy": "tunnel" });
    let (status, said) = it.stand.ask("PUT", "/v1/vms/c", Some(body));
    assert!(matches!(status, 200 | 201), "{status} {said}");
    assert!(!has_it("c"));
    host.ip(&format!(
        "-6 route add default via 2001:db8:2::1 dev {SECOND}"
    ))
    .unwrap();
    eventually("IPv6 by a route", || has_it("c").then_some(()));
}
