//! Ports of the host that lead to a guest.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use slipgate_testbed::{
    Direction, GUEST_DEVICE, GuestConfig, NetNs, WorldConfig,
    census::Census,
    clients::{tcp, udp, udp::UdpOutcome},
    pump::{Fate, SeenFrame},
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    streams::Receipt,
    turns,
    world::HOST,
    world_ipv6::HOST6,
};

use crate::{
    Cell, GATEWAY, GUEST, GUEST_MAC, Stand, WAIT, eventually,
    matrix::{at, matrix, refused_start},
};

matrix! {
    a_forward_from_the_uplink_runs_in_the_kernel: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "every client of a forward is relayed (exec.md)";
    a_forward_is_relayed_where_the_kernel_does_not_carry_it: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    datagrams_and_ranges_are_forwarded: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_forward_is_whole_both_ways_half_closed_and_refused: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_forward_carries_many_a_slow_reader_and_resets: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_forward_goes_on_beside_a_download_that_fills_the_link: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "the kernel carries both";
    a_port_that_is_taken_is_said_to_be_and_by_whom: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

/// Bytes of a stream.
const BYTES: u64 = 4 << 20;
/// More than every queue on the way holds.
const MANY_BYTES: u64 = 16 << 20;
const MINUTE: Duration = Duration::from_secs(60);

/// Every address of the guest's.
fn everywhere(cell: Cell) -> IpAddr {
    cell.family.unspecified()
}

fn in_guest(stand: &Stand, port: u16, service: TcpService) -> TcpServer<IpAddr> {
    TcpServer::start(&stand.guest.ns, (everywhere(stand.cell), port), service).unwrap()
}

fn answered(from: &NetNs, to: SocketAddr) {
    let sent = from.run(|| udp::probe(to, b"x", WAIT)).unwrap();
    assert!(matches!(sent, UdpOutcome::Answered(_)), "{to}: {sent:?}");
}

fn a_forward_from_the_uplink_runs_in_the_kernel(cell: Cell) {
    let stand = Stand::with_known_guest(cell, &["--forward", "tcp:8080:80"]);
    let server = in_guest(&stand, 80, TcpService::Streams);
    let census = Census::start(&stand.guest).unwrap();
    let before = stand.port_frames();
    let net = &stand.world.net;
    let to = at(cell.host(), 8080);
    let down = net.run(|| tcp::download(to, BYTES, 1, WAIT)).unwrap();
    assert_eq!(down.receipt, Receipt::expected(BYTES, 1));
    net.run(|| tcp::upload(to, BYTES, 2, WAIT)).unwrap();
    let sent = census.finish(&stand.guest).unwrap();
    let handed_over = stand.port_frames() - before;
    // A SYN each from the world, and the guest's answer to who it is.
    let due = 2 + sent.for_the_engine();
    assert!(sent.data > 100, "{sent:?}");
    assert_eq!(handed_over, due, "{sent:?}");
    // The guest sees who connects.
    let peers = server.peers();
    assert!(
        peers.iter().all(|peer| peer.ip() == cell.router()),
        "{peers:?}"
    );
    let flows = stand.slipgate.flows().unwrap();
    let flows: Vec<_> = flows.iter().filter(|flow| flow.proto == "tcp").collect();
    assert_eq!(flows.len(), 2, "{flows:?}");
    for flow in &flows {
        let (guest, nat) = (at(cell.guest(), 80), at(cell.host(), 8080));
        assert_eq!(
            (&flow.guest, &flow.nat),
            (&guest.to_string(), &nat.to_string())
        );
        assert!(
            flow.rule.as_str().unwrap().contains("tcp:8080:80"),
            "{flow:?}"
        );
        assert!(flow.tx_bytes + flow.rx_bytes > BYTES, "{flow:?}");
    }
    // A port beside it leads nowhere.
    let beside = at(cell.host(), 8081);
    net.run(|| tcp::expect_refused(beside)).unwrap();
}

/// From the host itself in each mode; from the world in user mode.
/// A stack takes no segment that comes in a frame to all, so the client's SYN would have to come again,
/// after a second.
#[test]
fn a_guest_that_has_sent_nothing_is_found_before_its_first_connection() {
    require_root_and_tun!();
    let guest = GuestConfig::new("tap0").unconfigured();
    let forward = ["--forward", "tap0=tcp:8080:80"];
    let stand = Stand::with(WorldConfig::default(), guest, &forward);
    let (ns, frames) = (&stand.guest.ns, stand.guest.frames().unwrap());
    // It answers to its address from now on, and says nothing by itself.
    ns.ip(&format!("addr add {GUEST}/24 dev {GUEST_DEVICE}"))
        .unwrap();
    ns.ip(&format!(
        "route add default via {GATEWAY} dev {GUEST_DEVICE}"
    ))
    .unwrap();
    let _server = TcpServer::start(ns, (GUEST, 80), TcpService::Echo).unwrap();
    let connect = || tcp::connect(crate::at(HOST, 8_080), WAIT);
    stand.world.net.run(connect).unwrap();
    let seen = frames.drain();
    let to_port = |frame: &&SeenFrame| {
        let bytes = &frame.bytes;
        bytes[12..14] == [0x08, 0x00] && bytes[23] == 6 && bytes[36..38] == 80_u16.to_be_bytes()
    };
    let segments: Vec<_> = seen.iter().filter(to_port).collect();
    assert!(!segments.is_empty());
    assert!(segments.iter().all(|frame| frame.bytes[..6] == GUEST_MAC));
}

fn a_forward_is_relayed_where_the_kernel_does_not_carry_it(cell: Cell) {
    let flags = ["--forward", "tcp:8080:80", "--forward", "udp:5353:5300"];
    let mut stand = Stand::with_known_guest(cell, &flags);
    let server = in_guest(&stand, 80, TcpService::Streams);
    let inside = (everywhere(cell), 5300);
    let _echo = UdpServer::start(&stand.guest.ns, inside, UdpService::Echo).unwrap();
    let (host, net) = (&stand.world.host, &stand.world.net);
    let mut ways = vec![(host, cell.loopback()), (host, cell.host())];
    if !cell.is_hybrid() {
        ways.push((net, cell.host()));
    }
    for (from, ip) in &ways {
        let to = at(*ip, 8080);
        let down = from.run(|| tcp::download(to, BYTES, 1, MINUTE)).unwrap();
        assert_eq!(down.receipt, Receipt::expected(BYTES, 1), "{ip}");
        from.run(|| tcp::upload(to, BYTES, 2, MINUTE)).unwrap();
        answered(from, at(*ip, 5353));
    }
    // Every client comes by a socket of slipgate's.
    let peers = server.peers();
    assert_eq!(peers.len(), 2 * ways.len());
    assert!(
        peers.iter().all(|peer| peer.ip() == cell.gateway()),
        "{peers:?}"
    );
    let _held = host
        .run(|| tcp::connect(at(cell.loopback(), 8080), WAIT))
        .unwrap();
    let guest = at(cell.guest(), 80).to_string();
    let flow = eventually("it is among the flows", || {
        let mut flows = stand.slipgate.flows().unwrap().into_iter();
        let of_guest = |flow: &slipgate_testbed::slipgate::FlowRow| {
            flow.guest == guest && flow.state == "established"
        };
        flows.find(of_guest)
    });
    assert_eq!(flow.path, "relay", "{flow:?}");
    let rule = flow.rule.as_str().unwrap();
    assert!(rule.contains("--forward tcp:8080:80"), "{flow:?}");
    assert!(stand.slipgate.stop().unwrap().success());
}

fn datagrams_and_ranges_are_forwarded(cell: Cell) {
    let _turn =
        turns::alone("a datagram each millisecond waits for the engine only as far as credits go");
    let of_loopback = format!(
        "tcp:{}:7000-7003",
        cell.destination(cell.loopback(), "9100-9103")
    );
    let stand = Stand::with_known_guest(
        cell,
        &[
            "--forward",
            "udp:5353:5300",
            "--forward",
            "tcp:9000-9003:7000-7003",
            "--forward",
            &of_loopback,
        ],
    );
    let inside = (everywhere(cell), 5300);
    let echo = UdpServer::start(&stand.guest.ns, inside, UdpService::Echo).unwrap();
    let greet = |port: u16| in_guest(&stand, port, TcpService::Greet(port.to_be_bytes().to_vec()));
    let _servers = [7000, 7003].map(greet);
    let net = &stand.world.net;
    let (to, pace) = (at(cell.host(), 5353), Duration::from_millis(1));
    let report = net.run(|| udp::paced(to, 200, 500, pace, WAIT)).unwrap();
    assert_eq!((report.received, report.corrupt), (200, 0), "{report:?}");
    assert_eq!(echo.datagrams(), 200);
    let greeting = |from: &NetNs, ip, port| {
        let mut said = Vec::new();
        let mut stream = from.run(|| tcp::connect(at(ip, port), WAIT)).unwrap();
        stream.read_to_end(&mut said).unwrap();
        said
    };
    assert_eq!(greeting(net, cell.host(), 9000), 7000u16.to_be_bytes());
    assert_eq!(greeting(net, cell.host(), 9003), 7003u16.to_be_bytes());
    let on_loopback = greeting(&stand.world.host, cell.loopback(), 9103);
    assert_eq!(on_loopback, 7003u16.to_be_bytes());
    for closed in [9004, 9103] {
        let to = at(cell.host(), closed);
        net.run(|| tcp::expect_refused(to)).unwrap();
    }
}

/// Where clients come from, and what they connect to for a port of the host. A guest with IPv6 has
/// both families.
fn ways(stand: &Stand, port: u16) -> Vec<(&NetNs, SocketAddr)> {
    let (host, net) = (&stand.world.host, &stand.world.net);
    let mut ways: Vec<(&NetNs, IpAddr)> = vec![
        (host, Ipv4Addr::LOCALHOST.into()),
        (host, HOST.into()),
        (net, HOST.into()),
    ];
    if stand.cell.is_ipv6() {
        ways.push((host, Ipv6Addr::LOCALHOST.into()));
        ways.push((host, HOST6.into()));
        ways.push((net, HOST6.into()));
    }
    ways.into_iter()
        .map(|(from, ip)| (from, at(ip, port)))
        .collect()
}

/// Serves connections of the guest at a port, each by `f` in a thread.
fn serve(stand: &Stand, port: u16, f: impl Fn(TcpStream) + Send + Sync + Clone + 'static) {
    // An address of IPv6 is one of both families here.
    let address = (everywhere(stand.cell), port);
    let listener = stand.run(|| TcpListener::bind(address).unwrap());
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let f = f.clone();
            thread::spawn(move || f(stream));
        }
    });
}

/// Answers what a client sent once it has ended its side: half-closed.
fn answer_at_the_end(mut stream: TcpStream) {
    stream.set_read_timeout(Some(MINUTE)).unwrap();
    let mut all = Vec::new();
    if stream.read_to_end(&mut all).is_ok() {
        let _ = stream.write_all(&all);
    }
}

fn connect(from: &NetNs, to: SocketAddr) -> slipgate_testbed::Result<TcpStream> {
    from.run(|| tcp::connect(to, MINUTE))
}

fn exchange(from: &NetNs, to: SocketAddr, sent: &[u8]) {
    let mut stream = connect(from, to).unwrap();
    stream.write_all(sent).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    assert!(got == sent, "{to}: {} bytes of {}", got.len(), sent.len());
}

fn pattern(bytes: u64, seed: usize) -> Vec<u8> {
    let byte = |at: usize| (at ^ at >> 8 ^ at >> 16 ^ seed) as u8;
    (0..bytes as usize).map(byte).collect()
}

const TWO_PORTS: [&str; 4] = ["--forward", "tcp:8080:80", "--forward", "tcp:8081:81"];

fn a_forward_is_whole_both_ways_half_closed_and_refused(cell: Cell) {
    let stand = Stand::with_known_guest(cell, &TWO_PORTS);
    serve(&stand, 80, answer_at_the_end);
    for (seed, (from, to)) in ways(&stand, 8080).into_iter().enumerate() {
        exchange(from, to, &pattern(BYTES, seed));
    }
    // Nobody listens at the guest's port. A client that the host's kernel has accepted is reset.
    for (from, to) in ways(&stand, 8081) {
        let read = from
            .run(|| TcpStream::connect_timeout(&to, WAIT))
            .and_then(|mut stream| stream.read(&mut [0; 1]));
        let kind = read.map_err(|error| error.kind());
        let refused = [ErrorKind::ConnectionReset, ErrorKind::ConnectionRefused];
        assert!(
            kind.is_err_and(|kind| refused.contains(&kind)),
            "{to}: {kind:?}"
        );
    }
}

/// Data of flows and of relayed connections share the link's queue.
fn a_forward_goes_on_beside_a_download_that_fills_the_link(cell: Cell) {
    const PER_FRAME: Duration = Duration::from_micros(500);
    const EXCHANGED: u64 = 200_000;
    let stand = Stand::with_known_guest(cell, &TWO_PORTS);
    serve(&stand, 80, answer_at_the_end);
    let endless = at(cell.server(), 7_000);
    let listener = stand.world.net.run(|| TcpListener::bind(endless)).unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        while stream.write_all(&[0; 65_536]).is_ok() {}
    });
    let mut download = stand.run(|| TcpStream::connect(endless)).unwrap();
    let over = download.try_clone().unwrap();
    let downloaded = Arc::new(AtomicU64::new(0));
    let count = downloaded.clone();
    let reader = thread::spawn(move || {
        let mut buffer = vec![0; 65_536];
        while let Ok(some @ 1..) = download.read(&mut buffer) {
            count.fetch_add(some as u64, Relaxed);
        }
    });
    // The guest takes some 2,000 frames with data a second.
    stand
        .guest
        .set_filter(Some(Box::new(|direction, _, frame| {
            if direction == Direction::In && frame.len() > 1_000 {
                thread::sleep(PER_FRAME);
            }
            Fate::Pass
        })))
        .unwrap();
    // Until the download has filled what lies between.
    thread::sleep(Duration::from_millis(300));
    let before = downloaded.load(Relaxed);
    let sent = pattern(EXCHANGED, 1);
    exchange(&stand.world.host, at(cell.loopback(), 8080), &sent);
    let beside = downloaded.load(Relaxed) - before;
    // An exchange has round trips: some 30 times as much. Without a share of its own it was 450 times.
    assert!(beside < 150 * EXCHANGED, "{beside} bytes beside it");
    over.shutdown(Shutdown::Both).unwrap();
    reader.join().unwrap();
}

fn a_forward_carries_many_a_slow_reader_and_resets(cell: Cell) {
    const AT_ONCE: usize = 64;
    let stand = Stand::with_known_guest(cell, &TWO_PORTS);
    serve(&stand, 80, answer_at_the_end);
    // A client that reads nothing for now, of more than all queues hold.
    let slow_way = at(cell.loopback(), 8080);
    let mut slow = connect(&stand.world.host, slow_way).unwrap();
    let sent = pattern(MANY_BYTES, 9);
    slow.write_all(&sent).unwrap();
    slow.shutdown(Shutdown::Write).unwrap();
    // And many at once beside it.
    let by_turns = ways(&stand, 8080);
    thread::scope(|scope| {
        for nth in 0..AT_ONCE {
            let (from, to) = by_turns[nth % by_turns.len()];
            scope.spawn(move || exchange(from, to, &vec![nth as u8; 100_000 + nth]));
        }
    });
    let mut got = Vec::new();
    slow.read_to_end(&mut got).unwrap();
    assert!(got == sent, "{} bytes of {}", got.len(), sent.len());
    // A guest that resets in the middle: its client is reset, and nobody else.
    serve(&stand, 81, |mut stream| {
        let mut some = [0; 1_000];
        stream.read_exact(&mut some).unwrap();
        let at_once = libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        nix::sys::socket::setsockopt(&stream, nix::sys::socket::sockopt::Linger, &at_once).unwrap();
    });
    // What the guest's link had no room for has waited, and was not lost.
    assert_eq!(stand.dropped("engine_busy"), 0);
    let mut other = connect(&stand.world.host, slow_way).unwrap();
    for (from, to) in ways(&stand, 8081) {
        let mut stream = connect(from, to).unwrap();
        stream.write_all(&[1; 1_000]).unwrap();
        let read = stream.read(&mut [0; 1]).map_err(|error| error.kind());
        assert_eq!(read, Err(ErrorKind::ConnectionReset), "{to}");
    }
    other.write_all(b"still here").unwrap();
    other.shutdown(Shutdown::Write).unwrap();
    let mut said = String::new();
    other.read_to_string(&mut said).unwrap();
    assert_eq!(said, "still here");
}

/// The process that is named as `(process 17)`.
fn process_in(said: &str) -> u32 {
    let (_, behind) = said.split_once("(process ").expect("a process");
    let (pid, _) = behind.split_once(')').expect("a number");
    pid.parse().unwrap()
}

/// Whether it is this process, or a child, which has copies of the descriptors until its `exec` and may
/// have ended since.
fn is_ours(pid: u32) -> bool {
    let ours = std::process::id();
    match std::fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(status) => pid == ours || status.contains(&format!("PPid:\t{ours}\n")),
        Err(error) => error.kind() == ErrorKind::NotFound,
    }
}

fn a_port_that_is_taken_is_said_to_be_and_by_whom(cell: Cell) {
    let takes = |world: &slipgate_testbed::World| {
        TcpServer::start(&world.host, (cell.host(), 8080), TcpService::Echo).unwrap()
    };
    let said = refused_start(cell, takes, &["--forward", "tcp:8080:80"]);
    let said = said.expect("it took a port that is taken");
    assert!(said.contains("8080") && said.contains("taken"), "{said}");
    // An ordinary user is not told of others' processes.
    if cell.is_hybrid() {
        assert!(is_ours(process_in(&said)), "{said}");
    }
    // It is taken until the last copy of the descriptor is closed: see `is_ours`.
    let refused = eventually("the port is free", || {
        match refused_start(cell, |_| (), &["--forward", "tcp:8080:80"]) {
            Some(said) if said.contains("taken") => None,
            other => Some(other),
        }
    });
    assert_eq!(refused, None);
}
