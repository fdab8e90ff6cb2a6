//! Translated ports that are used again while one side has a former connection in TIME-WAIT, and ports that
//! the host does not let a flow of user mode have: of a connection whose TIME-WAIT is the host's, since the
//! guest closed first, or of another process.

use std::{
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    ops::RangeInclusive,
};

use slipgate_testbed::{
    clients::tcp::{self, ConnectOutcome},
    kernel_view,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
};

use crate::{Cell, Stand, WAIT, eventually, matrix::matrix};

matrix! {
    a_tuple_in_the_hosts_time_wait_is_given_to_no_flow: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "no socket of the host's has the flow's tuple";
    a_tuple_in_time_wait_with_timestamps_is_used_again: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "no socket of the host's has the flow's tuple";
    a_port_that_another_process_has_bound_since_is_given_to_no_flow: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "no socket of the host's has the flow's tuple";
    a_server_that_has_the_tuple_in_time_wait_keeps_no_connection_waiting: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the server's peers are sockets of the host's, whose timestamps grow with each use of a tuple";
}

const PORTS: RangeInclusive<u16> = 61_000..=61_007;
/// Connections one after the other, each of which the guest closes first.
const CLOSES: u64 = 40;

fn stand_with_few_ports(cell: Cell) -> (Stand, TcpServer<IpAddr>) {
    let stand = Stand::of(cell, &["--nat-ports", "61000-61007"]);
    let address = (cell.server(), 7);
    let server = TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap();
    (stand, server)
}

/// Connects and closes at once, so many times. Returns how many were connected; all others were refused.
fn closes(stand: &Stand, server: &TcpServer<IpAddr>, times: u64) -> u64 {
    let mut connected = 0;
    for _ in 0..times {
        let outcome = stand.run(|| tcp::connect_outcome(server.address(), WAIT));
        match outcome.unwrap() {
            ConnectOutcome::Connected(_) => connected += 1,
            ConnectOutcome::Refused(_) => {}
            other => panic!("{other:?}"),
        }
    }
    connected
}

/// Connects and closes until so many were let in. Returns how many were refused meanwhile: as long as the
/// ends of those before are under way there may be no port.
fn until_let_in(stand: &Stand, server: &TcpServer<IpAddr>, times: u64) -> u64 {
    let (mut connected, mut refused) = (0, 0);
    eventually("each connection", || {
        let is_let_in = closes(stand, server, 1);
        (connected, refused) = (connected + is_let_in, refused + 1 - is_let_in);
        (connected == times).then_some(())
    });
    refused
}

/// Checks that all flows that were let in were also connected, and have closed in order, and no others.
fn expect_only_closed(
    mut stand: Stand,
    server: &TcpServer<IpAddr>,
    (connected, refused): (u64, u64),
) {
    eventually("the connections at the server", || {
        (server.accepted() == connected && server.open() == 0).then_some(())
    });
    assert_eq!(stand.refused("ports_exhausted"), refused);
    assert!(stand.slipgate.stop().unwrap().success());
    let records = stand.records();
    assert_eq!(records.len() as u64, connected);
    for record in records {
        assert_eq!(record["tcp"], "closed", "{record}");
    }
}

fn a_tuple_in_the_hosts_time_wait_is_given_to_no_flow(cell: Cell) {
    let (stand, server) = stand_with_few_ports(cell);
    let host = &stand.world.host;
    host.sysctl("net.ipv4.tcp_timestamps", "0").unwrap();
    let connected = closes(&stand, &server, CLOSES);
    assert_eq!(connected, PORTS.len() as u64, "each port once");
    expect_only_closed(stand, &server, (connected, CLOSES - connected));
}

fn a_tuple_in_time_wait_with_timestamps_is_used_again(cell: Cell) {
    let (stand, server) = stand_with_few_ports(cell);
    let refused = until_let_in(&stand, &server, CLOSES);
    expect_only_closed(stand, &server, (CLOSES, refused));
}

fn a_port_that_another_process_has_bound_since_is_given_to_no_flow(cell: Cell) {
    let (stand, server) = stand_with_few_ports(cell);
    let echo = (cell.server(), 7);
    let echo = UdpServer::start(&stand.world.net, echo, UdpService::Echo).unwrap();
    let host = &stand.world.host;
    let listen = |port| host.run(|| TcpListener::bind((cell.host(), port)).unwrap());
    let bind = |port| host.run(|| UdpSocket::bind((cell.host(), port)).unwrap());
    let left = *PORTS.end();
    let others = || *PORTS.start()..left;
    let mut listeners: Vec<TcpListener> = others().map(listen).collect();
    let _bound: Vec<UdpSocket> = others().map(bind).collect();
    let refused = until_let_in(&stand, &server, 8);
    let ports = || server.peers().iter().map(SocketAddr::port).collect();
    eventually("the connections at the server", || {
        let ports: Vec<u16> = ports();
        (ports.len() == 8).then(|| assert!(ports.iter().all(|port| *port == left), "{ports:?}"))
    });
    let answered = || {
        stand.run(|| {
            let socket = UdpSocket::bind(SocketAddr::new(cell.guest(), 0)).unwrap();
            socket.set_read_timeout(Some(WAIT)).unwrap();
            socket.connect(echo.address()).unwrap();
            socket.send(b"x").unwrap();
            socket.recv(&mut [0; 1])
        })
    };
    assert!(matches!(answered(), Ok(1)));
    assert_eq!(stand.refused("ports_exhausted"), refused);
    // And where there is none left, nothing is let in.
    listeners.push(listen(left));
    let admitted = server.accepted();
    for _ in 0..4 {
        stand.run(|| tcp::expect_refused(server.address())).unwrap();
    }
    assert_eq!(stand.refused("ports_exhausted"), refused + 4);
    assert_eq!(server.accepted(), admitted);
}

/// Linux derives timestamps and sequence numbers from a connection's addresses and ports. So to the
/// server every second connection of another port of the guest's seems older than the one before that
/// had its translated port, and is challenged. (Kernels before that derive timestamps from the addresses
/// alone, and challenge none.)
fn a_server_that_has_the_tuple_in_time_wait_keeps_no_connection_waiting(cell: Cell) {
    let stand = Stand::of(cell, &["--nat-ports", "61000-61007"]);
    let address = (cell.server(), 7);
    let server = TcpServer::start(&stand.world.net, address, TcpService::Close).unwrap();
    for _ in 0..CLOSES {
        stand
            .run(|| tcp::connect_close(server.address(), WAIT))
            .unwrap();
    }
    let sent_again = || kernel_view::protocol_counter("netstat", "TcpExt", "TCPSynRetrans");
    assert_eq!(stand.run(sent_again).unwrap(), 0);
    assert_eq!(stand.refused("ports_exhausted"), 0);
    assert_eq!(server.accepted(), CLOSES);
}
