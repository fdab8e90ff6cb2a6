//! The trap of the missing reverse entry: what the world answers is the host's then, which resets
//! it. Both entries of a flow stand from before its first packet leaves until after its last.

use std::{io::Read, net::UdpSocket};

use slipgate_abi::Tuple;
use slipgate_testbed::{
    NetNs,
    clients::tcp::{self, EchoSession},
    require_root_and_tun,
    servers::{TcpServer, TcpService},
    world::{HOST, SERVER},
};

use crate::{BRIEFLY, Stand, WAIT, at, eventually, stand::maps};

/// Counts of the host's own answers: TCP segments with RST, and ICMP destination unreachable.
fn host_answers(host: &NetNs) -> (u64, u64) {
    let text = host.run(|| std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap());
    let count = |protocol: &str, name: &str| -> u64 {
        let mut lines = text.lines().filter(|line| line.starts_with(protocol));
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let at = names.split_whitespace().position(|field| field == name);
        let value = values.split_whitespace().nth(at.unwrap());
        value.unwrap().parse().unwrap()
    };
    (count("Tcp:", "OutRsts"), count("Icmp:", "OutDestUnreachs"))
}

#[test]
fn without_the_reverse_entry_the_host_resets_the_servers_segments() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let server = TcpServer::start(&stand.world.net, (SERVER, 7), TcpService::Echo).unwrap();
    let mut stream = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    let mut session = EchoSession::new(&mut stream);
    session.round(100).unwrap();
    assert_eq!(host_answers(&stand.world.host), (0, 0));

    // By hand, what slipgate never does.
    let maps = maps(stand.slipgate.pins());
    let removed = maps.flows.remove_if(|tuple, _| tuple.scope == Tuple::WORLD);
    assert_eq!(removed.unwrap(), 1);
    stream.set_read_timeout(Some(BRIEFLY)).unwrap();
    EchoSession::new(&mut stream)
        .round(100)
        .expect_err("the echo is not the guest's");
    assert!(host_answers(&stand.world.host).0 > 0);
}

#[test]
fn each_answer_finds_its_flow_from_the_first_packet_to_the_last() {
    require_root_and_tun!();
    const AT_ONCE: usize = 16;
    const EACH: usize = 40;
    let stand = Stand::new(&["--new-flows-per-second", "100000"]);
    // It speaks first, as soon as the SYN is there, and closes first.
    let greeting = b"hello".repeat(1_000);
    let service = TcpService::Greet(greeting.clone());
    let server = TcpServer::start(&stand.world.net, (SERVER, 7), service).unwrap();
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
#[test]
fn a_flows_fragments_reach_their_guest_and_are_not_answered_by_the_host() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let bind = |ns: &NetNs, address: &str| {
        let socket = ns.run(|| UdpSocket::bind(address)).unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        socket
    };
    let server = bind(&stand.world.net, &at(SERVER, 7).to_string());
    let client = bind(&stand.guest.ns, "0.0.0.0:5000");
    let data = |len: usize| -> Vec<u8> { (0..len).map(|at| (at * 7 + at / 251) as u8).collect() };
    // Three fragments, and as many as the longest datagram has.
    for len in [3_000, 65_507] {
        client.send_to(&data(len), at(SERVER, 7)).unwrap();
        let mut buffer = vec![0; 70_000];
        let (got, nat) = server.recv_from(&mut buffer).unwrap();
        assert!(buffer[..got] == data(len), "{got} bytes of {len} out");
        server.send_to(&data(len), nat).unwrap();
        let (got, _) = client.recv_from(&mut buffer).unwrap();
        assert!(buffer[..got] == data(len), "{got} bytes of {len} in");
    }
    let flow = stand.flow_to(at(SERVER, 7));
    assert_eq!((flow.tx_packets, flow.rx_packets), (2, 2));
    assert_eq!(stand.dropped("fragment"), 0);
    assert_eq!(host_answers(&stand.world.host), (0, 0));

    // To another port the host answers: it is its business.
    server.send_to(&[7; 3_000], (HOST, 9)).unwrap();
    eventually("the host answers", || {
        (host_answers(&stand.world.host).1 == 1).then_some(())
    });
}
