//! `slipgate attach --vhost-user`, as a user without any privilege: QEMU gives the rings of its guest's
//! network card.

use std::{
    io::{Read as _, Write as _},
    net::Ipv4Addr,
    os::unix::net::UnixStream,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use slipgate_testbed::{
    builtin_guest::{Accelerator, Boot, Network, Qemu},
    clients::{tcp, tcp::EchoSession, udp, udp::UdpOutcome},
    require_kvm, require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    signal,
    world::{SERVER, SERVER_2},
};

use crate::{
    WAIT, at,
    unprivileged::{Attached, Place},
};

const MTU: u32 = 1500;
const STREAMS: u16 = 7000;
const CLOSE: u16 = 7001;
const ECHO: u16 = 7002;
const FORBIDDEN: u16 = 7100;
/// Bytes of a stream: many times every queue on the way.
const STREAM_BYTES: u64 = 30_000_000;
/// QEMU boots in a second, on a machine that does nothing else.
const BOOTS_WITHIN: Duration = Duration::from_secs(60);
const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;

fn attached(place: &Place, flags: &[&str]) -> Attached {
    Attached::start_by("--vhost-user", place, flags)
}

/// QEMU with the built-in guest, whose card is the socket's.
fn qemu<'a>(place: &'a Place, socket: &Path, line: &'a str) -> Qemu<'a> {
    Qemu {
        boot: Boot {
            cpus: 1,
            ..Boot::new(&place.world.host, line)
        },
        accelerator: Accelerator::Kvm,
        network: Network::VhostUser(socket.to_owned(), MTU),
    }
}

/// The same, running; killed by whoever has it.
fn spawn(place: &Place, socket: &Path, line: &str) -> Child {
    let mut command: Command = qemu(place, socket, line).command().unwrap();
    command.stdout(Stdio::null());
    place.world.host.spawn(command).unwrap()
}

fn json(place: &Place, command: &str) -> serde_json::Value {
    serde_json::from_str(&place.output(&[command, "--json"])).unwrap()
}

#[test]
fn a_guest_of_qemu_has_a_lease_names_streams_and_its_policy() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let world = &place.world;
    let zone = Zone::from([
        ("api.example.test".into(), Answer::a(SERVER_2, 300)),
        ("evil.test".into(), Answer::a(SERVER_2, 300)),
    ]);
    let resolver = DnsServer::start(&world.net, (SERVER, 53), zone).unwrap();
    let tcp = |port, service| TcpServer::start(&world.net, (SERVER_2, port), service).unwrap();
    let _streams = tcp(STREAMS, TcpService::Streams);
    let close = tcp(CLOSE, TcpService::Close);
    let _echo = tcp(ECHO, TcpService::Echo);
    let forbidden = tcp(FORBIDDEN, TcpService::Echo);
    let _udp = UdpServer::start(&world.net, (SERVER_2, ECHO), UdpService::Echo).unwrap();
    let dns = SERVER.to_string();
    let log = place.file("run/flows.jsonl");
    let attached = attached(
        &place,
        &[
            "--dns",
            &dns,
            "--default",
            "deny",
            "--allow",
            "*.example.test:7000-7002",
            "--flow-log",
            log.to_str().unwrap(),
        ],
    );
    let host = "api.example.test";
    let line = format!(
        "ping 10.0.2.2 2; crr {host}:{CLOSE} 200 x4 close; rr {host}:{ECHO} 50; \
         stream {host}:{STREAMS} {STREAM_BYTES} up x2; stream {host}:{STREAMS} {STREAM_BYTES} down x2"
    );
    let output = qemu(&place, &attached.socket, &line).run().unwrap();
    output.expect_well().unwrap();
    assert_eq!(close.accepted(), 200);
    let refused = format!("dns {host}; crr {host}:{FORBIDDEN} 1; crr evil.test:{ECHO} 1");
    // The next one: the socket serves again.
    let output = qemu(&place, &attached.socket, &refused).run().unwrap();
    assert!(!output.is_well(), "{output}");
    assert_eq!(output.results("dns").len(), 1, "{output}");
    assert_eq!(forbidden.accepted(), 0);
    assert_eq!(resolver.udp_queries("evil.test"), 0);

    let stats = json(&place, "stats");
    let vm = &stats["vms"][0];
    let packets = vm["kernel"]["rx_packets"].as_u64().unwrap();
    assert!(packets >= STREAM_BYTES / 1_460, "{stats:#}");
    assert!(vm["drops"]["malformed"].is_null(), "{stats:#}");
    let why = place.output(&["why", "web", "evil.test:7002"]);
    assert!(why.starts_with("no: "), "{why}");
    signal(attached.child.id(), libc::SIGTERM);
    assert_eq!(attached.end(&place), Some(0));
    let records = std::fs::read_to_string(&log).unwrap();
    let of = |event: &str| records.matches(event).count();
    assert!(of("\"flow_end\"") > 200);
    assert_eq!(of("\"flow_start\""), of("\"flow_end\""));
}

#[test]
fn a_vmm_that_dies_or_lies_costs_its_own_connection() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let forwards = [
        "--dns",
        "none",
        "--forward",
        "tcp:8080:80",
        "--forward",
        "udp:5353:80",
    ];
    let attached = attached(&place, &forwards);
    let host = &place.world.host;
    let serves = "serve 80 60s";
    for round in 0..3 {
        // One that speaks otherwise, and one with too long a message; and one that says nothing.
        for bytes in [&[0xff; 64][..], &[1, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0, 0]] {
            let mut liar = UnixStream::connect(&attached.socket).unwrap();
            liar.set_read_timeout(Some(WAIT)).unwrap();
            liar.write_all(bytes).unwrap();
            assert_eq!(liar.read(&mut [0; 1]).unwrap_or(0), 0, "it is closed");
        }
        drop(UnixStream::connect(&attached.socket).unwrap());
        let mut vmm = spawn(&place, &attached.socket, serves);
        let until = Instant::now() + BOOTS_WITHIN;
        let mut stream = loop {
            let mut stream = host.run(|| tcp::connect(at(LOOPBACK, 8080), WAIT)).unwrap();
            match EchoSession::new(&mut stream).round(1) {
                Ok(_) => break stream,
                Err(error) => assert!(Instant::now() < until, "{round}: it serves not: {error}"),
            }
        };
        EchoSession::new(&mut stream).round(500_000).unwrap();
        let sent = host.run(|| udp::probe(at(LOOPBACK, 5353), b"x", WAIT));
        assert!(
            matches!(sent, Ok(UdpOutcome::Answered(_))),
            "{round}: {sent:?}"
        );
        // In the middle of its work.
        vmm.kill().unwrap();
        vmm.wait().unwrap();
    }
    signal(attached.child.id(), libc::SIGTERM);
    assert_eq!(attached.end(&place), Some(0));
}
