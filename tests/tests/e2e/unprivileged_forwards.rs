//! Ports of the host that lead to a command and to slipgate's own VM, and their metrics, as a user
//! without any privilege. A guest at a socket is in `forwards`.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    process::Stdio,
};

use slipgate_testbed::{
    MicroVm,
    clients::{tcp, tcp::EchoSession, udp, udp::UdpOutcome},
    require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService},
    signal,
    world::HOST,
};

use crate::{GATEWAY, GUEST, WAIT, at, eventually, unprivileged::Place};

const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;
const METRICS: u16 = 9600;
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
    let mut lines = lines.map_while(Result::ok);
    let serves = lines.by_ref().any(|line| line.ends_with("it listens"));
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
        // By a socket of its own network.
        let client = lines.by_ref().find(|line| line.starts_with("client "));
        assert_eq!(client, Some(format!("client {GUEST}")));
    }
    let page = scrape(&place);
    let begun = metric(&page, r#"slipgate_relayed_flows_begun_total{vm="job"}"#);
    assert_eq!(begun, Some(2.0), "{page}");
    let bytes = r#"slipgate_relayed_bytes_total{vm="job",direction="rx"}"#;
    let carried = metric(&page, bytes);
    assert!(carried >= Some(1_002_922.0), "{page}");

    // Without the process that makes sockets there, by the TAP, once those that are ready are used.
    let makers = processes_beside("a_command_that_serves");
    assert_eq!(makers.len(), 1, "{makers:?}");
    signal(makers[0], libc::SIGKILL);
    let by_tap = format!("client {GATEWAY}");
    let came = (0..200).any(|_| {
        let stream = place
            .world
            .host
            .run(|| tcp::connect(at(LOOPBACK, 8080), WAIT));
        EchoSession::new(&mut stream.unwrap()).round(1).unwrap();
        lines.by_ref().find(|line| line.starts_with("client ")) == Some(by_tap.clone())
    });
    assert!(came, "{by_tap}");
    // Its end.
    drop(exec.stdin.take());
    assert!(exec.wait().unwrap().success());
    assert!(place.user.has_nothing_left());
}

/// Processes in the network namespace of the one that has this argument, besides that one.
fn processes_beside(argument: &str) -> Vec<u32> {
    let named = |pid: &u32| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        // The tests' own executable, and not those that start it.
        line.is_ok_and(|line| line.contains(argument)) && name.is_ok_and(|name| name == "tests\n")
    };
    let network = |pid: &u32| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let all = std::fs::read_dir("/proc").unwrap();
    let names = all.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let pids: Vec<u32> = names.filter_map(|name| name.parse().ok()).collect();
    let command = pids.iter().find(|pid| named(pid)).copied().unwrap();
    let its = network(&command);
    let beside = pids.into_iter();
    beside
        .filter(|pid| *pid != command && network(pid) == its)
        .collect()
}

/// The command of the test above: it echoes at port 80 until its input ends.
#[test]
#[ignore = "the child of a_port_of_the_host_leads_to_a_command"]
fn a_command_that_serves() {
    // Of both families, where the kernel has both.
    let any = [
        IpAddr::from(Ipv6Addr::UNSPECIFIED),
        Ipv4Addr::UNSPECIFIED.into(),
    ];
    let listener = TcpListener::bind(&any.map(|ip| SocketAddr::new(ip, 80))[..]).unwrap();
    println!("it listens");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            let client = stream.peer_addr().unwrap().ip();
            println!("client {}", client.to_canonical());
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
