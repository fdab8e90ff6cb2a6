//! The three kinds of relayed traffic by IPv6.
use std::net::{Ipv6Addr, TcpListener, UdpSocket};

use slipgate_abi::Protocol;

use super::{
    super::*,
    guest::{Close, End, GUEST6},
    world::{Client, VM, World, bytes},
};
use crate::{datagram::Datagram, ndp::addresses::bind};

const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 1);

fn at(port: u16) -> SocketAddr {
    SocketAddr::new(GATEWAY6.into(), port)
}

#[test]
fn dns_over_tcp_is_answered_by_ipv6() {
    let (mut world, _) = World::with_ipv6(Limits::default());
    let send = [&[0, 8][..], b"question"].concat();
    world
        .guest
        .connect(at(53), 40_000, End::new(send, Close::Never));
    world.idle(&mut [], 50);
    let asked = world.relay.next_question().unwrap();
    assert_eq!(asked.message, b"question");
    // Longer than a UDP answer may be, and than a segment.
    let answer = bytes(9_000, 3);
    world.with(|relay, cx| relay.answer(asked.connection, &answer, cx));
    world.idle(&mut [], 50);
    assert_eq!(world.guest.ends[0].1.received[2..], answer);
    let (flow, _) = world.relay.live(0).next().unwrap();
    assert_eq!(flow.guest, SocketAddr::new(GUEST6.into(), 40_000));
    assert_eq!(flow.remote, at(53));
}

#[test]
fn dns_connections_by_either_family_are_limited_together() {
    let limits = Limits {
        dns_connections_per_vm: 2,
        ..Limits::default()
    };
    let (mut world, _) = World::with_ipv6(limits);
    let four: SocketAddr = "10.0.2.3:53".parse().unwrap();
    for (to, from) in [(at(53), 40_000), (four, 40_000), (at(53), 40_001)] {
        let end = End::new(Vec::new(), Close::Never);
        world.guest.connect(to, from, end);
    }
    world.idle(&mut [], 50);
    let counts = world.relay.counts(VM);
    assert_eq!((counts.dns_connections, counts.dns_refused > 0), (2, true));
}

#[test]
fn a_client_by_ipv6_reaches_the_address_that_the_guest_used_last() {
    let (mut world, row) = World::with_ipv6(Limits::default());
    let forward = world.forward_tcp_at("::1", 80);
    // It has none yet: refused, and counted.
    let mut clients = vec![Client::connect(
        forward,
        End::new(bytes(100, 1), Close::WhenSent),
    )];
    world.run(&mut clients, 200, |_, clients| clients[0].end.reset);
    assert_eq!(world.relay.counts(VM).streams_refused, 1);
    bind(row, Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 0x99), 5);
    bind(row, GUEST6, 6);
    world
        .guest
        .listen(80, End::new(bytes(70_000, 2), Close::AfterPeer));
    let end = End::new(bytes(50_000, 1), Close::WhenSent);
    let mut clients = vec![Client::connect(forward, end)];
    world.run(&mut clients, 2_000, |_, clients| clients[0].end.eof);
    assert_eq!(clients[0].end.received, bytes(70_000, 2));
    assert_eq!(world.guest.ends[0].1.received, bytes(50_000, 1));
}

#[test]
fn datagrams_of_a_client_by_ipv6_are_relayed_and_answered() {
    let (mut world, row) = World::with_ipv6(Limits::default());
    bind(row, GUEST6, 6);
    let socket = UdpSocket::bind("[::1]:0").unwrap();
    let host = socket.local_addr().unwrap();
    world.forward(Protocol::Udp, 5_353, socket.into());
    let client = UdpSocket::bind("[::1]:0").unwrap();
    client.send_to(b"hello", host).unwrap();
    let (from, to, payload) = world.datagrams().remove(0);
    assert_eq!((from.ip(), &*payload), (GATEWAY6.into(), &b"hello"[..]));
    assert_eq!(to, SocketAddr::new(GUEST6.into(), 5_353));
    let answer = Datagram {
        from: to,
        to: from,
        payload: b"well",
    };
    assert_eq!(world.offer(&answer.emit()), Taken::Yes);
    let mut buffer = [0; 16];
    let (len, by) = client.recv_from(&mut buffer).unwrap();
    assert_eq!((&buffer[..len], by), (&b"well"[..], host));
}

#[test]
fn a_port_of_the_gateway_leads_to_the_hosts_loopback_of_the_guests_family() {
    let (mut world, _) = World::with_ipv6(Limits::default());
    let service: TcpListener = world.lead_at("::1", 8_080);
    let end = End::new(bytes(9_000, 1), Close::WhenSent);
    world.guest.connect(at(8_080), 40_000, end);
    let mut clients = Vec::new();
    world.run(&mut Vec::new(), 500, |_, _| {
        let answers = End::new(bytes(5_000, 2), Close::AfterPeer);
        clients.extend(Client::accept(&service, answers));
        !clients.is_empty()
    });
    assert_eq!(
        clients[0].stream.local_addr().unwrap().ip(),
        std::net::IpAddr::from(Ipv6Addr::LOCALHOST)
    );
    world.run(&mut clients, 500, |world, _| world.guest.ends[0].1.eof);
    assert_eq!(world.guest.ends[0].1.received, bytes(5_000, 2));
    // By IPv4 the same port leads to 127.0.0.1, where nobody listens.
    let four: SocketAddr = "10.0.2.2:8080".parse().unwrap();
    world
        .guest
        .connect(four, 40_001, End::new(Vec::new(), Close::Never));
    world.idle(&mut clients, 50);
    assert!(world.guest.ends[1].1.reset);
}
