//! Forwards of a daemon's VMs, which come and go with the VMs' definitions.

use std::net::{Ipv4Addr, TcpStream};

use slipgate_testbed::{
    Guest, NetNs,
    clients::{
        tcp::{self, ConnectOutcome, EchoSession},
        udp::{self, UdpOutcome},
    },
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::HOST,
};

use crate::{
    BRIEFLY, GUEST, WAIT, at,
    daemon::Stand,
    shortages::{limit_descriptors, lock_of, next_descriptor},
};

const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;

fn echo(guest: &Guest) -> TcpServer {
    TcpServer::start(&guest.ns, (GUEST, 80), TcpService::Echo).unwrap()
}

/// A connection to a port of the host that echoes.
fn session(from: &NetNs, address: Ipv4Addr, port: u16) -> TcpStream {
    let mut stream = from
        .run(|| tcp::connect(at(address, port), WAIT))
        .unwrap_or_else(|e| panic!("{address}:{port}: {e}"));
    assert!(goes_on(&mut stream), "{address}:{port}");
    stream
}

fn goes_on(stream: &mut TcpStream) -> bool {
    EchoSession::new(stream).round(1_000).is_ok()
}

fn leads_nowhere(from: &NetNs, address: Ipv4Addr, port: u16) -> bool {
    let outcome = from.run(|| tcp::connect_outcome(at(address, port), BRIEFLY));
    !matches!(outcome.unwrap(), ConnectOutcome::Connected(_))
}

#[test]
fn forwards_come_and_go_with_their_vms() {
    require_root_and_tun!();
    let mut stand = Stand::new(&[]);
    let [first, second] = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    let _servers = [echo(&first), echo(&second)];
    let forward = ["add", "a", "--tap", "tap0", "--forward", "tcp:8080:80"];
    assert_eq!(stand.vm(&forward), "a added: served on tap0\n");
    let mut outbound = stand.connect(&first);
    let mut from_world = session(&stand.world.net, HOST, 8080);
    let mut from_host = session(&stand.world.host, LOOPBACK, 8080);
    let flows = stand.daemon.flows().unwrap();
    let shown = flows.iter().filter(|flow| flow.rule == "forward of its VM");
    assert_eq!(shown.count(), 2, "{flows:?}");

    // The same again changes nothing, and neither does a port that is taken.
    assert_eq!(stand.vm(&forward), "a as it was: served on tap0\n");
    let error = stand.vm_error(&[
        "add",
        "b",
        "--tap",
        "tap1",
        "--forward",
        "tcp:127.0.0.1:8080:80",
    ]);
    assert!(
        error.contains("port 8080") && error.contains("leads to a"),
        "{error}"
    );
    assert_eq!(stand.vms().len(), 1);
    let taken = TcpServer::start(&stand.world.host, (HOST, 8088), TcpService::Echo).unwrap();
    let set = [
        "set",
        "a",
        "--forward",
        "tcp:8081:80",
        "--forward",
        "tcp:8088:80",
    ];
    let error = stand.vm_error(&set);
    assert!(
        error.contains("port 8088") && error.contains("taken by"),
        "{error}"
    );
    drop(taken);
    assert_eq!(
        stand.vms()[0]["forwards"],
        serde_json::json!(["tcp:8080:80"])
    );
    assert!(leads_nowhere(&stand.world.net, HOST, 8081));
    assert!(goes_on(&mut from_world) && goes_on(&mut from_host));

    // Another port, below 1024: connections by the one before have ended, those of the guest's go
    // on.
    stand.vm(&["set", "a", "--forward", "tcp:81:80"]);
    assert!(!goes_on(&mut from_world) && !goes_on(&mut from_host));
    let ended = stand.ends().into_iter().filter(|end| end.1 == "policy");
    assert_eq!(ended.count(), 2, "{:?}", stand.ends());
    for (from, address) in [(&stand.world.net, HOST), (&stand.world.host, LOOPBACK)] {
        assert!(leads_nowhere(from, address, 8080));
        session(from, address, 81);
    }
    stand.goes_on(&first, &mut outbound);

    // The port is free for another VM.
    stand.vm(&["add", "b", "--tap", "tap1", "--forward", "tcp:8080:80"]);
    let mut others = session(&stand.world.net, HOST, 8080);

    // Forwards are there with another engine, and with another daemon.
    stand.daemon.kill_engine().unwrap();
    session(&stand.world.net, HOST, 81);
    stand.daemon.kill_both().unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    assert!(goes_on(&mut others));
    for (from, address) in [(&stand.world.net, HOST), (&stand.world.host, LOOPBACK)] {
        session(from, address, 81);
        session(from, address, 8080);
    }

    // They go with the VM.
    let mut third = session(&stand.world.host, LOOPBACK, 81);
    stand.vm(&["rm", "a"]);
    assert!(!goes_on(&mut third));
    assert!(leads_nowhere(&stand.world.net, HOST, 81));
    TcpServer::start(&stand.world.host, (HOST, 81), TcpService::Echo).unwrap();
    assert!(goes_on(&mut others));
    stand.vm(&["set", "b", "--no-forward"]);
    assert!(leads_nowhere(&stand.world.net, HOST, 8080));
}

#[test]
fn a_port_that_leads_elsewhere_takes_its_clients_along() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let guest = stand.guest("tap0");
    let greet = |port: u16, text: &[u8]| {
        TcpServer::start(&guest.ns, (GUEST, port), TcpService::Greet(text.to_vec())).unwrap()
    };
    let _servers = [greet(80, b"first"), greet(81, b"second")];
    let _datagrams = UdpServer::start(&guest.ns, (GUEST, 53), UdpService::Echo).unwrap();
    stand.vm(&["add", "a", "--tap", "tap0", "--forward", "tcp:8080:80"]);
    let greeting = |from: &NetNs, address| {
        use std::io::Read as _;
        let mut said = String::new();
        let mut stream = from.run(|| tcp::connect(at(address, 8080), WAIT)).unwrap();
        stream.read_to_string(&mut said).unwrap();
        said
    };
    let ways: [(&NetNs, Ipv4Addr); 2] = [(&stand.world.net, HOST), (&stand.world.host, LOOPBACK)];
    for (from, address) in ways {
        assert_eq!(greeting(from, address), "first");
    }
    stand.vm(&[
        "set",
        "a",
        "--forward",
        "tcp:8080:81",
        "--forward",
        "udp:5300:53",
    ]);
    for (from, address) in ways {
        assert_eq!(greeting(from, address), "second");
        let sent = from
            .run(|| udp::probe(at(address, 5300), b"x", WAIT))
            .unwrap();
        assert!(
            matches!(sent, UdpOutcome::Answered(_)),
            "{address}: {sent:?}"
        );
    }
}

#[test]
fn connections_by_a_forward_that_goes_are_kept_where_the_policy_says_so() {
    require_root_and_tun!();
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("policy.toml");
    std::fs::write(&file, "default = \"allow\"\non_reload = \"keep\"\n").unwrap();
    let stand = Stand::new(&["--policy", &file.display().to_string()]);
    let guest = stand.guest("tap0");
    let _server = echo(&guest);
    stand.vm(&["add", "a", "--tap", "tap0", "--forward", "tcp:8080:80"]);
    let mut from_world = session(&stand.world.net, HOST, 8080);
    let mut from_host = session(&stand.world.host, LOOPBACK, 8080);
    stand.vm(&["set", "a", "--no-forward"]);
    assert!(goes_on(&mut from_world) && goes_on(&mut from_host));
    assert!(leads_nowhere(&stand.world.net, HOST, 8080));
    assert!(leads_nowhere(&stand.world.host, LOOPBACK, 8080));
}

/// One whose port somebody took while there was no daemon is served, and takes it when it is free.
#[test]
fn a_daemon_starts_without_a_port_that_was_taken_meanwhile() {
    require_root_and_tun!();
    let mut stand = Stand::new(&[]);
    let guest = stand.guest("tap0");
    let _server = echo(&guest);
    let add = ["add", "a", "--tap", "tap0", "--forward", "tcp:8080:80"];
    stand.vm(&add);
    assert!(stand.daemon.stop().unwrap().success());
    let taken = TcpServer::start(&stand.world.host, (HOST, 8080), TcpService::Echo).unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    let said = stand.daemon.stderr();
    assert!(said.contains("a is served without a forward"), "{said}");
    let vm = &stand.vms()[0];
    assert_eq!(vm["forwards"], serde_json::json!(["tcp:8080:80"]));
    assert_eq!(vm["unserved_forwards"], vm["forwards"]);
    stand.connect(&guest);
    let error = stand.vm_error(&add);
    assert!(error.contains("taken by"), "{error}");
    // A change of policy does not make it another VM's.
    let policy = scratch_policy(&stand, "open", "default = \"allow\"\n");
    stand
        .daemon
        .run(&["policy", "put", "open", &policy])
        .unwrap();
    stand.vm(&["set", "a", "--policy", "open", "--no-forward"]);
    drop(taken);
    let _other = stand.guest("tap1");
    stand.vm(&["add", "b", "--tap", "tap1", "--forward", "tcp:8080:80"]);
    let error = stand.vm_error(&["set", "a", "--forward", "tcp:8080:80"]);
    assert!(error.contains("leads to b"), "{error}");
    stand.vm(&["rm", "b"]);
    assert_eq!(
        stand.vm(&["set", "a", "--forward", "tcp:8080:80"]),
        "a changed: served on tap0\n"
    );
    assert!(stand.vms()[0].get("unserved_forwards").is_none());
    session(&stand.world.net, HOST, 8080);
}

fn scratch_policy(stand: &Stand, name: &str, text: &str) -> String {
    let file = stand.scratch.path().join(format!("{name}.toml"));
    std::fs::write(&file, text).unwrap();
    file.display().to_string()
}

/// A change that can't be made now leaves everything as it was; one that needs no lock is made.
#[test]
fn a_change_is_made_as_a_whole_or_not_at_all() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let [guest, other] = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    let _servers = [echo(&guest), echo(&other)];
    stand.vm(&["add", "a", "--tap", "tap0"]);
    let mut stream = stand.connect(&guest);
    let lock = std::fs::File::options()
        .write(true)
        .open(lock_of(&stand.daemon));
    let lock = lock.unwrap();
    lock.lock().unwrap();
    assert_eq!(
        stand.vm(&["set", "a", "--forward", "tcp:8080:80"]),
        "a changed: served on tap0\n"
    );
    session(&stand.world.net, HOST, 8080);
    let moved = ["set", "a", "--tap", "tap1", "--forward", "tcp:8081:80"];
    let error = stand.vm_error(&moved);
    assert!(error.contains("try again"), "{error}");
    let before = &stand.vms()[0];
    assert_eq!(
        (&before["tap"], &before["state"]),
        (&"tap0".into(), &"served".into())
    );
    assert_eq!(before["forwards"], serde_json::json!(["tcp:8080:80"]));
    stand.goes_on(&guest, &mut stream);
    assert!(leads_nowhere(&stand.world.net, HOST, 8081));
    session(&stand.world.net, HOST, 8080);
    lock.unlock().unwrap();
    assert_eq!(stand.vm(&moved), "a changed: served on tap1\n");
    stand.connect(&other);
    session(&stand.world.net, HOST, 8081);
    assert!(leads_nowhere(&stand.world.net, HOST, 8080));
}

#[test]
fn a_daemon_without_descriptors_refuses_forwards_and_lives() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let guest = stand.guest("tap0");
    let _server = echo(&guest);
    stand.vm(&["add", "a", "--tap", "tap0", "--forward", "tcp:8080:80"]);
    // The client's connection is one more; then the port's socket, and its copy.
    for more in 1..=2 {
        let free = next_descriptor(&stand.daemon) + more;
        let before = limit_descriptors(&stand.daemon, free);
        let error = stand.vm_error(&["set", "a", "--forward", "tcp:8081:80"]);
        limit_descriptors(&stand.daemon, before);
        assert!(error.contains("try again"), "{error}");
        assert!(stand.daemon.broker_runs(), "{}", stand.daemon.stderr());
        session(&stand.world.net, HOST, 8080);
        assert!(leads_nowhere(&stand.world.net, HOST, 8081));
    }
    stand.vm(&["set", "a", "--forward", "tcp:8081:80"]);
    session(&stand.world.net, HOST, 8081);
}

#[test]
fn forwards_that_can_not_be_are_refused_with_the_reason() {
    require_root_and_tun!();
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("policy.toml");
    std::fs::write(
        &file,
        "[[forward]]\nprotocol = \"tcp\"\nhost_port = 8080\nguest_port = 80\n",
    )
    .unwrap();
    let stand = Stand::new(&[]);
    for (spec, part) in [
        ("tcp:80", "not PROTOCOL"),
        ("b=tcp:80:80", "no VM \"b\""),
        ("tcp:61001:80", "--nat-ports"),
        (
            "tcp:192.0.2.7:80:80",
            "192.0.2.7 is not an address of this host",
        ),
        ("tcp:1000-1100:1000-1100", "64 forwarded ports at most"),
    ] {
        let error = stand.vm_error(&["add", "a", "--tap", "tap0", "--forward", spec]);
        assert!(error.contains(part), "{spec}: {error}");
    }
    assert_eq!(stand.vms().len(), 0);
    let apply = ["policy", "apply", &file.display().to_string()];
    let error = stand.daemon.run(&apply).unwrap_err().to_string();
    assert!(error.contains("slipgate vm add"), "{error}");
}
