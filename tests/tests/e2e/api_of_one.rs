//! What clients of the API change of one VM, in each mode; and the API of user mode, where the VM is that
//! of a command.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{IpAddr, TcpStream},
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _},
        net::UnixStream,
    },
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use slipgate_testbed::{
    Guest, MicroVm, NetNs,
    clients::{
        tcp,
        tcp::{ConnectOutcome, EchoSession},
        udp::{self, UdpOutcome},
    },
    require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
};

use crate::{
    BRIEFLY, Cell, WAIT,
    api::{Events, Stand, answer, curl_at},
    eventually,
    matrix::{at, cells, matrix, pings},
    unprivileged::Place,
};

matrix! {
    a_policy_that_is_put_cuts_what_it_refuses_before_the_answer: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_vm_takes_another_policy_and_other_quotas: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    flows_and_refusals_are_events: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    forwards_are_changed_as_a_whole_or_not_at_all: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    clients_of_a_forward_that_goes_are_kept_where_the_policy_says_so: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_vm_is_told_idle_once_a_client_asks_for_it: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    what_get_gave_is_put_back_and_what_is_absent_is_the_default: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

const VM: &str = "/v1/vms/tap0";
const CLOSED: &str = "/v1/policies/closed";

fn reaches(guest: &Guest, to: impl Into<std::net::SocketAddr>) -> bool {
    let to = to.into();
    guest
        .run(|| tcp::connect_outcome(to, WAIT))
        .is_ok_and(|outcome| matches!(outcome, ConnectOutcome::Connected(_)))
}

fn a_policy_that_is_put_cuts_what_it_refuses_before_the_answer(cell: Cell) {
    let (stand, guest) = Stand::with_vm(cell, &[]);
    let address = (cell.server(), 7000);
    let echo = TcpServer::start(&stand.world().net, address, TcpService::Echo).unwrap();
    assert_eq!(stand.put_policy(CLOSED, "default = \"allow\"\n"), 200);
    let named = json!({ "policy": "closed" });
    let (status, vm) = stand.ask("PATCH", VM, Some(named));
    assert_eq!((status, &vm["policy"]), (200, &json!("closed")), "{vm}");
    let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    EchoSession::new(&mut stream).round(1_000).unwrap();

    let (status, put) = stand.put_text(CLOSED, "default = \"deny\"\n");
    assert_eq!((status, &put["cut"]), (200, &json!(1)), "{put}");
    assert_eq!(put["generation"], 2, "{put}");
    assert!(EchoSession::new(&mut stream).round(10).is_err());
    assert!(!reaches(&guest, echo.address()));
    let (_, policies) = stand.ask_on("read.sock", "GET", "/v1/policies", None);
    assert_eq!(policies[0]["text"], "default = \"deny\"\n", "{policies}");
    let (status, problem) = stand.put_text(CLOSED, "default = \"perhaps\"\n");
    let detail = problem["detail"].as_str().unwrap();
    assert!(status == 422 && detail.contains("perhaps"), "{problem}");

    assert_eq!(stand.ask("DELETE", CLOSED, None).0, 409);
    let none = json!({ "policy": null });
    let (status, vm) = stand.ask("PATCH", VM, Some(none));
    assert_eq!((status, vm.get("policy")), (200, None), "{vm}");
    assert!(reaches(&guest, echo.address()));
    assert_eq!(stand.ask("DELETE", CLOSED, None).0, 204);
    assert_eq!(stand.ask("DELETE", CLOSED, None).0, 404);
}

fn a_vm_takes_another_policy_and_other_quotas(cell: Cell) {
    let (stand, guest) = Stand::with_vm(cell, &[]);
    let servers = [7000, 7001].map(|port| {
        let address = (cell.server(), port);
        TcpServer::start(&stand.world().net, address, TcpService::Echo).unwrap()
    });
    let rule = cell.destination(cell.server(), "7001");
    let own = json!({ "default": "deny", "rules": [{ "allow": format!("{rule}/tcp") }] });
    let mut stream = guest
        .run(|| tcp::connect(servers[0].address(), WAIT))
        .unwrap();
    let mut events = Events::read(&stand, "/v1/events?kind=policy_applied");
    let patch = json!({ "policy": own, "labels": { "tenant": "x" } });
    let (status, vm) = stand.ask("PATCH", VM, Some(patch));
    assert_eq!(status, 200, "{vm}");
    // A daemon puts the policy in force first, for nobody, and then for the VM.
    while events.next_of("policy_applied")["cut"] != 1 {}
    assert_eq!(
        (&vm["policy"], &vm["labels"]["tenant"]),
        (&own, &json!("x"))
    );
    assert!(EchoSession::new(&mut stream).round(10).is_err());
    let both = || servers.each_ref().map(|it| reaches(&guest, it.address()));
    assert_eq!(both(), [false, true]);
    assert_eq!(stand.ask("GET", "/v1/policies", None).1, json!([]));

    let patch = json!({ "policy": { "default": "perhaps" }, "quotas": { "max_flows": 1 } });
    let (status, problem) = stand.ask("PATCH", VM, Some(patch));
    assert_eq!(status, 422, "{problem}");
    assert_eq!(both(), [false, true]);
    let patch = json!({ "policy": null, "quotas": { "max_flows": 1 } });
    let (status, vm) = stand.ask("PATCH", VM, Some(patch));
    assert_eq!((status, &vm["quotas"]["max_flows"]), (200, &json!(1)));
    assert_eq!(stand.ask("POST", "/v1/vms/tap0/cut", None).0, 200);
    let one = guest
        .run(|| tcp::connect(servers[0].address(), WAIT))
        .unwrap();
    assert!(!reaches(&guest, servers[1].address()), "the second flow");
    drop(one);
}

fn flows_and_refusals_are_events(cell: Cell) {
    let (stand, guest) =
        Stand::with_vm(cell, &["--deny", &cell.destination(cell.server(), "7001")]);
    let address = (cell.server(), 7000);
    let echo = TcpServer::start(&stand.world().net, address, TcpService::Echo).unwrap();
    let mut events = Events::read(&stand, "/v1/events?kind=all&vm=tap0");
    // Both before and after the engine knows what is wanted.
    for _ in 0..20 {
        let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
        EchoSession::new(&mut stream).round(1_000).unwrap();
        std::thread::sleep(Duration::from_millis(10));
    }
    let start = events.next_of("flow_start");
    assert_eq!(start["remote"], echo.address().to_string());
    assert_eq!(stand.ask("POST", "/v1/vms/tap0/cut", None).0, 200);
    let mut end = events.next_of("flow_end");
    while end["id"] != start["id"] {
        end = events.next_of("flow_end");
    }
    assert!(end["tx_bytes"].as_u64().unwrap() > 1_000, "{end}");
    let denied = std::net::SocketAddr::from((cell.server(), 7001));
    guest.run(|| tcp::expect_refused(denied)).unwrap();
    let refused = events.next_of("refused");
    assert_eq!(refused["reason"], "rule", "{refused}");
}

/// From where clients connect to the host's ports, and at which address.
fn ways(stand: &Stand) -> [(&NetNs, IpAddr); 2] {
    let world = stand.world();
    let cell = stand.cell;
    [(&world.net, cell.host()), (&world.host, cell.loopback())]
}

fn leads_nowhere((from, address): (&NetNs, IpAddr), port: u16) -> bool {
    let outcome = from.run(|| tcp::connect_outcome(at(address, port), BRIEFLY));
    !matches!(outcome.unwrap(), ConnectOutcome::Connected(_))
}

fn forwards_are_changed_as_a_whole_or_not_at_all(cell: Cell) {
    let (stand, guest) = Stand::with_vm(cell, &[]);
    let echo = |port: u16| {
        let service = TcpService::Echo;
        TcpServer::start(&guest.ns, (cell.guest(), port), service).unwrap()
    };
    let (_first, second) = (echo(80), echo(81));
    let _datagrams = UdpServer::start(&guest.ns, (cell.guest(), 53), UdpService::Echo).unwrap();
    // It shows its address, to which forwards lead.
    assert!(pings(&guest, cell.gateway(), WAIT));
    let patch = |forwards: &[&str]| {
        let (status, vm) = stand.ask("PATCH", VM, Some(json!({ "forwards": forwards })));
        assert_eq!((status, &vm["forwards"]), (200, &json!(forwards)), "{vm}");
    };
    let session = |way: (&NetNs, IpAddr), port| {
        let mut stream = way.0.run(|| tcp::connect(at(way.1, port), WAIT)).unwrap();
        EchoSession::new(&mut stream).round(1_000).unwrap();
        stream
    };
    let goes_on = |stream: &mut TcpStream| EchoSession::new(stream).round(1_000).is_ok();
    patch(&["tcp:8080:80", "udp:5300:53"]);
    let [mut world, mut host] = ways(&stand).map(|way| session(way, 8080));
    for (from, address) in ways(&stand) {
        let sent = from
            .run(|| udp::probe(at(address, 5300), b"x", WAIT))
            .unwrap();
        assert!(matches!(sent, UdpOutcome::Answered(_)), "{sent:?}");
    }
    let (_, flows) = stand.ask("GET", "/v1/flows", None);
    let mut rules = flows.as_array().unwrap().iter().map(|flow| &flow["rule"]);
    assert!(rules.any(|rule| rule == "forward of its VM"), "{flows}");

    // One that can't be has all stay as it is.
    let taken =
        TcpServer::start(&stand.world().host, (cell.host(), 8088), TcpService::Echo).unwrap();
    for (body, status, part) in [
        (
            json!({ "forwards": ["tcp:8081:80", "tcp:8088:80"] }),
            409,
            "port 8088",
        ),
        (
            json!({ "forwards": ["tcp:8081:80"], "policy": { "default": "perhaps" } }),
            422,
            "perhaps",
        ),
        (
            json!({ "forwards": ["tcp:1000-1100:1000-1100"] }),
            422,
            "64 forwarded ports at most",
        ),
        (json!({ "forwards": ["tcp:80"] }), 422, "not PROTOCOL"),
    ] {
        let (got, problem) = stand.ask("PATCH", VM, Some(body));
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert!(got == status && detail.contains(part), "{got} {problem}");
    }
    drop(taken);
    let (_, vm) = stand.ask("GET", VM, None);
    assert_eq!(
        vm["forwards"],
        json!(["tcp:8080:80", "udp:5300:53"]),
        "{vm}"
    );
    assert!(leads_nowhere(ways(&stand)[0], 8081));
    assert!(goes_on(&mut world) && goes_on(&mut host));

    // Another port: clients of the one before end, and it is free.
    patch(&["tcp:8081:80", "udp:5300:53"]);
    assert!(!goes_on(&mut world) && !goes_on(&mut host));
    TcpServer::start(&stand.world().host, (cell.host(), 8080), TcpService::Echo).unwrap();
    for way in ways(&stand) {
        assert!(leads_nowhere(way, 8080));
        let mut before = session(way, 8081);
        let peers = second.peers().len();
        // The same one leads elsewhere, and takes its clients along.
        patch(&["tcp:8081:81", "udp:5300:53"]);
        assert!(!goes_on(&mut before));
        session(way, 8081);
        assert_eq!(second.peers().len(), peers + 1);
        patch(&["tcp:8081:80", "udp:5300:53"]);
    }
    patch(&[]);
    assert!(ways(&stand).iter().all(|way| leads_nowhere(*way, 8081)));
}

fn clients_of_a_forward_that_goes_are_kept_where_the_policy_says_so(cell: Cell) {
    let (stand, guest) = Stand::with_vm(cell, &[]);
    let _echo = TcpServer::start(&guest.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    assert!(pings(&guest, cell.gateway(), WAIT));
    let keeping = json!({ "default": "allow", "on_reload": "keep" });
    let patch = json!({ "policy": keeping, "forwards": ["tcp:8080:80"] });
    let (status, vm) = stand.ask("PATCH", VM, Some(patch));
    assert_eq!(status, 200, "{vm}");
    let mut streams = ways(&stand).map(|(from, address)| {
        let mut stream = from.run(|| tcp::connect(at(address, 8080), WAIT)).unwrap();
        EchoSession::new(&mut stream).round(1_000).unwrap();
        stream
    });
    assert_eq!(
        stand.ask("PATCH", VM, Some(json!({ "forwards": [] }))).0,
        200
    );
    for stream in &mut streams {
        EchoSession::new(stream).round(1_000).unwrap();
    }
    assert!(ways(&stand).iter().all(|way| leads_nowhere(*way, 8080)));
}

fn a_vm_is_told_idle_once_a_client_asks_for_it(cell: Cell) {
    let (stand, guest) = Stand::with_vm(cell, &[]);
    assert!(pings(&guest, cell.server(), WAIT));
    let idle_after = |seconds: Value| {
        let patch = json!({ "idle_after": seconds });
        let (status, vm) = stand.ask("PATCH", VM, Some(patch));
        assert_eq!(status, 200, "{vm}");
        vm
    };
    let mut events = Events::read(&stand, "/v1/events?kind=vm_idle,vm_busy");
    assert_eq!(idle_after(json!(2))["idle_after"], 2);
    let told = events.next();
    assert_eq!(told["event"], "vm_idle", "{told}");
    assert!(told["last_from_guest_ms"].as_u64() >= Some(2_000), "{told}");
    assert_eq!(stand.ask("GET", VM, None).1["idle"], true);
    assert!(pings(&guest, cell.server(), WAIT));
    assert_eq!(events.next()["event"], "vm_busy");
    assert_eq!(stand.ask("GET", VM, None).1["idle"], false);
    assert_eq!(events.next()["event"], "vm_idle");
    // It is not told any more, whatever it does; and then again, beginning with a busy one.
    assert_eq!(idle_after(json!(0))["idle"], false);
    assert!(pings(&guest, cell.server(), WAIT));
    assert_eq!(idle_after(Value::Null).get("idle_after"), None);
    idle_after(json!(2));
    assert_eq!(events.next()["event"], "vm_idle");
}

fn what_get_gave_is_put_back_and_what_is_absent_is_the_default(cell: Cell) {
    let (stand, _guest) = Stand::with_vm(cell, &[]);
    let patch = json!({
        "labels": { "tenant": "x" }, "quotas": { "max_flows": 9 }, "forwards": ["tcp:8080-8081:80-81"],
        "host_loopback": ["7000/tcp"], "idle_after": 60, "policy": { "default": "allow" },
    });
    let (status, changed) = stand.ask("PATCH", VM, Some(patch));
    assert_eq!(status, 200, "{changed}");
    let (_, vm) = stand.ask("GET", VM, None);
    assert!(vm["activity"].is_object(), "{vm}");
    let (status, same) = stand.ask("PUT", VM, Some(vm.clone()));
    assert_eq!(
        (status, &same["generation"]),
        (200, &vm["generation"]),
        "{same}"
    );
    assert_eq!(same["forwards"], json!(["tcp:8080-8081:80-81"]));

    // A TAP is what a daemon needs.
    let bare = match cell.is_hybrid() {
        true => json!({ "tap": "tap0" }),
        false => json!({}),
    };
    let (status, bare) = stand.ask("PUT", VM, Some(bare));
    assert_eq!(status, 200, "{bare}");
    for field in ["ip", "tap", "name", "id"] {
        assert_eq!(bare[field], vm[field], "{bare}");
    }
    let none = (json!([]), json!([]), json!({}));
    let shown = (&bare["forwards"], &bare["host_loopback"], &bare["labels"]);
    assert_eq!(shown, (&none.0, &none.1, &none.2), "{bare}");
    for field in ["policy", "idle_after"] {
        assert_eq!(bare.get(field), None, "{bare}");
    }
    assert_ne!(bare["quotas"], vm["quotas"], "{bare}");
    let (status, problem) = stand.ask("PUT", "/v1/vms/other", Some(vm));
    assert_eq!(status, 400, "{problem}");
}

/// A change comes before the next one is looked at, whatever that would replace; who reads meanwhile has
/// the new text with its own number. And so many requests wait for an engine that says nothing, and no more.
#[test]
fn while_a_change_is_put_in_force_others_are_told_to_come_again() {
    require_root_and_tun!();
    let (stand, _guest) = Stand::with_vm(cells::user_ipv4, &[]);
    let texts = ["default = \"allow\"\n", "default = \"deny\"\n"];
    assert_eq!(stand.put_policy(CLOSED, texts[0]), 200);
    let socket = stand.socket("api.sock");
    let stale = |method: &str, path: &str, body: &str| {
        let args = [
            "--request",
            method,
            "--header",
            "If-Match: \"0123456789abcdef\"",
        ];
        let args = [&args[..], &["--data-binary", body]].concat();
        answer(status_of(curl_at(&socket, &args, path)))
    };
    assert_eq!(stale("PUT", CLOSED, texts[1]).0, 412);
    assert_eq!(stale("PUT", VM, "{}").0, 412);
    stand.signal_engine(libc::SIGSTOP);
    std::thread::scope(|scope| {
        let put = scope.spawn(|| stand.put_text(CLOSED, texts[1]));
        eventually("the new text is shown", || {
            let (_, policies) = stand.ask("GET", "/v1/policies", None);
            let shown = (&policies[0]["text"], &policies[0]["generation"]);
            let is_new = shown == (&json!(texts[1]), &json!(2));
            assert!(
                is_new || shown == (&json!(texts[0]), &json!(1)),
                "{policies}"
            );
            is_new.then_some(())
        });
        for (method, path, body) in [
            ("PUT", CLOSED, texts[0]),
            ("DELETE", CLOSED, ""),
            ("PUT", VM, "{}"),
            ("PATCH", VM, r#"{ "forwards": ["tcp:8080:80"] }"#),
        ] {
            let (status, problem) = match method {
                // It would read the VM first, and refuse by what it has read.
                "PATCH" => stand.ask(method, path, serde_json::from_str(body).ok()),
                _ => stale(method, path, body),
            };
            let detail = problem["detail"].as_str().unwrap_or_default();
            let is_busy = status == 503 && detail.contains("is just being put in force");
            assert!(is_busy, "{method} {path}: {status} {problem}");
        }
        assert!(!put.is_finished());

        let (answers, answered) = std::sync::mpsc::channel();
        for _ in 0..70 {
            let answers = answers.clone();
            let stand = &stand;
            scope.spawn(move || {
                let why = format!("{VM}/why?address=192.0.2.1&port=80");
                answers.send(stand.ask("GET", &why, None)).unwrap();
            });
        }
        let (status, problem) = answered.recv_timeout(WAIT).unwrap();
        let detail = problem["detail"].as_str().unwrap_or_default();
        let is_full = status == 503 && detail.contains("64 requests wait");
        assert!(is_full, "{status} {problem}");
        stand.signal_engine(libc::SIGCONT);
        drop(answers);
        let all: Vec<u16> = answered.iter().map(|(status, _)| status).collect();
        assert!(all.iter().all(|it| [200, 503].contains(it)), "{all:?}");
        assert!(all.iter().filter(|it| **it == 200).count() >= 60, "{all:?}");
        let (status, put) = put.join().unwrap();
        assert_eq!((status, &put["generation"]), (200, &json!(2)), "{put}");
    });
    assert_eq!(stale("PUT", CLOSED, texts[0]).0, 412);
}

/// Whoever gets a connection gets an answer, also in the moment in which the command ends.
#[test]
fn who_connects_while_the_command_ends_is_answered() {
    require_root_and_tun!();
    let (mut stand, _guest) = Stand::with_vm(cells::user_ipv4, &[]);
    let socket = stand.socket("api.sock");
    let ask = |path: &Path| {
        let Ok(mut stream) = UnixStream::connect(path) else {
            return None;
        };
        let request = b"GET /v1/vms HTTP/1.1\r\nHost: slipgate\r\nConnection: close\r\n\r\n";
        let sent = stream.write_all(request);
        let mut answer = String::new();
        let read = stream.read_to_string(&mut answer);
        assert!(sent.is_ok() && read.is_ok(), "{sent:?} {read:?} {answer}");
        let status = answer.split(' ').nth(1).map(str::to_owned);
        Some(status.unwrap_or_else(|| panic!("an answer without a status: {answer:?}")))
    };
    let begun = std::sync::Barrier::new(9);
    let statuses = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    begun.wait();
                    let all = std::iter::from_fn(|| ask(&socket));
                    all.collect::<std::collections::BTreeSet<_>>()
                })
            })
            .collect();
        begun.wait();
        std::thread::sleep(BRIEFLY);
        assert!(stand.daemon.stop().unwrap().success());
        let clients = clients
            .into_iter()
            .flat_map(|client| client.join().unwrap());
        clients.collect::<std::collections::BTreeSet<_>>()
    });
    let known = ["200".to_owned(), "503".to_owned()];
    assert!(statuses.iter().all(|it| known.contains(it)), "{statuses:?}");
}

/// A request that is a daemon's, or the command line's, has an answer that says so, and changes nothing.
#[test]
fn what_user_mode_has_not_is_refused_with_the_reason() {
    require_root_and_tun!();
    // More ports than a definition may have.
    let ports = "tcp:8000-8099:8000-8099";
    let (stand, _guest) = Stand::with_vm(cells::user_ipv4, &["--forward", ports]);
    let (_, before) = stand.ask("GET", VM, None);
    assert_eq!(before["forwards"], json!([ports]), "{before}");
    let (status, vm) = stand.ask("PUT", VM, Some(before.clone()));
    assert_eq!((status, &vm["generation"]), (200, &json!(1)), "{vm}");
    let to_itself = format!("{}:80", before["ip"].as_str().unwrap());
    for (method, path, body, status, part) in [
        ("PUT", "/v1/vms/other", json!({}), 422, "no other"),
        (
            "PATCH",
            VM,
            json!({ "mac": "52:54:00:00:00:09" }),
            422,
            "mac: in user mode",
        ),
        (
            "PATCH",
            VM,
            json!({ "tap": "tap0" }),
            422,
            "tap: in user mode",
        ),
        (
            "PATCH",
            VM,
            json!({ "uplink": "eth9" }),
            422,
            "uplink: in user mode",
        ),
        (
            "PATCH",
            VM,
            json!({ "host_loopback": [to_itself] }),
            422,
            "that is the address of the guest",
        ),
        ("PATCH", "/v1/vms/other", json!({}), 404, "no VM"),
        ("DELETE", VM, Value::Null, 422, "end the command"),
        (
            "POST",
            "/v1/vms/tap0/keep",
            Value::Null,
            422,
            "slipgate serve",
        ),
        (
            "POST",
            "/v1/vms/tap0/sleep",
            Value::Null,
            422,
            "nothing is held",
        ),
        (
            "POST",
            "/v1/vms/tap0/resume",
            Value::Null,
            422,
            "nothing is held",
        ),
        ("DELETE", "/v1/vms/other", Value::Null, 404, "no VM"),
        (
            "POST",
            "/v1/machines/tap0/pause",
            Value::Null,
            404,
            "no machine",
        ),
    ] {
        let (got, problem) = stand.ask(method, path, Some(body));
        let detail = problem["detail"].as_str().unwrap_or_default();
        let is_so = got == status && detail.contains(part);
        assert!(is_so, "{method} {path}: {got} {problem}");
    }
    assert_eq!(stand.ask("GET", "/v1/machines", None).1, json!([]));
    let (_, mut after) = stand.ask("GET", VM, None);
    after["activity"] = before["activity"].clone();
    assert_eq!(after, before);
    let (status, vm) = stand.ask("PATCH", VM, Some(json!({})));
    assert_eq!((status, &vm["generation"]), (200, &json!(1)), "{vm}");
}

/// The sockets are for their user alone, who reads events there as a daemon's; they go with the command.
#[test]
fn sockets_of_user_mode_are_its_users_and_go_with_the_command() {
    require_root_and_tun!();
    let (mut stand, _guest) = Stand::with_vm(cells::user_ipv4, &[]);
    let sockets = ["api.sock", "read.sock"].map(|name| stand.socket(name));
    let link = fs::metadata(stand.socket("tap0.sock")).unwrap();
    for socket in &sockets {
        let file = fs::metadata(socket).unwrap();
        let shown = (
            file.file_type().is_socket(),
            file.mode() & 0o777,
            file.uid(),
        );
        assert_eq!(shown, (true, 0o600, link.uid()));
    }
    let path = sockets[1].display().to_string();
    let args = ["events", "--api", &path, "--after", "0"];
    let mut events = stand.daemon.command(&args).unwrap();
    let mut events = events.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(events.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "1 vm_added tap0");
    // By that user each process has nothing.
    for title in ["slipgate-api", "slipgate-api-read"] {
        let api = stand.daemon.children_named(title);
        let status = fs::read_to_string(format!("/proc/{}/status", api[0])).unwrap();
        for line in ["NoNewPrivs:\t1", "Seccomp:\t2", "CapBnd:\t0000000000000000"] {
            assert!(status.contains(line), "{title} has not {line}: {status}");
        }
    }
    let other = stand
        .daemon
        .command(&["exec", "--api", &path, "--", "true"]);
    let refused = stand.world().host.spawn(other.unwrap()).unwrap();
    assert_eq!(refused.wait_with_output().unwrap().status.code(), Some(2));
    assert!(sockets[1].exists());

    assert!(stand.daemon.stop().unwrap().success());
    events.wait().unwrap();
    assert!(sockets.iter().all(|socket| !socket.exists()));
}

/// The command is its user's, as the sockets are, by which its policy can be changed.
#[test]
fn a_command_does_not_reach_the_api_that_rules_it() {
    require_root_and_tun!();
    let place = Place::new();
    let socket = place.file("run/job-api.sock");
    let path = socket.to_str().unwrap();
    let script = format!(
        "curl --silent --unix-socket {path} http://slipgate/v1/vms; echo \"code $?\"; \
         rm -f {path}; mv {path} {path}.gone; read line"
    );
    let args = [
        "exec", "--name", "job", "--api", path, "--", "sh", "-c", &script,
    ];
    let mut exec = place.slipgate(&args);
    exec.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut exec = place.world.host.spawn(exec).unwrap();
    let stdout = exec.stdout.take().unwrap();
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).unwrap();
    // CURLE_COULDNT_CONNECT, and nothing before it.
    assert_eq!(line, "code 7\n");
    let (status, vms) = answer(status_of(curl_at(&socket, &[], "/v1/vms")));
    assert_eq!((status, &vms[0]["name"]), (200, &json!("job")), "{vms}");
    exec.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(exec.wait().unwrap().success());
    assert!(!socket.exists());
}

/// Below the directory of tables, which each command finds empty. The second command's file is made when the
/// first one runs.
#[test]
fn a_command_does_not_reach_the_api_of_another() {
    require_root_and_tun!();
    let place = Place::new();
    let socket = |name: &str| place.file(&format!("run/slipgate/api/{name}.sock"));
    let begin = |name: &str, script: &str| {
        let path = socket(name).display().to_string();
        let args = [
            "exec", "--name", name, "--api", &path, "--", "sh", "-c", script,
        ];
        let mut exec = place.slipgate(&args);
        exec.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut exec = place.world.host.spawn(exec).unwrap();
        let mut lines = BufReader::new(exec.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "begun");
        (exec, lines)
    };
    let waits = "echo begun; read line";
    let names = ["before", "job", "later"];
    let script = names.map(|name| {
        let path = socket(name).display().to_string();
        format!("; curl --silent --unix-socket {path} http://slipgate/v1/vms; echo \"code $?\"")
    });
    let (mut before, _lines) = begin(names[0], waits);
    let (mut job, lines) = begin(names[1], &format!("{waits}{}", script.concat()));
    let (mut later, _lines) = begin(names[2], waits);
    for name in names {
        let (status, vms) = answer(status_of(curl_at(&socket(name), &[], "/v1/vms")));
        assert_eq!((status, &vms[0]["name"]), (200, &json!(name)), "{vms}");
    }
    job.stdin.take().unwrap().write_all(b"\n").unwrap();
    // CURLE_COULDNT_CONNECT, and nothing before it.
    let said: Vec<_> = lines.map(Result::unwrap).collect();
    assert_eq!(said, ["code 7"; 3]);
    assert!(job.wait().unwrap().success());
    for exec in [&mut before, &mut later] {
        exec.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert!(exec.wait().unwrap().success());
    }
    assert!(!names.iter().any(|name| socket(name).exists()));
}

#[test]
fn a_socket_that_other_commands_can_reach_is_warned_of() {
    require_root_and_tun!();
    let place = Place::new();
    let said = |path: &str| {
        let path = place.file(path).display().to_string();
        let mut exec = place.slipgate(&["exec", "--api", &path, "--", "true"]);
        exec.stderr(Stdio::piped());
        let exec = place.world.host.spawn(exec).unwrap();
        let output = exec.wait_with_output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), text)
    };
    let (status, text) = said("run/job-api.sock");
    let advice = format!("below {}", place.file("run/slipgate/api").display());
    assert!(status == Some(0) && text.contains(&advice), "{text}");
    let (status, text) = said("run/slipgate/api/job.sock");
    assert!(status == Some(0) && !text.contains("can connect"), "{text}");
    let (status, text) = said("run/slipgate/job.sock");
    assert!(status != Some(0) && text.contains(&advice), "{text}");
    // Only root gives a file to a group that it is not in.
    let (status, text) = said("run/slipgate/api/job.sock,group=root");
    let is_said = text.contains("this user is not in the group root");
    assert!(status != Some(0) && is_said, "{text}");
    assert!(!place.file("run/slipgate/api/job.sock").exists());
}

/// Machines of user mode are their own command's.
#[test]
fn the_machine_of_user_mode_is_shown_paused_and_ended_by_the_api() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let socket = place.file("run/vm-api.sock");
    let path = socket.to_str().unwrap();
    let flags = [
        "--name",
        "vm",
        "--cmdline",
        "ping 10.0.2.2 1; wait 60s",
        "--api",
        path,
    ];
    let mut vm = MicroVm::start_by(&place.world.host, &place.user, &flags).unwrap();
    vm.await_line("\"workload\"", 3 * WAIT).unwrap();
    let ask = |method: &str, path: &str, body: &str| {
        let args = ["--request", method, "--data", body];
        answer(status_of(curl_at(&socket, &args, path)))
    };
    let machine = || ask("GET", "/v1/machines/vm", "").1;
    assert_eq!(machine()["state"], "running", "{}", machine());
    assert_eq!(machine()["tap"], Value::Null);
    assert_eq!(ask("POST", "/v1/machines/vm/pause", "").0, 204);
    assert_eq!(machine()["state"], "paused");
    assert_eq!(ask("POST", "/v1/machines/vm/resume", "").0, 204);
    assert_eq!(machine()["state"], "running");
    let snapshot = r#"{ "name": "s" }"#;
    let (status, problem) = ask("POST", "/v1/machines/vm/snapshot", snapshot);
    let detail = problem["detail"].as_str().unwrap();
    assert!(
        status == 422 && detail.contains("`slipgate snapshot`"),
        "{problem}"
    );
    assert_eq!(ask("POST", "/v1/machines/vm/kill", "").0, 204);
    let end = vm.finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(143));
    assert!(place.user.has_nothing_left() && !socket.exists());
}

/// The same curl, which prints the status behind the body.
fn status_of(mut curl: Command) -> Command {
    curl.args(["--write-out", "\n%{http_code}"]);
    curl
}
