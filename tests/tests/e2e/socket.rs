//! `slipgate attach --socket`, as a user without any privilege: a guest that comes in by a stream socket.

use std::{
    fs,
    io::{BufReader, Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
    process::Command,
    time::Duration,
};

use slipgate_testbed::{
    clients::{dns, icmp, tcp, tcp::EchoSession, udp, udp::UdpOutcome},
    frame, require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    signal,
    slipgate::binary,
    world::{SERVER, SERVER_2},
};

use crate::{
    DNS, GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, WAIT, at, eventually,
    unprivileged::{Attached, Place},
};

const ECHO: u16 = 7000;
const STREAMS: u16 = 7001;
const CLOSED: u16 = 7002;
const UDP_ECHO: u16 = 7003;
const FORBIDDEN: u16 = 7100;
/// Bytes of a stream: many times every queue on the way.
const STREAM_BYTES: u64 = 50_000_000;
const MINUTE: Duration = Duration::from_secs(60);
/// Longest frame of this protocol.
const MOST_FRAME: u32 = 14 + 65_535;

fn json(place: &Place, command: &str) -> serde_json::Value {
    serde_json::from_str(&place.output(&[command, "--json"])).unwrap()
}

/// Dropped packets of the VM by this reason.
fn drops(place: &Place, reason: &str) -> u64 {
    let stats = json(place, "stats");
    stats["vms"][0]["drops"][reason]["packets"]
        .as_u64()
        .unwrap_or(0)
}

#[test]
fn a_guest_by_the_socket_has_a_lease_names_and_its_policy() {
    require_root_and_tun!();
    let place = Place::new();
    let world = &place.world;
    let zone = Zone::from([
        ("api.example.test".into(), Answer::a(SERVER_2, 300)),
        ("evil.test".into(), Answer::a(SERVER_2, 300)),
    ]);
    let resolver = DnsServer::start(&world.net, (SERVER, 53), zone).unwrap();
    let tcp = |port, service| TcpServer::start(&world.net, (SERVER_2, port), service).unwrap();
    let echo = tcp(ECHO, TcpService::Echo);
    let _streams = tcp(STREAMS, TcpService::Streams);
    let forbidden = tcp(FORBIDDEN, TcpService::Echo);
    let _udp = UdpServer::start(&world.net, (SERVER_2, UDP_ECHO), UdpService::Echo).unwrap();
    let log = place.file("run/flows.jsonl");
    let attached = Attached::start(
        &place,
        &[
            "--dns",
            &SERVER.to_string(),
            "--default",
            "deny",
            "--allow",
            "*.example.test:7000-7003",
            "--flow-log",
            log.to_str().unwrap(),
        ],
    );
    let guest = attached.guest();
    let lease = guest.dhcp(WAIT).unwrap();
    assert_eq!((lease.address, lease.router), (GUEST, Some(GATEWAY)));
    assert_eq!((lease.dns, lease.mtu), (vec![DNS], Some(1_500)));

    guest.run(|| {
        let refused = |port| tcp::connect(at(SERVER_2, port), WAIT).is_err();
        assert!(refused(ECHO), "nobody has asked for its name");
        let ask = |name| dns::query_udp(at(DNS, 53), name, WAIT).unwrap().addresses();
        assert!(ask("evil.test").is_empty());
        assert_eq!(ask("api.example.test"), [SERVER_2]);
        let over_tcp = dns::query_tcp(at(DNS, 53), "api.example.test", WAIT);
        assert_eq!(over_tcp.unwrap().addresses(), [SERVER_2]);
        assert!(refused(FORBIDDEN));
        tcp::expect_refused(at(SERVER_2, CLOSED)).unwrap();
        assert_eq!(icmp::ping(GATEWAY, 2, 100, WAIT).unwrap().replies.len(), 2);
        tcp::download(at(SERVER_2, STREAMS), STREAM_BYTES, 1, MINUTE).unwrap();
        tcp::upload(at(SERVER_2, STREAMS), STREAM_BYTES, 2, MINUTE).unwrap();
        for size in [1, 1_472, 4_000, 60_000] {
            let outcome = udp::probe(at(SERVER_2, UDP_ECHO), &vec![size as u8; size], WAIT);
            assert!(
                matches!(outcome, Ok(UdpOutcome::Answered(_))),
                "{outcome:?}"
            );
        }
    });
    assert_eq!(
        (forbidden.accepted(), resolver.udp_queries("evil.test")),
        (0, 0)
    );

    let mut held = guest
        .run(|| tcp::connect(at(SERVER_2, ECHO), WAIT))
        .unwrap();
    EchoSession::new(&mut held).round(500_000).unwrap();
    let local = held.local_addr().unwrap().to_string();
    let flows = json(&place, "flows");
    let flow = flows
        .as_array()
        .unwrap()
        .iter()
        .find(|flow| flow["guest"] == local);
    let flow = flow.unwrap_or_else(|| panic!("{local} is not in {flows:#}"));
    assert_eq!(
        (&flow["vm"], &flow["path"]),
        (&"web".into(), &"sockets".into())
    );
    assert_eq!(flow["dns_name"], "api.example.test");
    assert_eq!(flow["nat"], echo.peers().last().unwrap().to_string());
    let why = place.output(&["why", "web", "evil.test:7000"]);
    assert!(why.starts_with("no: "), "{why}");
    assert_eq!(drops(&place, "engine_busy"), 0, "a stream's data waits");
    let stream_packets = STREAM_BYTES / 1_460;
    let stats = json(&place, "stats");
    assert!(stats["vms"][0]["kernel"]["rx_packets"].as_u64().unwrap() >= stream_packets);
    place.output(&["cut", flow["id"].as_str().unwrap()]);
    let cut = guest.run(|| held.read(&mut [0; 1]));
    assert!(cut.is_err(), "it is reset: {cut:?}");

    // The flow log is moved away, and opened again.
    let moved = place.file("run/flows.1.jsonl");
    fs::rename(&log, &moved).unwrap();
    signal(attached.child.id(), libc::SIGHUP);
    eventually("the log is made again", || log.exists().then_some(()));

    // An orderly end: whatever flow there is has its record.
    let _open = guest
        .run(|| tcp::connect(at(SERVER_2, ECHO), WAIT))
        .unwrap();
    signal(attached.child.id(), libc::SIGTERM);
    assert_eq!(attached.end(&place), Some(0));
    assert!(fs::read_to_string(&log).unwrap().contains("flow_end"));
    let records = [moved, log]
        .map(|part| fs::read_to_string(part).unwrap())
        .concat();
    let of = |event: &str| {
        let lines = records.lines().map(serde_json::from_str);
        let lines = lines.map(Result::<serde_json::Value, _>::unwrap);
        lines.filter(|record| record["event"] == event).count()
    };
    assert!(of("flow_end") >= 5, "{records}");
    assert_eq!(of("flow_start"), of("flow_end"), "{records}");
}

#[test]
fn a_guest_comes_again_or_is_the_only_one() {
    require_root_and_tun!();
    let place = Place::new();
    let _echo = TcpServer::start(&place.world.net, (SERVER_2, ECHO), TcpService::Echo).unwrap();
    let _streams =
        TcpServer::start(&place.world.net, (SERVER_2, STREAMS), TcpService::Streams).unwrap();
    // Frames as long as passt's, which the lease gives.
    let attached = Attached::start(&place, &["--mtu", "65520"]);
    for round in 0..2 {
        let guest = attached.guest();
        let lease = guest.dhcp(WAIT).unwrap();
        assert_eq!(lease.mtu, Some(65_520));
        guest.run(|| {
            tcp::download(at(SERVER_2, STREAMS), STREAM_BYTES, round, MINUTE).unwrap();
            tcp::upload(at(SERVER_2, STREAMS), STREAM_BYTES, round, MINUTE).unwrap();
            assert_eq!(
                icmp::ping(GATEWAY, 1, 1_000, WAIT).unwrap().replies.len(),
                1
            );
        });
    }
    signal(attached.child.id(), libc::SIGINT);
    assert_eq!(attached.end(&place), Some(0));

    let attached = Attached::start(&place, &["--one-off"]);
    let guest = attached.guest();
    guest.dhcp(WAIT).unwrap();
    let open = guest
        .run(|| tcp::connect(at(SERVER_2, ECHO), WAIT))
        .unwrap();
    drop(guest);
    assert_eq!(attached.end(&place), Some(0));
    drop(open);
}

#[test]
fn a_hostile_stream_costs_its_own_connection_and_is_counted() {
    require_root_and_tun!();
    let place = Place::new();
    let attached = Attached::start(&place, &[]);
    let connect = || {
        let stream = UnixStream::connect(&attached.socket).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        stream
    };
    let framed = |frame: &[u8]| [&(frame.len() as u32).to_be_bytes(), frame].concat();
    let counted = |what: &str, reason: &str, at_least: u64| {
        eventually(what, || (drops(&place, reason) >= at_least).then_some(()));
    };

    // Nothing, less than an Ethernet header, and only noise, among them the longest frame.
    let mut guest = connect();
    let noise: Vec<_> = [0, 1, 13].map(|len| framed(&vec![0xff; len])).concat();
    guest.write_all(&noise).unwrap();
    counted("short frames are malformed", "malformed", 3);
    guest
        .write_all(&framed(&vec![0xff; MOST_FRAME as usize]))
        .unwrap();
    counted("noise to all is for a group", "group", 1);
    // One byte at a time.
    for byte in framed(&[0xff; 60]) {
        guest.write_all(&[byte]).unwrap();
    }
    counted("it is still in step", "group", 2);
    // Longer than any: the connection is closed.
    guest.write_all(&(MOST_FRAME + 1).to_be_bytes()).unwrap();
    assert_eq!(guest.read(&mut [0; 1]).unwrap(), 0);
    counted("a length that can't be", "malformed", 4);
    // Cut in the middle.
    let mut guest = connect();
    guest.write_all(&framed(&[0; 60])[..30]).unwrap();
    drop(guest);
    counted("a frame that is not whole", "malformed", 5);

    // Whoever asks and does not read loses answers, and delays nobody: `why` is answered.
    let mut guest = connect();
    let question = framed(&frame::arp(1, (GUEST_MAC, GUEST), ([0; 6], GATEWAY)));
    let questions = question.repeat(1_000);
    let lost = || drops(&place, "engine_busy");
    eventually("answers are lost", || {
        guest.write_all(&questions).unwrap();
        (lost() > 0).then_some(())
    });
    let yes = place.output(&["why", "web", "203.0.113.20:7000"]);
    assert!(yes.starts_with("yes: "), "{yes}");
    // What was not lost is whole.
    let mut answers = BufReader::new(&guest);
    for _ in 0..1_000 {
        let mut answer = vec![0; question.len()];
        answers.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..4], question[..4]);
        assert_eq!(answer[4..16], [GUEST_MAC, GATEWAY_MAC].concat());
    }
    drop(guest);

    // One that closes its reading side is gone, though it says nothing more: who waited is served.
    let mut deaf = connect();
    let mut waits = connect();
    waits.write_all(&question).unwrap();
    deaf.shutdown(Shutdown::Read).unwrap();
    deaf.write_all(&question).unwrap();
    waits.read_exact(&mut vec![0; question.len()]).unwrap();
    drop((deaf, waits));

    // And the next one is served.
    let guest = attached.guest();
    guest.dhcp(WAIT).unwrap();
    assert_eq!(
        guest
            .run(|| icmp::ping(GATEWAY, 1, 100, WAIT))
            .unwrap()
            .replies
            .len(),
        1
    );
}

#[test]
fn a_socket_that_cannot_be_is_refused_by_its_flag() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |args: &[&str], status| {
        let output = Command::new(binary().unwrap())
            .arg("attach")
            .args(args)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(status), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let path = dir.path().join("a b.sock");
    let path = path.to_str().unwrap();
    assert!(refused(&["--socket", path], 2).contains("--name NAME"));
    let rings = refused(&["--vhost-user", path], 2);
    assert!(
        rings.contains("--vhost-user") && rings.contains("--name NAME"),
        "{rings}"
    );
    assert!(refused(&["--vhost-user", "a", "--socket", "b"], 2).contains("cannot be used with"));
    let socket = ["--socket", path, "--name", "web"];
    let with = |more: &[&str]| refused(&[&socket[..], more].concat(), 2);
    assert!(with(&["--tap", "tap0"]).contains("--tap"));
    assert!(with(&["--on-exit", "keep"]).contains("flows end"));
    assert!(with(&["--xdp", "on"]).contains("no part in the kernel"));
    assert!(refused(&["--tap", "tap0", "--one-off"], 2).contains("--tap"));
}
