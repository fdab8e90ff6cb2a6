//! The API of `slipgate serve`, by curl: VMs, flows and events, and who may change them.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use slipgate_testbed::{
    Capture, GUEST_DEVICE, Guest, GuestConfig, OrdinaryUser, PinDir, Slipgate, World,
    clients::{
        tcp,
        tcp::{ConnectOutcome, EchoSession},
    },
    servers::{TcpServer, TcpService},
    turns,
    world::UPLINK,
};

use crate::{
    BRIEFLY, Cell, Mode, WAIT, eventually,
    matrix::{at, cells, matrix, pings},
    stand::give_ipv6,
};

matrix! {
    a_vm_is_served_frozen_cut_and_removed_by_http: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    packets_and_metrics_come_by_http: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_reader_can_change_nothing: [hybrid_ipv4, user_ipv4],
        without [hybrid_ipv6, user_ipv6]: "requests are the same whatever addresses the guest has";
    the_api_is_started_again_and_guests_go_on: [hybrid_ipv4, user_ipv4],
        without [hybrid_ipv6, user_ipv6]: "the process is the same whatever addresses the guest has";
    hostile_clients_of_the_api_delay_no_admission: [hybrid_ipv4, user_ipv4],
        without [hybrid_ipv6, user_ipv6]: "clients are the same whatever addresses the guest has";
    what_comes_for_a_vm_that_sleeps_waits_until_it_is_resumed: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon, and none is put to sleep (attach-socket.md)";
    a_vms_forwards_are_put_patched_and_refused_by_http: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_port_that_is_just_being_given_back_is_waited_for: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_policy_that_no_vm_uses_is_removed: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_vms_definition_contains_its_policy: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_vms_definition_lists_ports_of_the_hosts_loopback: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    what_is_wrong_is_said_as_a_problem: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    flows_questions_and_refusals_are_events: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    events_are_printed_by_the_command_line: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_vm_is_idle_after_silence_and_busy_again: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    requests_beyond_those_that_may_wait_are_answered: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
}

/// The protocol of neighbour discovery.
const ICMPV6: u8 = 58;

/// A daemon with both sockets, or in user mode the `attach` of one VM, `tap0`; fields go in order.
pub(crate) struct Stand {
    pub(crate) daemon: Slipgate,
    world: World,
    files: Files,
    pub(crate) cell: Cell,
}

/// Where the sockets are.
enum Files {
    Scratch(tempfile::TempDir),
    OfUser(OrdinaryUser),
}

impl Files {
    fn path(&self, name: &str) -> PathBuf {
        match self {
            Self::Scratch(dir) => dir.path().join(name),
            Self::OfUser(user) => user.file("run").join(name),
        }
    }
}

impl Stand {
    pub(crate) fn new() -> Self {
        Self::of(cells::hybrid_ipv4, &[])
    }

    /// The stand of a cell. Its guests have their addresses at once.
    pub(crate) fn of(cell: Cell, more: &[&str]) -> Self {
        let world = World::new().unwrap();
        let all = [cell.give(&world), more].concat();
        match cell.mode {
            Mode::Hybrid => Self::in_world(cell, world, UPLINK, &all),
            Mode::User => Self::of_user(cell, world, &all),
        }
    }

    /// The same with a VM that is served, and its guest: both are called `tap0`.
    pub(crate) fn with_vm(cell: Cell, more: &[&str]) -> (Self, Guest) {
        let stand = Self::of(cell, more);
        let guest = stand.guest("tap0");
        if cell.is_hybrid() {
            let body = json!({ "tap": "tap0" });
            assert_eq!(stand.ask("PUT", "/v1/vms/tap0", Some(body)).0, 201);
        }
        (stand, guest)
    }

    fn of_user(cell: Cell, world: World, more: &[&str]) -> Self {
        // As most distributions have it.
        let everybody = "0 2147483647";
        world
            .host
            .sysctl("net.ipv4.ping_group_range", everybody)
            .unwrap();
        let user = OrdinaryUser::new().unwrap();
        let files = Files::OfUser(user.clone());
        let path = |name: &str| files.path(name).display().to_string();
        let (api, read) = (path("api.sock"), path("read.sock"));
        let args = [&["--api", &api, "--api-read", &read], more].concat();
        let link = files.path("tap0.sock");
        let daemon = Slipgate::attach_socket(&world.host, &user, &link, &args).unwrap();
        Self {
            daemon,
            world,
            files,
            cell,
        }
    }

    /// In this world, with this device as the uplink of all VMs.
    pub(crate) fn in_world(cell: Cell, world: World, uplink: &str, more: &[&str]) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let path = |name: &str| scratch.path().join(name).display().to_string();
        let (api, read) = (path("api.sock"), path("read.sock"));
        let mut args = vec!["--uplink", uplink, "--api", &api, "--api-read", &read];
        args.extend(more);
        let pins = PinDir::new().unwrap();
        let daemon = Slipgate::serve(&world.host, &pins, &args).unwrap();
        Self {
            daemon,
            world,
            files: Files::Scratch(scratch),
            cell,
        }
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.files.path(name)
    }

    pub(crate) fn world(&self) -> &World {
        &self.world
    }

    fn curl(&self, socket: &str, args: &[&str], path: &str) -> Command {
        curl_at(&self.socket(socket), args, path)
    }

    /// Status and body of the answer on a socket.
    pub(crate) fn ask_on(
        &self,
        socket: &str,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> (u16, Value) {
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
        answer(self.curl(socket, args, path))
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        self.ask_on("api.sock", method, path, body)
    }

    /// A VM as it is shown in answer to its PUT: what it does is no part of that.
    pub(crate) fn as_put_answers(&self, path: &str) -> Value {
        let (status, mut vm) = self.ask("GET", path, None);
        assert_eq!(status, 200, "{vm}");
        vm.as_object_mut().unwrap().remove("activity");
        vm
    }

    /// Status of the answer to the PUT of a policy's text.
    pub(crate) fn put_policy(&self, path: &str, text: &str) -> u16 {
        self.put_text(path, text).0
    }

    /// Status and body of the answer to the PUT of a text.
    pub(crate) fn put_text(&self, path: &str, text: &str) -> (u16, Value) {
        let args = ["--write-out", "\n%{http_code}", "--request", "PUT"];
        let args = [&args[..], &["--data-binary", text]].concat();
        answer(self.curl("api.sock", &args, path))
    }

    pub(crate) fn metrics(&self) -> String {
        let answer = self.curl("read.sock", &[], "/v1/metrics").output();
        String::from_utf8(answer.unwrap().stdout).unwrap()
    }

    pub(crate) fn signal_engine(&self, signal: i32) {
        let engines = self.daemon.children_named("slipgate-engine");
        slipgate_testbed::signal(engines[0], signal);
    }

    pub(crate) fn guest(&self, tap: &str) -> Guest {
        let at_socket = || {
            let config = GuestConfig::new(tap).on_socket(&self.socket("tap0.sock"));
            let guest = Guest::new(&self.world, config).unwrap();
            if self.cell.is_ipv6() {
                give_ipv6(&guest);
            }
            guest
        };
        match self.cell.mode {
            Mode::Hybrid => self.cell.guest_at(&self.world, tap),
            Mode::User => at_socket(),
        }
    }
}

/// curl that asks at this socket.
pub(crate) fn curl_at(socket: &Path, args: &[&str], path: &str) -> Command {
    let mut curl = Command::new("curl");
    curl.args([
        "--silent",
        "--no-buffer",
        "--max-time",
        "120",
        "--unix-socket",
    ])
    .arg(socket)
    .args(args)
    .arg(format!("http://slipgate{path}"));
    curl
}

/// Status and body that curl prints.
pub(crate) fn answer(mut curl: Command) -> (u16, Value) {
    let text = String::from_utf8(curl.output().unwrap().stdout).unwrap();
    let (body, status) = text.rsplit_once('\n').unwrap();
    (
        status.parse().unwrap(),
        serde_json::from_str(body).unwrap_or_default(),
    )
}

/// curl that reads events; it is killed on drop.
pub(crate) struct Events {
    curl: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Events {
    /// Asks for events, and waits for the head of the answer: none of the daemon's events is missed
    /// from then on.
    pub(crate) fn read(stand: &Stand, path: &str) -> Self {
        // With --include curl would keep the head until there is an event.
        let mut curl = stand.curl("read.sock", &["--dump-header", "-"], path);
        let mut curl = curl.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(curl.stdout.take().unwrap()).lines();
        let status = lines.next().unwrap().unwrap();
        assert_eq!(status.split(' ').nth(1), Some("200"), "{status}");
        while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
        Self { curl, lines }
    }

    pub(crate) fn next(&mut self) -> Value {
        serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap()
    }

    /// The next event of this kind.
    pub(crate) fn next_of(&mut self, kind: &str) -> Value {
        loop {
            let event = self.next();
            if event["event"] == kind {
                return event;
            }
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.curl.kill();
        let _ = self.curl.wait();
    }
}

fn a_vm_is_served_frozen_cut_and_removed_by_http(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let server = cell.server();
    let echo = TcpServer::start(&stand.world.net, (server, 7000), TcpService::Echo).unwrap();
    let guest = stand.guest("tap0");
    let mut events = Events::read(&stand, "/v1/events?after=0");
    if cell.is_hybrid() {
        let body = json!({ "tap": "tap0", "labels": { "tenant": "x" } });
        let (status, vm) = stand.ask("PUT", "/v1/vms/tap0", Some(body.clone()));
        assert_eq!((status, &vm["state"]), (201, &json!("served")), "{vm}");
        assert_eq!(stand.ask("PUT", "/v1/vms/tap0", Some(body)).0, 200);
    }
    assert_eq!(events.next()["event"], "vm_added");
    let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    guest
        .run(|| EchoSession::new(&mut stream).round(1_000))
        .unwrap();

    let (_, flows) = stand.ask_on("read.sock", "GET", "/v1/flows?vm=tap0", None);
    assert_eq!(flows.as_array().unwrap().len(), 1, "{flows}");
    assert_eq!(flows[0]["remote"], echo.address().to_string());
    let (_, stats) = stand.ask_on("read.sock", "GET", "/v1/stats", None);
    assert_eq!(stats["vms"][0]["flows"], 1, "{stats}");
    let why = format!("/v1/vms/tap0/why?address={server}&port=7000");
    let (status, why) = stand.ask_on("read.sock", "GET", &why, None);
    assert_eq!((status, &why["admitted"]), (200, &json!(true)), "{why}");

    assert_eq!(stand.ask("POST", "/v1/vms/tap0/freeze", None).0, 204);
    assert_eq!(
        events.next(),
        json!({ "event": "vm_frozen", "vm": "tap0", "seq": 2 })
    );
    assert!(!pings(&guest, server, BRIEFLY));
    let state = || stand.ask("GET", "/v1/vms/tap0", None).1["state"].clone();
    assert_eq!(state(), "frozen");
    assert_eq!(stand.ask("POST", "/v1/vms/tap0/thaw", None).0, 204);
    assert_eq!(events.next()["event"], "vm_thawed");
    assert!(pings(&guest, server, WAIT));
    assert_eq!(state(), "served");

    let _other = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    let id = flows[0]["id"].as_str().unwrap();
    let (status, cut) = stand.ask("POST", &format!("/v1/flows/{id}/cut"), None);
    assert_eq!((status, &cut["flows"]), (200, &json!(1)), "{cut}");
    let (status, problem) = stand.ask("POST", &format!("/v1/flows/{id}/cut"), None);
    assert_eq!(status, 404, "{problem}");
    let live = || stand.ask("GET", "/v1/flows?vm=tap0", None).1;
    let before = live().as_array().unwrap().len();
    assert!(before >= 1, "the second connection");
    let (status, ended) = stand.ask("POST", "/v1/vms/tap0/generation", None);
    assert_eq!((status, &ended["flows"]), (200, &json!(before)), "{ended}");
    assert_eq!(live(), json!([]));
    assert_eq!(stand.ask("POST", "/v1/vms/b/generation", None).0, 404);
    if cell.is_hybrid() {
        assert_eq!(stand.ask("DELETE", "/v1/vms/tap0", None).0, 204);
        assert_eq!(events.next()["event"], "vm_removed");
        assert_eq!(stand.ask("GET", "/v1/vms", None).1, json!([]));
        assert!(!pings(&guest, server, BRIEFLY));
    }
}

/// A client connects to a forward of a VM that sleeps, and another sends on a live connection.
fn what_comes_for_a_vm_that_sleeps_waits_until_it_is_resumed(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    let echo = TcpServer::start(&guest.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    let body = json!({ "tap": "tap0", "forwards": ["tcp:8080:80"] });
    assert_eq!(stand.ask("PUT", "/v1/vms/a", Some(body)).0, 201);
    // It shows its address, to which the forward leads.
    assert!(pings(&guest, cell.gateway(), WAIT));
    let address = at(cell.host(), 8080);
    let net = &stand.world.net;
    let mut live = net.run(|| tcp::connect(address, WAIT)).unwrap();
    EchoSession::new(&mut live).round(1_000).unwrap();
    let mut events = Events::read(&stand, "/v1/events?after=0&kind=wake,vm_asleep,vm_awake");
    assert_eq!(stand.ask("POST", "/v1/vms/a/sleep", None).0, 204);
    assert_eq!(stand.ask("GET", "/v1/vms/a", None).1["state"], "asleep");
    assert_eq!(events.next()["event"], "vm_asleep");

    let arrivals = Capture::keeping(&guest.ns, GUEST_DEVICE).unwrap();
    // By IPv6 the guest's kernel asks for its gateway now and then, which is answered.
    let is_of_link = |frame: &[u8]| frame[12..14] == [0x86, 0xdd] && frame[20] == ICMPV6;
    let received = || {
        let frames = arrivals.frames().into_iter();
        let came = frames.filter(|frame| !frame.sent && !is_of_link(&frame.bytes));
        came.map(|frame| frame.bytes).collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        let connects = scope.spawn(|| net.run(|| tcp::connect(address, WAIT)));
        let rounds = scope.spawn(|| EchoSession::new(&mut live).round(1_000));
        let wake = events.next();
        assert_eq!(
            (&wake["event"], &wake["proto"]),
            (&json!("wake"), &json!("tcp"))
        );
        assert_eq!(wake["to"], address.to_string(), "{wake}");
        std::thread::sleep(2 * BRIEFLY);
        assert!(!connects.is_finished() && !rounds.is_finished());
        let came = received();
        assert!(
            came.is_empty(),
            "something has come to the guest: {came:x?}"
        );
        assert_eq!(stand.ask("POST", "/v1/vms/a/resume", None).0, 204);
        let mut late = connects.join().unwrap().unwrap();
        assert!(!received().is_empty());
        EchoSession::new(&mut late).round(1_000).unwrap();
        rounds.join().unwrap().unwrap();
    });
    assert_eq!(echo.peers().len(), 2);
    assert_eq!(stand.ask("GET", "/v1/vms/a", None).1["state"], "served");
    let is_awake = |event: &Value| event["event"] == "vm_awake";
    while !is_awake(&events.next()) {}
    assert_eq!(stand.ask("POST", "/v1/vms/b/sleep", None).0, 404);
}

fn a_reader_can_change_nothing(cell: Cell) {
    let (stand, _guest) = Stand::with_vm(cell, &[]);
    let before = stand.ask("GET", "/v1/vms", None);
    let (_, document) = stand.ask_on("read.sock", "GET", "/v1/openapi.json", None);
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() > 10, "{document}");
    for (path, operations) in paths {
        let path = path.replace("{name}", "tap0").replace("{id}", "f");
        for method in ["PUT", "PATCH", "DELETE", "POST"] {
            let is_there = operations.get(method.to_lowercase()).is_some();
            let wanted = if is_there { 403 } else { 405 };
            let body = Some(json!({ "tap": "tap1" }));
            let (status, problem) = stand.ask_on("read.sock", method, &path, body);
            assert_eq!(status, wanted, "{method} {path}: {problem}");
        }
    }
    assert_eq!(stand.ask_on("read.sock", "GET", "/v1/vms", None), before);
}

/// The same PUT again changes nothing: no event, no flow, no other id.
fn a_vms_forwards_are_put_patched_and_refused_by_http(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    let echo = TcpServer::start(&guest.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    let mut events = Events::read(&stand, "/v1/events?after=0");
    let body = json!({ "tap": "tap0", "forwards": ["tcp:8080:80"] });
    let (status, vm) = stand.ask("PUT", "/v1/vms/a", Some(body.clone()));
    assert_eq!((status, &vm["forwards"]), (201, &json!(["tcp:8080:80"])));
    // It shows its address, to which the forward leads.
    assert!(pings(&guest, cell.gateway(), WAIT));
    let address = |port| at(cell.host(), port);
    let net = &stand.world.net;
    let mut stream = net.run(|| tcp::connect(address(8080), WAIT)).unwrap();
    // With the address that it has shown.
    let vm = stand.as_put_answers("/v1/vms/a");
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

/// A port that the engine is just giving back for another VM is waited for.
fn a_port_that_is_just_being_given_back_is_waited_for(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap1");
    let _echo = TcpServer::start(&guest.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    let of_address = format!("tcp:{}:80", at(cell.host(), 8080));
    let put = |vm: &str, tap: &str, forwards: Value| {
        let body = json!({ "tap": tap, "forwards": forwards });
        stand.ask("PUT", &format!("/v1/vms/{vm}"), Some(body))
    };
    let connect = || {
        assert!(pings(&guest, cell.gateway(), WAIT));
        let address = at(cell.host(), 8080);
        let mut stream = stand.world.net.run(|| tcp::connect(address, WAIT)).unwrap();
        EchoSession::new(&mut stream).round(1_000).unwrap();
    };
    let give_back: [&(dyn Fn() -> u16 + Sync); 2] =
        [&|| stand.ask("DELETE", "/v1/vms/a", None).0, &|| {
            put("a", "tap0", json!([])).0
        }];
    for give_back in give_back {
        assert_eq!(put("a", "tap0", json!(["tcp:8080:80"])).0, 201);
        stand.signal_engine(libc::SIGSTOP);
        std::thread::scope(|scope| {
            let given = scope.spawn(give_back);
            let has_it = || {
                let (_, all) = stand.ask("GET", "/v1/vms", None);
                let mut all = all.as_array()?.iter();
                all.any(|vm| vm["forwards"] == json!(["tcp:8080:80"]))
                    .then_some(())
            };
            let gives = || has_it().map_or(Some(()), |()| None);
            eventually("the broker has told the engine", gives);
            // Of any address, so another key.
            let taken = scope.spawn(|| put("b", "tap1", json!([of_address])));
            std::thread::sleep(BRIEFLY);
            assert!(!given.is_finished() && !taken.is_finished());
            stand.signal_engine(libc::SIGCONT);
            assert!(matches!(given.join().unwrap(), 200 | 204));
            let (status, vm) = taken.join().unwrap();
            assert_eq!(status, 201, "{vm}");
        });
        connect();
        for vm in ["a", "b"] {
            stand.ask("DELETE", &format!("/v1/vms/{vm}"), None);
        }
    }
}

/// A policy that was put is removed when no VM has it any more, for a successor too.
fn a_policy_that_no_vm_uses_is_removed(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let path = "/v1/policies/closed";
    assert_eq!(stand.ask("DELETE", path, None).0, 404);
    let text = "default = \"deny\"";
    assert_eq!(stand.put_policy(path, text), 200);
    assert_eq!(stand.put_policy("/v1/policies/other", text), 200);
    for (vm, policy) in [("a", json!("closed")), ("b", json!({ "default": "deny" }))] {
        let body = json!({ "tap": vm, "policy": policy });
        let (status, vm) = stand.ask("PUT", &format!("/v1/vms/{vm}"), Some(body));
        assert_eq!(status, 201, "{vm}");
    }
    let (status, problem) = stand.ask("DELETE", path, None);
    let detail = problem["detail"].as_str().unwrap();
    assert_eq!(status, 409, "{problem}");
    assert!(detail.contains("closed is that of a:"), "{detail}");
    let patch = json!({ "policy": "other" });
    assert_eq!(stand.ask("PATCH", "/v1/vms/a", Some(patch)).0, 200);
    assert_eq!(stand.ask("DELETE", path, None).0, 204);
    assert_eq!(stand.ask("GET", path, None).0, 404);
    assert_eq!(stand.ask("DELETE", path, None).0, 404);
    let refused = stand.daemon.run(&["policy", "rm", "other"]).unwrap_err();
    assert!(refused.to_string().contains("is that of a"), "{refused}");

    stand.daemon.kill_both().unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    let list = || stand.ask("GET", "/v1/policies", None).1;
    let names = || {
        Some(
            list()
                .as_array()?
                .iter()
                .map(|it| it["name"].clone())
                .collect(),
        )
    };
    let names: Vec<Value> = eventually("the API answers", names);
    assert_eq!(names, ["other"]);
    assert_eq!(stand.ask("DELETE", "/v1/vms/a", None).0, 204);
    stand.daemon.run(&["policy", "rm", "other"]).unwrap();
    assert_eq!(list(), json!([]));
    assert_eq!(stand.put_policy("/v1/policies/other", text), 200);
    assert_eq!(list()[0]["generation"], 1);
}

/// VMs with a policy of their own: it is in force when the PUT is answered, several VMs with the same
/// share one, and it outlives the daemon.
fn a_vms_definition_contains_its_policy(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let servers = [7000, 7001].map(|port| {
        let address = (cell.server(), port);
        TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap()
    });
    let guests = ["tap0", "tap1", "tap2"].map(|tap| stand.guest(tap));
    let reaches = |guest: &Guest, at: usize| {
        guest
            .run(|| tcp::connect_outcome(servers[at].address(), WAIT))
            .is_ok_and(|outcome| matches!(outcome, ConnectOutcome::Connected(_)))
    };
    let only = |port: u16| {
        let rule = cell.destination(cell.server(), &format!("{port}/tcp"));
        json!({ "default": "deny", "rules": [{ "allow": rule }] })
    };
    for (name, tap) in [("a", "tap0"), ("b", "tap1")] {
        let body = json!({ "tap": tap, "policy": only(7000) });
        let path = format!("/v1/vms/{name}");
        let (status, vm) = stand.ask("PUT", &path, Some(body.clone()));
        assert_eq!((status, &vm["policy"]), (201, &body["policy"]), "{vm}");
        assert_eq!(stand.ask("PUT", &path, Some(body)).0, 200);
        let mut got = stand.ask("GET", &path, None).1;
        let activity = got.as_object_mut().unwrap().remove("activity");
        assert_eq!((activity.unwrap()["flows"].as_u64(), got), (Some(0), vm));
    }
    let body = json!({ "tap": "tap2" });
    assert_eq!(stand.ask("PUT", "/v1/vms/c", Some(body)).0, 201);
    let both = |guest: &Guest| [reaches(guest, 0), reaches(guest, 1)];
    let all = |guests: &[Guest; 3]| guests.each_ref().map(both);
    assert_eq!(all(&guests), [[true, false], [true, false], [true, true]]);
    // They are no policies that others name.
    assert_eq!(stand.ask("GET", "/v1/policies", None).1, json!([]));

    // A connection that the next policy refuses is cut before the answer.
    let connect = || guests[0].run(|| tcp::connect(servers[0].address(), WAIT));
    let mut stream = connect().unwrap();
    let patch = json!({ "policy": { "rules": only(7001)["rules"] } });
    let (status, vm) = stand.ask("PATCH", "/v1/vms/a", Some(patch));
    assert_eq!((status, &vm["policy"]), (200, &only(7001)), "{vm}");
    assert!(EchoSession::new(&mut stream).round(10).is_err());
    assert_eq!(all(&guests), [[false, true], [true, false], [true, true]]);

    stand.daemon.kill_both().unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    eventually("the API answers", || {
        (stand.ask("GET", "/v1/vms/a", None).0 == 200).then_some(())
    });
    assert_eq!(all(&guests), [[false, true], [true, false], [true, true]]);
    for name in ["a", "b"] {
        let path = format!("/v1/vms/{name}");
        let (_, vm) = stand.ask("PATCH", &path, Some(json!({ "policy": null })));
        assert!(vm.get("policy").is_none(), "{vm}");
    }
    assert_eq!(all(&guests), [[true, true]; 3]);
    let flags = ["vm", "set", "a", "--policy-file"];
    let file = stand.socket("own.toml");
    std::fs::write(&file, "default = \"deny\"\n").unwrap();
    let file = file.display().to_string();
    stand.daemon.run(&[&flags[..], &[&file]].concat()).unwrap();
    assert_eq!(both(&guests[0]), [false, false]);
}

/// A VM's own ports of the host's loopback, beside another VM that has none.
fn a_vms_definition_lists_ports_of_the_hosts_loopback(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let local = (cell.loopback(), 7000);
    let _service = TcpServer::start(&stand.world.host, local, TcpService::Echo).unwrap();
    let guests = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    let at = |port| at(cell.gateway(), port);
    let connects = |guest: &Guest, port| {
        guest
            .run(|| tcp::connect_outcome(at(port), WAIT))
            .is_ok_and(|outcome| matches!(outcome, ConnectOutcome::Connected(_)))
    };
    let lists = |ports: &[&str]| json!({ "tap": "tap0", "host_loopback": ports });
    let (status, vm) = stand.ask("PUT", "/v1/vms/a", Some(lists(&["8000:7000/tcp"])));
    assert_eq!(
        (status, &vm["host_loopback"]),
        (201, &json!(["8000:7000/tcp"]))
    );
    let other = json!({ "tap": "tap1" });
    assert_eq!(stand.ask("PUT", "/v1/vms/b", Some(other)).0, 201);
    assert!(connects(&guests[0], 8000) && !connects(&guests[1], 8000));
    let why = format!("/v1/vms/a/why?address={}&port=8000", cell.gateway());
    let (_, why) = stand.ask("GET", &why, None);
    assert_eq!(why["rule"], "host_loopback 8000:7000/tcp", "{why}");

    // A connection by a port that is taken back is cut before the answer.
    let mut stream = guests[0].run(|| tcp::connect(at(8000), WAIT)).unwrap();
    assert_eq!(
        stand
            .ask("PUT", "/v1/vms/a", Some(lists(&["8000:7000/tcp"])))
            .0,
        200
    );
    EchoSession::new(&mut stream).round(100).unwrap();
    let patch = json!({ "host_loopback": ["8001:7000/tcp"] });
    assert_eq!(stand.ask("PATCH", "/v1/vms/a", Some(patch)).0, 200);
    assert!(EchoSession::new(&mut stream).round(10).is_err());
    assert!(!connects(&guests[0], 8000) && connects(&guests[0], 8001));

    stand.daemon.kill_both().unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    eventually("it is as before", || {
        connects(&guests[0], 8001).then_some(())
    });
    stand
        .daemon
        .run(&["vm", "set", "a", "--no-host-loopback"])
        .unwrap();
    assert!(!connects(&guests[0], 8001));
    for (port, part) in [
        ("53", "DNS"),
        ("192.0.2.1:80", "192.0.2.1"),
        ("x", "no port"),
    ] {
        let (status, problem) = stand.ask("PUT", "/v1/vms/a", Some(lists(&[port])));
        let detail = problem["detail"].as_str().unwrap();
        assert!(status == 422 && detail.contains(part), "{problem}");
    }
}

fn what_is_wrong_is_said_as_a_problem(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    for (body, part) in [
        (json!({ "tap": UPLINK }), "uplink"),
        (json!({ "tap": "tap0", "mac": "no" }), "mac no"),
        (json!({ "tap": "tap0", "policy": "p" }), "p"),
        (
            json!({ "tap": "tap0", "policy": { "default": "perhaps" } }),
            "perhaps",
        ),
        (
            json!({ "tap": "tap0", "policy": { "rules": [{ "deny_file": "/etc/shadow" }] } }),
            "deny_file names a file of the host",
        ),
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
fn the_api_is_started_again_and_guests_go_on(cell: Cell) {
    let (stand, guest) = Stand::with_vm(cell, &[]);
    for title in ["slipgate-api", "slipgate-api-read"] {
        let is_it = |pid: &u32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split('\0').next() == Some(title)
        };
        let found = stand.daemon.children_named(title).into_iter().find(is_it);
        slipgate_testbed::signal(found.unwrap(), libc::SIGKILL);
    }
    assert!(pings(&guest, cell.server(), WAIT));
    for socket in ["api.sock", "read.sock"] {
        let vms = || stand.ask_on(socket, "GET", "/v1/vms", None).1;
        eventually("it answers again", || {
            (vms()[0]["name"] == "tap0").then_some(())
        });
    }
}

/// Clients that send slowly, read nothing, send too much and are too many, all at once, delay no
/// admission, and no client of the other socket.
fn hostile_clients_of_the_api_delay_no_admission(cell: Cell) {
    let _turn = turns::alone("it measures how long an admission takes");
    let (stand, guest) = Stand::with_vm(cell, &[]);
    let address = (cell.server(), 7000);
    let echo = TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap();
    let connect = || {
        let began = Instant::now();
        drop(guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap());
        began.elapsed()
    };
    let sent = |text: &[u8]| {
        let mut stream = UnixStream::connect(stand.socket("api.sock")).unwrap();
        stream.set_nonblocking(true).unwrap();
        let _ = stream.write(text);
        stream
    };
    // Readers of events that read none, heads and bodies without an end, and a huge body.
    let mut hostile: Vec<_> = (0..20)
        .map(|_| sent(b"GET /v1/events?kind=all HTTP/1.1\r\nHost: x\r\n\r\n"))
        .collect();
    hostile.extend((0..20).map(|_| sent(b"GET /v1/vms HTTP/1.1\r\nX: ")));
    let head = b"PUT /v1/vms/b HTTP/1.1\r\nHost: x\r\nContent-Length: 40000\r\n\r\n{";
    hostile.extend((0..20).map(|_| sent(head)));
    let huge = "PUT /v1/vms/b HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000000\r\n\r\n".to_owned();
    let huge = huge + &"x".repeat(150_000);
    hostile.extend((0..10).map(|_| sent(huge.as_bytes())));
    // And more that say nothing at all than are accepted; the rest would wait in connect(2).
    hostile.extend((0..150).map(|_| sent(b"")));
    let mut took: Vec<_> = (0..100).map(|_| connect()).collect();
    took.sort();
    // A SYN that had been lost would have taken a second.
    assert!(took[98] < BRIEFLY, "{took:?}");
    let began = Instant::now();
    let (status, vms) = stand.ask_on("read.sock", "GET", "/v1/vms", None);
    assert_eq!((status, &vms[0]["name"]), (200, &json!("tap0")));
    assert!(began.elapsed() < BRIEFLY, "{:?}", began.elapsed());
    drop(hostile);
    eventually("others are served", || {
        (stand.ask("GET", "/v1/health", None).0 == 200).then_some(())
    });
}

/// Flows and questions are events like those of VMs, of whichever VM and kind a client asks for,
/// and of the next engine too.
fn flows_questions_and_refusals_are_events(cell: Cell) {
    let rule = cell.destination(cell.server(), "7001");
    let stand = Stand::of(cell, &["--deny", &rule, "--dns", "none"]);
    let address = (cell.server(), 7000);
    let echo = TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap();
    let guests = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    for (name, tap) in [("a", "tap0"), ("b", "tap1")] {
        let path = format!("/v1/vms/{name}");
        assert_eq!(stand.ask("PUT", &path, Some(json!({ "tap": tap }))).0, 201);
    }
    let connect = |guest: &Guest| {
        let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
        guest
            .run(|| EchoSession::new(&mut stream).round(1_000))
            .unwrap();
    };
    let mut of_a = Events::read(&stand, "/v1/events?kind=all&vm=a");
    let mut states = Events::read(&stand, "/v1/events");
    // Both before and after the engine knows what is wanted.
    for _ in 0..20 {
        connect(&guests[1]);
        connect(&guests[0]);
        std::thread::sleep(Duration::from_millis(10));
    }
    let start = of_a.next_of("flow_start");
    assert_eq!(
        (&start["vm"], &start["proto"]),
        (&json!("a"), &json!("tcp")),
        "{start}"
    );
    assert_eq!(start["remote"], echo.address().to_string());
    assert_eq!(stand.ask("POST", "/v1/vms/a/cut", None).0, 200);
    let mut end = of_a.next_of("flow_end");
    while end["id"] != start["id"] {
        end = of_a.next_of("flow_end");
    }
    assert!(end["tx_bytes"].as_u64().unwrap() > 1_000, "{end}");
    assert!(end["seq"].as_u64() > start["seq"].as_u64(), "{end}");

    let denied = at(cell.server(), 7001);
    guests[0].run(|| tcp::expect_refused(denied)).unwrap();
    let refused = of_a.next_of("refused");
    assert_eq!(refused["rule_text"], format!("--deny {rule}"), "{refused}");
    assert_eq!(refused["reason"], "rule");

    stand.signal_engine(libc::SIGKILL);
    // Who did not ask for them gets none of all that.
    assert_eq!(states.next()["event"], "engine_ended");
    assert_eq!(states.next()["event"], "engine_serves");
    for _ in 0..20 {
        connect(&guests[0]);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(of_a.next_of("flow_start")["vm"], "a");
}

fn events_are_printed_by_the_command_line(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let start = |args: &[&str]| {
        let mut command = Command::new(slipgate_testbed::slipgate::binary().unwrap());
        command.arg("events").args(args);
        command.arg("--pin-dir").arg(stand.daemon.pins().path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = stand.world.host.spawn(command).unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        (child, lines)
    };
    let (mut text, mut text_lines) = start(&["--after", "0", "--vm", "a"]);
    let (mut json, mut json_lines) = start(&["--after", "0", "--kind", "vm_removed", "--json"]);
    let (mut closed, closed_lines) = start(&["--after", "0"]);
    drop(closed_lines);
    let body = json!({ "tap": "tap0" });
    assert_eq!(stand.ask("PUT", "/v1/vms/a", Some(body)).0, 201);
    assert_eq!(text_lines.next().unwrap().unwrap(), "1 vm_added a");
    assert_eq!(stand.ask("DELETE", "/v1/vms/a", None).0, 204);
    assert_eq!(text_lines.next().unwrap().unwrap(), "2 vm_removed a");
    let line = json_lines.next().unwrap().unwrap();
    let removed = json!({ "event": "vm_removed", "vm": "a", "seq": 2 });
    assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), removed);
    // Nobody reads; ^C; the daemon stops.
    let ended = |child: &mut Child| eventually("it ends", || child.try_wait().unwrap());
    assert!(ended(&mut closed).success());
    slipgate_testbed::signal(json.id(), libc::SIGINT);
    assert!(ended(&mut json).success());
    let (mut wrong, _) = start(&["--kind", "colour"]);
    assert_eq!(ended(&mut wrong).code(), Some(1));
    let Stand { mut daemon, .. } = stand;
    daemon.stop().unwrap();
    assert_eq!(ended(&mut text).code(), Some(1));
}

fn a_vm_is_idle_after_silence_and_busy_again(cell: Cell) {
    let stand = Stand::of(cell, &["--idle-after", "2"]);
    let guests = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    let mut events = Events::read(&stand, "/v1/events?after=0&kind=vm_idle,vm_busy");
    for (name, body) in [
        ("a", json!({ "tap": "tap0" })),
        ("b", json!({ "tap": "tap1", "idle_after": 0 })),
    ] {
        let path = format!("/v1/vms/{name}");
        assert_eq!(stand.ask("PUT", &path, Some(body)).0, 201);
    }
    let of_a = |kind: &str| (json!(kind), json!("a"));
    let mut next = || {
        let event = events.next();
        (event["event"].clone(), event["vm"].clone())
    };
    assert_eq!(next(), of_a("vm_idle"));
    assert_eq!(stand.ask("GET", "/v1/vms/a", None).1["idle"], true);
    let ping = || assert!(pings(&guests[0], cell.server(), WAIT));
    ping();
    assert_eq!(next(), of_a("vm_busy"));
    assert_eq!(stand.ask("GET", "/v1/vms/a", None).1["idle"], false);
    assert_eq!(next(), of_a("vm_idle"));
    // The next engine knows that it was.
    stand.signal_engine(libc::SIGKILL);
    eventually("there is an engine again", || {
        let why = format!("/v1/vms/a/why?address={}&port=7000", cell.server());
        let (_, why) = stand.ask("GET", &why, None);
        (why["admitted"] == true).then_some(())
    });
    ping();
    assert_eq!(next(), of_a("vm_busy"));
}

fn packets_and_metrics_come_by_http(cell: Cell) {
    let (stand, guest) = Stand::with_vm(cell, &[]);
    let bounds = json!({ "packets": 4, "seconds": 15 }).to_string();
    let mut curl = stand.curl("api.sock", &["--data", &bounds], "/v1/vms/tap0/capture");
    let curl = curl.stdout(Stdio::piped()).spawn().unwrap();
    // It ends with its fourth packet.
    let output = std::thread::scope(|scope| {
        let captured = scope.spawn(|| curl.wait_with_output().unwrap());
        while !captured.is_finished() {
            pings(&guest, cell.server(), WAIT);
        }
        captured.join().unwrap()
    });
    assert!(output.status.success());
    let word = |at: usize| {
        let bytes = output.stdout[at..at + 4].try_into().unwrap();
        u32::from_le_bytes(bytes)
    };
    let (mut at, mut packets) = (0, 0);
    // Section header block first, enhanced packet blocks among the others.
    assert_eq!(word(0), 0x0a0d_0d0a);
    while at < output.stdout.len() {
        packets += u32::from(word(at) == 6);
        at += word(at + 4) as usize;
    }
    assert_eq!((at, packets), (output.stdout.len(), 4));
    let unknown = stand.ask("POST", "/v1/flows/0-0-1/capture", Some(json!({})));
    assert_eq!(unknown.0, 404, "{unknown:?}");
    let metrics = stand.metrics();
    assert!(
        metrics.contains("vm=\"tap0\"") && metrics.ends_with("# EOF\n"),
        "{metrics}"
    );
}

/// However many ask for what only the engine knows, and whatever it does, each gets an answer.
fn requests_beyond_those_that_may_wait_are_answered(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let _guest = stand.guest("tap0");
    let body = json!({ "tap": "tap0" });
    assert_eq!(stand.ask("PUT", "/v1/vms/a", Some(body)).0, 201);
    stand.signal_engine(libc::SIGSTOP);
    let ask = |socket: &str| {
        let mut stream = UnixStream::connect(stand.socket(socket)).unwrap();
        let request = "GET /v1/vms/a/why?address=203.0.113.10&port=7000 HTTP/1.0\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        stream.set_read_timeout(Some(6 * WAIT)).unwrap();
        stream
    };
    let sockets = ["api.sock", "read.sock"].into_iter();
    let waiting: Vec<_> = sockets
        .flat_map(|socket| (0..128).map(move |_| socket))
        .map(ask)
        .collect();
    std::thread::sleep(BRIEFLY);
    // So many may wait; these are more.
    let mut more: Vec<_> = (0..4)
        .map(|_| {
            let mut command = Command::new(slipgate_testbed::slipgate::binary().unwrap());
            command.args(["why", "a", "203.0.113.10:7000", "--pin-dir"]);
            command.arg(stand.daemon.pins().path());
            command.stdout(Stdio::null()).stderr(Stdio::null());
            stand.world.host.spawn(command).unwrap()
        })
        .collect();
    let mut codes: Vec<_> = more
        .iter_mut()
        .map(|child| child.wait().unwrap().code())
        .collect();
    codes.dedup();
    assert_eq!(codes, [Some(1)]);
    stand.signal_engine(libc::SIGCONT);
    for mut stream in waiting {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        // 503 where the broker took the engine for one that hangs.
        let status = answer.split(' ').nth(1).unwrap();
        assert!(["200", "503"].contains(&status), "{answer}");
    }
}
