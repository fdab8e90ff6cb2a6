//! IPv6 without translation: the network routes a prefix to the host, and guests keep their addresses.
use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    time::Duration,
};

use slipgate_testbed::{
    GUEST_DEVICE, Guest, GuestConfig, NetNs, Slipgate, World, WorldConfig,
    census::Census,
    clients::dns,
    dns_wire::types,
    require_root_and_tun, tls,
    world::{UPLINK, WORLD_LINK},
};
use userspace_nat::fake::hellos;

use super::{NAME, RESOLVER, names, scene::*};
use crate::{Stand, daemon};

const ROUTED: &str = "2001:db8:42::/64";
pub(super) const BRIEF: Duration = Duration::from_millis(600);

/// Has the world route a prefix to the host.
pub(super) fn route_by_host(world: &World, prefix: &str) {
    let route = format!("-6 route replace {prefix} via {HOST6} dev {WORLD_LINK}");
    world.net.ip(&route).unwrap();
}

/// Has the world expect a prefix on the uplink's link.
fn route_on_link(world: &World, prefix: &str) {
    let route = format!("-6 route replace {prefix} dev {WORLD_LINK}");
    world.net.ip(&route).unwrap();
}

/// A stand whose guest has a routed prefix, and has configured itself.
fn routed(args: &[&str]) -> Stand {
    routed_in(WorldConfig::default(), args)
}

fn routed_in(world: WorldConfig, args: &[&str]) -> Stand {
    let mode = format!("routed:{ROUTED}");
    let args = [&["--ipv6", &mode], args].concat();
    let stand = Stand::with(world, GuestConfig::new("tap0"), &args);
    give_world(&stand.world);
    route_by_host(&stand.world, ROUTED);
    configure(&stand);
    stand
}

fn own(stand: &Stand) -> Ipv6Addr {
    let address = address_of(stand).unwrap();
    assert!(address.to_string().starts_with("2001:db8:42:"), "{address}");
    address
}

/// The error of a connection that nobody is to answer.
pub(super) fn no_answer(from: &NetNs, to: SocketAddr) -> ErrorKind {
    let connected = from.run(|| TcpStream::connect_timeout(&to, BRIEF));
    connected.expect_err("nobody answers").kind()
}

#[test]
fn ipv6_routed_guest_reaches_the_world_with_its_own_address() {
    require_root_and_tun!();
    let mut stand = routed(&[]);
    let guest = own(&stand);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let census = Census::start(&stand.guest).unwrap();
    let mut stream = connect(&stand, server.address()).unwrap();
    let sent: Vec<u8> = (0..2_000_000_u32).map(|at| (at ^ at >> 7) as u8).collect();
    assert!(round(&mut stream, &sent).unwrap() == sent);
    let counted = census.finish(&stand.guest).unwrap();
    assert!(
        counted.data > 20 && stand.port_frames() < 200,
        "{counted:?}"
    );
    assert_eq!(
        datagram_to(&stand, server.address(), b"datagram").unwrap(),
        b"datagram"
    );
    assert_eq!(ping(&stand, SERVER6, b"echo").unwrap(), b"echo");
    assert_eq!(server.peers(), [IpAddr::from(guest); 2]);
    let flows = stand.slipgate.flows().unwrap();
    assert_eq!(flows.len(), 3, "{flows:?}");
    for flow in &flows {
        assert_eq!(flow.guest, flow.nat, "{flow:?}");
    }
    let tcp = flows.iter().find(|flow| flow.proto == "tcp").unwrap();
    assert!(tcp.tx_bytes > 2_000_000 && tcp.rx_bytes > 2_000_000);
    let (admitted, said) = stand
        .slipgate
        .why("tap0", &format!("[{SERVER6}]:7000"), "tcp")
        .unwrap();
    assert!(admitted && said.contains("its own address"), "{said}");
    // An error about its packet comes back to it.
    let socket = stand.run(|| UdpSocket::bind("[::]:0")).unwrap();
    socket.connect(at6(SERVER6, 7999)).unwrap();
    socket.set_read_timeout(Some(BRIEF)).unwrap();
    socket.send(b"to a closed port").unwrap();
    let refused = socket.recv(&mut [0; 10]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    assert!(stand.slipgate.stop().unwrap().success());
    let records = stand.records();
    assert!(records.len() >= 4, "{records:?}");
    for record in records
        .iter()
        .filter(|end| end.to_string().contains(SERVER6))
    {
        assert_eq!(record["guest"], record["nat"], "{record}");
    }
}

#[test]
fn ipv6_routed_packets_are_as_large_as_the_path_allows_and_come_in_fragments() {
    require_root_and_tun!();
    let world = WorldConfig {
        mtu: 1_300,
        ..WorldConfig::default()
    };
    let stand = routed_in(world, &[]);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut stream = connect(&stand, server.address()).unwrap();
    let sent = vec![7; 500_000];
    assert!(round(&mut stream, &sent).unwrap() == sent);
    let socket = stand.run(|| UdpSocket::bind("[::]:0")).unwrap();
    socket.connect(server.address()).unwrap();
    socket.send(&[7; 1_400]).unwrap();
    until("Packet Too Big", || {
        let shown = stand.guest.ns.ip(&format!("-6 route get {SERVER6}"));
        shown.unwrap().contains("mtu 1300")
    });
    // In fragments, both ways.
    let long = vec![9; 5_000];
    assert_eq!(datagram_to(&stand, server.address(), &long).unwrap(), long);
    let last = *server.peers().last().unwrap();
    assert_eq!(last, IpAddr::from(own(&stand)));
}

#[test]
fn ipv6_routed_guest_has_its_own_addresses_alone() {
    require_root_and_tun!();
    let stand = routed(&[]);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    for (address, reason) in [("2001:db8:43::7", "spoofed"), (HOST6, "spoofed")] {
        let add = format!("-6 addr add {address}/128 dev {GUEST_DEVICE} nodad");
        stand.guest.ns.ip(&add).unwrap();
        let before = stand.dropped(reason);
        let socket = stand.run(|| UdpSocket::bind(at6(address, 0))).unwrap();
        socket.send_to(b"from", server.address()).unwrap();
        until(reason, || stand.dropped(reason) > before);
    }
    assert!(server.peers().is_empty());
}

#[test]
fn ipv6_routed_prefix_lets_nobody_in_and_the_host_does_not_answer() {
    require_root_and_tun!();
    let stand = routed(&[]);
    let guest = own(&stand);
    let listener = stand.run(|| TcpListener::bind("[::]:80").unwrap());
    listener.set_nonblocking(true).unwrap();
    for forwarding in ["0", "1"] {
        let all = "net.ipv6.conf.all.forwarding";
        stand.world.host.sysctl(all, forwarding).unwrap();
        // With forwarding a host does not listen to routers, but ours has its route by hand.
        let before = stand.dropped("no_flow");
        for (at, address) in [guest, ip6("2001:db8:42::7777")].into_iter().enumerate() {
            let to = SocketAddr::new(address.into(), 80);
            assert_eq!(no_answer(&stand.world.net, to), ErrorKind::TimedOut, "{to}");
            // A SYN at least.
            assert!(stand.dropped("no_flow") > before + at as u64);
        }
        let raw = stand.world.net.run(raw_socket);
        raw.connect(SocketAddr::new(guest.into(), 0)).unwrap();
        raw.set_read_timeout(Some(BRIEF)).unwrap();
        raw.send(&[128, 0, 0, 0, 1, 1, 0, 1]).unwrap();
        assert!(raw.recv(&mut [0; 100]).is_err(), "no answer, no error");
    }
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    // Nor from the host itself.
    let to = SocketAddr::new(guest.into(), 80);
    let from_host = stand
        .world
        .host
        .run(|| TcpStream::connect_timeout(&to, BRIEF));
    assert!(from_host.is_err());
}

#[test]
fn ipv6_routed_prefix_in_which_the_host_gets_an_address_is_the_hosts_meanwhile() {
    require_root_and_tun!();
    let stand = routed(&[]);
    let _listener = stand
        .world
        .host
        .run(|| TcpListener::bind("[::]:80").unwrap());
    let host = "2001:db8:42::8";
    let to = at6(host, 80);
    let is_answered = || {
        let net = &stand.world.net;
        net.run(|| TcpStream::connect_timeout(&to, BRIEF)).is_ok()
    };
    assert!(!is_answered());
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut stream = connect(&stand, server.address()).unwrap();
    let of_host = |verb: &str| {
        let address = format!("-6 addr {verb} {host}/128 dev {UPLINK}");
        stand.world.host.ip(&address).unwrap();
    };
    of_host("add");
    until("the host is reached", is_answered);
    assert_eq!(round(&mut stream, b"flows stay").unwrap(), b"flows stay");
    of_host("del");
    let before = stand.dropped("no_flow");
    until("the prefix is the VM's again", || {
        !is_answered() && stand.dropped("no_flow") > before
    });
}

#[test]
fn ipv6_routed_prefix_on_the_uplinks_link_is_answered_for() {
    require_root_and_tun!();
    let mut stand = routed(&[]);
    let guest = own(&stand);
    route_on_link(&stand.world, ROUTED);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut stream = connect(&stand, server.address()).unwrap();
    assert_eq!(round(&mut stream, b"on link").unwrap(), b"on link");
    // A card would keep back what neighbours ask, as a veth does not.
    let details = stand.world.host.ip(&format!("-d link show {UPLINK}"));
    let details = details.unwrap();
    assert!(details.contains("allmulti 1"), "{details}");
    let shown = |world: &World| {
        let shown = world.net.ip(&format!("-6 neigh show dev {WORLD_LINK}"));
        shown.unwrap()
    };
    let mac = stand
        .world
        .host
        .ip(&format!("-o link show {UPLINK}"))
        .unwrap();
    let mac = mac.split("link/ether ").nth(1).unwrap();
    let mac = mac.split_whitespace().next().unwrap();
    let expected = format!("{guest} lladdr {mac}");
    assert!(shown(&stand.world).contains(&expected), "{expected}");
    // An address that is no guest's is nobody's.
    let nobody = SocketAddr::new(ip6("2001:db8:42::99").into(), 80);
    let unanswered = Duration::from_secs(5);
    let error = stand
        .world
        .net
        .run(|| TcpStream::connect_timeout(&nobody, unanswered))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::HostUnreachable);
    // The program answers, also without an engine.
    stand.slipgate.kill_both().unwrap();
    stand
        .world
        .net
        .ip(&format!("-6 neigh flush dev {WORLD_LINK}"))
        .unwrap();
    assert_eq!(
        round(&mut stream, b"without an engine").unwrap(),
        b"without an engine"
    );
    stand.again();
    assert_eq!(round(&mut stream, b"adopted").unwrap(), b"adopted");
    assert!(connect(&stand, server.address()).is_ok());
    // With the VM's end nobody is answered for.
    assert!(stand.slipgate.stop().unwrap().success());
    stand
        .world
        .net
        .ip(&format!("-6 neigh flush dev {WORLD_LINK}"))
        .unwrap();
    let gone = SocketAddr::new(guest.into(), 80);
    let error = stand
        .world
        .net
        .run(|| TcpStream::connect_timeout(&gone, unanswered))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::HostUnreachable);
}

#[test]
fn ipv6_routed_flows_outlive_the_engine_and_end_with_another_mode() {
    require_root_and_tun!();
    let mut stand = routed(&[]);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut stream = connect(&stand, server.address()).unwrap();
    assert_eq!(round(&mut stream, b"before").unwrap(), b"before");
    let id = |stand: &Stand| stand.slipgate.flows().unwrap()[0].id.clone();
    let before = id(&stand);
    stand.slipgate.kill_both().unwrap();
    assert_eq!(round(&mut stream, b"no engine").unwrap(), b"no engine");
    stand.again();
    assert_eq!(round(&mut stream, b"again").unwrap(), b"again");
    assert_eq!(id(&stand), before);
    // The same prefix, translated now: none goes on with its own address.
    stand.slipgate.kill_both().unwrap();
    let nat = ["--ipv6", "nat", "--ipv6-prefix", ROUTED];
    let args = [&["--tap", "tap0", "--uplink", UPLINK][..], &nat].concat();
    let (host, pins) = (&stand.world.host, stand.slipgate.pins());
    stand.slipgate = Slipgate::attach(host, pins, &args).unwrap();
    until("its flow has ended", || {
        stand.slipgate.flows().unwrap().is_empty()
    });
    let mut other = connect(&stand, server.address()).unwrap();
    assert_eq!(round(&mut other, b"translated").unwrap(), b"translated");
    assert_eq!(server.peers().last(), Some(&IpAddr::from(ip6(HOST6))));
}

#[test]
fn ipv6_routed_guest_is_held_to_names_and_inspection() {
    require_root_and_tun!();
    for (said, is_let_through) in [(NAME, true), ("evil.test", false)] {
        let inspect = ["--default", "deny", "--inspect", "*.example.test"];
        let stand = routed(&[&RESOLVER[..], &inspect].concat());
        let _names = names(&stand);
        let server = Echo::start(&stand.world, SERVER6, 443);
        assert!(connect(&stand, server.address()).is_err(), "not asked for");
        let question = dns::question(NAME, types::AAAA).to_bytes();
        let resolver = at6("2001:db8:42::1", 53);
        assert!(datagram_to(&stand, resolver, &question).is_ok());
        let mut stream = connect(&stand, server.address()).unwrap();
        let hello = hellos::records(&hellos::client_hello(said), 1_000);
        let back = round(&mut stream, &hello);
        let is_answered = back.is_ok_and(|back| back == tls::answer_to(&hello));
        assert_eq!(is_answered, is_let_through, "{said}");
        if is_let_through {
            assert_eq!(round(&mut stream, b"the kernel").unwrap(), b"the kernel");
            assert_eq!(server.peers(), [IpAddr::from(own(&stand))]);
        }
    }
}

#[test]
fn ipv6_routed_needs_no_address_of_the_host() {
    require_root_and_tun!();
    let stand = routed(&RESOLVER);
    let _names = names(&stand);
    // The router knows the host by its link-local address then, as on a link without numbers.
    let local = |ns: &NetNs, device: &str| {
        let shown = ns.ip(&format!("-6 -o addr show dev {device} scope link"));
        let shown = shown.unwrap();
        let found = shown
            .split_whitespace()
            .find(|word| word.starts_with("fe80::"));
        found.unwrap().split('/').next().unwrap().to_owned()
    };
    let host = local(&stand.world.host, UPLINK);
    let router = local(&stand.world.net, WORLD_LINK);
    let (net, own_host) = (&stand.world.net, &stand.world.host);
    net.ip(&format!(
        "-6 route replace {ROUTED} via {host} dev {WORLD_LINK}"
    ))
    .unwrap();
    own_host
        .ip(&format!("-6 addr del {HOST6}/64 dev {UPLINK}"))
        .unwrap();
    own_host
        .ip(&format!(
            "-6 route replace default via {router} dev {UPLINK}"
        ))
        .unwrap();
    let server = Echo::start(&stand.world, SERVER6, 7000);
    until("a route without an address of the host", || {
        connect(&stand, server.address()).is_ok()
    });
    let question = dns::question(NAME, types::AAAA).to_bytes();
    let reply = datagram_to(&stand, at6("2001:db8:42::1", 53), &question).unwrap();
    let reply = slipgate_testbed::dns_wire::Reply::parse(&reply).unwrap();
    assert_eq!(reply.records.len(), 1, "names lead to IPv6, too");
}

/// A daemon with a pool that is routed to the host, its VMs a, b and d, and the guests of the first two.
pub(super) fn daemon_of_three(pool: &str) -> (daemon::Stand, [Guest; 2]) {
    let mode = format!("routed:{pool}");
    let stand = daemon::Stand::new(&["--ipv6", &mode]);
    give_world(&stand.world);
    route_by_host(&stand.world, pool);
    let guests = [stand.guest("tap0"), stand.guest("tap1")];
    stand.vm(&["add", "a", "--tap", "tap0"]);
    stand.vm(&["add", "b", "--tap", "tap1"]);
    stand.vm(&["add", "d", "--tap", "tap3"]);
    (stand, guests)
}

/// The prefix that a VM of the daemon has, as in its definition.
pub(super) fn prefix(stand: &daemon::Stand, name: &str) -> String {
    let vms = stand.vms();
    let vm = vms.into_iter().find(|vm| vm["name"] == name).unwrap();
    let prefix = vm["guest_ipv6"]["prefix"].as_str().unwrap().to_owned();
    assert_eq!(vm["ipv6_prefix"], prefix);
    prefix
}

#[test]
fn ipv6_routed_prefixes_of_a_daemons_vms_are_their_own() {
    require_root_and_tun!();
    // Of four, the first is left to the host.
    let pool = "2001:db8:40::/62";
    let (mut stand, guests) = daemon_of_three(pool);
    let before = ["a", "b"].map(|name| prefix(&stand, name));
    assert_ne!(before[0], before[1]);
    let error = stand.vm_error(&["add", "c", "--tap", "tap2"]);
    assert!(error.contains("none is left for c"), "{error}");
    let taken = format!("routed:{}", before[0]);
    let error = stand.vm_error(&["add", "c", "--tap", "tap2", "--ipv6", &taken]);
    assert!(error.contains("a has it"), "{error}");
    // Of the host's own network none can be a VM's.
    let host = "routed:2001:db8:1::/64";
    let error = stand.vm_error(&["add", "c", "--tap", "tap2", "--ipv6", host]);
    assert!(error.contains(HOST6), "{error}");

    for guest in &guests {
        enable(&guest.ns, &[GUEST_DEVICE]);
    }
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut streams = Vec::new();
    let mut addresses = Vec::new();
    for guest in &guests {
        until("an address", || address_in(&guest.ns).is_some());
        let mut stream = connect_from(&guest.ns, server.address()).unwrap();
        assert_eq!(round(&mut stream, b"own").unwrap(), b"own");
        streams.push(stream);
        addresses.push(IpAddr::from(address_in(&guest.ns).unwrap()));
    }
    assert_eq!(server.peers(), addresses);
    // Another VM's prefix is a guests' network.
    let _listener = guests[1].run(|| TcpListener::bind("[::]:80").unwrap());
    assert!(connect_from(&guests[0].ns, SocketAddr::new(addresses[1], 80)).is_err());
    let (admitted, said) = stand
        .daemon
        .why("a", &format!("[{}]:80", addresses[1]), "tcp")
        .unwrap();
    assert!(!admitted && said.contains("guests"), "{said}");

    stand.daemon.kill_both().unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    assert_eq!(["a", "b"].map(|name| prefix(&stand, name)), before);
    for stream in &mut streams {
        assert_eq!(round(stream, b"goes on").unwrap(), b"goes on");
    }
    // One that is given back is the next one's.
    stand.vm(&["rm", "a"]);
    stand.vm(&["add", "c", "--tap", "tap0"]);
    assert_eq!(prefix(&stand, "c"), before[0]);
}
