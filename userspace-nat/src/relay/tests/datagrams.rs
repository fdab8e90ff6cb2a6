use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};

use proptest::prelude::*;
use slipgate_abi::Protocol;

use super::{
    super::*,
    guest::GUEST6,
    world::{Impairment, MS, VM, World},
};
use crate::{
    datagram::Datagram,
    ndp::addresses::bind,
    packet::Fragment,
    poll::Poller,
    port::{Outbox, single},
};

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

fn world(limits: Limits) -> (World, u16) {
    let mut world = World::new(limits, Impairment::default());
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    world.forward(Protocol::Udp, 5353, socket.into());
    (world, port)
}

/// Datagrams that the relay has for the guest: the gateway's port and the payload.
fn deliver(world: &mut World) -> Vec<(u16, Vec<u8>)> {
    let datagrams = world.datagrams().into_iter();
    datagrams
        .map(|(from, to, payload)| {
            assert_eq!(from.ip(), GATEWAY);
            assert_eq!(to, SocketAddrV4::new(GUEST, 5353).into());
            (from.port(), payload)
        })
        .collect()
}

fn answer(world: &mut World, from: u16, port: u16, payload: &[u8]) -> Taken {
    let packet = Datagram {
        from: SocketAddrV4::new(GUEST, from).into(),
        to: SocketAddrV4::new(GATEWAY, port).into(),
        payload,
    };
    let packet = packet.emit();
    world.with(|relay, cx| relay.packet(VM, &packet, single(packet.len()), cx))
}

fn client() -> UdpSocket {
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client
        .set_read_timeout(Some(std::time::Duration::from_secs(2)))
        .unwrap();
    client
}

#[test]
fn each_client_has_its_own_answers_from_the_address_it_asked() {
    let (mut world, port) = world(Limits::default());
    let (one, two) = (client(), client());
    one.send_to(b"one", ("127.0.0.1", port)).unwrap();
    two.send_to(b"two", ("127.0.0.2", port)).unwrap();
    let mut asked = Vec::new();
    while asked.len() < 2 {
        asked.extend(deliver(&mut world));
    }
    assert_ne!(asked[0].0, asked[1].0);
    for (from, payload) in &asked {
        assert_eq!(answer(&mut world, 5353, *from, payload), Taken::Yes);
    }
    for (socket, expected, address) in [(&one, b"one", "127.0.0.1"), (&two, b"two", "127.0.0.2")] {
        let mut buffer = [0; 100];
        let (len, from) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], expected);
        assert_eq!(from.to_string(), format!("{address}:{port}"));
    }
    let counts = world.relay.counts(VM);
    assert_eq!(
        (
            counts.associations,
            counts.bytes_to_guest,
            counts.bytes_from_guest
        ),
        (2, 6, 6)
    );
}

#[test]
fn what_the_engine_has_no_room_for_is_not_counted_as_received() {
    let (mut world, port) = world(Limits::default());
    world.out = Outbox::new(0);
    client().send_to(b"one", ("127.0.0.1", port)).unwrap();
    while world.relay.counts(VM).associations == 0 {
        assert_eq!(deliver(&mut world), []);
    }
    let counts = world.relay.counts(VM);
    assert_eq!((counts.rx, counts.bytes_to_guest), ((0, 0), 0));
}

#[test]
fn a_second_datagram_keeps_its_port_until_the_client_was_silent() {
    let (mut world, port) = world(Limits::default());
    let client = client();
    let ask = |world: &mut World| {
        client.send_to(b"x", ("127.0.0.1", port)).unwrap();
        deliver(world)[0].0
    };
    let first = ask(&mut world);
    world.now_ns += 299_000 * MS;
    world.with(|relay, cx| relay.on_timer(&|_| false, cx));
    assert_eq!(ask(&mut world), first);
    world.now_ns += 299_000 * MS;
    world.with(|relay, cx| relay.on_timer(&|_| false, cx));
    assert_eq!(ask(&mut world), first, "the second one refreshed it");
    // It goes at the first look after its time.
    for _ in 0..10 {
        world.now_ns += 40_000 * MS;
        world.with(|relay, cx| relay.on_timer(&|_| false, cx));
    }
    assert_eq!(world.relay.counts(VM).associations, 0);
    assert_eq!(world.relay.next_deadline_ns(false), None);
    assert_eq!(answer(&mut world, 5353, first, b"late"), Taken::No);
    assert_ne!(ask(&mut world), first);
}

#[test]
fn strangers_and_clients_beyond_the_limit_are_not_served() {
    let (mut world, port) = world(Limits {
        associations_per_vm: 1,
        ..Limits::default()
    });
    let (one, two) = (client(), client());
    one.send_to(b"one", ("127.0.0.1", port)).unwrap();
    let asked = deliver(&mut world);
    two.send_to(b"two", ("127.0.0.1", port)).unwrap();
    assert_eq!(deliver(&mut world), []);
    assert_eq!(world.relay.counts(VM).associations_refused, 1);
    assert_eq!(
        answer(&mut world, 9999, asked[0].0, b"x"),
        Taken::No,
        "another port of the guest"
    );
    assert_eq!(
        answer(&mut world, 5353, asked[0].0 ^ 1, b"x"),
        Taken::No,
        "another port of the gateway"
    );
    assert_eq!(answer(&mut world, 5353, asked[0].0, b"x"), Taken::Yes);
}

/// Puts fragments together. Returns their sizes and the datagram's payload.
pub(super) fn whole(world: &mut World) -> (Vec<usize>, Vec<u8>) {
    let mut ready = Vec::new();
    world.poller.wait(Some(1_000 * MS), &mut ready).unwrap();
    for readiness in ready {
        world.with(|relay, cx| relay.on_ready(readiness, cx));
    }
    let (mut sizes, mut data) = (Vec::new(), Vec::new());
    for frame in world.out.frames() {
        let l3 = crate::port::Frame::parse(frame).unwrap().l3;
        let fragment = Fragment::parse(l3).unwrap();
        assert_eq!(fragment.begin, data.len(), "in order");
        sizes.push(l3.len());
        data.extend_from_slice(fragment.data);
    }
    world.out.clear();
    (sizes, data.split_off(8))
}

#[test]
fn what_does_not_fit_the_guests_link_comes_in_fragments() {
    let (mut world, port) = world(Limits::default());
    let client = client();
    client.send_to(&[1; 1_472], ("127.0.0.1", port)).unwrap();
    assert_eq!(deliver(&mut world)[0].1.len(), 1_472, "whole");
    let long: Vec<u8> = (0..4_000_u32).map(|at| at as u8).collect();
    client.send_to(&long, ("127.0.0.1", port)).unwrap();
    let (sizes, payload) = whole(&mut world);
    assert_eq!((sizes, payload == long), (vec![1_500, 1_500, 1_068], true));
    let counts = world.relay.counts(VM);
    assert_eq!(counts.bytes_to_guest, 5_472);
    assert_eq!(counts.rx, (2, 1_500 + 4_028), "each is one packet");
}

#[test]
fn what_does_not_fit_the_guests_link_comes_in_fragments_by_ipv6() {
    let (mut world, row) = World::with_ipv6(Limits::default());
    bind(row, GUEST6, 5);
    let socket = UdpSocket::bind("[::1]:0").unwrap();
    let to = socket.local_addr().unwrap();
    world.forward(Protocol::Udp, 5353, socket.into());
    let client = UdpSocket::bind("[::1]:0").unwrap();
    let long: Vec<u8> = (0..4_000_u32).map(|at| at as u8).collect();
    client.send_to(&long, to).unwrap();
    let (sizes, payload) = whole(&mut world);
    assert_eq!((sizes, payload == long), (vec![1_496, 1_496, 1_160], true));
}

proptest! {
    /// No content after an IPv4 header to an address of the relay causes a panic.
    #[test]
    fn no_packet_panics(
        protocol in prop_oneof![Just(6_u8), Just(17)],
        to_gateway in any::<bool>(),
        packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 1..20),
        syn in any::<bool>(),
    ) {
        let mut relay = Relay::new(Limits { dns_connections_per_vm: 4, ..Limits::default() });
        relay.add_vm(crate::test_vm::vm(VM.get()), None);
        let mut out = Outbox::new(1 << 20);
        let poller = Poller::new().unwrap();
        let mut cx = Context { now_ns: 1_000 * MS, out: &mut out, poller: &poller };
        for mut payload in packets {
            if payload.len() >= 20 && protocol == 6 {
                let port = [0x90, payload[1] & 1, 0, 53];
                    payload[..4].copy_from_slice(&port);
                payload[12] = 0x50 | (payload[12] & 0x10);
                if syn {
                    payload[13] = 2;
                }
            }
            let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0, 10, 0, 2, 15];
            packet.extend(if to_gateway { [10, 0, 2, 2] } else { [8, 8, 8, 8] });
            packet.extend(&payload);
            let len = packet.len() as u16;
            packet[2..4].copy_from_slice(&len.to_be_bytes());
            crate::packet::ipv4::fill_checksum(&mut packet, 20);
            relay.packet(VM, &packet, single(packet.len()), &mut cx);
            cx.now_ns += 3_000 * MS;
            relay.on_timer(&|_| false, &mut cx);
        }
        prop_assert!(relay.counts(VM).dns_connections <= 4);
        cx.now_ns += 60_000 * MS;
        relay.on_timer(&|_| false, &mut cx);
        cx.now_ns += 60_000 * MS;
        relay.on_timer(&|_| false, &mut cx);
        prop_assert_eq!(relay.counts(VM).dns_connections, 0);
    }
}
