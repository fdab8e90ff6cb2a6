//! The API of `slipgate serve`, by curl: VMs, flows and events, and who may change them.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};
use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World,
    clients::{icmp, tcp, tcp::EchoSession},
    require_root_and_tun,
    servers::{TcpServer, TcpService},
    world::{SERVER, UPLINK},
};

use crate::{BRIEFLY, WAIT, eventually};

/// A daemon with both sockets; fields go in order.
struct Stand {
    daemon: Slipgate,
    world: World,
    scratch: tempfile::TempDir,
}

impl Stand {
    fn new() -> Self {
        let world = World::new().unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let path = |name: &str| scratch.path().join(name).display().to_string();
        let (api, read) = (path("api.sock"), path("read.sock"));
        let args = ["--uplink", UPLINK, "--api", &api, "--api-read", &read];
        let pins = PinDir::new().unwrap();
        let daemon = Slipgate::serve(&world.host, &pins, &args).unwrap();
        Self {
            daemon,
            world,
            scratch,
        }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn curl(&self, socket: &str, args: &[&str], path: &str) -> Command {
        let mut curl = Command::new("curl");
        curl.args([
            "--silent",
            "--no-buffer",
            "--max-time",
            "20",
            "--unix-socket",
        ])
        .arg(self.socket(socket))
        .args(args)
        .arg(format!("http://slipgate{path}"));
        curl
    }

    /// Status and body of the answer on a socket.
    fn ask_on(&self, socket: &str, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        let body = body.unwrap_or_default().to_string();
        let args = [
            "--write-out",
            "\n%{http_code}",
            "--request",
            method,
            "--data",
            &body,
        ];
        let args = if method == "GET" { &args[..4] } else { &args };
        let output = self.curl(socket, args, path).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (body, status) = text.rsplit_once('\n').unwrap();
        (
            status.parse().unwrap(),
            serde_json::from_str(body).unwrap_or_default(),
        )
    }

    fn ask(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        self.ask_on("api.sock", method, path, body)
    }

    fn guest(&self, tap: &str) -> Guest {
        Guest::new(&self.world, GuestConfig::new(tap)).unwrap()
    }
}

/// curl that reads events; it is killed on drop.
struct Events {
    curl: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Events {
    fn read(stand: &Stand, path: &str) -> Self {
        let mut curl = stand.curl("read.sock", &[], path);
        let mut curl = curl.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(curl.stdout.take().unwrap()).lines();
        Self { curl, lines }
    }

    fn next(&mut self) -> Value {
        serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.curl.kill();
        let _ = self.curl.wait();
    }
}

#[test]
fn a_vm_is_served_frozen_cut_and_removed_by_http() {
    require_root_and_tun!();
    let stand = Stand::new();
    let echo = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Echo).unwrap();
    let guest = stand.guest("tap0");
    let mut events = Events::read(&stand, "/v1/events?after=0");
    let body = json!({ "tap": "tap0", "labels": { "tenant": "x" } });
    let (status, vm) = stand.ask("PUT", "/v1/vms/a", Some(body.clone()));
    assert_eq!((status, &vm["state"]), (201, &json!("served")), "{vm}");
    assert_eq!(stand.ask("PUT", "/v1/vms/a", Some(body)).0, 200);
    assert_eq!(events.next()["event"], "vm_added");
    let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    guest
        .run(|| EchoSession::new(&mut stream).round(1_000))
        .unwrap();

    let (_, flows) = stand.ask_on("read.sock", "GET", "/v1/flows?vm=a", None);
    assert_eq!(flows.as_array().unwrap().len(), 1, "{flows}");
    assert_eq!(flows[0]["remote"], echo.address().to_string());
    let (_, stats) = stand.ask_on("read.sock", "GET", "/v1/stats", None);
    assert_eq!(stats["vms"][0]["flows"], 1, "{stats}");
    let why = "/v1/vms/a/why?address=203.0.113.10&port=7000";
    let (status, why) = stand.ask_on("read.sock", "GET", why, None);
    assert_eq!((status, &why["admitted"]), (200, &json!(true)), "{why}");

    assert_eq!(stand.ask("POST", "/v1/vms/a/freeze", None).0, 204);
    assert_eq!(
        events.next(),
        json!({ "event": "vm_frozen", "vm": "a", "seq": 2 })
    );
    let ping = || guest.run(|| icmp::ping(SERVER, 1, 56, BRIEFLY)).unwrap();
    assert_eq!(ping().replies.len(), 0);
    assert_eq!(stand.ask("GET", "/v1/vms/a", None).1["state"], "frozen");
    assert_eq!(stand.ask("POST", "/v1/vms/a/thaw", None).0, 204);
    assert_eq!(events.next()["event"], "vm_thawed");
    assert_eq!(ping().replies.len(), 1);

    let id = flows[0]["id"].as_str().unwrap();
    let (status, cut) = stand.ask("POST", &format!("/v1/flows/{id}/cut"), None);
    assert_eq!((status, &cut["flows"]), (200, &json!(1)), "{cut}");
    let (status, problem) = stand.ask("POST", &format!("/v1/flows/{id}/cut"), None);
    assert_eq!(status, 404, "{problem}");
    assert_eq!(stand.ask("DELETE", "/v1/vms/a", None).0, 204);
    assert_eq!(events.next()["event"], "vm_removed");
    assert_eq!(stand.ask("GET", "/v1/vms", None).1, json!([]));
    assert_eq!(ping().replies.len(), 0);
}

#[test]
fn a_reader_can_change_nothing() {
    require_root_and_tun!();
    let stand = Stand::new();
    assert_eq!(
        stand
            .ask("PUT", "/v1/vms/a", Some(json!({ "tap": "tap0" })))
            .0,
        201
    );
    let before = stand.ask("GET", "/v1/vms", None);
    for (method, path) in [
        ("PUT", "/v1/vms/b"),
        ("PATCH", "/v1/vms/a"),
        ("DELETE", "/v1/vms/a"),
        ("POST", "/v1/vms/a/freeze"),
        ("POST", "/v1/vms/a/thaw"),
        ("POST", "/v1/vms/a/cut"),
    ] {
        let body = Some(json!({ "tap": "tap1" }));
        let (status, problem) = stand.ask_on("read.sock", method, path, body);
        assert_eq!(status, 403, "{method} {path}: {problem}");
    }
    assert_eq!(stand.ask_on("read.sock", "GET", "/v1/vms", None), before);
}

/// The same PUT again changes nothing: no event, no flow, no other id.
#[test]
fn a_vms_forwards_are_put_patched_and_refused_by_http() {
    require_root_and_tun!();
    let stand = Stand::new();
    let guest = stand.guest("tap0");
    let echo = TcpServer::start(&guest.ns, (crate::GUEST, 80), TcpService::Echo).unwrap();
    let mut events = Events::read(&stand, "/v1/events?after=0");
    let body = json!({ "tap": "tap0", "forwards": ["tcp:8080:80"] });
    let (status, vm) = stand.ask("PUT", "/v1/vms/a", Some(body.clone()));
    assert_eq!((status, &vm["forwards"]), (201, &json!(["tcp:8080:80"])));
    let address = |port| crate::at(slipgate_testbed::world::HOST, port);
    let net = &stand.world.net;
    let mut stream = net.run(|| tcp::connect(address(8080), WAIT)).unwrap();
    assert_eq!(stand.ask("PUT", "/v1/vms/a", Some(body)), (200, vm));
    EchoSession::new(&mut stream).round(1_000).unwrap();
    assert_eq!(echo.peers().len(), 1);

    let other = json!({ "tap": "tap1", "forwards": ["tcp:8080:80"] });
    let (status, problem) = stand.ask("PUT", "/v1/vms/b", Some(other));
    assert_eq!(status, 409, "{problem}");
    let detail = problem["detail"].as_str().unwrap();
    assert!(
        detail.contains("port 8080 of the host leads to a"),
        "{detail}"
    );

    let patch = json!({ "forwards": ["tcp:8081:80"] });
    let (status, vm) = stand.ask("PATCH", "/v1/vms/a", Some(patch));
    assert_eq!((status, &vm["forwards"]), (200, &json!(["tcp:8081:80"])));
    assert!(EchoSession::new(&mut stream).round(10).is_err());
    net.run(|| tcp::connect(address(8081), WAIT)).unwrap();
    assert_eq!(events.next()["event"], "vm_added");
    assert_eq!(
        events.next(),
        json!({ "event": "vm_changed", "vm": "a", "seq": 2 })
    );
}

#[test]
fn what_is_wrong_is_said_as_a_problem() {
    require_root_and_tun!();
    let stand = Stand::new();
    for (body, part) in [
        (json!({ "tap": UPLINK }), "uplink"),
        (json!({ "tap": "tap0", "mac": "no" }), "mac no"),
        (json!({ "tap": "tap0", "policy": "p" }), "p"),
        (json!({ "tap": "tap0", "labels": { "": "1" } }), "labels"),
        (json!({ "tap": "no such tap" }), "can't be a network device"),
    ] {
        let (status, problem) = stand.ask("PUT", "/v1/vms/a", Some(body));
        assert_eq!(status, 422, "{problem}");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains(part), "{part}: {detail}");
    }
    assert_eq!(stand.ask("GET", "/v1/vms", None).1, json!([]));
}

/// Its process is another one each time, and the guest notices nothing.
#[test]
fn the_api_is_started_again_and_guests_go_on() {
    require_root_and_tun!();
    let stand = Stand::new();
    let guest = stand.guest("tap0");
    assert_eq!(
        stand
            .ask("PUT", "/v1/vms/a", Some(json!({ "tap": "tap0" })))
            .0,
        201
    );
    for title in ["slipgate-api", "slipgate-api-read"] {
        let is_it = |pid: &u32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split('\0').next() == Some(title)
        };
        let found = stand.daemon.children_named(title).into_iter().find(is_it);
        slipgate_testbed::signal(found.unwrap(), libc::SIGKILL);
    }
    let pinged = guest.run(|| icmp::ping(SERVER, 1, 56, WAIT)).unwrap();
    assert_eq!(pinged.replies.len(), 1);
    for socket in ["api.sock", "read.sock"] {
        let vms = || stand.ask_on(socket, "GET", "/v1/vms", None).1;
        eventually("it answers again", || {
            (vms()[0]["name"] == "a").then_some(())
        });
    }
}

/// Slow, numerous and endless clients delay no admission, and no other client for long.
#[test]
fn hostile_clients_of_the_api_delay_no_admission() {
    require_root_and_tun!();
    let stand = Stand::new();
    let echo = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Echo).unwrap();
    let guest = stand.guest("tap0");
    assert_eq!(
        stand
            .ask("PUT", "/v1/vms/a", Some(json!({ "tap": "tap0" })))
            .0,
        201
    );
    let idle: Vec<_> = (0..200)
        .map_while(|_| UnixStream::connect(stand.socket("api.sock")).ok())
        .collect();
    assert!(idle.len() > 128, "{}", idle.len());
    let mut took = Vec::new();
    for _ in 0..50 {
        let began = std::time::Instant::now();
        drop(guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap());
        took.push(began.elapsed());
    }
    took.sort();
    // A SYN that had been lost would have taken a second.
    assert!(took[48] < BRIEFLY, "{took:?}");
    drop(idle);
    eventually("others are served", || {
        (stand.ask("GET", "/v1/health", None).0 == 200).then_some(())
    });
}
