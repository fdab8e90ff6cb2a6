//! The trap of the missing reverse entry: what the world answers is the host's then, which resets
//! it. Both entries of a flow stand from before its first packet leaves until after its last.

use std::{
    io::Read,
    net::{IpAddr, SocketAddr, UdpSocket},
};

use slipgate_abi::Tuple;
use slipgate_testbed::{
    NetNs,
    clients::{
        icmp,
        tcp::{self, EchoSession},
    },
    kernel_view,
    servers::{TcpServer, TcpService},
};

use crate::{
    BRIEFLY, Cell, Stand, WAIT, eventually,
    matrix::{at, matrix},
    stand::maps,
};

matrix! {
    without_the_reverse_entry_the_host_resets_the_servers_segments: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's own sockets are the servers' peers, and answer them";
    each_answer_finds_its_flow_from_the_first_packet_to_the_last: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's own sockets are the servers' peers, and answer them";
    a_flows_fragments_reach_their_guest_and_are_not_answered_by_the_host: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

/// Counts of the host's own answers: TCP segments with RST, and destination unreachable by ICMP of
/// either family.
fn host_answers(host: &NetNs) -> (u64, u64) {
    let count = |protocol, name| {
        let counter = || kernel_view::protocol_counter("snmp", protocol, name);
        host.run(counter).unwrap()
    };
    let of_ipv6 = || std::fs::read_to_string("/proc/thread-self/net/snmp6").unwrap_or_default();
    let unreachable6: u64 = host
        .run(of_ipv6)
        .lines()
        .find_map(|line| line.strip_prefix("Icmp6OutDestUnreachs"))
        .map_or(0, |value| value.trim().parse().unwrap());
    let unreachable = count("Icmp", "OutDestUnreachs") + unreachable6;
    (count("Tcp", "OutRsts"), unreachable)
}

fn without_the_reverse_entry_the_host_resets_the_servers_segments(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let address = (cell.server(), 7);
    let server = TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap();
    let mut stream = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    let mut session = EchoSession::new(&mut stream);
    session.round(100).unwrap();
    assert_eq!(host_answers(&stand.world.host), (0, 0));

    // By hand, what slipgate never does.
    let maps = maps(stand.slipgate.pins());
    let removed = match cell.is_ipv6() {
        false => (maps.flows).remove_if(|tuple, _| tuple.scope == Tuple::WORLD),
        true => (maps.flows6).remove_if(|tuple, _| tuple.scope == Tuple::WORLD),
    };
    assert_eq!(removed.unwrap(), 1);
    stream.set_read_timeout(Some(BRIEFLY)).unwrap();
    EchoSession::new(&mut stream)
        .round(100)
        .expect_err("the echo is not the guest's");
    assert!(host_answers(&stand.world.host).0 > 0);
}

fn each_answer_finds_its_flow_from_the_first_packet_to_the_last(cell: Cell) {
    const AT_ONCE: usize = 16;
    const EACH: usize = 40;
    let stand = Stand::of(cell, &["--new-flows-per-second", "100000"]);
    // It speaks first, as soon as the SYN is there, and closes first.
    let greeting = b"hello".repeat(1_000);
    let service = TcpService::Greet(greeting.clone());
    let server = TcpServer::start(&stand.world.net, (cell.server(), 7), service).unwrap();
    let (address, greeting) = (server.address(), &greeting);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                stand.run(|| {
                    for _ in 0..EACH {
                        let mut heard = Vec::new();
                        let mut stream = tcp::connect(address, WAIT).unwrap();
                        stream.read_to_end(&mut heard).unwrap();
                        assert!(heard == *greeting);
                    }
                });
            });
        }
    });
    assert_eq!(server.accepted() as usize, AT_ONCE * EACH);
    assert_eq!(host_answers(&stand.world.host), (0, 0));
}

/// The same trap by another way: the host puts fragments together, and has no socket for them.
fn a_flows_fragments_reach_their_guest_and_are_not_answered_by_the_host(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let bind = |ns: &NetNs, address: SocketAddr| {
        let socket = ns.run(|| UdpSocket::bind(address)).unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        socket
    };
    let remote = at(cell.server(), 7);
    let server = bind(&stand.world.net, remote);
    let client = bind(&stand.guest.ns, at(cell.guest(), 5000));
    let data = |len: usize| -> Vec<u8> { (0..len).map(|at| (at * 7 + at / 251) as u8).collect() };
    // Two fragments, some, and as many as the longest datagram has.
    let longest = if cell.is_ipv6() { 65_487 } else { 65_507 };
    for len in [1_480, 4_500, longest] {
        client.send_to(&data(len), remote).unwrap();
        let mut buffer = vec![0; 70_000];
        let (got, nat) = server.recv_from(&mut buffer).unwrap();
        assert!(buffer[..got] == data(len), "{got} bytes of {len} out");
        server.send_to(&data(len), nat).unwrap();
        let (got, _) = client.recv_from(&mut buffer).unwrap();
        assert!(buffer[..got] == data(len), "{got} bytes of {len} in");
    }
    stand.run(|| match cell.server() {
        IpAddr::V4(ip) => {
            let report = icmp::ping(ip, 1, 4_000, WAIT).unwrap();
            assert_eq!((report.replies.len(), report.corrupt), (1, 0), "{report:?}");
        }
        IpAddr::V6(ip) => assert!(icmp::ping6(ip, 4_000, WAIT).unwrap().is_some()),
    });
    let flows = stand.slipgate.flows().unwrap();
    let flow = flows.iter().find(|flow| flow.proto == "udp").unwrap();
    let packets = (flow.tx_packets, flow.rx_packets);
    assert_eq!(packets, (3, 3), "a datagram is one packet: {flow:?}");
    assert_eq!(stand.dropped("fragment"), 0);
    let host = &stand.world.host;
    assert_eq!(host_answers(host), (0, 0));

    // To another port the host answers: it is its business.
    server.send_to(&data(3_000), (cell.host(), 9)).unwrap();
    eventually("the host answers", || {
        (host_answers(host).1 == 1).then_some(())
    });
}
