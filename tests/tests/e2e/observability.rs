//! Output for people: metrics, records other than those of flows' ends, `slipgate top`.

use std::{
    collections::HashMap,
    fs::File,
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddrV4, TcpStream},
    process::Stdio,
    sync::mpsc,
};

use nix::{
    pty::{Winsize, openpty},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slipgate_testbed::{
    clients::{dns, tcp},
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    world::SERVER,
};

use crate::{
    Cell, Stand, WAIT, eventually,
    matrix::{at, matrix},
};

matrix! {
    metrics_say_what_stats_say: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    who_scrapes_badly_or_slowly_holds_nobody_up: [hybrid_ipv4, user_ipv4],
        without [hybrid_ipv6, user_ipv6]: "the page is the same process's, whatever the guest's family";
    the_metrics_process_has_no_privileges_is_started_again_and_goes_with_the_broker: [hybrid_ipv4, user_ipv4],
        without [hybrid_ipv6, user_ipv6]: "the page is the same process's, whatever the guest's family";
    records_tell_starts_questions_refusals_and_relayed_flows: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    top_shows_flows_once_as_text_and_cuts_them_in_a_terminal: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

/// Where a stand of `--metrics` serves them.
pub(crate) const METRICS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9600);

/// Returns the response to an HTTP request to the metrics; empty where the connection ends without
/// one.
fn http(stand: &Stand, request: &str) -> String {
    stand.world.host.run(|| {
        let mut stream = TcpStream::connect(METRICS).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        // One that is refused in the middle of it may not take it all.
        let _ = stream.write_all(request.as_bytes());
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
            Err(e) => panic!("{e} after {request:?}"),
        }
        String::from_utf8(answer).unwrap()
    })
}

/// The metrics, by name with labels.
pub(crate) fn scrape(stand: &Stand) -> HashMap<String, f64> {
    let answer = http(stand, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let (head, text) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            (name.to_owned(), value.parse().expect("a number"))
        })
        .collect()
}

fn serve(stand: &Stand, service: TcpService) -> TcpServer<IpAddr> {
    TcpServer::start(&stand.world.net, (stand.cell.server(), 7000), service).unwrap()
}

/// Asks as the guest does, for a name's addresses.
fn ask(cell: Cell, name: &str) {
    let server = at(cell.dns(), 53);
    dns::ask_udp(server, &cell.question(name), WAIT).unwrap();
}

fn metrics_say_what_stats_say(cell: Cell) {
    let refused = at(cell.server_2(), 443);
    let flags = [
        "--metrics",
        "127.0.0.1:9600",
        "--deny",
        &refused.to_string(),
        "--deny",
        "*.evil.test",
        "--dns",
        "203.0.113.10",
        "--forward",
        "tcp:8080:80",
    ];
    let stand = Stand::with_known_guest(cell, &flags);
    let server = serve(&stand, TcpService::Streams);
    let inside = (cell.guest(), 80);
    let _inside = TcpServer::start(&stand.guest.ns, inside, TcpService::Echo).unwrap();
    stand.run(|| {
        tcp::download(server.address(), 1 << 20, 1, WAIT).unwrap();
        tcp::expect_refused(refused).unwrap();
        ask(cell, "x.evil.test");
    });
    stand.world.host.run(|| {
        let to = at(cell.loopback(), 8080);
        tcp::request_response(to, 1, 100, WAIT).unwrap();
    });
    // Last acknowledgements are on their way.
    let (stats, metrics) = eventually("the counts to stand", || {
        let before = stand.slipgate.stats().unwrap();
        std::thread::sleep(crate::BRIEFLY);
        let metrics = scrape(&stand);
        let stats = stand.slipgate.stats().unwrap();
        let counted = |stats: &serde_json::Value| {
            let vm = &stats["vms"][0];
            (vm["kernel"].clone(), vm["relayed"].clone())
        };
        (counted(&stats) == counted(&before)).then_some((stats, metrics))
    });
    let vm = &stats["vms"][0];
    let is = |name: &str, expected: &serde_json::Value| {
        let found = metrics.get(name).copied();
        assert_eq!(found, expected.as_f64(), "{name} in {metrics:#?}");
    };
    let directions = [
        ("tx", "tx_packets", "tx_bytes"),
        ("rx", "rx_packets", "rx_bytes"),
    ];
    for (direction, packets, bytes) in directions {
        let labels = format!(r#"{{vm="tap0",direction="{direction}"}}"#);
        is(
            &format!("slipgate_packets_total{labels}"),
            &vm["kernel"][packets],
        );
        is(
            &format!("slipgate_bytes_total{labels}"),
            &vm["kernel"][bytes],
        );
    }
    assert!(metrics[r#"slipgate_bytes_total{vm="tap0",direction="rx"}"#] > f64::from(1 << 20));
    is(
        r#"slipgate_flows_admitted_total{vm="tap0"}"#,
        &vm["admitted"],
    );
    is(r#"slipgate_flows{vm="tap0",protocol="tcp"}"#, &vm["flows"]);
    is(
        r#"slipgate_flows_refused_total{vm="tap0",reason="rule"}"#,
        &vm["refused"]["rule"],
    );
    is(
        &format!(r#"slipgate_flows_refused_by_rule_total{{rule="--deny {refused}"}}"#),
        &vm["refused_by"][0]["flows"],
    );
    is(
        r#"slipgate_dns_refused_total{vm="tap0",reason="name"}"#,
        &vm["names"]["refused_names"],
    );
    is(
        r#"slipgate_dns_questions_total{vm="tap0"}"#,
        &vm["dns_queries"],
    );
    is(
        r#"slipgate_relayed_flows_begun_total{vm="tap0"}"#,
        &vm["relayed"]["begun"],
    );
    assert_eq!(vm["relayed"]["begun"], 1, "{vm}");
    let last = &vm["refused_last"][0]["remote"];
    assert_eq!(*last, refused.to_string(), "{vm}");
}

fn who_scrapes_badly_or_slowly_holds_nobody_up(cell: Cell) {
    let stand = Stand::of(cell, &["--metrics", "127.0.0.1:9600"]);
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n".to_owned(), "405"),
        ("\r\n\r\n".to_owned(), "400"),
        (
            format!("GET /metrics HTTP/1.1\r\nX: {}", "a".repeat(9_000)),
            "431",
        ),
    ] {
        let answer = http(&stand, &request);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{answer:?}"
        );
    }
    stand.world.host.run(|| {
        // More than may be at once, who say nothing, half a request, or read nothing.
        let idle: Vec<TcpStream> = (0..100)
            .map(|i| {
                let mut stream = TcpStream::connect(METRICS).unwrap();
                let says = ["", "GET /met", "GET /metrics HTTP/1.1\r\n\r\n"];
                let _ = stream.write_all(says[i % 3].as_bytes());
                stream
            })
            .collect();
        for _ in 0..5 {
            // Whoever waits for one who says nothing waits until that one has had its time.
            let mut last = TcpStream::connect(METRICS).unwrap();
            scrape(&stand);
            last.set_nonblocking(true).unwrap();
            let error = last.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
        }
        drop(idle);
    });
    assert_eq!(
        stand.slipgate.stderr().matches("metrics process").count(),
        0
    );
}

/// The metrics process, while one runs.
fn metrics_pid(stand: &Stand) -> Option<u32> {
    stand.slipgate.children_named("slipgate-metrics").pop()
}

fn the_metrics_process_has_no_privileges_is_started_again_and_goes_with_the_broker(cell: Cell) {
    let mut stand = Stand::of(cell, &["--metrics", "127.0.0.1:9600"]);
    let server = serve(&stand, TcpService::Echo);
    for _ in 0..2 {
        let pid = eventually("a metrics process", || metrics_pid(&stand));
        scrape(&stand);
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(!status.contains("Uid:\t0\t"), "{status}");
        for line in [
            "CapEff:\t0000000000000000",
            "CapPrm:\t0000000000000000",
            "NoNewPrivs:\t1",
            "Seccomp:\t2",
        ] {
            assert!(status.contains(line), "{line} in:\n{status}");
        }
        slipgate_testbed::signal(pid, libc::SIGKILL);
        // The NAT is none the worse for it.
        stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
        eventually("another one", || {
            metrics_pid(&stand).filter(|new| *new != pid)
        });
    }
    let said = stand.says("the metrics process was killed");
    assert_eq!(
        said.matches("the metrics process was killed").count(),
        1,
        "{said}"
    );
    let pid = eventually("a metrics process", || metrics_pid(&stand));
    stand.slipgate.kill_broker().unwrap();
    eventually("its end", || {
        let gone = !std::path::Path::new(&format!("/proc/{pid}/ns")).exists();
        let zombie = std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| stat.contains(") Z "));
        (gone || zombie).then_some(())
    });
}

fn records_tell_starts_questions_refusals_and_relayed_flows(cell: Cell) {
    let denied = at(cell.server_2(), 443).to_string();
    let flags = [
        "--dns",
        "203.0.113.10",
        "--deny",
        "*.evil.test",
        "--deny",
        &denied,
        "--forward",
        "tcp:8080:80",
    ];
    let mut stand = Stand::with_known_guest(cell, &flags);
    let answer = Answer::address(cell.server_2(), 300);
    let zone = Zone::from([("api.example.test".to_owned(), answer)]);
    let resolver = DnsServer::start(&stand.world.net, (SERVER, 53), zone).unwrap();
    let server = serve(&stand, TcpService::Echo);
    let inside = (cell.guest(), 80);
    let inside = TcpServer::start(&stand.guest.ns, inside, TcpService::Echo).unwrap();
    let elsewhere = at(cell.resolver_elsewhere(), 53);
    stand.run(|| {
        ask(cell, "api.example.test");
        let question = cell.question("api.example.test");
        dns::ask_tcp(elsewhere, &question, WAIT).unwrap();
        ask(cell, "x.evil.test");
        let mut stream = tcp::connect(server.address(), WAIT).unwrap();
        tcp::EchoSession::new(&mut stream).round(1000).unwrap();
        for _ in 0..3 {
            tcp::expect_refused(at(cell.server_2(), 443)).unwrap();
        }
    });
    let relayed = stand.world.host.run(|| {
        let mut stream = tcp::connect(at(cell.loopback(), 8080), WAIT).unwrap();
        tcp::EchoSession::new(&mut stream).round(5000).unwrap();
        stream.local_addr().unwrap().to_string()
    });
    assert_eq!(inside.accepted(), 1);
    let started = eventually("a start", || stand.events("flow_start").pop());
    assert!(started["started"].is_string(), "{started}");
    drop(resolver);
    assert!(stand.slipgate.stop().unwrap().success());

    let questions = stand.events("dns");
    let of = |n: usize, field: &str| questions[n][field].clone();
    assert_eq!(questions.len(), 3, "{questions:#?}");
    let kind = if cell.is_ipv6() { "AAAA" } else { "A" };
    assert_eq!([of(0, "name"), of(0, "type")], ["api.example.test", kind]);
    assert_eq!([of(0, "verdict"), of(0, "rcode")], ["allowed", "NOERROR"]);
    assert_eq!(
        [of(0, "source"), of(0, "upstream")],
        ["upstream", "203.0.113.10:53"]
    );
    assert_eq!(of(0, "answers"), serde_json::json!([cell.server_2()]));
    assert_eq!([of(1, "source"), of(1, "transport")], ["cache", "tcp"]);
    assert_eq!([of(2, "verdict"), of(2, "rcode")], ["refused", "REFUSED"]);
    assert_eq!(of(2, "rule_text"), "--deny *.evil.test");

    let refused = stand.events("refused");
    assert_eq!(refused.len(), 1, "{refused:#?}");
    assert!(refused[0]["count"].as_u64() >= Some(3), "{refused:#?}");
    assert_eq!(refused[0]["rule_text"], format!("--deny {denied}"));
    assert_eq!(refused[0]["remote"], denied);

    let ends = stand.events("flow_end");
    let starts = stand.events("flow_start");
    for end in &ends {
        let same = |start: &&serde_json::Value| start["id"] == end["id"];
        assert_eq!(starts.iter().filter(same).count(), 1, "{end}");
    }
    let by = |path: &str, remote: &str| {
        let is = |end: &&serde_json::Value| end["path"] == path && end["remote"] == remote;
        let found = ends.iter().find(is);
        found.unwrap_or_else(|| panic!("{path} {remote} in {ends:#?}"))
    };
    let path = if cell.is_hybrid() {
        "kernel"
    } else {
        "sockets"
    };
    let translated = by(path, &server.address().to_string());
    assert!(translated["connect_us"].as_u64() > Some(0), "{translated}");
    let forward = by("relay", &relayed);
    assert_eq!(forward["rule_text"], "--forward tcp:8080:80", "{forward}");
    let (guest, host) = (at(cell.guest(), 80), at(cell.loopback(), 8080));
    assert_eq!(
        [&forward["guest"], &forward["nat"]],
        [&guest.to_string(), &host.to_string()]
    );
    for bytes in ["tx_bytes", "rx_bytes"] {
        assert!(forward[bytes].as_u64() > Some(5000), "{forward}");
    }
    let question = by("relay", &elsewhere.to_string());
    assert_eq!(question["direction"], "outbound", "{question}");
}

fn top_shows_flows_once_as_text_and_cuts_them_in_a_terminal(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let server = serve(&stand, TcpService::Echo);
    let remote = server.address().to_string();
    let mut stream = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    tcp::EchoSession::new(&mut stream).round(1000).unwrap();
    let text = stand.slipgate.run(&["top", "--once"]).unwrap().stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("slipgate top  1 VM  1 flow  "), "{text}");
    assert!(text.contains(&remote), "{text}");

    let size = Winsize {
        ws_row: 24,
        ws_col: 80,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let pty = openpty(Some(&size), None).unwrap();
    let end = || Stdio::from(pty.slave.try_clone().unwrap());
    let mut command = stand.slipgate.command(&["top"]).unwrap();
    command
        .env("TERM", "xterm")
        .stdin(end())
        .stdout(end())
        .stderr(end());
    let mut top = stand.world.host.spawn(command).unwrap();
    drop(pty.slave);
    let mut keys = File::from(pty.master.try_clone().unwrap());
    let (said, screen) = mpsc::channel();
    let mut master = File::from(pty.master);
    std::thread::spawn(move || {
        let mut bytes = [0; 4_096];
        while let Ok(n) = master.read(&mut bytes)
            && n > 0
            && said.send(bytes[..n].to_vec()).is_ok()
        {}
    });
    let mut seen = String::new();
    let mut wait_for = |what: &str| {
        eventually(what, || {
            while let Ok(bytes) = screen.try_recv() {
                seen.push_str(&String::from_utf8_lossy(&bytes));
            }
            seen.contains(what).then_some(())
        });
    };
    wait_for(&remote);
    // The arrow down selects the first flow; without it nothing is cut.
    keys.write_all(b"\x1b[B").unwrap();
    keys.write_all(b"c").unwrap();
    wait_for("cut");
    eventually("no flow", || {
        stand.slipgate.flows().unwrap().is_empty().then_some(())
    });
    keys.write_all(b"f").unwrap();
    wait_for("frozen");
    kill(Pid::from_raw(top.id() as i32), Signal::SIGTERM).unwrap();
    // Out of the alternate screen, and the cursor is back.
    wait_for("\x1b[?1049l");
    assert!(top.wait().unwrap().success());
}
