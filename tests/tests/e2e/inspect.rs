//! Inspection: the name that a connection gives must be one that its rule admits. Real stacks are
//! at both ends. Each test runs with `--allow` first, where it succeeds.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Shutdown, TcpStream},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use sha2::{Digest as _, Sha256};
use slipgate_testbed::{
    clients::{dns, tcp},
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    streams::hexadecimal,
    tls,
    world::SERVER,
};
use userspace_nat::fake::hellos;

use crate::{
    BRIEFLY, Cell, Stand, WAIT, eventually,
    matrix::{at, matrix},
};

matrix! {
    an_allowed_name_in_any_pieces_reaches_the_server_and_the_connection_goes_on: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    another_name_no_name_or_a_hidden_one_is_reset: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    each_request_of_a_kept_connection_is_held_to_its_name: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    what_follows_an_answer_to_half_a_request_is_not_sent_on: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_server_that_speaks_first_is_heard: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    tls_of_openssl_and_curl_works_and_a_forged_name_does_not: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

const NAME: &str = "api.example.test";

fn arguments(action: &str) -> Vec<&str> {
    let resolver = ["--dns", "203.0.113.10", "--default", "deny"];
    [&resolver[..], &[action, "*.example.test"]].concat()
}

struct Servers {
    _dns: DnsServer,
    tcp: TcpServer<IpAddr>,
}

fn serve(stand: &Stand, port: u16, service: TcpService) -> Servers {
    let (net, cell) = (&stand.world.net, stand.cell);
    let answer = |ip| Answer::address(ip, 300);
    let zone = Zone::from([
        (NAME.to_owned(), answer(cell.server_2())),
        ("other.example.test".to_owned(), answer(cell.server())),
    ]);
    Servers {
        _dns: DnsServer::start(net, (SERVER, 53), zone).unwrap(),
        tcp: TcpServer::start(net, (cell.server_2(), port), service).unwrap(),
    }
}

/// Runs `check` with `--allow`, then with `--inspect`; its argument says which. The guest knows the
/// address.
fn allowed_and_inspected(
    cell: Cell,
    port: u16,
    service: &TcpService,
    check: impl Fn(&mut Stand, &Servers, bool),
) {
    for (action, inspected) in [("--allow", false), ("--inspect", true)] {
        let mut stand = Stand::of(cell, &arguments(action));
        let servers = serve(&stand, port, service.clone());
        ask(&stand, NAME);
        check(&mut stand, &servers, inspected);
    }
}

fn ask(stand: &Stand, name: &str) {
    let (server, question) = (at(stand.cell.dns(), 53), stand.cell.question(name));
    let answer = stand.run(|| dns::ask_udp(server, &question, WAIT));
    assert_eq!(answer.unwrap().reply.code, 0);
}

fn hello(name: &str) -> Vec<u8> {
    hellos::records(&hellos::client_hello(name), 1_000)
}

/// Sends this in pieces of so many bytes, and returns as much as comes back; `None`: reset.
fn echoed(stream: &mut TcpStream, sent: &[u8], each: usize) -> Option<Vec<u8>> {
    stream.set_nodelay(true).unwrap();
    for piece in sent.chunks(each) {
        if stream.write_all(piece).is_err() {
            return None;
        }
        if each < 10 {
            thread::sleep(Duration::from_millis(1));
        }
    }
    let mut back = vec![0; sent.len()];
    match stream.read_exact(&mut back) {
        Ok(()) => Some(back),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => None,
        Err(error) => panic!("neither echoed nor reset: {error}"),
    }
}

/// Rounds of a connection, each of one frame a way at least.
const ROUNDS: u64 = 20;

fn connect(stand: &Stand, servers: &Servers) -> TcpStream {
    let address = servers.tcp.address();
    stand.run(|| tcp::connect(address, WAIT)).unwrap()
}

fn an_allowed_name_in_any_pieces_reaches_the_server_and_the_connection_goes_on(cell: Cell) {
    allowed_and_inspected(
        cell,
        443,
        &TcpService::EchoTls,
        |stand, servers, inspected| {
            for each in [1_000, 100, 1] {
                let mut stream = connect(stand, servers);
                let hello = hello(NAME);
                let answer = tls::answer_to(&hello);
                assert_eq!(echoed(&mut stream, &hello, each), Some(answer), "{each}");
                if cell.is_hybrid() {
                    let local = stream.local_addr().unwrap().to_string();
                    eventually("the kernel's flow", || {
                        let flows = stand.flows_to(servers.tcp.address());
                        let flow = flows.into_iter().find(|flow| flow.guest == local)?;
                        (flow.verdict == "fast").then_some(())
                    });
                }
                let mut session = tcp::EchoSession::new(&mut stream);
                for size in [1, 1_000, 100_000] {
                    session.round(size).unwrap();
                }
                if cell.is_hybrid() {
                    // Frames of the stack itself, such as an NDP message, may come at any time.
                    let before = stand.port_frames();
                    let mut session = tcp::EchoSession::new(&mut stream);
                    for _ in 0..ROUNDS {
                        session.round(1_000).unwrap();
                    }
                    let frames = stand.port_frames() - before;
                    assert!(frames < ROUNDS, "{frames} frames came to the engine");
                }
            }
            assert_eq!(stand.dropped("held") > 0, inspected);
            assert_eq!(stand.refused("inspection"), 0);
        },
    );
}

fn another_name_no_name_or_a_hidden_one_is_reset(cell: Cell) {
    let hidden =
        hellos::client_hello_with(&[hellos::server_name(NAME.as_bytes()), (0xfe0d, vec![0; 16])]);
    let said = [
        hello("evil.test"),
        hello("other.example.test"),
        hellos::records(&hellos::client_hello_with(&[]), 100),
        hellos::records(&hidden, 100),
        b"\x13BitTorrent protocol".to_vec(),
    ];
    allowed_and_inspected(cell, 443, &TcpService::Echo, |stand, servers, inspected| {
        // Its address is known too, and is another one.
        ask(stand, "other.example.test");
        for (n, said) in said.iter().enumerate() {
            for each in [1_000, 1] {
                let mut stream = connect(stand, servers);
                let back = echoed(&mut stream, said, each);
                assert_eq!(back.is_none(), inspected, "{n} {each}");
            }
        }
        let refused = if inspected { 2 * said.len() as u64 } else { 0 };
        assert_eq!(stand.refused("inspection"), refused);
        stand.slipgate.stop().unwrap();
        let mut ends = stand.records();
        ends.retain(|end| end["end"] == "inspection");
        assert_eq!(ends.len() as u64, refused);
    });
}

fn each_request_of_a_kept_connection_is_held_to_its_name(cell: Cell) {
    let request = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes();
    let long = {
        let head = format!("POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 300000\r\n\r\n");
        [head.into_bytes(), vec![b'x'; 300_000]].concat()
    };
    allowed_and_inspected(cell, 80, &TcpService::Echo, |stand, servers, inspected| {
        let mut stream = connect(stand, servers);
        for _ in 0..3 {
            let back = echoed(&mut stream, &request(NAME), 1_000);
            assert_eq!(back, Some(request(NAME)));
        }
        let back = echoed(&mut stream, &request("evil.test"), 1_000);
        assert_eq!(back.is_none(), inspected);
    });
    allowed_and_inspected(cell, 80, &TcpService::Digest, |stand, servers, _| {
        let all = [request(NAME), long.clone(), request(NAME), long.clone()].concat();
        let mut stream = connect(stand, servers);
        stream.write_all(&all).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut digest = String::new();
        stream.read_to_string(&mut digest).unwrap();
        assert_eq!(digest.trim_end(), hexadecimal(&Sha256::digest(&all)));
    });
}

fn what_follows_an_answer_to_half_a_request_is_not_sent_on(cell: Cell) {
    let head = format!("POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 100\r\n\r\n");
    allowed_and_inspected(cell, 80, &TcpService::Echo, |stand, servers, inspected| {
        let mut stream = connect(stand, servers);
        let back = echoed(&mut stream, head.as_bytes(), 1_000);
        assert_eq!(back.as_deref(), Some(head.as_bytes()), "the answer comes");
        let evil = b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n";
        let back = echoed(&mut stream, &[b"a=", &evil[..]].concat(), 1_000);
        assert_eq!(back.is_none(), inspected);
    });
}

fn a_server_that_speaks_first_is_heard(cell: Cell) {
    allowed_and_inspected(
        cell,
        2525,
        &TcpService::Hold,
        |stand, servers, inspected| {
            let greeter = (cell.server_2(), 2526);
            let service = TcpService::Greet(b"220 ready\r\n".to_vec());
            let greeter = TcpServer::start(&stand.world.net, greeter, service).unwrap();
            let mut stream = stand.run(|| tcp::connect(greeter.address(), WAIT)).unwrap();
            let mut heard = Vec::new();
            stream.read_to_end(&mut heard).unwrap();
            assert_eq!(heard, b"220 ready\r\n");
            stream.shutdown(Shutdown::Write).unwrap();

            let mut stream = connect(stand, servers);
            stream.write_all(b"ehlo x\r\n").unwrap();
            let timeout = if inspected { WAIT } else { BRIEFLY };
            stream.set_read_timeout(Some(timeout)).unwrap();
            let error = stream.read(&mut [0]).unwrap_err();
            assert_eq!(
                error.kind() == ErrorKind::ConnectionReset,
                inspected,
                "{error}"
            );
        },
    );
}

/// A real TLS server's and a real client's handshakes, HelloRetryRequest among them.
fn tls_of_openssl_and_curl_works_and_a_forged_name_does_not(cell: Cell) {
    let scratch = tempfile::tempdir().unwrap();
    let file = |name: &str| scratch.path().join(name).display().to_string();
    let (key, certificate) = (file("key"), file("certificate"));
    let mut make = Command::new("openssl");
    make.args(["req", "-x509", "-newkey", "ec", "-pkeyopt"]);
    make.args(["ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]);
    make.args([
        "-subj",
        "/CN=api.example.test",
        "-keyout",
        &key,
        "-out",
        &certificate,
    ]);
    make.stdout(Stdio::null()).stderr(Stdio::null());
    assert!(make.status().unwrap().success());
    let page: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
    fs::write(scratch.path().join("page"), &page).unwrap();

    for (action, inspected) in [("--allow", false), ("--inspect", true)] {
        let stand = Stand::of(cell, &arguments(action));
        let _servers = serve(&stand, 7000, TcpService::Hold);
        // P-384 alone: a client that begins with another group is asked to begin again.
        for (port, more) in [
            ("443", &[][..]),
            ("444", &["-groups", "P-384"]),
            ("445", &["-tls1_2"]),
        ] {
            let mut server = Command::new("openssl");
            server.args([
                "s_server",
                "-accept",
                port,
                "-key",
                &key,
                "-cert",
                &certificate,
            ]);
            server.arg(if cell.is_ipv6() { "-6" } else { "-4" });
            server.args(["-WWW", "-quiet"]).args(more);
            server.current_dir(scratch.path());
            server
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            let mut server = stand.world.net.spawn(server).unwrap();
            let address = at(cell.server_2(), port.parse().unwrap());
            ask(&stand, NAME);
            let get = |name: &str| {
                let mut curl = Command::new("curl");
                let server = match cell.server_2() {
                    IpAddr::V4(ip) => ip.to_string(),
                    IpAddr::V6(ip) => format!("[{ip}]"),
                };
                let to = format!("{name}:{port}:{server}");
                curl.args(["-sk", "--max-time", "10", "--resolve", &to]);
                curl.arg(format!("https://{name}:{port}/page"));
                curl.stdout(Stdio::piped());
                stand.guest.spawn(curl).unwrap().wait_with_output().unwrap()
            };
            eventually("the TLS server", || {
                let net = &stand.world.net;
                net.run(|| TcpStream::connect(address)).ok()
            });
            let got = get(NAME);
            assert!(
                got.status.success() && got.stdout.ends_with(&page),
                "{port}"
            );
            let forged = get("evil.test");
            // 35: the handshake failed.
            let code = if inspected { Some(35) } else { Some(0) };
            assert_eq!(forged.status.code(), code, "{port}");
            server.kill().unwrap();
            server.wait().unwrap();
        }
    }
}
