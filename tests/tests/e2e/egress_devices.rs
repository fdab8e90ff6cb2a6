//! Uplinks of other kinds that policies name: a VLAN, a macvlan, a tunnel of WireGuard, one without L2.
use std::{
    net::{IpAddr, SocketAddr, TcpStream},
    process::Command,
};

use serde_json::{Value, json};
use slipgate_testbed::{
    Capture, Guest, NetNs,
    accounting::FlowKey,
    clients::{
        IcmpError, tcp,
        tcp::{ConnectOutcome, EchoSession},
        udp,
        udp::UdpOutcome,
    },
    left_out,
    rig::on_path,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    skipped,
    world::{UPLINK, WORLD_LINK},
};

use crate::{
    BRIEFLY, Cell, WAIT,
    api::Stand,
    eventually,
    matrix::{add_address, matrix},
    stand::SECOND,
};

matrix! {
    a_policy_names_a_vlan_as_uplink_beside_the_device_under_it: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    a_policy_names_a_macvlan_as_uplink_beside_the_device_under_it: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    a_policy_leads_into_a_wireguard_tunnel: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    a_policy_leads_into_a_tunnel_without_l2: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
}

fn put(stand: &Stand, name: &str, body: Value) {
    let (status, vm) = stand.ask("PUT", &format!("/v1/vms/{name}"), Some(body));
    assert!(matches!(status, 200 | 201), "{status} {vm}");
}

/// Puts the policy `own` in force, once slipgate has seen what it names.
fn put_policy(stand: &Stand, text: &str) {
    eventually("what the policy names", || {
        matches!(stand.put_policy("/v1/policies/own", text), 200 | 201).then_some(())
    });
}

fn echo(stand: &Stand) -> TcpServer<IpAddr> {
    let at = (stand.cell.server(), 7000);
    TcpServer::start(&stand.world().net, at, TcpService::Echo).unwrap()
}

fn connected(guest: &Guest, echo: &TcpServer<IpAddr>) -> TcpStream {
    let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    exchange(guest, &mut stream, 10_000);
    stream
}

fn exchange(guest: &Guest, stream: &mut TcpStream, bytes: usize) {
    guest.run(|| EchoSession::new(stream).round(bytes)).unwrap();
}

/// The address from which the server sees a new connection of the guest.
fn source(guest: &Guest, echo: &TcpServer<IpAddr>) -> IpAddr {
    drop(connected(guest, echo));
    echo.peers().last().unwrap().ip()
}

fn is_answered(guest: &Guest, datagrams: &UdpServer<IpAddr>, bytes: usize) {
    let answer = guest.run(|| udp::probe(datagrams.address(), &vec![7; bytes], WAIT));
    assert!(matches!(answer, Ok(UdpOutcome::Answered(_))), "{answer:?}");
}

/// Nothing of the guest's leaves while the device is away.
fn leaves_by_no_other(stand: &Stand, guest: &Guest, echo: &TcpServer<IpAddr>) {
    eventually("its end", || {
        let vm = stand.ask("GET", "/v1/vms/a", None).1;
        (vm["lacks_uplink"] == true).then_some(())
    });
    let outcome = guest.run(|| tcp::connect_outcome(echo.address(), BRIEFLY));
    assert!(!matches!(outcome.unwrap(), ConnectOutcome::Connected(_)));
}

/// Addresses of the host and of the world's router on the device under test.
fn ends(cell: Cell) -> [IpAddr; 2] {
    match cell.is_ipv6() {
        false => ["198.18.7.2", "198.18.7.1"],
        true => ["2001:db8:7::2", "2001:db8:7::1"],
    }
    .map(|address| address.parse().unwrap())
}

/// Gives the host's device and the world's their addresses, and the host a default route by its device
/// that the host itself does not use.
fn give_addresses(stand: &Stand, device: &str, there: &str, via: &str) {
    let world = stand.world();
    let [host, router] = ends(stand.cell);
    let (family, len, nodad) = match stand.cell.is_ipv6() {
        false => ("-4", 24, ""),
        true => ("-6", 64, "nodad"),
    };
    for (ns, device, address) in [(&world.host, device, host), (&world.net, there, router)] {
        if stand.cell.is_ipv6() {
            // Until it is sure of its own address on the link, a kernel asks for no neighbour's.
            let key = format!("net.ipv6.conf.{device}.accept_dad");
            ns.sysctl(&key, "0").unwrap();
        }
        ns.ip(&format!("addr add {address}/{len} dev {device} {nodad}"))
            .unwrap();
        ns.ip(&format!("link set {device} up")).unwrap();
    }
    let default = format!("{family} route add default {via} dev {device} metric 9000");
    world.host.ip(&default).unwrap();
}

/// Name of a device above the uplink.
const UPPER: &str = "upper7";

/// Makes a device of this kind above each end of the uplink.
fn add_upper(stand: &Stand, kind: &str) -> slipgate_testbed::Result<()> {
    let world = stand.world();
    let add = format!("link add link {UPLINK} name {UPPER} type {kind}");
    world.host.ip(&add)?;
    let there = format!("link add link {WORLD_LINK} name w7 type {kind}");
    world.net.ip(&there).unwrap();
    let [_, router] = ends(stand.cell);
    give_addresses(stand, UPPER, "w7", &format!("via {router}"));
    Ok(())
}

fn a_policy_names_a_vlan_as_uplink_beside_the_device_under_it(cell: Cell) {
    let (stand, kind) = (Stand::of(cell, &[]), "vlan id 7");
    if add_upper(&stand, kind).is_err() {
        return left_out!("the kernel has no VLANs");
    }
    carries_its_vms_and_the_device_under_it_others(&stand, kind);
}

/// It has no tag: its MAC alone tells its packets from those of the device under it.
fn a_policy_names_a_macvlan_as_uplink_beside_the_device_under_it(cell: Cell) {
    let (stand, kind) = (Stand::of(cell, &[]), "macvlan mode bridge");
    for ns in [&stand.world().host, &stand.world().net] {
        // Both devices hear both devices' questions, and each is to answer for its own address alone.
        ns.sysctl("net.ipv4.conf.all.arp_ignore", "1").unwrap();
        ns.sysctl("net.ipv4.conf.all.arp_announce", "2").unwrap();
    }
    if add_upper(&stand, kind).is_err() {
        return left_out!("the kernel has no macvlans");
    }
    carries_its_vms_and_the_device_under_it_others(&stand, kind);
}

/// Of the device of this kind, which is there.
fn carries_its_vms_and_the_device_under_it_others(stand: &Stand, kind: &str) {
    let (cell, [host, _]) = (stand.cell, ends(stand.cell));
    let echo = echo(stand);
    let (guest, other) = (stand.guest("tap0"), stand.guest("tap1"));
    let by = format!("default = \"allow\"\negress.uplink = \"{UPPER}\"\n");
    put_policy(stand, &by);
    put(stand, "a", json!({ "tap": "tap0", "policy": "own" }));
    put(stand, "b", json!({ "tap": "tap1" }));
    assert_eq!(source(&guest, &echo), host);
    assert_eq!(source(&other, &echo), cell.host());
    let at = (cell.server(), 7);
    let datagrams = UdpServer::start(&stand.world().net, at, UdpService::Echo).unwrap();
    for guest in [&guest, &other] {
        exchange(guest, &mut connected(guest, &echo), 4_000_000);
        is_answered(guest, &datagrams, 1);
    }
    // The device goes, and comes again.
    stand.world().host.ip(&format!("link del {UPPER}")).unwrap();
    stand.world().net.ip("link del w7").unwrap();
    leaves_by_no_other(stand, &guest, &echo);
    add_upper(stand, kind).unwrap();
    eventually("the uplink", || {
        guest.run(|| tcp::connect(echo.address(), BRIEFLY)).ok()
    });
    assert_eq!(source(&guest, &echo), host);
}

/// Name of the tunnel's device at both ends.
const TUNNEL: &str = "wg0";
/// Port of the tunnel at both ends.
const TUNNEL_PORT: u16 = 51820;

/// Why there is no tunnel.
enum Lacks {
    Kernel,
    Tool,
}

/// Makes a tunnel of WireGuard between the host and the world, over the uplink and by the cell's family.
fn add_wireguard(stand: &Stand) -> Result<(), Lacks> {
    let world = stand.world();
    let add = format!("link add {TUNNEL} type wireguard");
    world.host.ip(&add).map_err(|_| Lacks::Kernel)?;
    on_path("wg").map_err(|_| Lacks::Tool)?;
    world.net.ip(&add).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let keys = [&world.host, &world.net].map(|ns| {
        let file = scratch.path().join("key");
        std::fs::write(&file, wg(ns, "genkey")).unwrap();
        let set = format!(
            "set {TUNNEL} listen-port {TUNNEL_PORT} private-key {}",
            file.display()
        );
        wg(ns, &set);
        wg(ns, &format!("show {TUNNEL} public-key"))
    });
    let [host_key, world_key] = keys;
    for (ns, peer, address) in [
        (&world.host, world_key, stand.cell.router()),
        (&world.net, host_key, stand.cell.host()),
    ] {
        let endpoint = SocketAddr::new(address, TUNNEL_PORT);
        let peer = peer.trim();
        let all = "allowed-ips 0.0.0.0/0,::/0";
        wg(
            ns,
            &format!("set {TUNNEL} peer {peer} endpoint {endpoint} {all}"),
        );
    }
    give_addresses(stand, TUNNEL, TUNNEL, "");
    Ok(())
}

/// Runs `wg ARGUMENTS` in the namespace and returns its output.
fn wg(ns: &NetNs, arguments: &str) -> String {
    let mut command = Command::new("wg");
    command.args(arguments.split_whitespace());
    String::from_utf8(ns.output(command).unwrap().stdout).unwrap()
}

/// Everything of the guest's goes inside, by the kernel's own WireGuard.
fn a_policy_leads_into_a_wireguard_tunnel(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    match add_wireguard(&stand) {
        Ok(()) => {}
        Err(Lacks::Kernel) => return left_out!("the kernel has no WireGuard"),
        Err(Lacks::Tool) => return skipped!("there is no wg (Debian: wireguard-tools)"),
    }
    let [own, _] = ends(cell);
    let (net, host) = (&stand.world().net, &stand.world().host);
    let echo = echo(&stand);
    let datagrams = UdpServer::start(net, (cell.server(), 7), UdpService::Echo).unwrap();
    datagrams.allow_fragments().unwrap();
    let (guest, other) = (stand.guest("tap0"), stand.guest("tap1"));
    let by_uplink = format!("default = \"allow\"\negress.uplink = \"{TUNNEL}\"\n");
    put_policy(&stand, &by_uplink);
    put(&stand, "a", json!({ "tap": "tap0", "policy": "own" }));
    put(&stand, "b", json!({ "tap": "tap1" }));

    let inside = Capture::start(net, TUNNEL).unwrap();
    let outside = Capture::start(net, WORLD_LINK).unwrap();
    assert_eq!(source(&other, &echo), cell.host());
    assert_eq!(source(&guest, &echo), own);
    let mut stream = connected(&guest, &echo);
    let from = *echo.peers().last().unwrap();
    exchange(&guest, &mut stream, 4_000_000);
    // The guest is told the tunnel's MTU by its first larger datagram. Then whole ones, and fragments.
    let told = guest.run(|| udp::probe(datagrams.address(), &[7; 1_400], WAIT));
    let is_told = |error: &IcmpError| (error.kind, error.code) == cell.too_large();
    assert!(
        matches!(&told, Ok(UdpOutcome::Refused(error, _)) if is_told(error)),
        "{told:?}"
    );
    for bytes in [100, 1_400, 4_000] {
        is_answered(&guest, &datagrams, bytes);
    }
    let (inside, outside) = (inside.finish().unwrap(), outside.finish().unwrap());
    let comes = |key: &FlowKey| key.source.ip() == own;
    let sent = inside.received.sum(|key| key.source == from);
    assert!(sent.bytes > 4_000_000, "{inside:?}");
    assert_eq!(outside.received.sum(comes).packets, 0, "{outside:?}");
    let tunnel = SocketAddr::new(cell.host(), TUNNEL_PORT);
    let carried = outside.received.sum(|key| key.source == tunnel);
    assert!(carried.bytes > sent.bytes, "{carried:?} {sent:?}");
    // The kernel carries it.
    let rows = stand.ask("GET", "/v1/flows", None).1;
    let mut flows = rows.as_array().unwrap().iter();
    let row = flows.find(|row| row["nat"] == from.to_string().as_str());
    let row = row.unwrap_or_else(|| panic!("{from} of {rows}"));
    assert_eq!(row["path"], "kernel", "{row}");
    assert!(row["tx_bytes"].as_u64() >= Some(4_000_000), "{row}");

    // The tunnel goes, and comes again with other keys.
    let remove = || {
        for ns in [host, net] {
            ns.ip(&format!("link del {TUNNEL}")).unwrap();
        }
    };
    remove();
    leaves_by_no_other(&stand, &guest, &echo);
    assert!(add_wireguard(&stand).is_ok());
    eventually("the tunnel", || {
        guest.run(|| tcp::connect(echo.address(), BRIEFLY)).ok()
    });
    assert_eq!(source(&guest, &echo), own);
}

/// Like a tunnel of WireGuard, but a TUN, which every kernel has, and without keys.
fn a_policy_leads_into_a_tunnel_without_l2(cell: Cell) {
    let (world, flags) = cell.world_without_l2();
    let stand = Stand::in_world(cell, world, SECOND, flags);
    let echo = echo(&stand);
    let guest = stand.guest("tap0");
    let [own, _] = cell.pool();
    let text =
        format!("default = \"allow\"\nnat_addresses = [\"{own}\"]\negress.uplink = \"{UPLINK}\"\n");
    add_address(stand.world(), own, UPLINK);
    put_policy(&stand, &text);
    put(&stand, "a", json!({ "tap": "tap0", "policy": "own" }));
    assert_eq!(source(&guest, &echo), own);
    exchange(&guest, &mut connected(&guest, &echo), 1_000_000);
}
