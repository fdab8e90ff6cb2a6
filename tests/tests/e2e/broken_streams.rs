//! Streams of which one side does not do its part: a server that resets in the middle or never reads, a
//! guest that reads nothing for a while, a segment that is lost again and again, urgent data. Beside each a
//! second stream arrives whole and in time.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, connect, getpeername,
        getsockopt, send, setsockopt, socket, sockopt,
    },
};
use slipgate_testbed::{
    Direction,
    clients::tcp,
    frame::Packet,
    pattern::Pattern,
    pump::Fate,
    servers::{TcpServer, TcpService},
};

use crate::{BRIEFLY, Cell, Stand, WAIT, eventually, matrix::matrix};

matrix! {
    a_server_that_resets_in_the_middle_resets_the_guest: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_server_that_never_reads_bounds_an_upload_and_stalls_nobody: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_guest_that_reads_nothing_for_a_while_has_every_byte: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    what_is_kept_behind_a_gap_is_told_and_given_back: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "the kernel keeps no segments";
    a_server_that_is_gone_is_noticed_by_a_guest_that_asks: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    servers_that_do_not_answer_delay_no_other: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    urgent_data_arrives_in_its_place_and_is_counted: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "the kernel carries the guest's own segments";
}

/// Bytes of the stream beside it.
const BESIDE: u64 = 8 << 20;
/// More than every queue on the way holds.
const MANY: u64 = 64 << 20;
/// Bytes that a server sends before it resets, and a stream that is held up has.
const SOME: usize = 1 << 20;

/// Serves the connections to a port of the server's.
fn serve(
    stand: &Stand,
    port: u16,
    f: impl Fn(TcpStream) + Send + Sync + Clone + 'static,
) -> SocketAddr {
    let address = SocketAddr::new(stand.cell.server(), port);
    let net = &stand.world.net;
    let listener = net.run(|| TcpListener::bind(address).unwrap());
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let f = f.clone();
            thread::spawn(move || f(stream));
        }
    });
    address
}

fn streams(stand: &Stand) -> TcpServer<IpAddr> {
    let address = (stand.cell.server(), 7000);
    TcpServer::start(&stand.world.net, address, TcpService::Streams).unwrap()
}

/// A checked stream each way.
fn whole_streams(stand: &Stand, server: &TcpServer<IpAddr>, seed: u64) {
    stand.run(|| {
        tcp::download(server.address(), BESIDE, seed, WAIT).unwrap();
        tcp::upload(server.address(), BESIDE, seed + 1, WAIT).unwrap();
    });
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Pattern::new(seed).fill(&mut bytes);
    bytes
}

fn reset(stream: TcpStream) {
    let at_once = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    setsockopt(&stream, sockopt::Linger, &at_once).unwrap();
}

fn a_server_that_resets_in_the_middle_resets_the_guest(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let server = streams(&stand);
    let breaks = serve(&stand, 7001, |mut stream| {
        stream.write_all(&pattern(1, SOME)).unwrap();
        // Once the guest has had all of it, and goes on reading.
        stream.read_exact(&mut [0; 1]).unwrap();
        reset(stream);
    });
    stand.run(|| {
        thread::scope(|scope| {
            let beside = scope.spawn(|| whole_streams(&stand, &server, 3));
            for _ in 0..4 {
                let mut stream = tcp::connect(breaks, WAIT).unwrap();
                let mut got = vec![0; SOME];
                stream.read_exact(&mut got).unwrap();
                assert!(got == pattern(1, SOME));
                stream.write_all(b"x").unwrap();
                let end = stream.read(&mut [0; 1]).map_err(|error| error.kind());
                assert_eq!(end, Err(ErrorKind::ConnectionReset));
            }
            beside.join().unwrap();
        });
    });
    assert!(stand.slipgate.stop().unwrap().success());
    let mut records = stand.records();
    records.retain(|record| record["remote"] == breaks.to_string());
    assert_eq!(records.len(), 4);
    for record in records {
        assert_eq!(record["tcp"], "reset", "{record}");
    }
}

fn a_server_that_never_reads_bounds_an_upload_and_stalls_nobody(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let server = streams(&stand);
    let hold = (cell.server(), 7001);
    let hold = TcpServer::start(&stand.world.net, hold, TcpService::Hold).unwrap();
    let mut stream = stand.run(|| tcp::connect(hold.address(), WAIT)).unwrap();
    stream.set_write_timeout(Some(BRIEFLY)).unwrap();
    let (piece, mut written) = (pattern(5, SOME), 0);
    // Until nothing more goes for a while: one wait alone may be that of a busy machine.
    let mut waits = 0;
    while waits < 4 {
        match stream.write(&piece) {
            Ok(some) => (written, waits) = (written + some as u64, 0),
            Err(_) => waits += 1,
        }
        assert!(written < MANY, "nothing bounds it");
    }
    whole_streams(&stand, &server, 7);
    // Not in the meantime, either.
    let more = stream.write(&piece).map_err(|error| error.kind());
    let is_little = match more {
        Ok(some) => some < SOME,
        Err(kind) => kind == ErrorKind::WouldBlock,
    };
    assert!(is_little, "{more:?}");
    assert_eq!(stand.flows_to(hold.address()).len(), 1, "it lives");
}

fn a_guest_that_reads_nothing_for_a_while_has_every_byte(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let server = streams(&stand);
    let pours = serve(&stand, 7001, |mut stream| {
        stream.write_all(&pattern(9, MANY as usize)).unwrap();
    });
    let mut slow = stand.run(|| tcp::connect(pours, WAIT)).unwrap();
    let began = std::time::Instant::now();
    whole_streams(&stand, &server, 11);
    // Probes of the closed window have come and gone.
    thread::sleep(Duration::from_secs(3).saturating_sub(began.elapsed()));
    let mut got = Vec::new();
    slow.read_to_end(&mut got).unwrap();
    assert_eq!(got.len() as u64, MANY);
    assert!(got == pattern(9, MANY as usize));
}

fn what_is_kept_behind_a_gap_is_told_and_given_back(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let server = streams(&stand);
    let kept = |field: &str| stand.total()["tcp"][field].as_u64().unwrap_or(0);
    assert_eq!(kept("kept_bytes"), 0);
    // The first long segment to the port is lost, however often it is sent.
    let is_lossy = Arc::new(AtomicBool::new(true));
    let (lossy, mut lost) = (is_lossy.clone(), None);
    let filter = move |direction, _: &_, frame: &[u8]| {
        let packet = Packet::<SocketAddr>::of_ethernet(frame);
        let Some(packet) = packet.filter(|packet| packet.destination.port() == 7000) else {
            return Fate::Pass;
        };
        let numbers = packet.tcp_numbers();
        let is_long = packet.payload().len() > 1_000;
        let (Direction::Out, Some((sequence, _)), true) = (direction, numbers, is_long) else {
            return Fate::Pass;
        };
        match lossy.load(SeqCst) && *lost.get_or_insert(sequence) == sequence {
            true => Fate::Lose,
            false => Fate::Pass,
        }
    };
    stand.guest.set_filter(Some(Box::new(filter))).unwrap();
    thread::scope(|scope| {
        let upload = scope.spawn(|| stand.run(|| tcp::upload(server.address(), BESIDE, 13, WAIT)));
        let held = eventually("what is kept", || {
            Some(kept("kept_bytes")).filter(|it| *it > 0)
        });
        assert!(held <= 1 << 20, "{held}");
        is_lossy.store(false, SeqCst);
        upload.join().unwrap().unwrap();
    });
    stand.guest.set_filter(None).unwrap();
    eventually("nothing is kept", || {
        (kept("kept_bytes") == 0).then_some(())
    });
}

fn a_server_that_is_gone_is_noticed_by_a_guest_that_asks(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let [gone, lives] = [7001, 7002].map(|port| {
        let address = (cell.server(), port);
        TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap()
    });
    let connect = |server: &TcpServer<IpAddr>| {
        let mut stream = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
        tcp::EchoSession::new(&mut stream).round(100).unwrap();
        stream
    };
    let [mut asks, mut asks_too] = [&gone, &lives].map(|server| {
        let stream = connect(server);
        setsockopt(&stream, sockopt::TcpKeepIdle, &1).unwrap();
        setsockopt(&stream, sockopt::TcpKeepInterval, &1).unwrap();
        setsockopt(&stream, sockopt::TcpKeepCount, &3).unwrap();
        setsockopt(&stream, sockopt::KeepAlive, &true).unwrap();
        stream
    });
    let mut asks_nothing = connect(&gone);
    let net = &stand.world.net;
    net.nft(
        "table inet gone {
            chain in { type filter hook input priority 0; tcp dport 7001 drop; }
            chain out { type filter hook output priority 0; tcp sport 7001 drop; }
        }",
    )
    .unwrap();
    let end = asks.read(&mut [0; 1]).map_err(|error| error.kind());
    let is_noticed = match cell.is_hybrid() {
        // The guest's own probes have no answer.
        true => end == Err(ErrorKind::TimedOut),
        false => end == Err(ErrorKind::ConnectionReset),
    };
    assert!(is_noticed, "{end:?}");
    // Nobody else minds.
    tcp::EchoSession::new(&mut asks_too).round(100).unwrap();
    asks_nothing.set_nonblocking(true).unwrap();
    let read = asks_nothing.read(&mut [0; 1]).map_err(|error| error.kind());
    assert_eq!(read, Err(ErrorKind::WouldBlock));
    let port = asks.local_addr().unwrap().port();
    assert!(stand.slipgate.stop().unwrap().success());
    let is_its = |record: &serde_json::Value| {
        let guest = record["guest"].as_str().unwrap_or_default();
        guest.ends_with(&format!(":{port}"))
    };
    let record = stand.records().into_iter().find(is_its).expect("a record");
    assert_eq!(record["tcp"], "reset", "{record}");
}

/// A path that leads nowhere, as voidbox's slirp waited for each such server in turn.
fn servers_that_do_not_answer_delay_no_other(cell: Cell) {
    const SILENT: u16 = 64;
    let stand = Stand::of(cell, &["--dns", "none"]);
    let server = streams(&stand);
    let silence = "table inet silence {
        chain in { type filter hook prerouting priority -400; tcp dport 9000-9063 drop; }
    }";
    stand.world.net.nft(silence).unwrap();
    let to = |port| SocketAddr::new(cell.server(), port);
    let begin = |port| {
        let family = match cell.is_ipv6() {
            false => AddressFamily::Inet,
            true => AddressFamily::Inet6,
        };
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let socket = socket(family, SockType::Stream, flags, None).unwrap();
        let address = SockaddrStorage::from(to(port));
        assert_eq!(
            connect(socket.as_raw_fd(), &address),
            Err(Errno::EINPROGRESS)
        );
        socket
    };
    let waiting: Vec<_> = stand.run(|| (9_000..9_000 + SILENT).map(begin).collect());
    // New flows and streams, while each of the others waits.
    for _ in 0..50 {
        drop(stand.run(|| tcp::connect(server.address(), WAIT)).unwrap());
    }
    whole_streams(&stand, &server, 1);
    for socket in &waiting {
        let error = getsockopt(socket, sockopt::SocketError).unwrap();
        let connected = getpeername::<SockaddrStorage>(socket.as_raw_fd());
        assert_eq!(
            (error, connected),
            (0, Err(Errno::ENOTCONN)),
            "it still waits"
        );
    }
    let flows = stand.slipgate.flows().unwrap();
    let silent = flows.iter().filter(|flow| {
        let remote: SocketAddr = flow.remote.parse().unwrap();
        remote.port() >= 9_000
    });
    assert_eq!(silent.count(), usize::from(SILENT));
}

fn urgent_data_arrives_in_its_place_and_is_counted(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let server = streams(&stand);
    let got = Arc::new(std::sync::Mutex::new(Vec::new()));
    let place = got.clone();
    let reads = serve(&stand, 7001, move |mut stream| {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        *place.lock().unwrap() = all;
        stream.write_all(b"!").unwrap();
    });
    let mut stream = stand.run(|| tcp::connect(reads, WAIT)).unwrap();
    stream.write_all(b"before").unwrap();
    for byte in [b"1", b"2"] {
        let sent = send(stream.as_raw_fd(), byte, MsgFlags::MSG_OOB);
        assert_eq!(sent, Ok(1));
        stream.write_all(b"behind").unwrap();
    }
    whole_streams(&stand, &server, 15);
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    stream.read_exact(&mut [0; 1]).unwrap();
    assert_eq!(*got.lock().unwrap(), b"before1behind2behind");
    let urgent = &stand.total()["tcp"]["urgent"];
    assert!(urgent.as_u64() >= Some(2), "{urgent}");
}
