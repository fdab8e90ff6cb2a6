//! Routing tables at the time at which a policy names them first: at the start, and by a change.
use std::{
    fs,
    net::{IpAddr, TcpStream},
};

use slipgate_abi::IfIndex;
use slipgate_testbed::{
    GuestConfig, World,
    clients::{tcp, tcp::EchoSession},
    servers::{TcpServer, TcpService},
    world::UPLINK,
};

use crate::{
    Cell, Stand, WAIT, api, eventually,
    matrix::matrix,
    stand::{SECOND, add_second_ipv6, add_second_uplink, give_ipv6, maps},
};

matrix! {
    the_table_of_the_first_policy_is_known_to_the_first_flow_and_to_a_successor: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    next_hops_of_a_table_that_a_policy_names_are_resolved: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
}

const BY_TABLE: &str = "default = \"allow\"\negress.table = 100\n";

/// Adds a route of the cell's family to the table 100 of the host.
fn add_route(world: &World, cell: Cell, route: &str) {
    let family = if cell.is_ipv6() { "-6" } else { "-4" };
    let add = format!("{family} route add {route} table 100");
    world.host.ip(&add).unwrap();
}

fn the_table_of_the_first_policy_is_known_to_the_first_flow_and_to_a_successor(cell: Cell) {
    let world = World::new().unwrap();
    let given = cell.give(&world);
    add_second_uplink(&world);
    if cell.is_ipv6() {
        add_second_ipv6(&world);
    }
    let by_second = format!("default via {} dev {SECOND}", cell.second_router());
    add_route(&world, cell, &by_second);
    let scratch = tempfile::tempdir().unwrap();
    let policy = scratch.path().join("policy.toml");
    fs::write(&policy, BY_TABLE).unwrap();
    let args = [given, &["--policy", policy.to_str().unwrap()]].concat();
    let mut stand = Stand::in_world(world, GuestConfig::new("tap0"), &[], &args);
    if cell.is_ipv6() {
        give_ipv6(&stand.guest);
    }
    let at = (cell.server(), 7000);
    let echo = TcpServer::start(&stand.world.net, at, TcpService::Echo).unwrap();
    // Nothing of the host's network has changed since the start.
    let connected = |stand: &Stand| {
        let mut stream = stand.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
        exchange(stand, &mut stream);
        assert_eq!(echo.peers().last().unwrap().ip(), cell.second_address());
        stream
    };
    let mut stream = connected(&stand);
    stand.slipgate.kill_both().unwrap();
    stand.again();
    exchange(&stand, &mut stream);
    drop(connected(&stand));
}

fn exchange(stand: &Stand, stream: &mut TcpStream) {
    stand
        .run(|| EchoSession::new(stream).round(10_000))
        .unwrap();
}

fn next_hops_of_a_table_that_a_policy_names_are_resolved(cell: Cell) {
    let stand = api::Stand::of(cell, &[]);
    let world = stand.world();
    // On no network of the host's, so that this route alone says that it is a router.
    // No route says so of the stranger.
    let (router, stranger) = match cell.is_ipv6() {
        true => ("2001:db8:77::1", "2001:db8:77::2"),
        false => ("192.0.2.77", "192.0.2.78"),
    };
    let [router, stranger] = [router, stranger].map(|hop| hop.parse::<IpAddr>().unwrap());
    add_route(
        world,
        cell,
        &format!("default via {router} dev {UPLINK} onlink"),
    );
    let guest = stand.guest("tap0");
    let policy = |text: &str| {
        let (status, said) = stand.put_text("/v1/policies/tunnel", text);
        assert!(matches!(status, 200 | 201), "{status} {said}");
    };
    policy("default = \"allow\"\n");
    let body = serde_json::json!({ "tap": "tap0", "policy": "tunnel" });
    let (status, vm) = stand.ask("PUT", "/v1/vms/a", Some(body));
    assert_eq!(status, 201, "{vm}");
    // As an engine does that knows the table from before.
    let maps = maps(stand.daemon.pins());
    let uplink = IfIndex::new(world.host.ifindex(UPLINK).unwrap());
    // The stranger first: hops are completed in the order of their indices.
    let [first, second] =
        [stranger, router].map(|hop| maps.claim_next_hop(0, uplink, hop, 0).unwrap());
    assert!(first < second);
    let is_asked_for = |hop: IpAddr| {
        let shown = world.host.ip(&format!("neigh show nud all dev {UPLINK}"));
        let shown = shown.unwrap();
        let mut lines = shown.lines();
        lines.any(|line| line.starts_with(&format!("{hop} ")))
    };
    for hop in [router, stranger] {
        let why = "no route that slipgate follows leads to it";
        assert!(!is_asked_for(hop), "{hop}: {why}");
    }
    policy(BY_TABLE);
    eventually("the router's neighbour entry", || {
        is_asked_for(router).then_some(())
    });
    assert!(
        !is_asked_for(stranger),
        "a claim alone has nothing resolved"
    );
    drop(guest);
}
