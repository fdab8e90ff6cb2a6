//! The workloads against Linux, on the other side of a TAP in a network namespace.

mod dhcp_server;
mod machine;
mod router;
mod served;

use std::{
    collections::HashMap,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use slipgate_guest::pattern::Pattern;
use slipgate_testbed::{
    NetNs,
    dns_wire::Record,
    require_root_and_tun,
    servers::{Answer, DnsServer, HttpServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    world_ipv6,
};

use dhcp_server::{DhcpServer, Offer};
use machine::{Config, Faults, Ran, Tap, run_over};
use router::Router;

const HOST: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 15);
const HOST6: Ipv6Addr = Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 1);
/// Of the host's prefix and the guest's MAC address.
const GUEST6: Ipv6Addr = Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0xff, 0xfe00, 15);
/// All addresses of both families.
const ANY: Ipv6Addr = Ipv6Addr::UNSPECIFIED;
const TAP: &str = "tap0";
const NAME: &str = "www.example.test";
/// Command for a static address, for guests without DHCP.
const ADDRESS: &str = "address 10.99.0.15/24 10.99.0.1 10.99.0.1;";

/// Host with a TAP and all servers, reached by both families.
struct Stage {
    ns: NetNs,
    tap: Tap,
    close: TcpServer<Ipv6Addr>,
    echo: TcpServer<Ipv6Addr>,
    sink: UdpServer<Ipv6Addr>,
    _servers: (DnsServer, HttpServer, Vec<TcpServer<Ipv6Addr>>),
}

/// Returns workloads by IPv4, and the same by IPv6.
fn by_both(line: &str) -> [String; 2] {
    let changes = [
        ("dns ", "dns6 "),
        ("www.example.test:", "[www.example.test]:"),
        ("10.99.0.1", "[fd99::1]"),
        ("10.98.0.1", "[fd98::1]"),
        ("10.97.0.1", "[fd97::1]"),
    ];
    let change = |line: String, (from, to)| line.replace(from, to);
    [line.into(), changes.into_iter().fold(line.into(), change)]
}

impl Stage {
    fn new(queues: usize) -> Stage {
        let ns = NetNs::new("host").unwrap();
        let tap = Tap::new(&ns, TAP, queues);
        ns.ip(&format!("addr add {HOST}/24 dev {TAP}")).unwrap();
        let no_probes = format!("net.ipv6.conf.{TAP}.accept_dad");
        ns.sysctl(&no_probes, "0").unwrap();
        world_ipv6::enable(&ns, &[TAP]).unwrap();
        world_ipv6::add_address(&ns, HOST6, 64, TAP).unwrap();
        let hosts = [IpAddr::from(HOST), HOST6.into()];
        let records = hosts.map(|host| Record::of_address(host, 60));
        let zone = Zone::from([
            (NAME.to_owned(), Answer::records(records.into())),
            ("broken.test".to_owned(), Answer::code(2)),
        ]);
        let pages = HashMap::from([("/".to_owned(), vec![b'x'; 20_000])]);
        let tcp = |port, service| TcpServer::start(&ns, (ANY, port), service).unwrap();
        Stage {
            close: tcp(7001, TcpService::Close),
            echo: tcp(7, TcpService::Echo),
            sink: UdpServer::start(&ns, (ANY, 9), UdpService::Sink).unwrap(),
            _servers: (
                DnsServer::start(&ns, (HOST, 53), zone).unwrap(),
                HttpServer::start(&ns, (ANY, 80), pages).unwrap(),
                vec![
                    tcp(7000, TcpService::Streams),
                    tcp(7002, TcpService::Reset),
                    tcp(7003, TcpService::Hold),
                ],
            ),
            ns,
            tap,
        }
    }

    /// Lets the host advertise its prefix.
    fn advertise(&self, mtu: Option<u32>) -> Router {
        Router::start(&self.ns, TAP, HOST6, mtu)
    }

    fn run(&self, command_line: &str, config: Config) -> Ran {
        run_over(&self.tap, command_line, config)
    }
}

fn only<'r>(ran: &'r Ran, name: &str) -> &'r Value {
    let lines = ran.workload(name);
    assert_eq!(lines.len(), 1, "{name}: {lines:?}");
    lines[0]
}

/// Asserts that a line has these fields, among others.
fn assert_says(line: &Value, due: Value) {
    for (key, value) in due.as_object().unwrap() {
        assert_eq!(&line[key], value, "{key} of {line}");
    }
}

#[test]
fn every_workload_on_two_cpus_by_a_lease() {
    require_root_and_tun!();
    let stage = Stage::new(2);
    let offer = Offer {
        address: GUEST,
        mask: Ipv4Addr::new(255, 255, 255, 0),
        server: HOST,
        mtu: Some(1400),
    };
    let _dhcp = DhcpServer::start(&stage.ns, TAP, offer);
    let _router = stage.advertise(None);
    let lines = by_both(
        "dns www.example.test; ping 10.99.0.1 3; crr www.example.test:7001 500 x4;\
        crr 10.99.0.1:80 50 x2; crr 10.99.0.1:7 300 x2 echo; rr 10.99.0.1:7 300 x2;\
        stream 10.99.0.1:7000 3000000 up x2; stream 10.99.0.1:7000 3000001 down;\
        flood 10.99.0.1:9 2000 64 x2; wait 10",
    );
    // By IPv6 a frame with a number is not smaller than 70 bytes.
    let dues = [("dns", "10.99.0.1", 64), ("dns6", "fd99::1", 70)];
    for (line, due) in lines.iter().zip(dues) {
        let (closed, peers) = (stage.close.accepted(), stage.echo.peers().len());
        let ran = stage.run(line, Config::cpus(2));
        every_workload_was_done(&ran, due);
        assert_eq!(stage.close.accepted() - closed, 500);
        let peers = &stage.echo.peers()[peers..];
        let mut ports: Vec<u16> = peers.iter().map(|peer| peer.port()).collect();
        let count = ports.len();
        ports.sort();
        ports.dedup();
        let what = "no port twice in TIME-WAIT";
        assert_eq!((ports.len(), count), (302, 302), "{what}");
    }
}

fn every_workload_was_done(ran: &Ran, (lookup, address, frame_bytes): (&str, &str, u32)) {
    assert_eq!(ran.status, 0);
    assert_says(&ran.lines[0], json!({"boot": true, "cpus": 2, "pairs": 2}));
    let lease = json!({
        "address": "10.99.0.15/24", "router": "10.99.0.1", "dns": ["10.99.0.1"], "mtu": 1400,
        "mtu_by_dhcp": true,
    });
    assert_says(only(ran, "lease"), lease);
    let by_ipv6 = ran.workload("ipv6");
    if lookup == "dns6" {
        let address = format!("{GUEST6}/64");
        assert_says(by_ipv6[0], json!({"address": address, "mtu": 1400}));
    }
    assert_eq!(by_ipv6.len(), usize::from(lookup == "dns6"));
    let dns = only(ran, lookup);
    assert_says(dns, json!({"addresses": [address], "questions": 1}));
    assert!(dns["ttfb_us"].as_f64().unwrap() > 0.0);
    assert_says(only(ran, "ping"), json!({"to": address, "n": 3, "lost": 0}));
    let connections = ran.workload("crr");
    let [close, get, echo] = connections[..] else {
        panic!("{connections:?}");
    };
    assert_says(
        close,
        json!({"exchange": "close", "done": 500, "failed": 0, "bytes": 0}),
    );
    let page = 50
        * (20_000 + "HTTP/1.1 200 OK\r\nContent-Length: 20000\r\nConnection: close\r\n\r\n".len());
    assert_says(
        get,
        json!({"exchange": "get", "done": 50, "failed": 0, "bytes": page}),
    );
    assert_says(
        echo,
        json!({"exchange": "echo", "done": 300, "failed": 0, "bytes": 300 * 64}),
    );
    for line in [close, get, echo, only(ran, "rr")] {
        let [p50, p99, max] = ["p50_us", "p99_us", "max_us"].map(|key| line[key].as_f64().unwrap());
        assert!(0.0 < p50 && p50 <= p99 && p99 <= max, "{line}");
    }
    assert_says(
        only(ran, "rr"),
        json!({"done": 300, "failed": 0, "bytes": 300 * 64}),
    );
    let streams = ran.workload("stream");
    let [up, down] = streams[..] else {
        panic!("{streams:?}");
    };
    assert_says(
        up,
        json!({"direction": "up", "done": 2, "failed": 0, "bytes": 6_000_000}),
    );
    assert_says(
        down,
        json!({"direction": "down", "done": 1, "failed": 0, "bytes": 3_000_001}),
    );
    assert_says(
        only(ran, "flood"),
        json!({"done": 2000, "failed": 0, "frame_bytes": frame_bytes}),
    );
    let last = ran.lines.last().unwrap();
    assert_says(last, json!({"end": true, "status": 0}));

    let pairs: Vec<_> = ran
        .lines
        .iter()
        .filter(|line| line.get("pair").is_some())
        .collect();
    assert_eq!(pairs.len(), 2);
    for pair in pairs {
        assert!(pair["rx_frames"].as_u64().unwrap() > 1000, "{pair}");
        assert!(pair["tx_frames"].as_u64().unwrap() > 1000, "{pair}");
    }
    assert_eq!(ran.pairs("passed_in_dropped"), 0);
    assert_eq!(ran.largest_sent, 1414, "the lease's MTU, and no more");
}

#[test]
fn frames_on_the_wrong_queue_find_their_cpu() {
    require_root_and_tun!();
    let stage = Stage::new(3);
    // The data streamed to a CPU fits, all at once, where frames from other CPUs wait: Linux sends
    // a whole window in one go.
    let lines = by_both(
        "dns www.example.test; crr 10.99.0.1:7001 300 x3; rr 10.99.0.1:7 300 x3;\
        stream 10.99.0.1:7000 400000 up x3; stream 10.99.0.1:7000 400000 down x3;\
        ping 10.99.0.1 2",
    );
    let _router = stage.advertise(None);
    let mut config = Config::cpus(3);
    config.crossed = true;
    for line in lines {
        let ran = stage.run(&format!("{ADDRESS}{line}"), config);
        assert_eq!(ran.status, 0);
        assert_says(only(&ran, "crr"), json!({"done": 300, "failed": 0}));
        assert!(ran.pairs("passed_in") > 1000, "every unicast frame");
        assert_eq!(ran.pairs("passed_in_dropped"), 0);
    }
}

/// Starts a server that reads 64 bytes from each of `count` connections, sends this answer and
/// closes.
fn answer_with(ns: &NetNs, port: u16, answer: Vec<u8>, count: usize) {
    let listener = ns.run(|| TcpListener::bind((ANY, port)).unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().take(count).flatten() {
            stream.read_exact(&mut [0; 64]).unwrap();
            stream.write_all(&answer).unwrap();
        }
    });
}

fn echo_message() -> [u8; 64] {
    let mut message = [0; 64];
    Pattern::new(1).fill(&mut message);
    message
}

#[test]
fn failures_are_told_apart() {
    require_root_and_tun!();
    let stage = Stage::new(2);
    stage.ns.sysctl("net.ipv4.ip_forward", "1").unwrap();
    stage.ns.sysctl("net.ipv4.icmp_ratelimit", "0").unwrap();
    stage
        .ns
        .sysctl("net.ipv6.conf.all.forwarding", "1")
        .unwrap();
    stage.ns.sysctl("net.ipv6.icmp.ratelimit", "0").unwrap();
    for refused in ["prohibit 10.98.0.0/16", "prohibit fd98::/16"] {
        stage.ns.ip(&format!("route add {refused}")).unwrap();
    }
    for silent in ["blackhole 10.97.0.0/16", "blackhole fd97::/16"] {
        stage.ns.ip(&format!("route add {silent}")).unwrap();
    }
    let _router = stage.advertise(None);
    answer_with(&stage.ns, 7005, vec![0; 64], 2 * 5);
    answer_with(&stage.ns, 7006, echo_message()[..63].to_vec(), 2 * 5);
    let cases = [
        ("crr 10.99.0.1:6999 20 x2", json!({"refused": 20}), 0),
        // No more than that: Linux limits the rate of these errors.
        ("crr 10.98.0.1:80 2 x2", json!({"unreachable": 2}), 0),
        ("crr 10.97.0.1:80 4 x4", json!({"timed_out": 4}), 0),
        ("crr 10.99.0.1:7003 4 x4", json!({"timed_out": 4}), 0),
        ("crr 10.99.0.1:7005 5 echo", json!({"wrong": 5}), 0),
        ("crr 10.99.0.1:7006 5 echo", json!({"short": 5}), 0),
        ("stream 10.99.0.1:7 5000 down", json!({"wrong": 1}), 0),
        ("flood 10.99.0.1:9 10 1515", json!({"unable": 10}), 0),
        ("crr 10.99.0.1:7001 3", json!({}), 3),
    ];
    let line: Vec<&str> = cases.iter().map(|(command, ..)| *command).collect();
    let mut config = Config::cpus(2);
    config.speed = 20;
    for line in by_both(&line.join(";")) {
        let ran = stage.run(&format!("{ADDRESS}{line}"), config);
        assert_eq!(ran.status, 1);
        let lines: Vec<_> = ran
            .lines
            .iter()
            .filter(|line| line.get("failures").is_some())
            .collect();
        assert_eq!(lines.len(), cases.len());
        for (line, (command, failures, done)) in lines.into_iter().zip(&cases) {
            assert_eq!(
                (&line["failures"], &line["done"]),
                (failures, &json!(done)),
                "{command}: {line}"
            );
        }
    }
}

/// A server's TIME-WAIT, left by an earlier guest, accepts a SYN of the same port only with a later
/// timestamp (PAWS): the clock of the timestamps must not restart with each boot.
#[test]
fn timestamps_follow_the_time_of_day() {
    require_root_and_tun!();
    let stage = Stage::new(1);
    let ran = stage.run(
        &format!("{ADDRESS}wait 20ms; crr 10.99.0.1:7001 5"),
        Config::cpus(1),
    );
    assert_eq!(ran.status, 0);
    let since_boot_ms = ran
        .timestamp_ms
        .wrapping_sub(machine::BOOTED_UNIX_MS as u32);
    assert!((20..600_000).contains(&since_boot_ms), "{since_boot_ms} ms");
}

#[test]
fn a_reset_in_the_midst_of_it() {
    require_root_and_tun!();
    let stage = Stage::new(1);
    let ran = stage.run(&format!("{ADDRESS}crr 10.99.0.1:7002 5"), Config::cpus(1));
    assert_says(
        only(&ran, "crr"),
        json!({"done": 0, "failures": {"reset": 5}}),
    );
}

#[test]
fn streams_are_whole_on_a_bad_link() {
    require_root_and_tun!();
    let stage = Stage::new(2);
    let mut config = Config::cpus(2);
    config.faults = Some(Faults {
        lose: 50,
        duplicate: 50,
        reorder: 200,
    });
    let line = "dns www.example.test; stream 10.99.0.1:7000 2000000 up x2;\
        stream 10.99.0.1:7000 2000000 down x2; rr 10.99.0.1:7 50 x2; crr 10.99.0.1:7001 50 x4";
    let ran = stage.run(&format!("{ADDRESS}{line}"), config);
    assert_eq!(ran.status, 0);
    for stream in ran.workload("stream") {
        assert_says(stream, json!({"done": 2, "bytes": 4_000_000}));
    }
}

#[test]
fn raw_streams_and_many_at_once() {
    require_root_and_tun!();
    let stage = Stage::new(2);
    let line = "stream 10.99.0.1:7000 4000000 up raw x2; stream 10.99.0.1:7000 4000000 down raw;\
        crr 10.99.0.1:7001 2000 x100; flood 10.99.0.1:9 100 1514";
    let ran = stage.run(&format!("{ADDRESS}{line}"), Config::cpus(2));
    assert_eq!(ran.status, 0);
    let streams = ran.workload("stream");
    assert_says(streams[0], json!({"raw": true, "bytes": 8_000_000}));
    assert!(streams[1]["bytes"].as_u64().unwrap() >= 4_000_000);
    assert_says(only(&ran, "crr"), json!({"done": 2000, "failed": 0}));
    assert_eq!(ran.largest_sent, 1514);
    let since = Instant::now();
    while stage.sink.datagrams() < 100 && since.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let arrived = stage.sink.payload_bytes();
    assert_eq!((arrived, stage.sink.datagrams()), (100 * (1514 - 42), 100));
}

#[test]
fn what_comes_to_a_served_port_is_echoed() {
    require_root_and_tun!();
    let stage = Stage::new(2);
    let sent: Vec<u8> = (0..100_000u32).map(|i| (i * 7) as u8).collect();
    let _router = stage.advertise(None);
    let client = |host: IpAddr, guest: IpAddr| {
        let until = Instant::now() + Duration::from_secs(10);
        let connect = || TcpStream::connect((guest, 7));
        // Until the guest serves, it resets.
        let first = std::iter::repeat_with(connect).find(|tried| {
            std::thread::sleep(Duration::from_millis(5));
            tried.is_ok() || Instant::now() > until
        });
        // More than there are places at once, of which each is free again in time.
        let again = (0..23).map(|_| connect());
        for mut stream in first.into_iter().chain(again).flatten() {
            let mut back = Vec::new();
            let mut writer = stream.try_clone().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    writer.write_all(&sent).unwrap();
                    writer.shutdown(Shutdown::Write).unwrap();
                });
                stream.read_to_end(&mut back).unwrap();
            });
            assert!(back == sent, "{} bytes came back", back.len());
        }
        let socket = UdpSocket::bind((host, 0)).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        socket.send_to(b"hello", (guest, 9)).unwrap();
        let mut back = [0; 16];
        assert_eq!(socket.recv(&mut back).unwrap(), 5);
        assert_eq!(&back[..5], b"hello");
    };
    let ends = [
        (HOST.into(), GUEST.into(), "serve 7 9 10s"),
        (HOST6.into(), GUEST6.into(), "ipv6; serve 7 9 10s"),
    ];
    let due = json!({
        "ports": ["7", "9"], "ms": 10_000, "connections": 24, "datagrams": 1, "bytes": 2_400_005,
    });
    for (host, guest, line) in ends {
        let ran = std::thread::scope(|scope| {
            let clients = scope.spawn(|| stage.ns.run(|| client(host, guest)));
            let ran = stage.run(&format!("{ADDRESS}{line}"), Config::cpus(2));
            clients.join().unwrap();
            ran
        });
        assert_eq!(ran.status, 0);
        assert_says(only(&ran, "serve"), due.clone());
    }
}

#[test]
fn a_router_s_mtu_holds_on_all_cpus() {
    require_root_and_tun!();
    let stage = Stage::new(2);
    let _router = stage.advertise(Some(1300));
    let line = format!("{ADDRESS}stream [{HOST6}]:7000 400000 up x2; ipv6");
    let ran = stage.run(&line, Config::cpus(2));
    assert_eq!(ran.status, 0);
    assert_says(only(&ran, "ipv6"), json!({"mtu": 1300}));
    assert_says(only(&ran, "stream"), json!({"done": 2, "bytes": 800_000}));
    assert_eq!(ran.largest_sent, 1314);
}

/// Who wants IPv4 waits for nobody, and who wants IPv6 waits once.
#[test]
fn without_a_router() {
    require_root_and_tun!();
    let stage = Stage::new(2);
    let line = format!(
        "{ADDRESS}crr 10.99.0.1:7001 5; crr [{HOST6}]:7001 5; ping {HOST6} 1; ipv6;\
        dns6 {NAME}; crr {NAME}:7001 5"
    );
    let started = Instant::now();
    let ran = stage.run(&line, Config::cpus(2));
    assert_eq!(ran.status, 1);
    let waited = started.elapsed();
    assert!(waited < Duration::from_secs(8), "{waited:?}");
    let why = "no IPv6 address within 4 s; does a router on the network advertise a prefix?";
    let connections = ran.workload("crr");
    assert_says(connections[0], json!({"done": 5, "failed": 0}));
    let without = [connections[1], only(&ran, "ping"), only(&ran, "ipv6")];
    assert_eq!(without.map(|line| &line["error"]), [why; 3]);
    assert_says(only(&ran, "dns6"), json!({"addresses": ["fd99::1"]}));
    assert_says(connections[2], json!({"done": 5, "failed": 0}));
}

#[test]
fn names_that_are_none() {
    require_root_and_tun!();
    let stage = Stage::new(1);
    let line = "dns nowhere.test; dns broken.test 10.99.0.1; crr nowhere.test:80 5";
    let ran = stage.run(&format!("{ADDRESS}{line}"), Config::cpus(1));
    assert_eq!(ran.status, 1);
    let errors: Vec<_> = ran
        .workload("dns")
        .iter()
        .map(|line| &line["error"])
        .collect();
    assert_eq!(errors, ["NXDOMAIN", "SERVFAIL"]);
    assert_eq!(only(&ran, "crr")["error"], "look the host up: NXDOMAIN");
}

#[test]
fn without_a_lease_and_with_a_wrong_command_line() {
    require_root_and_tun!();
    let stage = Stage::new(2);
    let mut config = Config::cpus(2);
    config.speed = 50;
    let ran = stage.run("dns www.example.test", config);
    assert_eq!(ran.status, 3);
    assert!(
        ran.lines[1]["error"]
            .as_str()
            .unwrap()
            .contains("no DHCP lease")
    );
    let ran = stage.run("wait 1; frobnicate now", config);
    assert_eq!(ran.status, 2);
    assert_says(&ran.lines[1], json!({"command": "frobnicate now"}));
    assert_says(ran.lines.last().unwrap(), json!({"end": true, "status": 2}));
}

#[test]
fn two_neighbours_are_found_within_a_second() {
    require_root_and_tun!();
    let stage = Stage::new(2);
    let (near, far) = (Ipv4Addr::new(10, 99, 0, 3), Ipv4Addr::new(192, 0, 2, 53));
    stage
        .ns
        .ip(&format!("addr add {near}/24 dev {TAP}"))
        .unwrap();
    stage.ns.ip(&format!("addr add {far}/32 dev lo")).unwrap();
    let zone = || Zone::from([(NAME.to_owned(), Answer::a(HOST, 60))]);
    let _servers = [near, far].map(|at| DnsServer::start(&stage.ns, (at, 53), zone()).unwrap());
    let line = format!("address {GUEST}/24 {HOST} {near}; dns {NAME}; dns {NAME} {far}");
    let ran = stage.run(&line, Config::cpus(2));
    assert_eq!(ran.status, 0);
    for line in ran.workload("dns") {
        assert_says(line, json!({"addresses": ["10.99.0.1"], "questions": 1}));
    }
}
