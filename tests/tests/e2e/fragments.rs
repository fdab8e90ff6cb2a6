//! Datagrams in fragments, in every order: from a guest, to its flow, to its forward, and the host's own.

use std::net::{SocketAddr, UdpSocket};

use slipgate_testbed::{LinkSender, NetNs, frame::FrameBuilder};

use crate::{
    Cell, GATEWAY_MAC, GUEST_MAC, Stand, WAIT,
    matrix::{at, matrix},
};

matrix! {
    datagrams_in_fragments_of_any_order_are_whole_where_they_belong: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

/// Every order of three fragments.
const ORDERS: [[usize; 3]; 6] = [
    [0, 1, 2],
    [0, 2, 1],
    [1, 0, 2],
    [1, 2, 0],
    [2, 0, 1],
    [2, 1, 0],
];
/// Data of each fragment but the last, bytes.
const STEP: usize = 1_200;
const UDP: u8 = 17;

fn data(number: usize) -> Vec<u8> {
    (0..3_000)
        .map(|at| (at * 7 + at / 251 + number) as u8)
        .collect()
}

/// A datagram in three fragments.
fn fragments(from: SocketAddr, to: SocketAddr, number: usize) -> Vec<FrameBuilder> {
    let header = if from.is_ipv6() { 40 } else { 20 };
    let whole = FrameBuilder::udp(from, to).payload(&data(number));
    let bytes = &whole.build_ip()[header..];
    let all = bytes.chunks(STEP).enumerate().map(|(at, chunk)| {
        let begin = at * STEP;
        FrameBuilder::ip(from.ip(), to.ip(), UDP)
            .ident(100 + number as u16)
            .fragment((begin / 8) as u16, begin + chunk.len() < bytes.len())
            .payload(chunk)
    });
    all.collect()
}

fn bound(ns: &NetNs, address: SocketAddr) -> UdpSocket {
    let socket = ns.run(|| UdpSocket::bind(address)).unwrap();
    socket.set_read_timeout(Some(WAIT)).unwrap();
    socket
}

/// Expects a datagram whole. Returns who sent it.
fn expect(socket: &UdpSocket, number: usize, what: &str) -> SocketAddr {
    let mut buffer = [0; 4_000];
    let (len, from) = socket
        .recv_from(&mut buffer)
        .unwrap_or_else(|error| panic!("{what}, {:?}: {error}", ORDERS[number % 6]));
    assert!(buffer[..len] == data(number), "{len} bytes {what}");
    from
}

fn datagrams_in_fragments_of_any_order_are_whole_where_they_belong(cell: Cell) {
    let stand = Stand::with_known_guest(cell, &["--forward", "udp:5353:5300"]);
    let server = bound(&stand.world.net, at(cell.server(), 7));
    let own = bound(&stand.world.host, at(cell.host(), 5_454));
    let client = bound(&stand.guest.ns, at(cell.guest(), 5_000));
    let inside = bound(&stand.guest.ns, at(cell.guest(), 5_300));
    let world = LinkSender::new(&stand.world).unwrap();
    // By the time the flow is there, the guest and the world know their neighbours.
    client.send_to(&data(99), at(cell.server(), 7)).unwrap();
    let nat = expect(&server, 99, "to the world");
    for (number, order) in ORDERS.into_iter().enumerate() {
        // Another socket of the guest, as far as anybody can tell.
        let from = at(cell.guest(), 6_000 + number as u16);
        let sent = fragments(from, at(cell.server(), 7), number);
        for place in order {
            let frame = sent[place].clone().macs(GUEST_MAC, GATEWAY_MAC);
            let (vnet, bytes) = frame.build();
            stand.guest.inject(vnet, &bytes).unwrap();
        }
        expect(&server, number, "to the world");
        let from_world = |from: SocketAddr, to: SocketAddr, number: usize| {
            let sent = fragments(from, to, number);
            order
                .iter()
                .for_each(|place| world.send(&sent[*place]).unwrap());
        };
        let remote = at(cell.server(), 7);
        from_world(remote, nat, 10 + number);
        assert_eq!(expect(&client, 10 + number, "to a flow"), remote);
        // Each opens a flow of its own.
        let stranger = at(cell.server(), 7_000 + number as u16);
        from_world(stranger, at(cell.host(), 5_353), 20 + number);
        expect(&inside, 20 + number, "to a forward");
        from_world(stranger, at(cell.host(), 5_454), 30 + number);
        assert_eq!(expect(&own, 30 + number, "to the host"), stranger);
    }
    assert_eq!(stand.dropped("fragment"), 0);
    let flows = stand.slipgate.flows().unwrap();
    let flow = flows
        .iter()
        .find(|flow| flow.proto == "udp" && flow.tx_packets == 1 && flow.rx_packets > 1);
    let flow = flow.expect("the flow that was answered");
    assert_eq!(flow.rx_packets, 6, "a datagram is one packet: {flow:?}");
}
