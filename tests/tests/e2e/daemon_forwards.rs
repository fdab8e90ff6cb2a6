//! Forwards of a daemon's VMs, which come and go with the VMs' definitions.

use std::net::{IpAddr, TcpStream};

use slipgate_testbed::{
    Guest, NetNs,
    clients::{
        tcp::{self, ConnectOutcome, EchoSession},
        udp::{self, UdpOutcome},
    },
    servers::{TcpServer, TcpService, UdpServer, UdpService},
};

use crate::{
    BRIEFLY, Cell, WAIT,
    daemon::Stand,
    matrix::{at, matrix, pings},
    shortages::{limit_descriptors, lock_of, next_descriptor},
};

matrix! {
    forwards_come_and_go_with_their_vms: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VM has no daemon; clients of its API change its forwards: forwards_are_changed_as_a_whole_or_not_at_all (api.md)";
    a_port_that_leads_elsewhere_takes_its_clients_along: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VM has no daemon; clients of its API change its forwards: forwards_are_changed_as_a_whole_or_not_at_all (api.md)";
    connections_by_a_forward_that_goes_are_kept_where_the_policy_says_so: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VM has no daemon; clients of its API change its forwards: forwards_are_changed_as_a_whole_or_not_at_all (api.md)";
    a_daemon_starts_without_a_port_that_was_taken_meanwhile: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VM has no daemon; clients of its API change its forwards: forwards_are_changed_as_a_whole_or_not_at_all (api.md)";
    a_change_is_made_as_a_whole_or_not_at_all: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VM has no daemon; clients of its API change its forwards: forwards_are_changed_as_a_whole_or_not_at_all (api.md)";
    a_daemon_without_descriptors_refuses_forwards_and_lives: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VM has no daemon; clients of its API change its forwards: forwards_are_changed_as_a_whole_or_not_at_all (api.md)";
    forwards_that_can_not_be_are_refused_with_the_reason: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VM has no daemon; clients of its API change its forwards: forwards_are_changed_as_a_whole_or_not_at_all (api.md)";
}

impl Stand {
    fn echo_in(&self, guest: &Guest) -> TcpServer<IpAddr> {
        TcpServer::start(&guest.ns, (self.cell.guest(), 80), TcpService::Echo).unwrap()
    }

    /// Adds the VM `name` with a forward to port 80 of its guest, which shows its address: forwards lead
    /// there.
    fn add(&self, name: &str, guest: &Guest, forward: &str) {
        self.vm(&["add", name, "--tap", guest.tap(), "--forward", forward]);
        assert!(pings(guest, self.cell.gateway(), WAIT));
    }

    /// From where clients connect to the host's ports, and at which address.
    fn ways(&self) -> [(&NetNs, IpAddr); 2] {
        let world = (&self.world.net, self.cell.host());
        [world, (&self.world.host, self.cell.loopback())]
    }

    /// A connection from the world to a port of the host.
    fn session(&self, port: u16) -> TcpStream {
        session(self.ways()[0], port)
    }

    /// Whether the world connects to nobody at a port of the host.
    fn leads_nowhere(&self, port: u16) -> bool {
        leads_nowhere(self.ways()[0], port)
    }

    /// Somebody else who listens at a port of the host.
    fn take(&self, port: u16) -> TcpServer<IpAddr> {
        let address = (self.cell.host(), port);
        TcpServer::start(&self.world.host, address, TcpService::Echo).unwrap()
    }
}

/// A connection to a port of the host that echoes.
fn session((from, address): (&NetNs, IpAddr), port: u16) -> TcpStream {
    let mut stream = from
        .run(|| tcp::connect(at(address, port), WAIT))
        .unwrap_or_else(|e| panic!("{address}, port {port}: {e}"));
    assert!(goes_on(&mut stream), "{address}, port {port}");
    stream
}

fn goes_on(stream: &mut TcpStream) -> bool {
    EchoSession::new(stream).round(1_000).is_ok()
}

fn leads_nowhere((from, address): (&NetNs, IpAddr), port: u16) -> bool {
    let outcome = from.run(|| tcp::connect_outcome(at(address, port), BRIEFLY));
    !matches!(outcome.unwrap(), ConnectOutcome::Connected(_))
}

fn forwards_come_and_go_with_their_vms(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let [first, second] = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    let _servers = [&first, &second].map(|guest| stand.echo_in(guest));
    let forward = ["add", "a", "--tap", "tap0", "--forward", "tcp:8080:80"];
    assert_eq!(stand.vm(&forward), "a added: served on tap0\n");
    let mut outbound = stand.connect(&first);
    let [mut from_world, mut from_host] = stand.ways().map(|way| session(way, 8080));
    let flows = stand.daemon.flows().unwrap();
    let shown = flows.iter().filter(|flow| flow.rule == "forward of its VM");
    assert_eq!(shown.count(), 2, "{flows:?}");

    // The same again changes nothing, and neither does a port that is taken.
    assert_eq!(stand.vm(&forward), "a as it was: served on tap0\n");
    let same = format!("tcp:{}:80", cell.destination(cell.loopback(), "8080"));
    let error = stand.vm_error(&["add", "b", "--tap", "tap1", "--forward", &same]);
    assert!(
        error.contains("port 8080") && error.contains("leads to a"),
        "{error}"
    );
    assert_eq!(stand.vms().len(), 1);
    let taken = stand.take(8088);
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
    assert!(stand.leads_nowhere(8081));
    assert!(goes_on(&mut from_world) && goes_on(&mut from_host));

    // Another port, below 1024: connections by the one before have ended, those of the guest's go
    // on.
    stand.vm(&["set", "a", "--forward", "tcp:81:80"]);
    assert!(!goes_on(&mut from_world) && !goes_on(&mut from_host));
    let ended = stand.ends().into_iter().filter(|end| end.1 == "policy");
    assert_eq!(ended.count(), 2, "{:?}", stand.ends());
    for way in stand.ways() {
        assert!(leads_nowhere(way, 8080));
        session(way, 81);
    }
    stand.goes_on(&first, &mut outbound);

    // The port is free for another VM.
    stand.add("b", &second, "tcp:8080:80");
    let mut others = stand.session(8080);

    // Forwards are there with another engine, and with another daemon.
    stand.daemon.kill_engine().unwrap();
    stand.session(81);
    stand.daemon.kill_both().unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    assert!(goes_on(&mut others));
    for way in stand.ways() {
        session(way, 81);
        session(way, 8080);
    }

    // They go with the VM.
    let mut third = session(stand.ways()[1], 81);
    stand.vm(&["rm", "a"]);
    assert!(!goes_on(&mut third));
    assert!(stand.leads_nowhere(81));
    stand.take(81);
    assert!(goes_on(&mut others));
    stand.vm(&["set", "b", "--no-forward"]);
    assert!(stand.leads_nowhere(8080));
}

fn a_port_that_leads_elsewhere_takes_its_clients_along(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    let greet = |port: u16, text: &[u8]| {
        let service = TcpService::Greet(text.to_vec());
        TcpServer::start(&guest.ns, (cell.guest(), port), service).unwrap()
    };
    let _servers = [greet(80, b"first"), greet(81, b"second")];
    let _datagrams = UdpServer::start(&guest.ns, (cell.guest(), 53), UdpService::Echo).unwrap();
    stand.add("a", &guest, "tcp:8080:80");
    let greeting = |from: &NetNs, address| {
        use std::io::Read as _;
        let mut said = String::new();
        let mut stream = from.run(|| tcp::connect(at(address, 8080), WAIT)).unwrap();
        stream.read_to_string(&mut said).unwrap();
        said
    };
    for (from, address) in stand.ways() {
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
    for (from, address) in stand.ways() {
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

fn connections_by_a_forward_that_goes_are_kept_where_the_policy_says_so(cell: Cell) {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("policy.toml");
    std::fs::write(&file, "default = \"allow\"\non_reload = \"keep\"\n").unwrap();
    let stand = Stand::of(cell, &["--policy", &file.display().to_string()]);
    let guest = stand.guest("tap0");
    let _server = stand.echo_in(&guest);
    stand.add("a", &guest, "tcp:8080:80");
    let [mut from_world, mut from_host] = stand.ways().map(|way| session(way, 8080));
    stand.vm(&["set", "a", "--no-forward"]);
    assert!(goes_on(&mut from_world) && goes_on(&mut from_host));
    assert!(stand.leads_nowhere(8080));
    assert!(leads_nowhere(stand.ways()[1], 8080));
}

/// One whose port somebody took while there was no daemon is served, and takes it when it is free.
fn a_daemon_starts_without_a_port_that_was_taken_meanwhile(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    let _server = stand.echo_in(&guest);
    stand.add("a", &guest, "tcp:8080:80");
    assert!(stand.daemon.stop().unwrap().success());
    let taken = stand.take(8080);
    stand.daemon = stand.daemon.again().unwrap();
    let said = stand.daemon.stderr();
    assert!(said.contains("a is served without a forward"), "{said}");
    let vm = &stand.vms()[0];
    assert_eq!(vm["forwards"], serde_json::json!(["tcp:8080:80"]));
    assert_eq!(vm["unserved_forwards"], vm["forwards"]);
    stand.connect(&guest);
    let again = ["add", "a", "--tap", "tap0", "--forward", "tcp:8080:80"];
    let error = stand.vm_error(&again);
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
    stand.session(8080);
}

fn scratch_policy(stand: &Stand, name: &str, text: &str) -> String {
    let file = stand.scratch.path().join(format!("{name}.toml"));
    std::fs::write(&file, text).unwrap();
    file.display().to_string()
}

/// A change that can't be made now leaves everything as it was; one that needs no lock is made.
fn a_change_is_made_as_a_whole_or_not_at_all(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let [guest, other] = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    let _servers = [&guest, &other].map(|guest| stand.echo_in(guest));
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
    stand.session(8080);
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
    assert!(stand.leads_nowhere(8081));
    stand.session(8080);
    lock.unlock().unwrap();
    assert_eq!(stand.vm(&moved), "a changed: served on tap1\n");
    stand.connect(&other);
    stand.session(8081);
    assert!(stand.leads_nowhere(8080));
}

fn a_daemon_without_descriptors_refuses_forwards_and_lives(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    let _server = stand.echo_in(&guest);
    stand.add("a", &guest, "tcp:8080:80");
    // The client's connection is one more; then the port's socket, and its copy.
    for more in 1..=2 {
        let free = next_descriptor(&stand.daemon) + more;
        let before = limit_descriptors(&stand.daemon, free);
        let error = stand.vm_error(&["set", "a", "--forward", "tcp:8081:80"]);
        limit_descriptors(&stand.daemon, before);
        assert!(error.contains("try again"), "{error}");
        assert!(stand.daemon.broker_runs(), "{}", stand.daemon.stderr());
        stand.session(8080);
        assert!(stand.leads_nowhere(8081));
    }
    stand.vm(&["set", "a", "--forward", "tcp:8081:80"]);
    stand.session(8081);
}

fn forwards_that_can_not_be_are_refused_with_the_reason(cell: Cell) {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("policy.toml");
    std::fs::write(
        &file,
        "[[forward]]\nprotocol = \"tcp\"\nhost_port = 8080\nguest_port = 80\n",
    )
    .unwrap();
    let stand = Stand::of(cell, &[]);
    let elsewhere = ["192.0.2.7", "2001:db8:9::7"][usize::from(cell.is_ipv6())];
    let at_elsewhere = cell.destination(elsewhere.parse().unwrap(), "80");
    for (spec, part) in [
        ("tcp:80", "not PROTOCOL"),
        ("b=tcp:80:80", "no VM \"b\""),
        ("tcp:61001:80", "--nat-ports"),
        (
            &format!("tcp:{at_elsewhere}:80"),
            &format!("{elsewhere} is not an address of this host"),
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
