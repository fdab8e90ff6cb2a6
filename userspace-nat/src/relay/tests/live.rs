use std::{collections::HashMap, net::UdpSocket};

use slipgate_abi::{Protocol, RuleIndex, VmId};

use super::{
    super::*,
    guest::{Close, End},
    world::{Client, Impairment, VM, World},
};
use crate::datagram::Datagram;

/// One of each: a forwarded connection, a client of a forwarded UDP port, DNS over TCP, a connection
/// to the host's loopback and an exchange with it, in this order.
fn one_of_each() -> (World, [Client; 2], UdpSocket) {
    let mut world = World::new(Limits::default(), Impairment::default());
    let forward = world.forward_tcp(80);
    let quiet = || End::new(Vec::new(), Close::Never);
    world.guest.listen(80, quiet());
    let mut clients = vec![Client::connect(forward, quiet())];
    world.idle(&mut clients, 20);

    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let udp = socket.local_addr().unwrap();
    let forward = Forward {
        vm: VM,
        protocol: Protocol::Udp,
        guest_port: 5353,
        rule: RuleIndex::new(1),
        socket: socket.into(),
    };
    world.with(|relay, cx| relay.add_forward(forward, cx).unwrap());
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    sender.send_to(b"x", udp).unwrap();
    while world.datagrams().is_empty() {}

    world
        .guest
        .connect("8.8.8.8:53".parse::<SocketAddr>().unwrap(), 40_000, quiet());
    world.idle(&mut clients, 20);
    let listener = world.lead(8080);
    world.guest.connect(
        "10.0.2.2:8080".parse::<SocketAddr>().unwrap(),
        40_001,
        quiet(),
    );
    let mut service = None;
    world.run(&mut clients, 1_000, |_, _| {
        service = service
            .take()
            .or_else(|| Client::accept(&listener, quiet()));
        service.is_some()
    });
    world.idle(&mut clients, 20);
    let listens = UdpSocket::bind("127.0.0.1:0").unwrap();
    world
        .leads
        .insert(5300, listens.local_addr().unwrap().port());
    let datagram = Datagram {
        from: "10.0.2.15:40002".parse().unwrap(),
        to: "10.0.2.2:5300".parse().unwrap(),
        payload: b"abc",
    };
    assert_eq!(world.offer(&datagram.emit()), Taken::Yes);
    let clients = [clients.remove(0), service.unwrap()];
    (world, clients, listens)
}

#[test]
fn each_kind_is_listed_as_it_stands_and_what_is_counted_is_the_sum() {
    let (world, ..) = one_of_each();
    let live: Vec<_> = world.relay.live(0).collect();
    let shown: Vec<_> = live
        .iter()
        .map(|(flow, state)| (flow.number, flow.remote.port(), flow.inbound, *state))
        .collect();
    let port = |at: usize| live[at].0.remote.port();
    let expected = [
        (1, port(0), true, "established"),
        (2, port(1), true, "one-way"),
        (3, 53, false, "established"),
        (4, 8080, false, "established"),
        (5, 5300, false, "one-way"),
    ];
    assert_eq!(shown, expected);
    let from: Vec<u64> = world.relay.live(4).map(|(flow, _)| flow.number).collect();
    assert_eq!(from, [4, 5]);
    let counts = world.relay.counts(VM);
    assert_eq!((counts.begun, counts.ended), (5, 0));
    let sum = |of: fn(&RelayedFlow) -> (u64, u64)| {
        let each = live.iter().map(|(flow, _)| of(flow));
        each.fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
    };
    assert_eq!((counts.tx, counts.rx), (sum(|f| f.tx), sum(|f| f.rx)));
    assert!(counts.tx.0 > 4 && counts.rx.0 > 4, "{counts:?}");
}

#[test]
fn one_is_cut_by_its_number_and_the_others_stay() {
    for number in 1..=5 {
        let (mut world, mut clients, _listens) = one_of_each();
        world.relay.keep_records(true);
        assert!(world.with(|relay, cx| relay.cut_flow(number, "cut", cx)));
        assert!(!world.with(|relay, cx| relay.cut_flow(number, "cut", cx)));
        let left: Vec<u64> = world.relay.live(0).map(|(flow, _)| flow.number).collect();
        let others: Vec<u64> = (1..=5).filter(|other| *other != number).collect();
        assert_eq!(left, others);
        let (flow, end) = world.relay.next_record().unwrap();
        assert_eq!((flow.number, end.unwrap().reason), (number, "cut"));
        world.idle(&mut clients, 50);
        // Both ends of a connection hear of it, and nobody else does.
        let heard: HashMap<u64, bool> = [
            (1, clients[0].end.reset),
            (3, world.guest.ends[1].1.reset),
            (4, clients[1].end.reset && world.guest.ends[2].1.reset),
        ]
        .into();
        for (of, reset) in heard {
            assert_eq!(reset, of == number, "{of} when {number} is cut");
        }
    }
}

#[test]
fn a_vms_are_cut_together_dns_among_them_and_no_other_vms() {
    let (mut world, mut clients, _listens) = one_of_each();
    assert_eq!(
        world.with(|relay, cx| relay.cut(VmId::new(VM.get() + 1), "cut", cx)),
        0
    );
    assert_eq!(world.relay.live(0).count(), 5);
    assert_eq!(world.with(|relay, cx| relay.cut(VM, "cut", cx)), 5);
    world.idle(&mut clients, 50);
    assert!(world.guest.ends.iter().all(|(_, end)| end.reset));
    assert!(clients.iter().all(|client| client.end.reset));
    world.assert_empty();
    let counts = world.relay.counts(VM);
    assert_eq!((counts.begun, counts.ended), (5, 5));
}
