//! Datagrams of guests that are longer than a link on the way carries, which a router knows and
//! nobody else at first.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use slipgate_testbed::{
    NetNs, World, WorldConfig,
    frame::FrameBuilder,
    servers::{UdpServer, UdpService},
    world_ipv6,
};

use crate::{
    BRIEFLY, Cell, GATEWAY_MAC, GUEST_MAC, eventually,
    guest_errors::{PORT, Scene},
    matrix::matrix,
    stand::counts,
};

matrix! {
    a_smaller_link_behind_a_router_is_told_and_kept_in_mind: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    of_datagrams_at_once_only_those_too_long_are_lost: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    what_may_be_fragmented_is_beside_what_may_not: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "the router fragments, and the engine leaves fragments as they came";
}

/// MTU of the link behind the router, bytes.
const MTU: usize = 1_300;

/// A network behind the world's router, by a link with that MTU, and a server in it.
struct Behind {
    server: UdpServer<IpAddr>,
    _ns: NetNs,
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
        Self { server, _ns: ns }
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
