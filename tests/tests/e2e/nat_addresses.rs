//! Pools of source addresses, VMs' own addresses, and policies that name them with an uplink.
use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read as _,
    net::{IpAddr, TcpStream},
};

use serde_json::{Value, json};
use slipgate_testbed::{
    Guest,
    clients::{
        IcmpError, tcp,
        tcp::{ConnectOutcome, EchoSession},
        udp,
        udp::UdpOutcome,
    },
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::UPLINK,
};

use crate::{
    BRIEFLY, Cell, WAIT,
    api::Stand,
    eventually,
    matrix::{add_address, at, cells, matrix, pings, remove_address},
    stand::SECOND,
};

matrix! {
    rfc4787_req_2_all_that_a_vm_sends_comes_from_the_address_it_is_paired_with: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host chooses the addresses of its sockets (policy.md)";
    a_vm_keeps_its_address_when_another_engine_takes_over_and_when_the_pool_grows: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host chooses the addresses of its sockets (policy.md)";
    a_policy_that_takes_the_address_away_ends_the_flow_and_gives_another: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host chooses the addresses of its sockets (policy.md)";
    two_addresses_carry_twice_the_connections_to_one_server: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host chooses the addresses of its sockets (policy.md)";
    a_vm_has_a_public_address_of_its_own_by_which_its_forward_is_reached_too: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host chooses the addresses of its sockets (policy.md)";
    an_address_that_the_host_loses_is_given_up_and_none_steps_in_for_the_pool: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host chooses the addresses of its sockets (policy.md)";
    a_policy_names_the_uplink_and_the_address_of_its_vms: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host chooses the addresses of its sockets (policy.md)";
}

fn policy_with(addresses: &str) -> String {
    format!("default = \"allow\"\nnat_addresses = [{addresses}]\n")
}

/// A daemon on a host with all these addresses, with a policy `web` for two of them.
fn stand(cell: Cell, more: &[&str]) -> Stand {
    let stand = Stand::of(cell, more);
    for address in cell.pool().into_iter().chain(cell.others()) {
        add_address(stand.world(), address, UPLINK);
    }
    eventually("the addresses", || {
        let text = policy_with(cell.pool_prefix());
        matches!(stand.put_policy("/v1/policies/web", &text), 200 | 201).then_some(())
    });
    stand
}

fn put(stand: &Stand, name: &str, body: Value) -> Value {
    let (status, vm) = stand.ask("PUT", &format!("/v1/vms/{name}"), Some(body));
    assert!(matches!(status, 200 | 201), "{status} {vm}");
    vm
}

fn echo(stand: &Stand) -> TcpServer<IpAddr> {
    let at = (stand.cell.server(), 7000);
    TcpServer::start(&stand.world().net, at, TcpService::Echo).unwrap()
}

fn connected(guest: &Guest, echo: &TcpServer<IpAddr>) -> TcpStream {
    let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    guest
        .run(|| EchoSession::new(&mut stream).round(10_000))
        .unwrap();
    stream
}

/// The address from which the server sees a new connection of the guest.
fn source(guest: &Guest, echo: &TcpServer<IpAddr>) -> IpAddr {
    drop(connected(guest, echo));
    echo.peers().last().unwrap().ip()
}

fn rfc4787_req_2_all_that_a_vm_sends_comes_from_the_address_it_is_paired_with(cell: Cell) {
    let stand = stand(cell, &[]);
    let net = &stand.world().net;
    let echo = echo(&stand);
    let datagrams = UdpServer::start(net, (cell.server(), 7), UdpService::Echo).unwrap();
    datagrams.allow_fragments().unwrap();
    let mut seen = BTreeSet::new();
    for (name, tap) in [("a", "tap0"), ("b", "tap1"), ("c", "tap2"), ("d", "tap3")] {
        let guest = stand.guest(tap);
        put(&stand, name, json!({ "tap": tap, "policy": "web" }));
        let own = source(&guest, &echo);
        assert!(cell.pool().contains(&own), "{own}");
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
        let closed = guest
            .run(|| udp::probe(at(cell.server(), 9), b"x", WAIT))
            .unwrap();
        let [_, (kind, code)] = cell.unreachable();
        let unreachable = IcmpError { kind, code };
        assert!(
            matches!(closed, UdpOutcome::Refused(error, _) if error == unreachable),
            "{closed:?}"
        );
        assert!(pings(&guest, cell.server(), WAIT));
        let now: BTreeSet<IpAddr> = datagrams.peers().keys().map(|peer| peer.ip()).collect();
        seen.insert(own);
        assert_eq!(now, seen, "datagrams come from no other address");
        let why = format!("/v1/vms/{name}/why?address={}&port=7000", cell.server());
        let (_, why) = stand.ask("GET", &why, None);
        let via = why["via"].as_str().unwrap_or_default();
        assert!(
            via.starts_with(&format!("{own} by {} ", cell.router())),
            "{why}"
        );
        let told = why["explanation"].as_str().unwrap_or_default();
        assert!(told.contains(&format!("{own}, the one of 2")), "{why}");
    }
    assert_eq!(seen, BTreeSet::from(cell.pool()), "both have VMs");
}

fn a_vm_keeps_its_address_when_another_engine_takes_over_and_when_the_pool_grows(cell: Cell) {
    let stand = stand(cell, &[]);
    let echo = echo(&stand);
    let guest = stand.guest("tap0");
    put(&stand, "a", json!({ "tap": "tap0", "policy": "web" }));
    let mut stream = connected(&guest, &echo);
    let own = echo.peers().last().unwrap().ip();
    let mut echoes = || {
        guest
            .run(|| EchoSession::new(&mut stream).round(10_000))
            .unwrap()
    };
    // Larger pools would give one VM in two another address.
    let both = [cell.pool_prefix(), cell.others_prefix()].join(", ");
    let larger = policy_with(&both);
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

fn a_policy_that_takes_the_address_away_ends_the_flow_and_gives_another(cell: Cell) {
    let stand = stand(cell, &[]);
    let echo = echo(&stand);
    let (guest, other) = (stand.guest("tap0"), stand.guest("tap1"));
    put(&stand, "a", json!({ "tap": "tap0", "policy": "web" }));
    put(&stand, "other", json!({ "tap": "tap1" }));
    let mut stream = connected(&guest, &echo);
    let mut others = connected(&other, &echo);
    assert_eq!(echo.peers().last().unwrap().ip(), cell.host());
    let text = policy_with(cell.others_prefix());
    let (status, put) = stand.put_text("/v1/policies/web", &text);
    assert_eq!((status, put["cut"].as_u64()), (200, Some(1)), "{put}");
    let ended = guest.run(|| stream.read(&mut [0; 16]));
    assert!(ended.is_err(), "{ended:?}");
    assert!(cell.others().contains(&source(&guest, &echo)));
    other
        .run(|| EchoSession::new(&mut others).round(10_000))
        .unwrap();

    // A policy may leave flows where they are.
    let mut stream = connected(&guest, &echo);
    let text = format!("on_reload = \"keep\"\n{}", policy_with(cell.pool_prefix()));
    let (status, put) = stand.put_text("/v1/policies/web", &text);
    assert_eq!((status, put["cut"].as_u64()), (200, Some(0)), "{put}");
    guest
        .run(|| EchoSession::new(&mut stream).round(10_000))
        .unwrap();
    assert!(cell.pool().contains(&source(&guest, &echo)));
}

fn two_addresses_carry_twice_the_connections_to_one_server(cell: Cell) {
    let stand = stand(cell, &["--nat-ports", "61000-61007"]);
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
    let mut seen = BTreeMap::<IpAddr, usize>::new();
    for peer in echo.peers() {
        *seen.entry(peer.ip()).or_default() += 1;
    }
    assert_eq!(
        seen,
        cell.pool().map(|address| (address, 8)).into(),
        "all ports of each"
    );
    assert_eq!(open.len(), 16);
    let (_, stats) = stand.ask("GET", "/v1/stats", None);
    let of_vms = stats["vms"].as_array().unwrap().iter();
    let refused = of_vms.filter_map(|vm| vm["refused"]["ports_exhausted"].as_u64());
    assert!(refused.sum::<u64>() >= 36 - 16, "{stats}");
}

fn a_vm_has_a_public_address_of_its_own_by_which_its_forward_is_reached_too(cell: Cell) {
    let stand = stand(cell, &[]);
    let (host, net) = (&stand.world().host, &stand.world().net);
    let (routed, own) = cell.routed();
    host.ip(&format!("route add local {routed} dev lo"))
        .unwrap();
    net.ip(&format!("route add {routed} via {}", cell.host()))
        .unwrap();
    let echo = echo(&stand);
    let guest = stand.guest("tap0");
    let _service = TcpServer::start(&guest.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    let body = json!({ "tap": "tap0", "nat_addresses": [own], "forwards": ["tcp:8080:80"] });
    let vm = eventually("the route", || {
        let (status, vm) = stand.ask("PUT", "/v1/vms/a", Some(body.clone()));
        (status == 201).then_some(vm)
    });
    assert_eq!(vm["nat_addresses"], json!([own]));
    assert_eq!(source(&guest, &echo), own);
    for address in [own, cell.host()] {
        let mut stream = net.run(|| tcp::connect(at(address, 8080), WAIT)).unwrap();
        net.run(|| EchoSession::new(&mut stream).round(10_000))
            .unwrap();
    }
    // It is no other VM's, and no policy's.
    let _other = stand.guest("tap1");
    let body = json!({ "tap": "tap1", "nat_addresses": [routed] });
    let (status, problem) = stand.ask("PUT", "/v1/vms/b", Some(body));
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(
        status == 409 && detail.contains(&format!("{own}: a has it")),
        "{status} {problem}"
    );
    let text = policy_with(&format!("\"{own}\""));
    let (status, problem) = stand.put_text("/v1/policies/other", &text);
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(
        status == 409 && detail.contains("it is of a alone"),
        "{status} {problem}"
    );
    // Nor may a VM take one of a policy for itself.
    let body = json!({ "tap": "tap1", "nat_addresses": [cell.pool()[0]] });
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
    let named = format!("tcp:{}:80", at(own, 9000));
    refuses(
        json!({ "tap": "tap1", "forwards": [named] }),
        "a has that address for itself",
    );
    let third = cell.others()[0];
    let named = format!("tcp:{}:80", at(third, 9000));
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
    assert_eq!(source(&guest, &echo), cell.host());
}

fn an_address_that_the_host_loses_is_given_up_and_none_steps_in_for_the_pool(cell: Cell) {
    let stand = stand(cell, &[]);
    let echo = echo(&stand);
    let guest = stand.guest("tap0");
    put(&stand, "a", json!({ "tap": "tap0", "policy": "web" }));
    let own = source(&guest, &echo);
    let pool = cell.pool();
    let other = pool[usize::from(own == pool[0])];
    remove_address(stand.world(), own, UPLINK);
    eventually("the other address", || {
        let connected = guest.run(|| tcp::connect(echo.address(), BRIEFLY)).is_ok();
        (connected && echo.peers().last()?.ip() == other).then_some(())
    });
    remove_address(stand.world(), other, UPLINK);
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
    assert!(echo.peers().iter().all(|peer| pool.contains(&peer.ip())));
    let why = format!("/v1/vms/a/why?address={}&port=7000", cell.server());
    let (_, why) = stand.ask("GET", &why, None);
    assert_eq!(why["refusal"], "no_address", "{why}");
}

#[test]
fn what_is_not_there_is_refused_with_a_remedy() {
    require_root_and_tun!();
    let stand = stand(cells::hybrid_ipv4, &[]);
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

fn a_policy_names_the_uplink_and_the_address_of_its_vms(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let second = cell.second_of_two();
    let add_second = || {
        cell.add_second_uplink(stand.world());
        add_address(stand.world(), second, SECOND);
    };
    add_second();
    let host = &stand.world().host;
    let echo = echo(&stand);
    let (guest, other) = (stand.guest("tap0"), stand.guest("tap1"));
    let by = format!("default = \"allow\"\negress.uplink = \"{SECOND}\"\n");
    eventually("the device", || {
        matches!(stand.put_policy("/v1/policies/tunnel", &by), 200 | 201).then_some(())
    });
    put(&stand, "a", json!({ "tap": "tap0", "policy": "tunnel" }));
    put(&stand, "b", json!({ "tap": "tap1" }));
    assert_eq!(source(&guest, &echo), cell.second_address());
    assert_eq!(source(&other, &echo), cell.host());
    let mut stream = connected(&guest, &echo);
    let with_address = format!("{by}nat_addresses = [\"{second}\"]\n");
    assert_eq!(stand.put_policy("/v1/policies/tunnel", &with_address), 200);
    let ended = guest.run(|| stream.read(&mut [0; 16]));
    assert!(ended.is_err(), "{ended:?}");
    assert_eq!(source(&guest, &echo), second);

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
    add_second();
    eventually("the uplink", || {
        guest.run(|| tcp::connect(echo.address(), BRIEFLY)).ok()
    });
    assert!(!lacks());
    assert_eq!(source(&guest, &echo), second);

    // The VM's own definition comes before its policy, and the policy may name none any more.
    let (status, _) = stand.ask("PATCH", "/v1/vms/a", Some(json!({ "policy": null })));
    assert_eq!(status, 200);
    assert_eq!(source(&guest, &echo), cell.host());
    let (status, _) = stand.ask("PATCH", "/v1/vms/a", Some(json!({ "policy": "tunnel" })));
    assert_eq!(status, 200);
    assert_eq!(source(&guest, &echo), second);
    assert_eq!(
        stand.put_policy("/v1/policies/tunnel", "default = \"allow\"\n"),
        200
    );
    assert_eq!(source(&guest, &echo), cell.host());
}
