//! A guest with a single IPv6 address, which it takes by DHCPv6 and keeps toward the world.
use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
};

use slipgate_testbed::{
    GUEST_DEVICE, GuestConfig, NetNs, WorldConfig,
    clients::dns,
    dhcpv6::{Answer, Client},
    dns_wire::{Reply, types},
    kernel_view, require_root_and_tun,
    slipgate::Slipgate,
    world::UPLINK,
};

use super::{
    NAME, RESOLVER, names,
    routed::{daemon_of_three, no_answer, prefix, route_by_host},
    scene::*,
};
use crate::{Stand, WAIT, daemon};

/// 63 addresses that the network routes to the host.
const POOL: &str = "2001:db8:42::40/122";
const IPPROTO_ICMPV6: u8 = 58;
const STATUS_NOT_ON_LINK: u16 = 4;

/// A stand whose guest has taken its single address, of this pool.
fn single(pool: &str, args: &[&str]) -> (Stand, Client, Answer) {
    let mode = format!("routed:{pool}");
    let args = [&["--ipv6", &mode], args].concat();
    let stand = Stand::with(WorldConfig::default(), GuestConfig::new("tap0"), &args);
    give_world(&stand.world);
    let mut client = client(&stand.guest.ns);
    let answer = client.acquire(WAIT).unwrap();
    apply(&stand.guest.ns, own(&answer));
    (stand, client, answer)
}

/// Lets a guest's kernel have IPv6, and opens a client.
fn client(ns: &NetNs) -> Client {
    enable(ns, &[GUEST_DEVICE]);
    until("a link-local address", || has_link_local(ns));
    until("a router", || {
        !ns.ip("-6 route show default").unwrap().is_empty()
    });
    // Advertisements name no prefix of which it would make an address.
    let shown = ns.ip(&format!("-6 -o addr show dev {GUEST_DEVICE} scope global"));
    assert_eq!(shown.unwrap(), "");
    Client::open(ns, GUEST_DEVICE, GuestConfig::new("").mac).unwrap()
}

fn own(answer: &Answer) -> Ipv6Addr {
    let [address] = answer.usable()[..] else {
        panic!("one address: {answer:?}");
    };
    address
}

/// Configures an address, which the guest's kernel probes.
fn apply(ns: &NetNs, address: Ipv6Addr) {
    let add = format!("-6 addr add {address}/128 dev {GUEST_DEVICE}");
    ns.ip(&add).unwrap();
    until("an address that is nobody's", || {
        let sure = format!("-6 -o addr show dev {GUEST_DEVICE} scope global -tentative");
        ns.ip(&sure).unwrap().contains(&address.to_string())
    });
}

fn in_pool(address: Ipv6Addr) -> bool {
    let first = ip6("2001:db8:42::40").to_bits();
    address.to_bits() > first && address.to_bits() - first < 64
}

#[test]
fn ipv6_single_address_is_taken_by_dhcpv6_and_reaches_the_world_as_it_is() {
    require_root_and_tun!();
    let (mut stand, mut client, answer) = single(POOL, &RESOLVER);
    let guest = own(&answer);
    assert!(in_pool(guest), "{guest}");
    route_by_host(&stand.world, POOL);
    let _names = names(&stand);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut stream = connect(&stand, server.address()).unwrap();
    let sent: Vec<u8> = (0..500_000_u32).map(|at| (at ^ at >> 7) as u8).collect();
    assert!(round(&mut stream, &sent).unwrap() == sent);
    let back = datagram_to(&stand, server.address(), b"datagram");
    assert_eq!(back.unwrap(), b"datagram");
    assert_eq!(ping(&stand, SERVER6, b"echo").unwrap(), b"echo");
    assert_eq!(server.peers(), [IpAddr::from(guest); 2]);
    let flows = stand.slipgate.flows().unwrap();
    assert!(flows.len() >= 3, "{flows:?}");
    for flow in flows {
        assert_eq!(flow.guest, flow.nat, "{flow:?}");
    }
    // The resolver that it was told of, which is on no network of the guest's.
    assert_eq!(answer.resolvers, [ip6(GATEWAY6)]);
    let question = dns::question(NAME, types::AAAA).to_bytes();
    let resolver = SocketAddr::new(answer.resolvers[0].into(), 53);
    let reply = datagram_to(&stand, resolver, &question).unwrap();
    assert_eq!(Reply::parse(&reply).unwrap().records.len(), 1);

    // It stays the same, also with another engine, and by each way to ask.
    assert_eq!(
        own(&client.renew(&answer.server, &[guest], WAIT).unwrap()),
        guest
    );
    stand.slipgate.kill_both().unwrap();
    assert_eq!(round(&mut stream, b"no engine").unwrap(), b"no engine");
    stand.again();
    assert_eq!(round(&mut stream, b"again").unwrap(), b"again");
    let renewed = client.renew(&answer.server, &[guest], WAIT).unwrap();
    assert_eq!(
        (own(&renewed), renewed.server),
        (guest, answer.server.clone())
    );
    assert_eq!(own(&client.rebind(&[guest], WAIT).unwrap()), guest);
    assert_eq!(own(&client.acquire_rapidly(WAIT).unwrap()), guest);
    let confirmed = client.confirm(&[guest], WAIT).unwrap();
    assert_eq!(confirmed.status, Some(0));
    // An address of another VM, as a clone has it at first.
    let original = ip6("2001:db8:42::1");
    let refused = client.confirm(&[original], WAIT).unwrap();
    assert_eq!(refused.status, Some(STATUS_NOT_ON_LINK));
    let changed = client.renew(&answer.server, &[original], WAIT).unwrap();
    assert_eq!(own(&changed), guest);
    assert!(changed.addresses.contains(&(original, 0, 0)), "{changed:?}");
    let released = client.release(&answer.server, &[guest], WAIT).unwrap();
    assert_eq!(released.status, Some(0));
}

#[test]
fn ipv6_single_address_is_the_only_one_that_a_guest_has() {
    require_root_and_tun!();
    let (stand, _client, answer) = single(POOL, &[]);
    route_by_host(&stand.world, "2001:db8:42::/64");
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let own = own(&answer);
    // Another of the pool, which may be a neighbour's, and others of the same /64.
    let beside = Ipv6Addr::from_bits(own.to_bits() ^ 1);
    for address in [beside, ip6("2001:db8:42::40"), ip6("2001:db8:42::1:1")] {
        let add = format!("-6 addr add {address}/128 dev {GUEST_DEVICE} nodad");
        stand.guest.ns.ip(&add).unwrap();
        let before = stand.dropped("spoofed");
        let from = SocketAddr::new(address.into(), 0);
        let socket = stand.run(|| UdpSocket::bind(from)).unwrap();
        socket.send_to(b"from", server.address()).unwrap();
        until("it is dropped", || stand.dropped("spoofed") > before);
    }
    assert!(server.peers().is_empty());
    // Its own still passes.
    let from = SocketAddr::new(own.into(), 0);
    let socket = stand.run(|| UdpSocket::bind(from)).unwrap();
    socket.send_to(b"from", server.address()).unwrap();
    until("its own passes", || server.peers() == [IpAddr::from(own)]);
}

#[test]
fn ipv6_single_address_lets_nobody_in_and_its_neighbours_are_the_hosts() {
    require_root_and_tun!();
    let (stand, _client, answer) = single(POOL, &["--forward", "tcp:8080:80"]);
    route_by_host(&stand.world, "2001:db8:42::/64");
    let listener = stand.run(|| TcpListener::bind("[::]:80").unwrap());
    let to = |address: Ipv6Addr| SocketAddr::new(address.into(), 80);
    let before = stand.dropped("no_flow");
    let own = own(&answer);
    let error = no_answer(&stand.world.net, to(own));
    assert_eq!(error, ErrorKind::TimedOut);
    let dropped = stand.dropped("no_flow");
    assert!(dropped > before);
    // The rest of its /64 is not its.
    no_answer(&stand.world.net, to(Ipv6Addr::from_bits(own.to_bits() ^ 1)));
    assert_eq!(stand.dropped("no_flow"), dropped);
    // By a port of the host's it is reached.
    let forward = SocketAddr::new(ip6(HOST6).into(), 8080);
    let client = connect_from(&stand.world.net, forward).unwrap();
    let (served, peer) = listener.accept().unwrap();
    assert_eq!(peer, client.local_addr().unwrap());
    assert_eq!(served.local_addr().unwrap(), to(own));
}

#[test]
fn ipv6_single_address_replaces_the_vms_own_prefix_and_outlives_restarts() {
    require_root_and_tun!();
    let mode = ["--ipv6", "routed:2001:db8:42::/64"];
    let (world, guest) = (WorldConfig::default(), GuestConfig::new("tap0"));
    let mut stand = Stand::with(world, guest, &mode);
    give_world(&stand.world);
    let routed = |stand: &Stand| {
        let (host, pins) = (&stand.world.host, stand.slipgate.pins());
        let entries = kernel_view::dump(host, pins, "FORWARDS6").unwrap();
        let keys = entries.iter().map(|entry| &entry["formatted"]["key"]);
        let keys = keys.filter(|key| key["protocol"] == IPPROTO_ICMPV6);
        let ports: Vec<_> = keys.map(|key| key["port"].clone()).collect();
        ports
    };
    assert_eq!(routed(&stand), [0], "a /64");
    // Killed, it leaves the entry of its /64, in which its address is. Ports of mappings are closed by
    // a successor, and an entry of an address has 128 in the place of the port.
    let mode = format!("routed:{POOL}");
    let ports = [
        "--tap",
        "tap0",
        "--uplink",
        UPLINK,
        "--eim-ports",
        "100-999",
    ];
    let args = [&ports[..], &["--ipv6", &mode]].concat();
    for _ in 0..2 {
        stand.slipgate.kill_both().unwrap();
        let (host, pins) = (&stand.world.host, stand.slipgate.pins());
        stand.slipgate = Slipgate::attach(host, pins, &args).unwrap();
        // Its engine has begun.
        let answer = client(&stand.guest.ns).acquire(WAIT).unwrap();
        assert!(in_pool(own(&answer)), "{answer:?}");
        assert_eq!(routed(&stand), [128]);
    }
}

#[test]
fn ipv6_single_address_of_the_uplinks_own_network_is_answered_for() {
    require_root_and_tun!();
    // Of the /64 that host and router have on their link: nothing is routed.
    let (stand, mut client, answer) = single("2001:db8:1::40/122", &[]);
    let guest = own(&answer);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut stream = connect(&stand, server.address()).unwrap();
    assert_eq!(round(&mut stream, b"on link").unwrap(), b"on link");
    assert_eq!(server.peers(), [IpAddr::from(guest)]);
    let neighbours = stand.world.net.ip("-6 neigh show").unwrap();
    let entry = neighbours
        .lines()
        .find(|line| line.contains(&guest.to_string()));
    assert!(
        entry.is_some_and(|it| it.contains("lladdr")),
        "{neighbours}"
    );
    // A switch that follows listeners passes what neighbours ask: the group is listened to.
    let groups = format!("-6 maddr show dev {UPLINK}");
    let groups = stand.world.host.ip(&groups).unwrap();
    let [.., low] = guest.to_bits().to_be_bytes();
    let group = format!("ff02::1:ff00:{low:x}");
    assert!(groups.contains(&group), "{group}: {groups}");
    // The host goes on with its own address there.
    let host = SocketAddr::new(ip6(HOST6).into(), 7001);
    let _listener = stand.world.host.run(|| TcpListener::bind(host).unwrap());
    assert!(connect_from(&stand.world.net, host).is_ok());
    // What the guest has given back is nobody's, until it uses it.
    client.release(&answer.server, &[guest], WAIT).unwrap();
    stand.world.net.ip("-6 neigh flush all").unwrap();
    let gone = no_answer(&stand.world.net, SocketAddr::new(guest.into(), 80));
    assert!(matches!(
        gone,
        ErrorKind::TimedOut | ErrorKind::HostUnreachable
    ));
    let neighbours = stand.world.net.ip("-6 neigh show").unwrap();
    let entry = neighbours
        .lines()
        .find(|line| line.contains(&guest.to_string()));
    assert!(
        entry.is_none_or(|it| !it.contains("lladdr")),
        "{neighbours}"
    );
}

#[test]
fn ipv6_single_addresses_of_a_daemons_vms_are_their_own() {
    require_root_and_tun!();
    // Of four, the first is left to the host.
    let pool = "2001:db8:42::8/126";
    let (mut stand, guests) = daemon_of_three(pool);
    let address = |stand: &daemon::Stand, name: &str| -> Ipv6Addr {
        let prefix = prefix(stand, name);
        prefix.strip_suffix("/128").unwrap().parse().unwrap()
    };
    let before = ["a", "b"].map(|name| address(&stand, name));
    assert_ne!(before[0], before[1]);
    let error = stand.vm_error(&["add", "c", "--tap", "tap2"]);
    assert!(error.contains("none is left for c"), "{error}");
    for taken in [format!("{}/128", before[0]), "2001:db8:42::/64".to_owned()] {
        let mode = format!("routed:{taken}");
        let error = stand.vm_error(&["add", "c", "--tap", "tap2", "--ipv6", &mode]);
        assert!(error.contains("has it"), "{error}");
    }
    let host = format!("routed:{HOST6}/128");
    let error = stand.vm_error(&["add", "c", "--tap", "tap2", "--ipv6", &host]);
    assert!(error.contains(HOST6), "{error}");
    // One of its own, beside the pool.
    let own_mode = ["--ipv6", "routed:2001:db8:42::77/128"];
    stand.vm(&[&["add", "c", "--tap", "tap2"], &own_mode[..]].concat());
    assert_eq!(address(&stand, "c"), ip6("2001:db8:42::77"));

    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut streams = Vec::new();
    for (guest, expected) in guests.iter().zip(before) {
        let mut client = client(&guest.ns);
        let answer = client.acquire(WAIT).unwrap();
        assert_eq!(own(&answer), expected);
        apply(&guest.ns, expected);
        let mut stream = connect_from(&guest.ns, server.address()).unwrap();
        assert_eq!(round(&mut stream, b"own").unwrap(), b"own");
        streams.push(stream);
    }
    assert_eq!(server.peers(), before.map(IpAddr::from));
    // No VM reaches another's address, nor has it.
    let _listener = guests[1].run(|| TcpListener::bind("[::]:80").unwrap());
    let other = SocketAddr::new(before[1].into(), 80);
    assert!(connect_from(&guests[0].ns, other).is_err());
    let (admitted, said) = stand.daemon.why("a", &other.to_string(), "tcp").unwrap();
    assert!(!admitted && said.contains("guests"), "{said}");
    let spoofed = || {
        let stats = stand.daemon.stats().unwrap();
        let dropped = &stats["total"]["drops"]["spoofed"]["packets"];
        dropped.as_u64().unwrap_or(0)
    };
    let counted = spoofed();
    let add = format!("-6 addr add {}/128 dev {GUEST_DEVICE} nodad", before[1]);
    guests[0].ns.ip(&add).unwrap();
    let from = SocketAddr::new(before[1].into(), 0);
    let socket = guests[0].run(|| UdpSocket::bind(from)).unwrap();
    socket.send_to(b"from", server.address()).unwrap();
    until("a neighbour's address is dropped", || spoofed() > counted);
    assert_eq!(server.peers().len(), 2);

    stand.daemon.kill_both().unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    assert_eq!(["a", "b"].map(|name| address(&stand, name)), before);
    for stream in &mut streams {
        assert_eq!(round(stream, b"goes on").unwrap(), b"goes on");
    }
    // One that is given back is the next one's.
    stand.vm(&["rm", "a"]);
    stand.vm(&["add", "e", "--tap", "tap0"]);
    assert_eq!(address(&stand, "e"), before[0]);
}
