//! A host that runs out of what flows need: new ones are refused visibly, those that run go on, and there
//! is room again when some end.

use std::{
    net::{SocketAddr, TcpStream, UdpSocket},
    thread,
};

use slipgate_testbed::{
    clients::tcp,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
};

use crate::{Cell, Stand, WAIT, eventually, matrix::matrix};

matrix! {
    without_ports_the_new_is_refused_and_what_runs_goes_on: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    without_descriptors_the_new_is_refused_and_what_runs_goes_on: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "a flow takes no descriptor in the kernel";
}

/// Bytes that a connection carries while others are refused.
const CARRIED: u64 = 32 << 20;
/// Descriptors of each process, of which the engine keeps 64 for other things than flows.
const FILES: u64 = 128;
/// Flows that there are ports for.
const ROOM: usize = 8;

fn without_ports_the_new_is_refused_and_what_runs_goes_on(cell: Cell) {
    let stand = Stand::of(cell, &["--nat-ports", "61000-61007"]);
    let server = streams(&stand);
    let open: Vec<TcpStream> = (0..ROOM).map(|_| connect(&stand, &server)).collect();
    let reason = "ports_exhausted";
    goes_on_beside_refusals(&stand, &server, open, (reason, "no translated port"));
}

fn without_descriptors_the_new_is_refused_and_what_runs_goes_on(cell: Cell) {
    let stand = Stand::with_few_files(cell, FILES);
    let server = streams(&stand);
    let echo = (cell.server(), 7);
    let echo = UdpServer::start(&stand.world.net, echo, UdpService::Echo).unwrap();
    let mut open = Vec::new();
    while let Ok(stream) = stand.run(|| TcpStream::connect_timeout(&server.address(), WAIT)) {
        stream.set_read_timeout(Some(WAIT)).unwrap();
        open.push(stream);
        assert!((open.len() as u64) < FILES, "there is no room for these");
    }
    assert!(open.len() > 2, "{}", open.len());
    // A datagram's flow is refused by ICMP.
    let refused = stand.run(|| {
        let socket = UdpSocket::bind(SocketAddr::new(cell.guest(), 0)).unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        socket.connect(echo.address()).unwrap();
        socket.send(b"x").unwrap();
        socket
            .recv(&mut [0; 1])
            .map_err(|error| error.raw_os_error())
    });
    assert!(
        matches!(refused, Err(Some(libc::EHOSTUNREACH | libc::EACCES))),
        "{refused:?}"
    );
    assert_eq!(echo.datagrams(), 0);
    goes_on_beside_refusals(&stand, &server, open, ("no_socket", "descriptors"));
}

/// Checks what holds while `open` are all that there is room for: what is refused, by its reason and a word
/// of `why`, and what is not.
fn goes_on_beside_refusals(
    stand: &Stand,
    server: &TcpServer<std::net::IpAddr>,
    mut open: Vec<TcpStream>,
    (reason, word): (&str, &str),
) {
    let before = stand.refused(reason);
    let carrier = open.pop().expect("one that is open");
    let admitted = server.accepted();
    stand.run(|| {
        thread::scope(|scope| {
            let carried = scope.spawn(|| tcp::download_over(carrier, CARRIED, 7));
            for _ in 0..8 {
                tcp::expect_refused(server.address()).unwrap();
            }
            // Byte by byte.
            carried.join().unwrap().unwrap();
        });
    });
    assert_eq!(server.accepted(), admitted);
    assert!(stand.refused(reason) >= before + 8);
    // Those that only wait live, too, and the end of one was all that it took.
    eventually("room", || {
        stand
            .run(|| TcpStream::connect_timeout(&server.address(), WAIT))
            .ok()
    });
    // It was closed at once; another is opened, and there is none left again.
    let again = eventually("room for good", || {
        stand
            .run(|| TcpStream::connect_timeout(&server.address(), WAIT))
            .ok()
    });
    let to = server.address().to_string();
    let (is_admitted, why) = eventually("the refusal in why", || {
        let (is_admitted, why) = stand.slipgate.why("tap0", &to, "tcp").unwrap();
        (!is_admitted).then_some((is_admitted, why))
    });
    assert!(!is_admitted && why.contains(word), "{why}");
    drop(again);
    for stream in open {
        stand
            .run(|| tcp::download_over(stream, 1 << 20, 11))
            .unwrap();
    }
}

fn connect(stand: &Stand, server: &TcpServer<std::net::IpAddr>) -> TcpStream {
    stand.run(|| tcp::connect(server.address(), WAIT)).unwrap()
}

fn streams(stand: &Stand) -> TcpServer<std::net::IpAddr> {
    let address = (stand.cell.server(), 7000);
    TcpServer::start(&stand.world.net, address, TcpService::Streams).unwrap()
}
