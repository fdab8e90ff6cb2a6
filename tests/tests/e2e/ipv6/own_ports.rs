//! Ports of a guest's own address that the world may open, and guests that reach each other by them.
use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use serde_json::Value;
use slipgate_testbed::{
    GUEST_DEVICE, GuestConfig, World, WorldConfig, census::Census, require_root_and_tun,
    world::WORLD_LINK,
};

use super::{
    routed::{BRIEF, daemon_of_three, no_answer, route_by_host},
    scene::*,
};
use crate::{Stand, daemon};

const ROUTED: &str = "2001:db8:42::/64";
const PORT: u16 = 443;

/// A stand whose guest has a routed prefix, with a port that the world may open, and has configured
/// itself. The guest returns what it gets there.
fn open(args: &[&str]) -> (Stand, Echo, SocketAddr) {
    let mode = format!("routed:{ROUTED}");
    let args = [&["--ipv6", &mode], args].concat();
    let stand = Stand::with(WorldConfig::default(), GuestConfig::new("tap0"), &args);
    give_world(&stand.world);
    route_by_host(&stand.world, ROUTED);
    let own = configure(&stand);
    let server = Echo::start_in(&stand.guest.ns, at6("::", PORT));
    (stand, server, SocketAddr::new(own.into(), PORT))
}

fn client(world: &World) -> IpAddr {
    let shown = world
        .net
        .ip(&format!("-6 -o addr show dev {WORLD_LINK} scope global"));
    let shown = shown.unwrap();
    let address = shown.split_whitespace().find(|word| word.ends_with("/64"));
    address.unwrap().trim_end_matches("/64").parse().unwrap()
}

const OWN: [&str; 4] = ["--forward", "tcp:own:443", "--forward", "udp:own:443"];

#[test]
fn ipv6_own_port_is_open_to_the_world_without_translation() {
    require_root_and_tun!();
    let (mut stand, server, to) = open(&OWN);
    let census = Census::start(&stand.guest).unwrap();
    let mut stream = connect_from(&stand.world.net, to).unwrap();
    let sent: Vec<u8> = (0..2_000_000_u32).map(|at| (at ^ at >> 7) as u8).collect();
    assert!(round(&mut stream, &sent).unwrap() == sent);
    let counted = census.finish(&stand.guest).unwrap();
    assert!(
        counted.data > 20 && stand.port_frames() < 200,
        "by the kernel: {counted:?}"
    );
    let answer = datagram_from(&stand.world.net, to, b"datagram").unwrap();
    assert_eq!(answer, b"datagram");
    // Fragments, too.
    let long = vec![9; 5_000];
    assert_eq!(datagram_from(&stand.world.net, to, &long).unwrap(), long);
    let client = client(&stand.world);
    assert_eq!(server.peers(), [client; 3], "the guest sees who came");
    let flows = stand.slipgate.flows().unwrap();
    assert_eq!(flows.len(), 3, "{flows:?}");
    for flow in &flows {
        assert_eq!(flow.guest, flow.nat);
        assert!(flow.guest.contains(&to.ip().to_string()), "{flow:?}");
        let rule = flow.rule.to_string();
        assert!(
            rule.contains("--forward") && rule.contains("own:443"),
            "{rule}"
        );
    }
    // The host has no socket there, and no other port is open.
    for port in [80, 8080] {
        let closed = SocketAddr::new(to.ip(), port);
        assert_eq!(no_answer(&stand.world.net, closed), ErrorKind::TimedOut);
    }
    let nobody = at6("2001:db8:42::7777", PORT);
    assert_eq!(no_answer(&stand.world.net, nobody), ErrorKind::TimedOut);
    // It outlives broker and engine.
    stand.slipgate.kill_both().unwrap();
    assert_eq!(round(&mut stream, b"no engine").unwrap(), b"no engine");
    stand.again();
    assert_eq!(round(&mut stream, b"again").unwrap(), b"again");
    let mut other = connect_from(&stand.world.net, to).unwrap();
    assert_eq!(round(&mut other, b"another").unwrap(), b"another");
    assert!(stand.slipgate.stop().unwrap().success());
    let records = stand.records();
    let ours = records
        .iter()
        .filter(|it| it.to_string().contains("own:443"));
    assert!(ours.count() >= 3, "{records:?}");
}

#[test]
fn ipv6_own_port_of_one_address_is_that_ones_alone() {
    require_root_and_tun!();
    let named = "tcp:[2001:db8:42::9]:443:443";
    let (stand, server, other) = open(&["--forward", named]);
    assert_eq!(no_answer(&stand.world.net, other), ErrorKind::TimedOut);
    let to = at6("2001:db8:42::9", PORT);
    let add = format!("-6 addr add {}/64 dev {GUEST_DEVICE}", to.ip());
    stand.guest.ns.ip(&add).unwrap();
    until("the guest is sure of its address", || {
        let connected = stand
            .world
            .net
            .run(|| std::net::TcpStream::connect_timeout(&to, BRIEF));
        connected.is_ok()
    });
    until("it is accepted", || !server.peers().is_empty());
}

#[test]
fn ipv6_own_port_is_shut_while_its_vm_is_frozen() {
    require_root_and_tun!();
    let (stand, _server, to) = open(&OWN);
    let run = |args: &[&str]| drop(stand.slipgate.run(args).unwrap());
    assert!(connect_from(&stand.world.net, to).is_ok());
    run(&["freeze", "tap0"]);
    assert_eq!(no_answer(&stand.world.net, to), ErrorKind::TimedOut);
    run(&["thaw", "tap0"]);
    assert!(connect_from(&stand.world.net, to).is_ok());
}

/// The definition of a daemon's VM.
fn vm(stand: &daemon::Stand, name: &str) -> Value {
    let mut vms = stand.vms().into_iter();
    vms.find(|vm| vm["name"] == name).unwrap()
}

#[test]
fn ipv6_own_ports_come_and_go_with_a_daemons_vms_which_reach_each_other_by_them() {
    require_root_and_tun!();
    let pool = "2001:db8:40::/62";
    let (mut stand, guests) = daemon_of_three(pool);
    for guest in &guests {
        enable(&guest.ns, &[GUEST_DEVICE]);
    }
    let addresses: Vec<Ipv6Addr> = guests
        .iter()
        .map(|guest| {
            until("an address", || address_in(&guest.ns).is_some());
            address_in(&guest.ns).unwrap()
        })
        .collect();
    let at = |vm: usize| SocketAddr::new(addresses[vm].into(), PORT);
    let servers = guests
        .each_ref()
        .map(|guest| Echo::start_in(&guest.ns, at6("::", PORT)));
    assert_eq!(no_answer(&stand.world.net, at(0)), ErrorKind::TimedOut);
    // Each VM has the same port: they are of addresses that differ.
    stand.vm(&["set", "a", "--forward", "tcp:own:443"]);
    stand.vm(&["set", "b", "--forward", "tcp:own:443"]);
    assert_eq!(vm(&stand, "a")["forwards"][0], "tcp:own:443");
    let mut streams: Vec<_> = (0..2)
        .map(|vm| connect_from(&stand.world.net, at(vm)).unwrap())
        .collect();
    for stream in &mut streams {
        assert_eq!(round(stream, b"in").unwrap(), b"in");
    }
    // Guests are protected from each other, until the rules of the one allow it.
    assert!(connect_from(&guests[0].ns, at(1)).is_err());
    let (admitted, said) = stand
        .daemon
        .why("a", &format!("[{}]:443", addresses[1]), "tcp")
        .unwrap();
    assert!(!admitted && said.contains("guests"), "{said}");
    stand.daemon.kill_both().unwrap();
    let allow = ["--allow", pool];
    stand.daemon = stand.daemon.again_with(&allow).unwrap();
    for stream in &mut streams {
        assert_eq!(round(stream, b"adopted").unwrap(), b"adopted");
    }
    let (admitted, said) = stand
        .daemon
        .why("a", &format!("[{}]:443", addresses[1]), "tcp")
        .unwrap();
    assert!(admitted && said.contains("VM b"), "{said}");
    let mut between = connect_from(&guests[0].ns, at(1)).unwrap();
    let sent: Vec<u8> = (0..300_000_u32).map(|at| (at ^ at >> 7) as u8).collect();
    assert!(round(&mut between, &sent).unwrap() == sent);
    let last = *servers[1].peers().last().unwrap();
    assert_eq!(last, IpAddr::from(addresses[0]), "its own address");
    // What is not open of the other is not reached, whatever the rules say.
    let closed = SocketAddr::new(addresses[1].into(), 80);
    assert!(connect_from(&guests[0].ns, closed).is_err());
    // Its successor knows both halves.
    stand.daemon.kill_both().unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    assert_eq!(round(&mut between, b"adopted").unwrap(), b"adopted");
    // An address is its VM's alone to open.
    let others = format!("tcp:[{}]:443:443", addresses[1]);
    let error = stand.vm_error(&["set", "a", "--forward", &others]);
    assert!(error.contains("routed to b"), "{error}");
    assert_eq!(vm(&stand, "a")["forwards"][0], "tcp:own:443");
    // The port goes, and its flows with it.
    stand.vm(&["set", "b", "--forward", "tcp:own:444"]);
    assert_eq!(no_answer(&stand.world.net, at(1)), ErrorKind::TimedOut);
    assert!(round(&mut streams[1], b"cut").is_err());
    assert!(round(&mut between, b"cut").is_err());
    assert_eq!(round(&mut streams[0], b"stays").unwrap(), b"stays");
    let error = stand.vm_error(&[
        "add",
        "c",
        "--tap",
        "tap2",
        "--ipv6",
        "nat",
        "--forward",
        "tcp:own:443",
    ]);
    assert!(error.contains("no addresses of its own"), "{error}");
}

/// A neighbour that gives itself a guest's address finds out that somebody has it.
#[test]
fn ipv6_routed_address_on_the_uplinks_link_is_found_to_be_a_duplicate() {
    require_root_and_tun!();
    let (stand, _server, to) = open(&OWN);
    let taken = to.ip();
    let net = &stand.world.net;
    let state = |address: IpAddr| {
        let add = format!("-6 addr add {address}/128 dev {WORLD_LINK}");
        net.ip(&add).unwrap();
        let shown = || {
            let shown = net.ip(&format!("-6 -o addr show dev {WORLD_LINK}"));
            let shown = shown.unwrap();
            let text = address.to_string();
            shown
                .lines()
                .find(|line| line.contains(&text))
                .unwrap()
                .to_owned()
        };
        until("the kernel is sure", || {
            let shown = shown();
            !shown.contains("tentative") || shown.contains("dadfailed")
        });
        shown()
    };
    net.sysctl(&format!("net.ipv6.conf.{WORLD_LINK}.accept_dad"), "1")
        .unwrap();
    let shown = state(taken);
    assert!(shown.contains("dadfailed"), "{shown}");
    let free = state(ip6("2001:db8:42::99").into());
    assert!(!free.contains("dadfailed"), "{free}");
}
