//! The host's own NAT that comes, or begins to matter, while slipgate serves.

use std::net::{IpAddr, Ipv6Addr};

use serde_json::{Value, json};
use slipgate_testbed::{
    NetNs, Slipgate, World, WorldConfig,
    clients::{
        icmp, tcp,
        udp::{self, UdpOutcome},
    },
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::{SERVER, UPLINK},
    world_ipv6::{self, HOST6, SERVER6},
};

use crate::{
    Cell, Stand, WAIT, api, eventually,
    host_nat::{BESIDE, Held, PORTS, masquerade_at, remove_tables, routed_client},
    matrix::{at, cells, matrix},
    stand::{SECOND, add_second_uplink, give_ipv6},
};

matrix! {
    masquerading_that_comes_while_guests_have_every_port_leaves_them_alone: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "flows are sockets of the host's, whose ports its own NAT knows";
    tuples_that_masqueraded_clients_have_are_left_to_them: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "flows are sockets of the host's, whose ports its own NAT knows";
}

/// Ports as a flag.
fn ports() -> String {
    format!("{}-{}", PORTS.start(), PORTS.end())
}

/// Waits until slipgate's log says it. The kernel gives notice of rules at once.
fn says(slipgate: &Slipgate, words: &str) {
    eventually(words, || slipgate.stderr().contains(words).then_some(()));
}

/// What `slipgate doctor` says of the host's NAT.
fn doctor(slipgate: &Slipgate, flags: &[&str]) -> Vec<Value> {
    let output = slipgate.run(&[&["doctor", "--json"], flags].concat());
    let found: Vec<Value> = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    let of_nat = found.into_iter().filter(|it| it["what"] == "host's NAT");
    of_nat.collect()
}

fn all_are_notes_of(found: &[Value], words: &str) {
    let is_one = |it: &Value| {
        let found = it["found"].as_str().unwrap();
        it["state"] == "note" && found.contains(words)
    };
    assert!(!found.is_empty() && found.iter().all(is_one), "{found:?}");
}

fn masquerading_that_comes_while_guests_have_every_port_leaves_them_alone(cell: Cell) {
    let world = WorldConfig {
        ip_forward: true,
        ..Default::default()
    };
    let ports = ports();
    let stand = Stand::of_several(cell, world, &[], &[], &["--nat-ports", &ports]);
    let host = &stand.world.host;
    let server = at(cell.server(), 7000);
    let address = (cell.server(), 7000);
    let _tcp = TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap();
    let _udp = UdpServer::start(&stand.world.net, address, UdpService::Echo).unwrap();
    let mut of_guest = stand.run(|| Held::open(server, None));
    let client = routed_client(host);
    masquerade_at(host, "own", UPLINK, BESIDE);
    // From the very ports that guests' flows have at the uplink.
    let mut of_client = client.run(|| Held::open(server, Some(PORTS)));
    let mut all_live = || {
        of_guest.lives();
        of_client.lives();
    };
    all_live();
    assert_eq!(stand.slipgate.flows().unwrap().len(), 2 * PORTS.count());
    let [clear] = doctor(&stand.slipgate, &[]).try_into().unwrap();
    let found = clear["found"].as_str().unwrap();
    assert!(clear["state"] == "ok" && found.contains(&ports), "{clear}");
    // These ports are not the served ones, but those of a start that is planned.
    let planned = doctor(&stand.slipgate, &["--nat-ports", "50000-60000"]);
    assert_eq!(planned[0]["state"], "note", "{planned:?}");
    assert!(!stand.slipgate.stderr().contains("own out"));

    // Rules that may use guests' ports are told of as they come and when they have gone. Connections that
    // are there stay as they are.
    masquerade_at(host, "late", UPLINK, "masquerade");
    says(&stand.slipgate, "late out");
    all_are_notes_of(&doctor(&stand.slipgate, &[]), "late out");
    all_live();
    remove_tables(host, "late");
    says(&stand.slipgate, "keep clear of guests' tuples again");
    assert_eq!(doctor(&stand.slipgate, &[])[0]["state"], "ok");
    all_live();
    // Of the same once more.
    let told = |stand: &Stand| stand.slipgate.stderr().matches("late out").count();
    let before = told(&stand);
    masquerade_at(host, "late", UPLINK, "masquerade");
    eventually("told again", || (told(&stand) > before).then_some(()));
}

/// Masquerading to all ports comes while slipgate serves, and clients by it have ports of guests'. The
/// broker has the host's connections read as it notices rules, and every ten seconds.
fn tuples_that_masqueraded_clients_have_are_left_to_them(cell: Cell) {
    let world = WorldConfig {
        ip_forward: true,
        ..Default::default()
    };
    let stand = Stand::of_several(cell, world, &[], &[], &["--nat-ports", &ports()]);
    let host = &stand.world.host;
    let server = at(cell.server(), 7000);
    let address = (cell.server(), 7000);
    let _tcp = TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap();
    let _udp = UdpServer::start(&stand.world.net, address, UdpService::Echo).unwrap();
    let client = routed_client(host);
    masquerade_at(host, "own", UPLINK, "masquerade");
    says(&stand.slipgate, "own out");
    let theirs: Vec<u16> = PORTS.step_by(4).collect();
    let mut of_client = client.run(|| Held::from_ports(server, &theirs));
    masquerade_at(host, "more", UPLINK, "masquerade");
    says(&stand.slipgate, "more out");
    // Of TCP and of UDP.
    let left_to_them = format!("leave {} ports", 2 * theirs.len());
    eventually("the host's connections are read", || {
        let found = doctor(&stand.slipgate, &[]);
        let says = |it: &Value| it["remedy"].as_str().unwrap().contains(&left_to_them);
        (found.len() >= 2 && found.iter().all(says)).then_some(())
    });

    let left = vec![0; PORTS.count() - theirs.len()];
    let mut of_guest = stand.run(|| Held::from_ports(server, &left));
    for _ in 0..2 {
        of_guest.lives();
        of_client.lives();
    }
    let flows = stand.slipgate.flows().unwrap();
    assert_eq!(flows.len(), 2 * left.len());
    stand.run(|| tcp::expect_refused(server)).unwrap();
}

/// A world with a second uplink, in both families, by which nobody leaves who does not name it.
fn two_uplinks() -> World {
    let world = World::with(WorldConfig {
        ip_forward: true,
        ..Default::default()
    })
    .unwrap();
    world.give_ipv6().unwrap();
    add_second_uplink(&world);
    for (ns, device) in [(&world.host, SECOND), (&world.net, "w1")] {
        ns.sysctl(&format!("net.ipv6.conf.{device}.accept_dad"), "0")
            .unwrap();
        world_ipv6::enable(ns, &[device]).unwrap();
    }
    let (host, net) = (&world.host, &world.net);
    net.ip("-6 addr add 2001:db8:2::1/64 dev w1 nodad").unwrap();
    host.ip(&format!("-6 addr add 2001:db8:2::2/64 dev {SECOND} nodad"))
        .unwrap();
    for (family, router) in [("-4", "198.18.1.1"), ("-6", "2001:db8:2::1")] {
        host.ip(&format!(
            "{family} route add default via {router} dev {SECOND} metric 9000"
        ))
        .unwrap();
    }
    world
}

/// Has a client's packets leave by the second uplink.
fn leave_by_second(host: &NetNs) {
    for (family, router) in [("-4", "198.18.1.1"), ("-6", "2001:db8:2::1")] {
        for line in [
            format!("route add default via {router} dev {SECOND} table 77"),
            "rule add iif c0 lookup 77".to_owned(),
        ] {
            host.ip(&format!("{family} {line}")).unwrap();
        }
    }
}

fn refused(answer: (u16, Value), parts: &[&str]) {
    let (status, problem) = answer;
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert_eq!(status, 422, "{problem}");
    for part in parts {
        assert!(detail.contains(part), "{detail}\n  not {part}");
    }
}

#[test]
fn a_vm_or_policy_with_an_uplink_that_masquerades_is_refused_or_lives_beside_it() {
    require_root_and_tun!();
    let world = two_uplinks();
    let client = routed_client(&world.host);
    leave_by_second(&world.host);
    masquerade_at(&world.host, "own", SECOND, "masquerade");
    let ports = ports();
    let stand = api::Stand::in_world(
        cells::hybrid_ipv4,
        world,
        UPLINK,
        &["--nat-ports", &ports, "--ipv6", "nat"],
    );
    let (host, net) = (&stand.world().host, &stand.world().net);
    let guest = stand.guest("tap0");
    give_ipv6(&guest);
    let put = || {
        stand.ask(
            "PUT",
            "/v1/vms/a",
            Some(json!({ "tap": "tap0", "uplink": SECOND })),
        )
    };
    let why = ["own out", SECOND, "--host-nat share"];
    refused(put(), &why);
    let by = format!("default = \"allow\"\negress.uplink = \"{SECOND}\"\n");
    refused(stand.put_text("/v1/policies/second", &by), &why);
    assert_eq!(stand.ask("GET", "/v1/vms/a", None).0, 404);

    // The answer to a request depends on the rules that there are then.
    remove_tables(host, "own");
    masquerade_at(host, "own", SECOND, BESIDE);
    let (status, vm) = put();
    assert_eq!(status, 201, "{vm}");
    let servers = [SERVER.into(), SERVER6.into()].map(|ip: IpAddr| (ip, 7000).into());
    let tcp4 = TcpServer::start(net, (SERVER, 7000), TcpService::Echo).unwrap();
    let udp4 = UdpServer::start(net, (SERVER, 7000), UdpService::Echo).unwrap();
    let tcp6 = TcpServer::start(net, (SERVER6, 7000), TcpService::Echo).unwrap();
    let udp6 = UdpServer::start(net, (SERVER6, 7000), UdpService::Echo).unwrap();
    let mut held = Vec::new();
    // A socket of IPv6 at any address has the port for IPv4, too.
    let (some, others): (Vec<u16>, Vec<u16>) = PORTS.partition(|port| port % 2 == 0);
    for (server, ports) in servers.into_iter().zip([some, others]) {
        held.push(guest.run(|| Held::open(server, None)));
        held.push(client.run(|| Held::from_ports(server, &ports)));
    }
    held.iter_mut().for_each(Held::lives);
    drop((tcp4, udp4, tcp6, udp6));

    // Another VM there is as welcome, and rules that come now are told of.
    let _second = stand.guest("tap1");
    let other = json!({ "tap": "tap1", "uplink": SECOND });
    assert_eq!(stand.ask("PUT", "/v1/vms/b", Some(other.clone())).0, 201);
    masquerade_at(host, "late", SECOND, "masquerade");
    says(&stand.daemon, "late out");
    all_are_notes_of(&doctor(&stand.daemon, &[]), SECOND);
    // It is shared already: no more is lost by a definition that is put again.
    assert_eq!(stand.ask("PUT", "/v1/vms/b", Some(other)).0, 200);
    remove_tables(host, "late");
    says(&stand.daemon, "keep clear of guests' tuples again");
}

#[test]
fn a_policy_whose_routes_lead_to_a_device_that_masquerades_is_refused() {
    require_root_and_tun!();
    let world = two_uplinks();
    for line in [
        "route add default via 198.18.1.1 dev up1 table 77",
        "rule add fwmark 7 lookup 77",
        "addr add 198.18.0.9/32 dev up0",
        "route add local 198.51.100.7/32 dev lo",
    ] {
        world.host.ip(line).unwrap();
    }
    masquerade_at(&world.host, "own", SECOND, "masquerade");
    let ports = ports();
    // At the uplink of all, others' address is not what they share.
    let flags = ["--nat-ports", &*ports, "--nat-address", "198.18.0.9"];
    let stand = api::Stand::in_world(cells::hybrid_ipv4, world, UPLINK, &flags);
    let _guest = stand.guest("tap0");
    let host = &stand.world().host;
    let policy = |egress: &str| format!("default = \"allow\"\negress.{egress}\n");
    let put = |egress: &str| stand.put_text("/v1/policies/there", &policy(egress));
    let ways = ["table = 77", "mark = 7", "routes = \"host\""];
    let keys = ["egress.table 77", "egress.mark 0x7", "egress.routes host"];
    for (egress, key) in ways.into_iter().zip(keys) {
        refused(put(egress), &[key, "own out", SECOND, "--host-nat share"]);
    }
    assert_eq!(stand.ask("GET", "/v1/policies/there", None).0, 404);
    // None of them leads by a device that is named besides.
    let only = format!("uplink = \"{UPLINK}\"\negress.table = 77");
    assert_eq!(put(&only).0, 200);

    // A mark whose packets no rule leads elsewhere leaves by the uplink of all.
    let pool = "mark = 9\nnat_addresses = [\"198.51.100.7\"]";
    host.nft(&format!(
        "add table ip pool\n\
         add chain ip pool out {{ type nat hook postrouting priority 101 ; }}\n\
         add rule ip pool out oifname {UPLINK} snat to 198.51.100.7"
    ))
    .unwrap();
    refused(put(pool), &["pool out", UPLINK]);
    host.nft("delete table ip pool").unwrap();

    // Where the host keeps its ports apart, each is as welcome, and so is a VM that has it.
    remove_tables(host, "own");
    masquerade_at(host, "own", SECOND, BESIDE);
    for egress in ways {
        let (status, put) = put(egress);
        assert_eq!(status, 200, "{egress}: {put}");
        let vm = json!({ "tap": "tap0", "policy": "there" });
        let (status, vm) = stand.ask("PUT", "/v1/vms/a", Some(vm));
        assert!(matches!(status, 200 | 201), "{egress}: {vm}");
    }
    // What is shared already is no reason to refuse more of it.
    masquerade_at(host, "late", SECOND, "masquerade");
    says(&stand.daemon, "late out");
    let other = stand.put_text("/v1/policies/other", &policy(ways[0]));
    assert_eq!(other.0, 200, "{}", other.1);
}

/// The address of a VM's own in the world.
const OWN6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 7, 0, 0, 0, 0, 8);

#[test]
fn a_vm_has_an_ipv6_address_of_its_own_beside_masquerading_and_none_that_the_host_gives() {
    require_root_and_tun!();
    let world = World::new().unwrap();
    world.give_ipv6().unwrap();
    let (host, net) = (&world.host, &world.net);
    net.ip(&format!("-6 route add 2001:db8:7::/64 via {HOST6}"))
        .unwrap();
    masquerade_at(host, "own", UPLINK, "masquerade");
    // Of no concern to a daemon whose VMs have IPv4 at another address alone, until one comes with IPv6.
    host.ip(&format!("addr add 198.18.0.8/32 dev {UPLINK}"))
        .unwrap();
    let stand = api::Stand::in_world(
        cells::hybrid_ipv4,
        world,
        UPLINK,
        &["--nat-address", "198.18.0.8"],
    );
    let (host, net) = (&stand.world().host, &stand.world().net);
    let guest = stand.guest("tap0");
    give_ipv6(&guest);
    let add = |more: &[&str]| {
        let args = ["vm", "add", "a", "--tap", "tap0", "--ipv6", "nat"];
        match stand.daemon.run(&[&args, more].concat()) {
            Ok(_) => (true, String::new()),
            Err(e) => (false, e.to_string()),
        }
    };
    let own = OWN6.to_string();
    let with_own = ["--nat-address", &*own];
    let refused_for = |more: &[&str], parts: &[&str]| {
        let (done, said) = add(more);
        assert!(!done);
        for part in parts {
            assert!(said.contains(part), "{said}\n  not {part}");
        }
    };
    refused_for(&[], &["own out", "IPv6 flows", "--host-nat share"]);

    // On the uplink, masquerading takes the newest address first, unless it is deprecated.
    let on_uplink = format!("{own}/128 dev {UPLINK}");
    host.ip(&format!("-6 addr add {on_uplink} nodad")).unwrap();
    eventually("the address", || {
        let (done, said) = add(&with_own);
        (!done && said.contains("own out")).then_some(())
    });
    host.ip(&format!("-6 addr change {on_uplink} preferred_lft 0"))
        .unwrap();
    eventually("the VM", || add(&with_own).0.then_some(()));

    let echo = TcpServer::start(net, (SERVER6, 7000), TcpService::Echo).unwrap();
    let datagrams = UdpServer::start(net, (SERVER6, 7), UdpService::Echo).unwrap();
    let streams = guest.run(|| {
        let to = at(SERVER6, 7000);
        let mut stream = tcp::connect(to, WAIT).unwrap();
        tcp::EchoSession::new(&mut stream).round(1_000_000).unwrap();
        let answer = udp::probe(at(SERVER6, 7), b"x", WAIT).unwrap();
        assert!(matches!(answer, UdpOutcome::Answered(_)), "{answer:?}");
        assert!(icmp::ping6(SERVER6, 100, WAIT).unwrap().is_some());
        stream
    });
    let own = IpAddr::from(OWN6);
    let tcp_peers: Vec<IpAddr> = echo.peers().iter().map(|peer| peer.ip()).collect();
    let udp_peers: Vec<IpAddr> = datagrams.peers().keys().map(|peer| peer.ip()).collect();
    assert_eq!((tcp_peers, udp_peers), (vec![own], vec![own]));
    drop(streams);

    // What comes later is told of: a translation to that very address.
    host.nft(&format!(
        "add table ip6 late\n\
         add chain ip6 late out {{ type nat hook postrouting priority 101 ; }}\n\
         add rule ip6 late out snat to 2001:db8:7::7-{own}"
    ))
    .unwrap();
    says(&stand.daemon, "late out");
}
