//! Datagrams of guests that are longer than a link on the way carries, which a router knows and
//! nobody else at first.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
};

use slipgate_testbed::{
    NetNs, World, WorldConfig,
    clients::tcp,
    frame::FrameBuilder,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    streams::Receipt,
    world_ipv6,
};

use crate::{
    BRIEFLY, Cell, GATEWAY_MAC, GUEST_MAC, Stand, WAIT, eventually,
    guest_errors::{PORT, Scene},
    matrix::matrix,
    stand::counts,
};

matrix! {
    a_smaller_link_behind_a_router_is_told_and_kept_in_mind: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    what_one_flow_is_told_the_guest_keeps_in_mind_for_the_next: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "TCP's segments are made by the host's stack there, which follows the path";
    of_datagrams_at_once_only_those_too_long_are_lost: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    what_may_be_fragmented_is_beside_what_may_not: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "the router fragments, and the engine leaves fragments as they came";
}

/// MTU of the link behind the router, bytes.
const MTU: usize = 1_300;

/// A network behind the world's router, by a link with that MTU, and a server in it.
struct Behind {
    server: UdpServer<IpAddr>,
    ns: NetNs,
}

impl Behind {
    fn new(cell: Cell, world: &World, service: UdpService) -> Self {
        let ns = NetNs::new("behind").unwrap();
        let net = &world.net;
        let peer = ns.path();
        net.ip(&format!(
            "link add b0 mtu {MTU} type veth peer name b1 mtu {MTU} netns {}",
            peer.display()
        ))
        .unwrap();
        if cell.is_ipv6() {
            world_ipv6::enable(net, &["b0"]).unwrap();
            world_ipv6::enable(&ns, &["b1"]).unwrap();
        }
        let (key, family, len, add) = match cell.is_ipv6() {
            false => ("net.ipv4.ip_forward", "-4", 24, ""),
            true => ("net.ipv6.conf.all.forwarding", "-6", 64, "nodad"),
        };
        net.sysctl(key, "1").unwrap();
        let [router, server] = places(cell);
        for (ns, device, address) in [(net, "b0", router), (&ns, "b1", server)] {
            ns.ip(&format!(
                "{family} addr add {address}/{len} dev {device} {add}"
            ))
            .unwrap();
            ns.ip(&format!("link set {device} up")).unwrap();
        }
        ns.ip(&format!("{family} route add default via {router} dev b1"))
            .unwrap();
        let server = UdpServer::start(&ns, (server, 7), service).unwrap();
        Self { server, ns }
    }
}

/// Addresses of the router and of the server behind it.
fn places(cell: Cell) -> [IpAddr; 2] {
    [1, 2].map(|last| {
        let ipv6 = Ipv6Addr::new(0x2001, 0xdb8, 0xfe, 0, 0, 0, 0, last);
        cell.family
            .choose(Ipv4Addr::new(192, 88, 98, last as u8), ipv6)
    })
}

/// A datagram whose packet has this length.
fn datagram_of(cell: Cell, to: SocketAddr, ip_bytes: usize) -> FrameBuilder {
    let payload = vec![7; ip_bytes - cell.headers() - 8];
    cell.datagram(PORT, to).payload(&payload)
}

fn a_smaller_link_behind_a_router_is_told_and_kept_in_mind(cell: Cell) {
    let scene = Scene::new(cell, WorldConfig::default());
    let behind = Behind::new(cell, &scene.stand.world, UdpService::Echo);
    let server = behind.server.address();
    let told = |frame: &FrameBuilder| {
        let answer = scene.send(frame);
        assert_eq!(answer.icmp, Some(cell.too_large()));
        assert_eq!(answer.mtu() as usize, MTU);
        answer.from.ip()
    };
    let keeper = if cell.is_hybrid() {
        cell.router()
    } else {
        cell.gateway()
    };
    let too_long = datagram_of(cell, server, MTU + 1);
    assert_eq!(told(&too_long), cell.router());
    assert_eq!(told(&too_long), keeper, "the host knows it now");
    assert_eq!(scene.send(&datagram_of(cell, server, MTU)).protocol, 17);
    let ping = FrameBuilder::ping(cell.guest(), server.ip(), 7, 1).macs(GUEST_MAC, GATEWAY_MAC);
    let ping_of = |len: usize| ping.clone().payload(&vec![7; len - cell.headers() - 8]);
    assert_eq!(told(&ping_of(MTU + 1)), keeper);
    assert_eq!(scene.send(&ping_of(MTU)).from.ip(), server.ip());
    // Each packet is in one place of the books.
    let [(packets, bytes), _] = counts(&scene.stand.flow_to(server));
    let left = if cell.is_hybrid() { 3 } else { 2 };
    assert_eq!(packets, left);
    assert_eq!(bytes, (MTU + (left as usize - 1) * (MTU + 1)) as u64);
    let dropped = if cell.is_hybrid() { 0 } else { 2 };
    assert_eq!(scene.stand.dropped("too_big"), dropped);
}

/// Errors about packets that are too long, as this network's router has sent them.
fn too_large_by(cell: Cell, net: &NetNs) -> u64 {
    let (file, name) = match cell.is_ipv6() {
        false => ("snmp", "OutDestUnreachs"),
        true => ("snmp6", "Icmp6OutPktTooBigs"),
    };
    let read = || fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap();
    let counters = net.run(read);
    if cell.is_ipv6() {
        let mut lines = counters.lines().map(str::split_whitespace);
        let mut line = lines.find_map(|mut line| (line.next() == Some(name)).then_some(line));
        return line.as_mut().unwrap().next().unwrap().parse().unwrap();
    }
    let mut lines = counters.lines().filter(|line| line.starts_with("Icmp:"));
    let [names, values] = [(); 2].map(|()| lines.next().unwrap().split_whitespace());
    let (_, value) = names.zip(values).find(|(found, _)| *found == name).unwrap();
    value.parse().unwrap()
}

fn what_one_flow_is_told_the_guest_keeps_in_mind_for_the_next(cell: Cell) {
    const BYTES: u64 = 256 << 10;
    let stand = Stand::of(cell, &[]);
    let net = &stand.world.net;
    let behind = Behind::new(cell, &stand.world, UdpService::Sink);
    let place = places(cell)[1];
    // The server knows nothing of it either, so its MSS says nothing.
    behind.ns.ip("link set b1 mtu 1500").unwrap();
    let server = TcpServer::start(&behind.ns, (place, 80), TcpService::Streams).unwrap();
    let mtu_of_guest = || {
        let route = stand.guest.ns.ip(&format!("route get {place}")).unwrap();
        route.contains(&format!("mtu {MTU}"))
    };
    let upload = |seed| {
        let upload = || tcp::upload(server.address(), BYTES, seed, WAIT);
        stand.run(upload).unwrap().receipt
    };
    assert_eq!((too_large_by(cell, net), mtu_of_guest()), (0, false));
    assert_eq!(upload(1), Receipt::expected(BYTES, 1));
    let told = too_large_by(cell, net);
    assert!(told > 0 && mtu_of_guest(), "{told}");
    // Other flows to the same host: their first packets fit.
    assert_eq!(upload(2), Receipt::expected(BYTES, 2));
    let send = || {
        let socket = UdpSocket::bind((cell.family.unspecified(), 0)).unwrap();
        socket
            .send_to(&[7; 1_400], behind.server.address())
            .unwrap();
    };
    stand.run(send);
    assert_eq!(
        too_large_by(cell, net),
        told,
        "the router is not asked again"
    );
    assert!(
        stand
            .slipgate
            .flows()
            .unwrap()
            .iter()
            .any(|flow| flow.path == "kernel")
    );
}

fn of_datagrams_at_once_only_those_too_long_are_lost(cell: Cell) {
    let scene = Scene::new(cell, WorldConfig::default());
    let behind = Behind::new(cell, &scene.stand.world, UdpService::Sink);
    let server = behind.server.address();
    // The host is to know the way, or the router would lose them.
    let too_long = datagram_of(cell, server, MTU + 1);
    assert_eq!(scene.send(&too_long).icmp, Some(cell.too_large()));
    for bytes in [MTU + 1, MTU + 1, MTU, MTU + 100, MTU - 1] {
        let (vnet, frame) = datagram_of(cell, server, bytes).build();
        scene.stand.guest.inject(vnet, &frame).unwrap();
    }
    eventually("those that fit", || {
        (behind.server.datagrams() == 2).then_some(())
    });
    if !cell.is_hybrid() {
        assert_eq!(scene.stand.dropped("too_big"), 3);
    }
}

fn what_may_be_fragmented_is_beside_what_may_not(cell: Cell) {
    let scene = Scene::new(cell, WorldConfig::default());
    let behind = Behind::new(cell, &scene.stand.world, UdpService::Sink);
    let server = behind.server.address();
    let too_long = datagram_of(cell, server, MTU + 1);
    assert_eq!(scene.send(&too_long).icmp, Some(cell.too_large()));
    // Of the same flow, and so by the same socket of the host: in fragments that the guest made.
    for _ in 0..3 {
        let before = behind.server.datagrams();
        eventually("a datagram in fragments", || {
            match scene.socket.send_to(&[7; 4_000], server) {
                // What the router told the guest before; it is sent in the next round.
                Err(e) if e.raw_os_error() == Some(libc::EMSGSIZE) => {}
                sent => assert_eq!(sent.unwrap(), 4_000),
            }
            std::thread::sleep(BRIEFLY / 4);
            (behind.server.datagrams() > before).then_some(())
        });
        let again = scene.send(&too_long);
        assert_eq!(
            (again.icmp, again.from.ip()),
            (Some(cell.too_large()), cell.gateway())
        );
    }
    assert_eq!(scene.stand.flows_to(server).len(), 1);
    assert!(behind.server.payload_bytes().is_multiple_of(4_000));
    if !cell.is_ipv6() {
        let before = behind.server.datagrams();
        let (vnet, frame) = datagram_of(cell, server, MTU + 1)
            .dont_fragment(false)
            .build();
        scene.stand.guest.inject(vnet, &frame).unwrap();
        eventually("one without DF", || {
            (behind.server.datagrams() > before).then_some(())
        });
        assert_eq!(
            scene.send(&too_long).icmp,
            Some(cell.too_large()),
            "with DF again"
        );
    }
}
