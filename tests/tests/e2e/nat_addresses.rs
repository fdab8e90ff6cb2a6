//! Pools of source addresses, VMs' own addresses, and uplinks that policies name.
use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read as _,
    net::{Ipv4Addr, TcpStream},
};

use serde_json::{Value, json};
use slipgate_testbed::{
    Guest, World, WorldConfig,
    clients::{
        IcmpError, icmp, tcp,
        tcp::{ConnectOutcome, EchoSession},
        udp,
        udp::UdpOutcome,
    },
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::{HOST, ROUTER, SERVER, Uplink},
};

use crate::{
    BRIEFLY, GUEST, WAIT,
    api::Stand,
    at, eventually,
    stand::{SECOND, SECOND_ADDRESS, add_second_uplink},
};

/// Two addresses that the host has besides its first one, and two more.
const POOL: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 18, 0, 8), Ipv4Addr::new(198, 18, 0, 9)];
const OTHERS: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 18, 0, 12), Ipv4Addr::new(198, 18, 0, 13)];
/// A prefix that is routed to the host.
const ROUTED: &str = "203.0.112.0/30";

fn policy_with(addresses: &str) -> String {
    format!("default = \"allow\"\nnat_addresses = [{addresses}]\n")
}

/// A daemon on a host with all these addresses, with a policy `web` for two of them.
fn stand(more: &[&str]) -> Stand {
    let stand = Stand::with(more);
    let host = &stand.world().host;
    for address in POOL.iter().chain(&OTHERS) {
        host.ip(&format!("addr add {address}/32 dev up0")).unwrap();
    }
    eventually("the addresses", || {
        let text = policy_with("\"198.18.0.8/31\"");
        matches!(stand.put_policy("/v1/policies/web", &text), 200 | 201).then_some(())
    });
    stand
}

fn put(stand: &Stand, name: &str, body: Value) -> Value {
    let (status, vm) = stand.ask("PUT", &format!("/v1/vms/{name}"), Some(body));
    assert!(matches!(status, 200 | 201), "{status} {vm}");
    vm
}

fn echo(stand: &Stand) -> TcpServer {
    TcpServer::start(&stand.world().net, (SERVER, 7000), TcpService::Echo).unwrap()
}

fn connected(guest: &Guest, echo: &TcpServer) -> TcpStream {
    let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    guest
        .run(|| EchoSession::new(&mut stream).round(10_000))
        .unwrap();
    stream
}

/// The address from which the server sees a new connection of the guest.
fn source(guest: &Guest, echo: &TcpServer) -> Ipv4Addr {
    drop(connected(guest, echo));
    *echo.peers().last().unwrap().ip()
}

#[test]
fn rfc4787_req_2_all_that_a_vm_sends_comes_from_the_address_it_is_paired_with() {
    require_root_and_tun!();
    let stand = stand(&[]);
    let net = &stand.world().net;
    let echo = echo(&stand);
    let datagrams = UdpServer::start(net, (SERVER, 7), UdpService::Echo).unwrap();
    datagrams.allow_fragments().unwrap();
    let mut seen = BTreeSet::new();
    for (name, tap) in [("a", "tap0"), ("b", "tap1"), ("c", "tap2"), ("d", "tap3")] {
        let guest = stand.guest(tap);
        put(&stand, name, json!({ "tap": tap, "policy": "web" }));
        let own = source(&guest, &echo);
        assert!(POOL.contains(&own), "{own}");
        for _ in 0..3 {
            assert_eq!(source(&guest, &echo), own);
        }
        // Datagrams, whole and in fragments both ways, and errors about them.
        for size in [100, 4_000] {
            let payload = vec![7; size];
            let outcome = guest.run(|| udp::probe(datagrams.address(), &payload, WAIT));
            assert!(
                matches!(outcome, Ok(UdpOutcome::Answered(_))),
                "{outcome:?}"
            );
        }
        let closed = guest.run(|| udp::probe(at(SERVER, 9), b"x", WAIT)).unwrap();
        let unreachable = IcmpError { kind: 3, code: 3 };
        assert!(
            matches!(closed, UdpOutcome::Refused(error, _) if error == unreachable),
            "{closed:?}"
        );
        let expired = guest.run(|| icmp::ping_with_ttl(SERVER, 1, 32, 2, WAIT));
        assert_eq!(expired.unwrap().replies.len(), 1);
        let now: BTreeSet<Ipv4Addr> = datagrams.peers().keys().map(|peer| *peer.ip()).collect();
        seen.insert(own);
        assert_eq!(now, seen, "datagrams come from no other address");
        let why = format!("/v1/vms/{name}/why?address={SERVER}&port=7000");
        let (_, why) = stand.ask("GET", &why, None);
        let via = why["via"].as_str().unwrap_or_default();
        assert!(via.starts_with(&format!("{own} by {ROUTER} ")), "{why}");
        let told = why["explanation"].as_str().unwrap_or_default();
        assert!(told.contains(&format!("{own}, the one of 2")), "{why}");
    }
    assert_eq!(seen, BTreeSet::from(POOL), "both have VMs");
}

#[test]
fn a_vm_keeps_its_address_when_another_engine_takes_over_and_when_the_pool_grows() {
    require_root_and_tun!();
    let stand = stand(&[]);
    let echo = echo(&stand);
    let guest = stand.guest("tap0");
    put(&stand, "a", json!({ "tap": "tap0", "policy": "web" }));
    let mut stream = connected(&guest, &echo);
    let own = *echo.peers().last().unwrap().ip();
    let mut echoes = || {
        guest
            .run(|| EchoSession::new(&mut stream).round(10_000))
            .unwrap()
    };
    // Larger pools would give one VM in two another address.
    let larger = policy_with("\"198.18.0.8/31\", \"198.18.0.12/31\"");
    assert_eq!(stand.put_policy("/v1/policies/web", &larger), 200);
    assert_eq!(source(&guest, &echo), own);
    stand.signal_engine(libc::SIGKILL);
    echoes();
    eventually("an engine", || {
        guest.run(|| tcp::connect(echo.address(), BRIEFLY)).ok()
    });
    assert_eq!(source(&guest, &echo), own);
    echoes();
}

#[test]
fn a_policy_that_takes_the_address_away_ends_the_flow_and_gives_another() {
    require_root_and_tun!();
    let stand = stand(&[]);
    let echo = echo(&stand);
    let (guest, other) = (stand.guest("tap0"), stand.guest("tap1"));
    put(&stand, "a", json!({ "tap": "tap0", "policy": "web" }));
    put(&stand, "other", json!({ "tap": "tap1" }));
    let mut stream = connected(&guest, &echo);
    let mut others = connected(&other, &echo);
    assert_eq!(*echo.peers().last().unwrap().ip(), HOST);
    let text = policy_with("\"198.18.0.12/31\"");
    let (status, put) = stand.put_text("/v1/policies/web", &text);
    assert_eq!((status, put["cut"].as_u64()), (200, Some(1)), "{put}");
    let ended = guest.run(|| stream.read(&mut [0; 16]));
    assert!(ended.is_err(), "{ended:?}");
    assert!(OTHERS.contains(&source(&guest, &echo)));
    other
        .run(|| EchoSession::new(&mut others).round(10_000))
        .unwrap();

    // A policy may leave flows where they are.
    let mut stream = connected(&guest, &echo);
    let text = format!("on_reload = \"keep\"\n{}", policy_with("\"198.18.0.8/31\""));
    let (status, put) = stand.put_text("/v1/policies/web", &text);
    assert_eq!((status, put["cut"].as_u64()), (200, Some(0)), "{put}");
    guest
        .run(|| EchoSession::new(&mut stream).round(10_000))
        .unwrap();
    assert!(POOL.contains(&source(&guest, &echo)));
}

#[test]
fn two_addresses_carry_twice_the_connections_to_one_server() {
    require_root_and_tun!();
    let stand = stand(&["--nat-ports", "61000-61007"]);
    let echo = echo(&stand);
    let taps = [("a", "tap0"), ("b", "tap1"), ("c", "tap2"), ("d", "tap3")];
    let guests: Vec<Guest> = taps.iter().map(|(_, tap)| stand.guest(tap)).collect();
    for (name, tap) in taps {
        put(&stand, name, json!({ "tap": tap, "policy": "web" }));
    }
    let mut open: Vec<TcpStream> = Vec::new();
    for _ in 0..9 {
        for guest in &guests {
            open.extend(guest.run(|| tcp::connect(echo.address(), BRIEFLY)));
        }
    }
    let mut seen = BTreeMap::<Ipv4Addr, usize>::new();
    for peer in echo.peers() {
        *seen.entry(*peer.ip()).or_default() += 1;
    }
    assert_eq!(
        seen,
        POOL.map(|address| (address, 8)).into(),
        "all ports of each"
    );
    assert_eq!(open.len(), 16);
    let (_, stats) = stand.ask("GET", "/v1/stats", None);
    let of_vms = stats["vms"].as_array().unwrap().iter();
    let refused = of_vms.filter_map(|vm| vm["refused"]["ports_exhausted"].as_u64());
    assert!(refused.sum::<u64>() >= 36 - 16, "{stats}");
}

#[test]
fn a_vm_has_a_public_address_of_its_own_by_which_its_forward_is_reached_too() {
    require_root_and_tun!();
    let stand = stand(&[]);
    let (host, net) = (&stand.world().host, &stand.world().net);
    host.ip(&format!("route add local {ROUTED} dev lo"))
        .unwrap();
    net.ip(&format!("route add {ROUTED} via {HOST}")).unwrap();
    let own = Ipv4Addr::new(203, 0, 112, 1);
    let echo = echo(&stand);
    let guest = stand.guest("tap0");
    let _service = TcpServer::start(&guest.ns, (GUEST, 80), TcpService::Echo).unwrap();
    let body = json!({ "tap": "tap0", "nat_addresses": [own], "forwards": ["tcp:8080:80"] });
    let vm = eventually("the route", || {
        let (status, vm) = stand.ask("PUT", "/v1/vms/a", Some(body.clone()));
        (status == 201).then_some(vm)
    });
    assert_eq!(vm["nat_addresses"], json!([own]));
    assert_eq!(source(&guest, &echo), own);
    for address in [own, HOST] {
        let mut stream = net.run(|| tcp::connect(at(address, 8080), WAIT)).unwrap();
        net.run(|| EchoSession::new(&mut stream).round(10_000))
            .unwrap();
    }
    // It is no other VM's, and no policy's.
    let _other = stand.guest("tap1");
    let body = json!({ "tap": "tap1", "nat_addresses": [ROUTED] });
    let (status, problem) = stand.ask("PUT", "/v1/vms/b", Some(body));
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(
        status == 409 && detail.contains("203.0.112.1: a has it"),
        "{status} {problem}"
    );
    let text = policy_with("\"203.0.112.1\"");
    let (status, problem) = stand.put_text("/v1/policies/other", &text);
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(
        status == 409 && detail.contains("it is of a alone"),
        "{status} {problem}"
    );
    // Nor may a VM take one of a policy for itself.
    let body = json!({ "tap": "tap1", "nat_addresses": [POOL[0]] });
    let (status, problem) = stand.ask("PUT", "/v1/vms/b", Some(body));
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(
        status == 409 && detail.contains("the policy web has it"),
        "{status} {problem}"
    );
    // No other VM's forward names it, and it is not taken where one does.
    let refuses = |body: Value, words: &str| {
        let (status, problem) = stand.ask("PUT", "/v1/vms/b", Some(body));
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert!(
            status == 409 && detail.contains(words),
            "{status} {problem}"
        );
    };
    let named = format!("tcp:{own}:9000:80");
    refuses(
        json!({ "tap": "tap1", "forwards": [named] }),
        "a has that address for itself",
    );
    let third = OTHERS[0];
    let named = format!("tcp:{third}:9000:80");
    let (status, vm) = stand.ask(
        "PATCH",
        "/v1/vms/a",
        Some(json!({ "forwards": ["tcp:8080:80", named] })),
    );
    assert_eq!(status, 200, "{vm}");
    refuses(
        json!({ "tap": "tap1", "nat_addresses": [third] }),
        "of a names it",
    );
    // Without it, it leaves as the host does; its flows may stay.
    let mut stream = connected(&guest, &echo);
    let (status, vm) = stand.ask("PATCH", "/v1/vms/a", Some(json!({ "nat_addresses": null })));
    assert_eq!((status, vm.get("nat_addresses")), (200, None), "{vm}");
    guest
        .run(|| EchoSession::new(&mut stream).round(10_000))
        .unwrap();
    assert_eq!(source(&guest, &echo), HOST);
}

#[test]
fn an_address_that_the_host_loses_is_given_up_and_none_steps_in_for_the_pool() {
    require_root_and_tun!();
    let stand = stand(&[]);
    let host = &stand.world().host;
    let echo = echo(&stand);
    let guest = stand.guest("tap0");
    put(&stand, "a", json!({ "tap": "tap0", "policy": "web" }));
    let own = source(&guest, &echo);
    let other = POOL[usize::from(own == POOL[0])];
    host.ip(&format!("addr del {own}/32 dev up0")).unwrap();
    eventually("the other address", || {
        let connected = guest.run(|| tcp::connect(echo.address(), BRIEFLY)).is_ok();
        (connected && *echo.peers().last()?.ip() == other).then_some(())
    });
    host.ip(&format!("addr del {other}/32 dev up0")).unwrap();
    let refused = || {
        let (_, stats) = stand.ask("GET", "/v1/stats", None);
        stats["vms"][0]["refused"]["no_address"]
            .as_u64()
            .unwrap_or(0)
    };
    eventually("the end of it", || {
        let _ = guest.run(|| tcp::connect_outcome(echo.address(), BRIEFLY));
        (refused() > 0).then_some(())
    });
    assert!(echo.peers().iter().all(|peer| POOL.contains(peer.ip())));
    let why = format!("/v1/vms/a/why?address={SERVER}&port=7000");
    let (_, why) = stand.ask("GET", &why, None);
    assert_eq!(why["refusal"], "no_address", "{why}");
}

#[test]
fn what_is_not_there_is_refused_with_a_remedy() {
    require_root_and_tun!();
    let stand = stand(&[]);
    let _guest = stand.guest("tap0");
    let says = |(status, problem): (u16, Value), words: &[&str]| {
        let detail = problem["detail"].as_str().unwrap_or_default().to_owned();
        let all = words.iter().all(|word| detail.contains(word));
        assert!(status == 422 && all, "{status} {problem}");
    };
    let put = |text: &str| stand.put_text("/v1/policies/new", text);
    let remedy = [
        "not an address of this host",
        "ip address add 198.18.0.99/32 dev up0",
    ];
    says(put(&policy_with("\"198.18.0.99\"")), &remedy);
    says(put(&policy_with("\"198.18.0.8/29\"")), &["198.18.0.10"]);
    says(put(&policy_with("\"198.18.0.255\"")), &["198.18.0.255"]);
    says(
        put(&policy_with("\"127.0.0.1\"")),
        &["can't have that source"],
    );
    let by = |device: &str| format!("default = \"allow\"\negress.uplink = \"{device}\"\n");
    says(put(&by("wg9")), &["no such device", "ip link"]);
    says(put(&by("lo")), &["loopback"]);
    let body = json!({ "tap": "tap0", "nat_addresses": ["198.18.0.99"] });
    says(stand.ask("PUT", "/v1/vms/a", Some(body)), &remedy);
    // What was refused changes nothing.
    let (_, policies) = stand.ask("GET", "/v1/policies", None);
    assert!(!policies.to_string().contains("new"), "{policies}");
}

/// A second uplink, by which main leads to the world if it leads there by no other.
fn add_second(world: &World) {
    add_second_uplink(world);
    let host = &world.host;
    host.ip(&format!(
        "route add default via 198.18.1.1 dev {SECOND} metric 9000"
    ))
    .unwrap();
}

#[test]
fn a_policy_names_the_uplink_and_the_address_of_its_vms() {
    require_root_and_tun!();
    let stand = Stand::new();
    add_second(stand.world());
    let host = &stand.world().host;
    host.ip(&format!("addr add 198.18.1.8/32 dev {SECOND}"))
        .unwrap();
    let echo = echo(&stand);
    let (guest, other) = (stand.guest("tap0"), stand.guest("tap1"));
    let by = format!("default = \"allow\"\negress.uplink = \"{SECOND}\"\n");
    eventually("the device", || {
        matches!(stand.put_policy("/v1/policies/tunnel", &by), 200 | 201).then_some(())
    });
    put(&stand, "a", json!({ "tap": "tap0", "policy": "tunnel" }));
    put(&stand, "b", json!({ "tap": "tap1" }));
    assert_eq!(source(&guest, &echo), SECOND_ADDRESS);
    assert_eq!(source(&other, &echo), HOST);
    let mut stream = connected(&guest, &echo);
    let with_address = format!("{by}nat_addresses = [\"198.18.1.8\"]\n");
    assert_eq!(stand.put_policy("/v1/policies/tunnel", &with_address), 200);
    let ended = guest.run(|| stream.read(&mut [0; 16]));
    assert!(ended.is_err(), "{ended:?}");
    assert_eq!(source(&guest, &echo), Ipv4Addr::new(198, 18, 1, 8));

    // The device goes: no flow leaves by another. It comes back.
    let lacks = || {
        stand
            .ask("GET", "/v1/vms/a", None)
            .1
            .get("lacks_uplink")
            .is_some()
    };
    host.ip(&format!("link del {SECOND}")).unwrap();
    eventually("its end", || lacks().then_some(()));
    let outcome = guest.run(|| tcp::connect_outcome(echo.address(), BRIEFLY));
    assert!(!matches!(outcome.unwrap(), ConnectOutcome::Connected(_)));
    add_second(stand.world());
    host.ip(&format!("addr add 198.18.1.8/32 dev {SECOND}"))
        .unwrap();
    eventually("the uplink", || {
        guest.run(|| tcp::connect(echo.address(), BRIEFLY)).ok()
    });
    assert!(!lacks());
    assert_eq!(source(&guest, &echo), Ipv4Addr::new(198, 18, 1, 8));

    // The VM's own definition comes before its policy, and the policy may name none any more.
    let (status, _) = stand.ask("PATCH", "/v1/vms/a", Some(json!({ "policy": null })));
    assert_eq!(status, 200);
    assert_eq!(source(&guest, &echo), HOST);
    let (status, _) = stand.ask("PATCH", "/v1/vms/a", Some(json!({ "policy": "tunnel" })));
    assert_eq!(status, 200);
    assert_eq!(source(&guest, &echo), Ipv4Addr::new(198, 18, 1, 8));
    assert_eq!(
        stand.put_policy("/v1/policies/tunnel", "default = \"allow\"\n"),
        200
    );
    assert_eq!(source(&guest, &echo), HOST);
}

#[test]
fn a_policy_leads_into_a_tunnel_without_l2() {
    require_root_and_tun!();
    let world = World::with(WorldConfig {
        uplink: Uplink::Tun,
        ..WorldConfig::default()
    })
    .unwrap();
    add_second(&world);
    let stand = Stand::of(world, SECOND, &[]);
    let echo = echo(&stand);
    let guest = stand.guest("tap0");
    let text = "default = \"allow\"\nnat_addresses = [\"198.18.0.8\"]\negress.uplink = \"up0\"\n";
    stand
        .world()
        .host
        .ip("addr add 198.18.0.8/32 dev up0")
        .unwrap();
    eventually("the address", || {
        matches!(stand.put_policy("/v1/policies/tunnel", text), 200 | 201).then_some(())
    });
    put(&stand, "a", json!({ "tap": "tap0", "policy": "tunnel" }));
    assert_eq!(source(&guest, &echo), POOL[0]);
    let mut stream = connected(&guest, &echo);
    guest
        .run(|| EchoSession::new(&mut stream).round(1_000_000))
        .unwrap();
}
