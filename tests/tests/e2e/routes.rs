//! The host's routes change under live flows; routers of another family; several next hops.
use std::{
    io::{ErrorKind, Read as _},
    net::{IpAddr, SocketAddr, TcpStream},
    sync::atomic::Ordering::Acquire,
};

use serde_json::Value;
use slipgate_abi::link::is_usable;
use slipgate_testbed::{
    World,
    clients::{
        tcp,
        tcp::{ConnectOutcome, EchoSession},
    },
    require_root_and_tun,
    servers::{TcpServer, TcpService},
    world::{HOST, SERVER, UPLINK, WORLD_LINK},
    world_ipv6,
};

use crate::{BRIEFLY, Cell, Stand, WAIT, eventually, matrix::matrix, stand::maps};

matrix! {
    a_flow_to_what_is_not_reached_any_more_is_reset_and_recorded: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    flows_are_spread_over_two_routers_and_outlive_one: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's kernel spreads its sockets' flows";
    flows_outlive_their_route_over_a_restart: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's kernel routes its sockets";
}

fn echo(stand: &Stand) -> TcpServer<IpAddr> {
    let at = (stand.cell.server(), 7000);
    TcpServer::start(&stand.world.net, at, TcpService::Echo).unwrap()
}

fn connected(stand: &Stand, echo: &TcpServer<IpAddr>) -> TcpStream {
    let mut stream = stand.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    exchange(stand, &mut stream);
    stream
}

fn exchange(stand: &Stand, stream: &mut TcpStream) {
    stand
        .run(|| EchoSession::new(stream).round(10_000))
        .unwrap();
}

/// Waits until `slipgate why` says of the server what is expected.
fn why_says(stand: &Stand, what: &str, is_it: impl Fn(bool, &str) -> bool) -> String {
    let to = SocketAddr::new(stand.cell.server(), 7000).to_string();
    eventually(what, || {
        let (admitted, said) = stand.slipgate.why("tap0", &to, "tcp").unwrap();
        is_it(admitted, &said).then_some(said)
    })
}

fn ip(stand: &Stand, what: &str) {
    let family = if stand.cell.is_ipv6() { "-6" } else { "-4" };
    stand.world.host.ip(&format!("{family} {what}")).unwrap();
}

fn a_flow_to_what_is_not_reached_any_more_is_reset_and_recorded(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let echo = echo(&stand);
    let server = cell.server();
    for (number, [add, remove]) in [
        [
            format!("route add blackhole {server}"),
            format!("route del blackhole {server}"),
        ],
        [
            format!("route add unreachable {server}"),
            format!("route del unreachable {server}"),
        ],
        [
            format!("addr add {server} dev lo"),
            format!("addr del {server} dev lo"),
        ],
    ]
    .into_iter()
    .enumerate()
    {
        let mut stream = connected(&stand, &echo);
        ip(&stand, &add);
        // The guest is silent, and learns it all the same.
        stand.run(|| stream.set_read_timeout(Some(WAIT))).unwrap();
        let read = stand.run(|| stream.read(&mut [0; 16]));
        let kind = read.map_err(|error| error.kind());
        assert_eq!(kind, Err(ErrorKind::ConnectionReset), "{add}");
        eventually("its record", || {
            let records = stand.records();
            let ends: Vec<&Value> = records.iter().map(|record| &record["end"]).collect();
            (ends.len() > number).then(|| assert!(ends.iter().all(|end| *end == "route")))
        });
        let outcome = stand.run(|| tcp::connect_outcome(echo.address(), BRIEFLY));
        let outcome = outcome.unwrap();
        assert!(
            !matches!(outcome, ConnectOutcome::Connected(_)),
            "{add}: {outcome:?}"
        );
        ip(&stand, &remove);
        why_says(&stand, "the way back", |admitted, _| admitted);
    }
    drop(connected(&stand, &echo));
}

/// Address of the world's second router, which has a device and a MAC of its own.
fn second_router(cell: Cell) -> IpAddr {
    let text = if cell.is_ipv6() {
        "2001:db8:1::3"
    } else {
        "198.18.0.3"
    };
    text.parse().unwrap()
}

/// The world's second router, on the same link as the first.
const SECOND: &str = "w2";

fn add_second_router(world: &World, cell: Cell) {
    let net = &world.net;
    net.ip(&format!(
        "link add link {WORLD_LINK} name {SECOND} type macvlan mode bridge"
    ))
    .unwrap();
    // Each answers for its own address only, and takes what comes by it.
    for key in ["all.arp_ignore=1", "all.rp_filter=0", "w2.rp_filter=0"] {
        let (key, value) = key.split_once('=').unwrap();
        net.sysctl(&format!("net.ipv4.conf.{key}"), value).unwrap();
    }
    let (family, len, last) = match cell.is_ipv6() {
        false => ("-4", 24, ""),
        true => {
            net.sysctl("net.ipv6.conf.w2.accept_dad", "0").unwrap();
            world_ipv6::enable(net, &[SECOND]).unwrap();
            ("-6", 64, "nodad")
        }
    };
    net.ip(&format!("link set {SECOND} up")).unwrap();
    let router = second_router(cell);
    net.ip(&format!(
        "{family} addr add {router}/{len} dev {SECOND} {last}"
    ))
    .unwrap();
}

/// Packets that the second router has received.
fn received(stand: &Stand) -> u64 {
    let shown = stand.world.net.ip(&format!("-s -j link show dev {SECOND}"));
    let shown: Value = serde_json::from_str(&shown.unwrap()).unwrap();
    shown[0]["stats64"]["rx"]["packets"].as_u64().unwrap()
}

/// Whether a connection's packets go by the second router.
fn is_by_second(stand: &Stand, stream: &mut TcpStream) -> bool {
    const ROUNDS: u64 = 10;
    let before = received(stand);
    for _ in 0..ROUNDS {
        stand.run(|| EchoSession::new(stream).round(10)).unwrap();
    }
    received(stand) - before >= ROUNDS
}

fn flows_are_spread_over_two_routers_and_outlive_one(cell: Cell) {
    const FLOWS: usize = 24;
    let stand = Stand::of(cell, &[]);
    add_second_router(&stand.world, cell);
    let echo = echo(&stand);
    let routers = [cell.router(), second_router(cell)];
    let set = |routers: &[IpAddr]| {
        ip(&stand, "route del default");
        let hop = |router: &IpAddr| format!("nexthop via {router} dev {UPLINK}");
        let hops: Vec<String> = routers.iter().map(hop).collect();
        ip(&stand, &format!("route add default {}", hops.join(" ")));
        why_says(&stand, "the next hops", |admitted, said| {
            let all = routers
                .iter()
                .all(|router| said.contains(&router.to_string()));
            let is_spread = said.contains("The next hop: ");
            admitted && all && is_spread == (routers.len() > 1)
        });
    };
    set(&routers);
    let mut streams: Vec<_> = (0..FLOWS).map(|_| connected(&stand, &echo)).collect();
    let ways = |streams: &mut Vec<TcpStream>| -> Vec<bool> {
        let by_second = |stream| is_by_second(&stand, stream);
        streams.iter_mut().map(by_second).collect()
    };
    let spread = ways(&mut streams);
    let by_second = spread.iter().filter(|by_second| **by_second).count();
    assert!((2..FLOWS - 1).contains(&by_second), "{spread:?}");
    assert_eq!(ways(&mut streams), spread, "each has one way");
    // The second is no next hop any more: all go on by the first.
    set(&routers[..1]);
    eventually("all by the first", || {
        (ways(&mut streams) == [false; FLOWS]).then_some(())
    });
    // It is one again, for new ones.
    set(&routers);
    assert_eq!(ways(&mut streams), [false; FLOWS]);
    let mut more: Vec<_> = (0..FLOWS).map(|_| connected(&stand, &echo)).collect();
    assert!(ways(&mut more).contains(&true));
}

fn flows_outlive_their_route_over_a_restart(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let echo = echo(&stand);
    let mut stream = connected(&stand, &echo);
    let is_valid = |stand: &Stand| {
        let maps = maps(stand.slipgate.pins());
        let hops: Vec<u32> = maps.next_hops_of(0).collect();
        let mut hops = hops.into_iter().filter_map(|index| maps.next_hop(index));
        hops.any(|hop| hop.claim().1 == cell.router() && is_usable(hop.sequence().load(Acquire)))
    };
    eventually("a next hop", || {
        exchange(&stand, &mut stream);
        is_valid(&stand).then_some(())
    });
    // Neither to the world nor to the router.
    ip(&stand, &format!("route flush dev {UPLINK} table main"));
    why_says(&stand, "no route", |admitted, _| !admitted);
    exchange(&stand, &mut stream);
    stand.slipgate.kill_both().unwrap();
    exchange(&stand, &mut stream);
    stand.again();
    why_says(&stand, "no route", |admitted, _| !admitted);
    exchange(&stand, &mut stream);
    assert!(is_valid(&stand));
}

#[test]
fn a_router_with_an_address_of_ipv6_alone_leads_to_ipv4() {
    require_root_and_tun!();
    const ROUTER: &str = "fe80::53";
    let stand = Stand::new(&[]);
    let (host, net) = (&stand.world.host, &stand.world.net);
    for (ns, device) in [(host, UPLINK), (net, WORLD_LINK)] {
        ns.sysctl(&format!("net.ipv6.conf.{device}.accept_dad"), "0")
            .unwrap();
        world_ipv6::enable(ns, &[device]).unwrap();
    }
    net.ip(&format!("-6 addr add {ROUTER}/64 dev {WORLD_LINK} nodad"))
        .unwrap();
    host.ip("-6 addr add fe80::54/64 dev up0 nodad").unwrap();
    host.ip("route del default").unwrap();
    host.ip(&format!(
        "-4 route add default via inet6 {ROUTER} dev {UPLINK}"
    ))
    .unwrap();
    let said = why_says(&stand, "the route", |admitted, said| {
        admitted && said.contains(ROUTER)
    });
    assert!(said.contains(&format!("{HOST} by {ROUTER} ")), "{said}");
    let echo = TcpServer::start(net, (IpAddr::from(SERVER), 7000), TcpService::Echo).unwrap();
    let mut stream = connected(&stand, &echo);
    assert_eq!(echo.peers()[0].ip(), IpAddr::from(HOST));
    // The host has learnt the router's MAC.
    let router = eventually("the router's MAC", || {
        let neighbours = host.ip("-6 neigh show dev up0").unwrap();
        let router = neighbours.lines().find(|line| line.starts_with(ROUTER))?;
        router.contains("lladdr").then(|| router.to_owned())
    });
    assert!(router.contains("lladdr"), "{router}");
    // With it known, the programs write it themselves.
    let maps = maps(stand.slipgate.pins());
    let router: IpAddr = ROUTER.parse().unwrap();
    eventually("a next hop", || {
        exchange(&stand, &mut stream);
        let hops = maps
            .next_hops_of(0)
            .filter_map(|index| maps.next_hop(index));
        let mut its = hops.filter(|hop| hop.claim().1 == router);
        its.any(|hop| is_usable(hop.sequence().load(Acquire)))
            .then_some(())
    });
    exchange(&stand, &mut stream);
}
