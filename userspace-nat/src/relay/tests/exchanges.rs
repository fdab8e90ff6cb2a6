use std::{
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    time::Duration,
};

use super::{
    super::*,
    datagrams::whole,
    world::{Impairment, MS, VM, World},
};
use crate::datagram::Datagram;
use slipgate_policy::Destination;

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

/// A service on the host's loopback that port 5353 of the gateway leads to.
fn world(limits: Limits) -> (World, UdpSocket) {
    let mut world = World::new(limits, Impairment::default());
    let service = UdpSocket::bind("127.0.0.1:0").unwrap();
    let patience = Duration::from_secs(2);
    service.set_read_timeout(Some(patience)).unwrap();
    let port = service.local_addr().unwrap().port();
    world.leads.insert(5353, port);
    (world, service)
}

fn send(world: &mut World, from: u16, payload: &[u8]) -> Taken {
    let datagram = Datagram {
        from: SocketAddrV4::new(GUEST, from).into(),
        to: SocketAddrV4::new(GATEWAY, 5353).into(),
        payload,
    };
    world.offer(&datagram.emit())
}

fn receive(service: &UdpSocket) -> (Vec<u8>, std::net::SocketAddr) {
    let mut buffer = vec![0; 65_536];
    let (len, from) = service.recv_from(&mut buffer).unwrap();
    buffer.truncate(len);
    (buffer, from)
}

/// Datagrams that the relay has for the guest: the destination port and the payload.
fn deliver(world: &mut World) -> Vec<(u16, Vec<u8>)> {
    let datagrams = world.datagrams().into_iter();
    datagrams
        .map(|(from, to, payload)| {
            assert_eq!(from, SocketAddrV4::new(GATEWAY, 5353).into());
            assert_eq!(to.ip(), GUEST);
            (to.port(), payload)
        })
        .collect()
}

fn timers(world: &mut World) {
    let frozen = world.frozen;
    world.with(|relay, cx| relay.on_timer(&|_| frozen, cx));
}

/// As it would be left in the moment before the socket is connected.
#[test]
fn a_datagram_of_a_stranger_is_passed_over() {
    let sockets: [UdpSocket; 3] = std::array::from_fn(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
    let [ours, service, stranger] = sockets;
    let port = service.local_addr().unwrap().port();
    ours.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    for (from, is_services) in [(&stranger, false), (&service, true)] {
        from.send_to(b"hello", ours.local_addr().unwrap()).unwrap();
        let got =
            host_socket::receive(&ours, host_socket::at(Version::V4, port), &mut [0; 16]).unwrap();
        assert_eq!(got, is_services.then_some(5));
    }
}

#[test]
fn each_of_the_guests_ports_has_its_own_answers() {
    let (mut world, service) = world(Limits::default());
    world.relay.keep_records(true);
    let largest = vec![7; 1_472];
    for (port, payload) in [(40_000, &b"one"[..]), (40_001, &largest), (40_000, b"more")] {
        assert_eq!(send(&mut world, port, payload), Taken::Yes);
    }
    let asked: Vec<_> = (0..3).map(|_| receive(&service)).collect();
    assert_eq!(asked[0].1, asked[2].1);
    assert_ne!(asked[0].1, asked[1].1);
    assert!(
        asked
            .iter()
            .all(|(_, from)| from.ip() == Ipv4Addr::LOCALHOST)
    );
    assert_eq!(world.relay.counts(VM).loopback_exchanges, 2);
    for (payload, from) in &asked {
        service.send_to(payload, from).unwrap();
    }
    let mut answers = Vec::new();
    while answers.len() < 3 {
        answers.extend(deliver(&mut world));
    }
    answers.sort();
    assert_eq!(
        answers,
        [
            (40_000, b"more".to_vec()),
            (40_000, b"one".to_vec()),
            (40_001, largest)
        ]
    );
    // A stranger on the host has no way in.
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.send_to(b"stranger", asked[0].1).unwrap();
    assert_eq!(deliver(&mut world), []);

    world.with(|relay, _| relay.end_records(2_000 * MS));
    let records: Vec<_> = std::iter::from_fn(|| world.relay.next_record()).collect();
    let ends: Vec<_> = records.iter().filter(|(_, end)| end.is_some()).collect();
    assert_eq!((records.len(), ends.len()), (4, 2));
    let (one, _) = ends.iter().find(|(f, _)| f.guest.port() == 40_000).unwrap();
    assert_eq!((one.tx, one.rx), ((2, 63), (2, 63)));
    assert_eq!(one.nat, Some(asked[0].1));
    assert_eq!(one.host, service.local_addr().ok());
}

#[test]
fn a_port_that_nobody_has_is_refused() {
    let (mut world, service) = world(Limits::default());
    assert_eq!(send(&mut world, 40_000, b"one"), Taken::Yes);
    receive(&service);
    drop(service);
    assert_eq!(send(&mut world, 40_000, b"two"), Taken::Refused);
    assert_eq!(send(&mut world, 40_000, b"three"), Taken::Refused);
    world.assert_empty();
}

#[test]
fn too_many_are_refused_and_harm_none_and_silence_ends_them() {
    let limits = Limits {
        loopback_exchanges_per_vm: 2,
        ..Limits::default()
    };
    let idle_ns = limits.association_idle_ns;
    let (mut world, service) = world(limits);
    for port in [40_000, 40_001] {
        assert_eq!(send(&mut world, port, b"x"), Taken::Yes);
    }
    assert_eq!(send(&mut world, 40_002, b"x"), Taken::OverLimit);
    world.now_ns += idle_ns - MS;
    timers(&mut world);
    assert_eq!(send(&mut world, 40_000, b"x"), Taken::Yes);
    world.now_ns += MS;
    timers(&mut world);
    assert_eq!(world.relay.loopback_flows(VM), 1, "the silent one is over");
    assert_eq!(send(&mut world, 40_002, b"x"), Taken::Yes);
    // An answer keeps it.
    world.now_ns += idle_ns / 2;
    let mut from = None;
    for _ in 0..4 {
        from = Some(receive(&service).1);
    }
    service.send_to(b"answer", from.unwrap()).unwrap();
    while deliver(&mut world).is_empty() {}
    world.now_ns += idle_ns / 2;
    timers(&mut world);
    assert_eq!(world.relay.loopback_flows(VM), 1);
    world.now_ns += idle_ns;
    timers(&mut world);
    world.assert_empty();
    assert_eq!(world.relay.next_deadline_ns(false), None);
}

#[test]
fn what_is_longer_than_the_link_comes_in_fragments() {
    let (mut world, service) = world(Limits::default());
    send(&mut world, 40_000, b"x");
    let (_, from) = receive(&service);
    let long: Vec<u8> = (0..4_000_u32).map(|at| at as u8).collect();
    service.send_to(&long, from).unwrap();
    let (sizes, payload) = whole(&mut world);
    assert_eq!((sizes, payload == long), (vec![1_500, 1_500, 1_068], true));
}

#[test]
fn rules_cuts_and_the_vms_end_end_them_and_frost_does_not() {
    let (mut world, _service) = world(Limits::default());
    let idle_ns = Limits::default().association_idle_ns;
    send(&mut world, 40_000, b"x");
    world.frozen = true;
    for _ in 0..3 {
        world.now_ns += idle_ns;
        timers(&mut world);
    }
    assert_eq!(world.relay.loopback_flows(VM), 1);
    world.frozen = false;
    let rejudge = |world: &mut World, standing| {
        let judges = |_: &VmNet, to: Destination, _: u16| {
            assert_eq!((to.protocol, to.port), (Protocol::Udp, 5353));
            standing
        };
        let all = [VM].into();
        world.with(|relay, cx| relay.rejudge(&all, &judges, cx)).cut
    };
    assert_eq!(rejudge(&mut world, Standing::Stands), 0);
    assert_eq!(rejudge(&mut world, Standing::Cut), 1);
    world.assert_empty();
    send(&mut world, 40_000, b"x");
    assert_eq!(world.with(|relay, cx| relay.cut(VM, "cut", cx)), 1);
    world.assert_empty();
    send(&mut world, 40_000, b"x");
    world.with(|relay, cx| relay.remove_vm(VM, cx));
    world.assert_empty();
    assert_eq!(send(&mut world, 40_000, b"x"), Taken::No, "nobody's");
}
