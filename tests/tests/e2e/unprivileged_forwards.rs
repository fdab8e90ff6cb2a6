//! Ports of the host that lead to guests of user-mode engines, and their metrics, as a user without
//! any privilege.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, TcpListener, TcpStream},
    process::Stdio,
    time::Duration,
};

use slipgate_testbed::{
    MicroVm,
    clients::{tcp, tcp::EchoSession, udp, udp::UdpOutcome},
    require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    signal,
    streams::Receipt,
    world::HOST,
};

use crate::{
    GATEWAY, GUEST, WAIT, at, eventually,
    unprivileged::{Attached, Place},
};

const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;
const METRICS: u16 = 9600;
/// Bytes of a stream: many times every queue on the way.
const BYTES: u64 = 20_000_000;
const MINUTE: Duration = Duration::from_secs(60);
const FORWARDED: [&str; 8] = [
    "--forward",
    "tcp:8080:80",
    "--forward",
    "tcp:127.0.0.1:9001-9002:7001-7002",
    "--forward",
    "udp:5353:5300",
    "--metrics",
    "127.0.0.1:9600",
];

/// Returns the metrics' page.
fn scrape(place: &Place) -> String {
    place.world.host.run(|| {
        let mut stream = TcpStream::connect((LOOPBACK, METRICS)).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        page
    })
}

/// The value of a metric, by its name with labels.
fn metric(page: &str, name: &str) -> Option<f64> {
    let line = page.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().parse().ok()
}

#[test]
fn ports_of_the_host_lead_to_a_guest_by_the_socket() {
    require_root_and_tun!();
    let place = Place::new();
    let world = &place.world;
    let attached = Attached::start(&place, &FORWARDED);
    // Before the guest is there.
    let early = world.host.run(|| tcp::connect(at(LOOPBACK, 8080), WAIT));
    let guest = attached.guest();
    guest.dhcp(WAIT).unwrap();
    let streams = TcpServer::start(&guest.ns, (GUEST, 80), TcpService::Streams).unwrap();
    let _echo = UdpServer::start(&guest.ns, (GUEST, 5300), UdpService::Echo).unwrap();
    let greeting = TcpService::Greet(b"seven".to_vec());
    let _greets = TcpServer::start(&guest.ns, (GUEST, 7002), greeting).unwrap();

    for (from, address) in [
        (&world.host, LOOPBACK),
        (&world.host, HOST),
        (&world.net, HOST),
    ] {
        let down = from.run(|| tcp::download(at(address, 8080), BYTES, 1, MINUTE));
        assert_eq!(down.unwrap().receipt, Receipt::expected(BYTES, 1));
        from.run(|| tcp::upload(at(address, 8080), BYTES, 2, MINUTE))
            .unwrap();
        let sent = from.run(|| udp::probe(at(address, 5353), b"x", WAIT));
        assert!(matches!(sent, Ok(UdpOutcome::Answered(_))), "{sent:?}");
    }
    // Every client comes by the host's socket.
    let peers = streams.peers();
    assert!(peers.iter().all(|peer| *peer.ip() == GATEWAY), "{peers:?}");
    drop(early);

    // The second of a range, on loopback alone.
    let mut greeted = world
        .host
        .run(|| tcp::connect(at(LOOPBACK, 9002), WAIT))
        .unwrap();
    let mut said = String::new();
    greeted.read_to_string(&mut said).unwrap();
    assert_eq!(said, "seven");
    world
        .net
        .run(|| tcp::expect_refused(at(HOST, 9002)))
        .unwrap();
    // A port of the guest at which nobody listens.
    let nobody = world
        .host
        .run(|| tcp::connect(at(LOOPBACK, 9001), WAIT))
        .map(|mut stream| stream.read(&mut [0; 1]).map_or(0, |read| read));
    assert_eq!(nobody.unwrap_or(0), 0);

    let _held = world
        .host
        .run(|| tcp::connect(at(LOOPBACK, 8080), WAIT))
        .unwrap();
    let flows = eventually("it is among the flows", || {
        let flows: serde_json::Value =
            serde_json::from_str(&place.output(&["flows", "--json"])).unwrap();
        let flows = flows.as_array().unwrap().iter();
        flows
            .filter(|flow| flow["guest"] == at(GUEST, 80).to_string())
            .find(|flow| flow["state"] == "established")
            .cloned()
    });
    assert_eq!(flows["path"], "relay", "{flows:#}");
    let rule = flows["rule"].as_str().unwrap();
    assert!(rule.contains("--forward tcp:8080:80"), "{flows:#}");

    let page = scrape(&place);
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.ends_with("# EOF\n"));
    let begun = metric(&page, r#"slipgate_relayed_flows_begun_total{vm="web"}"#);
    let stats: serde_json::Value =
        serde_json::from_str(&place.output(&["stats", "--json"])).unwrap();
    let relayed = stats["vms"][0]["relayed"]["begun"].as_f64();
    assert!(relayed.is_some_and(|it| it >= 7.0), "{stats:#}");
    assert_eq!(begun, relayed, "{page}");
    signal(attached.child.id(), libc::SIGTERM);
    assert_eq!(attached.end(&place), Some(0));
}

#[test]
fn a_port_of_the_host_leads_to_a_command() {
    require_root_and_tun!();
    let place = Place::new();
    let command = place.file("tests");
    let command = [
        command.to_str().unwrap(),
        "unprivileged_forwards::a_command_that_serves",
        "--exact",
        "--ignored",
        "--nocapture",
    ];
    let args = [
        &["exec", "--name", "job", "--dns", "none"],
        &FORWARDED[..],
        &["--"],
        &command,
    ];
    let mut exec = place.slipgate(&args.concat());
    exec.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut exec = place.world.host.spawn(exec).unwrap();
    let lines = BufReader::new(exec.stdout.take().unwrap()).lines();
    let serves = lines
        .map_while(Result::ok)
        .any(|line| line.ends_with("it listens"));
    assert!(serves, "it ended before it served");
    for address in [LOOPBACK, HOST] {
        let mut stream = place
            .world
            .host
            .run(|| tcp::connect(at(address, 8080), WAIT))
            .unwrap();
        let mut session = EchoSession::new(&mut stream);
        for size in [1, 1_460, 500_000] {
            session.round(size).unwrap();
        }
    }
    let page = scrape(&place);
    let begun = metric(&page, r#"slipgate_relayed_flows_begun_total{vm="job"}"#);
    assert_eq!(begun, Some(2.0), "{page}");
    // Its end.
    drop(exec.stdin.take());
    assert!(exec.wait().unwrap().success());
    assert!(place.user.has_nothing_left());
}

/// The command of the test above: it echoes at port 80 until its input ends.
#[test]
#[ignore = "the child of a_port_of_the_host_leads_to_a_command"]
fn a_command_that_serves() {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 80)).unwrap();
    println!("it listens");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            std::thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
        }
    });
    let _ = std::io::stdin().read_line(&mut String::new());
    std::process::exit(0);
}

#[test]
fn a_port_of_the_host_leads_to_slipgates_own_vm() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let line = "serve 80 5300 60s";
    let all = [
        &["--name", "vm", "--dns", "none"],
        &FORWARDED[..],
        &["--cmdline", line],
    ]
    .concat();
    let mut vm = MicroVm::start_by(&place.world.host, &place.user, &all).unwrap();
    vm.await_line("\"lease\"", WAIT).unwrap();
    let host = &place.world.host;
    let mut stream = eventually("it serves", || {
        let mut stream = host.run(|| tcp::connect(at(LOOPBACK, 8080), WAIT)).ok()?;
        EchoSession::new(&mut stream).round(1).ok()?;
        Some(stream)
    });
    EchoSession::new(&mut stream).round(500_000).unwrap();
    let sent = host.run(|| udp::probe(at(LOOPBACK, 5353), b"x", WAIT));
    assert!(matches!(sent, Ok(UdpOutcome::Answered(_))), "{sent:?}");
    let page = scrape(&place);
    let begun = metric(&page, r#"slipgate_relayed_flows_begun_total{vm="vm"}"#);
    assert!(begun >= Some(1.0), "{page}");
    signal(vm.broker_pid(), libc::SIGTERM);
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
    assert!(place.user.has_nothing_left());
}

#[test]
fn a_port_that_cannot_be_had_is_refused_with_the_reason() {
    require_root_and_tun!();
    let place = Place::new();
    let socket = place.file("run/web.sock");
    let refused = |flags: &[&str]| {
        let args = [&["attach", "--socket", socket.to_str().unwrap()], flags].concat();
        let mut command = place.slipgate(&args);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let child = place.world.host.spawn(command).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(!output.status.success(), "{flags:?}");
        assert!(!socket.exists() && place.user.has_nothing_left());
        String::from_utf8(output.stderr).unwrap()
    };
    let error = refused(&["--forward", "tcp:80:80"]);
    assert!(
        error.contains("ports below 1024") && error.contains("ip_unprivileged_port_start=80"),
        "{error}"
    );
    let world = &place.world;
    let _taken = TcpServer::start(&world.host, (LOOPBACK, 8080), TcpService::Close).unwrap();
    let error = refused(&["--forward", "tcp:8080:80"]);
    assert!(error.contains("it is taken by"), "{error}");
    let error = refused(&["--metrics", "127.0.0.1:8080"]);
    assert!(error.contains("--metrics 127.0.0.1:8080"), "{error}");
}
