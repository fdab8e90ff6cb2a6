//! Guests of one host that reach each other by their translated addresses.

use std::{
    fs,
    net::{SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Capture, GUEST_DEVICE, Guest, GuestConfig, WorldConfig,
    accounting::FlowKey,
    clients::{stun, tcp, udp, udp::UdpOutcome},
    servers::{StunServer, TcpServer, TcpService, UdpServer, UdpService},
    slipgate::FlowRow,
    streams::Receipt,
};

use crate::{
    BRIEFLY, Cell, Stand, WAIT, eventually,
    matrix::{at, matrix, pings},
    stand::counts,
};

matrix! {
    guests_of_one_host_punch_a_hole_to_each_other: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each guest of user mode has an engine of its own (policy.md)";
    a_connection_between_guests_is_counted_as_both_saw_it: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each guest of user mode has an engine of its own (policy.md)";
    a_guest_reaches_itself_and_a_forward_by_the_external_address: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each guest of user mode has an engine of its own (policy.md)";
    a_hairpin_lives_through_a_reload_and_the_engines_death: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each guest of user mode has an engine of its own (policy.md)";
}

const EIM_PORTS: &str = "20000-20999";
const BYTES: u64 = 32 << 20;

/// Two guests under a policy, and a server outside. Fields go in order.
struct Pair {
    stand: Stand,
    server: StunServer,
    policy: tempfile::NamedTempFile,
}

impl Pair {
    fn of(cell: Cell, policy: &str, more: &[&str]) -> Pair {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), policy).unwrap();
        let path = file.path().to_str().unwrap();
        let mut args = vec!["--policy", path, "--eim-ports", EIM_PORTS];
        args.extend(more);
        let world = WorldConfig::default();
        let stand = Stand::of_several(cell, world, &[], &[GuestConfig::new("tap1")], &args);
        let servers = [cell.server(), cell.server_2()];
        let (net, ports) = (&stand.world.net, [3_478, 3_479]);
        let server = StunServer::start(net, servers, ports).unwrap();
        Pair {
            stand,
            server,
            policy: file,
        }
    }

    fn guests(&self) -> [&Guest; 2] {
        [&self.stand.guest, &self.stand.neighbours[0]]
    }

    /// A socket of each guest, and its address as the server saw it.
    fn ends(&self) -> [(UdpSocket, SocketAddr); 2] {
        let server = self.server.address();
        self.guests().map(|guest| {
            let (socket, response) = guest.run(|| stun::bind(server, BRIEFLY)).unwrap();
            socket
                .set_read_timeout(Some(Duration::from_millis(50)))
                .unwrap();
            (socket, response.mapped)
        })
    }

    /// Has each socket send to the other's address until each has received. Returns whether both
    /// have within this time.
    fn punch(&self, ends: &[(UdpSocket, SocketAddr); 2], patience: Duration) -> bool {
        // What was sent before may still wait in a socket.
        let payload = format!("{:?}", Instant::now());
        let mut buffer = [0; 128];
        let until = Instant::now() + patience;
        let mut received = [false; 2];
        while received != [true; 2] && Instant::now() < until {
            for at in [0, 1] {
                let (socket, theirs) = (&ends[at].0, ends[1 - at].1);
                let _ = socket.send_to(payload.as_bytes(), theirs);
                while let Ok((len, from)) = socket.recv_from(&mut buffer) {
                    let is_new = buffer[..len] == *payload.as_bytes();
                    received[at] |= is_new && from == theirs;
                    if is_new {
                        break;
                    }
                }
            }
        }
        received == [true; 2]
    }

    fn flow(&self, vm: &str, remote: impl Into<SocketAddr>) -> FlowRow {
        let remote = remote.into();
        let mut flows = self.stand.flows_to(remote);
        flows.retain(|flow| flow.vm == vm);
        assert_eq!(flows.len(), 1, "flows of {vm} to {remote}: {flows:?}");
        flows.remove(0)
    }
}

fn asking_for(filtering: &str) -> String {
    format!(
        "default = \"allow\"\n\
         [nat.udp]\nmapping = \"endpoint-independent\"\nfiltering = \"{filtering}\"\n\
         [nat.tcp]\nmapping = \"endpoint-independent\"\nfiltering = \"{filtering}\"\n"
    )
}

fn guests_of_one_host_punch_a_hole_to_each_other(cell: Cell) {
    let host = cell.host();
    for filtering in ["address-and-port-dependent", "endpoint-independent"] {
        let pair = Pair::of(cell, &asking_for(filtering), &[]);
        let ends = pair.ends();
        assert!(pair.punch(&ends, WAIT), "{filtering}");
        let [one, other] = [ends[0].1, ends[1].1];
        assert_eq!([one.ip(), other.ip()], [host; 2]);
        let flow = pair.flow("tap0", other);
        assert_eq!(flow.nat, one.to_string());
        assert_eq!(flow.path, "hairpin");
        assert_eq!(pair.flow("tap1", one).nat, other.to_string());
        let (admitted, why) = (pair.stand.slipgate)
            .why("tap0", &other.to_string(), "udp")
            .unwrap();
        assert!(admitted && why.contains("(hairpin) to VM tap1"), "{why}");
    }
    let off = asking_for("endpoint-independent") + "hairpin = false\n";
    let off = off.replace("[nat.tcp]", "hairpin = false\n[nat.tcp]");
    let pair = Pair::of(cell, &off, &[]);
    let ends = pair.ends();
    assert!(!pair.punch(&ends, 2 * BRIEFLY));
    assert!(pair.stand.refused("protected") > 0);
}

fn a_connection_between_guests_is_counted_as_both_saw_it(cell: Cell) {
    let pair = Pair::of(cell, &asking_for("endpoint-independent"), &[]);
    let [one, other] = pair.guests();
    let net = &pair.stand.world.net;
    let outside = TcpServer::start(net, (cell.server(), 7_000), TcpService::Echo).unwrap();
    // The other guest learns the address of its port, and listens there.
    let keeps = other.run(|| tcp::connect_from(7_100, outside.address(), WAIT));
    let _keeps = keeps.unwrap();
    let mapped = eventually("the server to see it", || outside.peers().first().copied());
    let address = (cell.guest(), 7_100);
    let _serving = TcpServer::start(&other.ns, address, TcpService::Streams).unwrap();
    let watching = pair
        .guests()
        .map(|guest| Capture::start(&guest.ns, GUEST_DEVICE).unwrap());
    let down = one.run(|| tcp::download(mapped, BYTES, 1, WAIT)).unwrap();
    assert_eq!(down.receipt, Receipt::expected(BYTES, 1));
    println!("down: {:.2} Gb/s", down.bits_per_second() / 1e9);
    let up = one.run(|| tcp::upload(mapped, BYTES, 2, WAIT)).unwrap();
    println!("up: {:.2} Gb/s", up.bits_per_second() / 1e9);
    std::thread::sleep(Duration::from_millis(100));
    let [at_one, at_other] = watching.map(|capture| capture.finish().unwrap());
    let flows = pair.stand.flows_to(mapped);
    assert_eq!(flows.len(), 2, "{flows:?}");
    for flow in &flows {
        let nat: SocketAddr = flow.nat.parse().unwrap();
        let theirs = pair.flow("tap1", nat);
        assert_eq!([&flow.path, &theirs.path], ["hairpin"; 2]);
        assert_eq!(theirs.direction, "inbound");
        let key = |source: SocketAddr, destination| FlowKey::tcp(source, destination);
        let inside = key(flow.guest.parse().unwrap(), mapped);
        let there = key(theirs.guest.parse().unwrap(), nat);
        let of = |counts: slipgate_testbed::accounting::Counts| (counts.packets, counts.bytes);
        let [sent, received] = [
            of(at_one.sent.of(inside)),
            of(at_one.received.of(inside.reversed())),
        ];
        assert_eq!(counts(flow), [sent, received], "the client's books");
        let [sent, received] = [
            of(at_other.sent.of(there)),
            of(at_other.received.of(there.reversed())),
        ];
        assert_eq!(counts(&theirs), [sent, received], "the server's books");
        assert!(sent.0 > 0 && received.0 > 0);
    }
}

fn a_guest_reaches_itself_and_a_forward_by_the_external_address(cell: Cell) {
    let policy = asking_for("address-and-port-dependent");
    let pair = Pair::of(cell, &policy, &["--forward", "tap1=udp:5353:5300"]);
    let [one, other] = pair.guests();
    let _echo = UdpServer::start(&other.ns, (cell.guest(), 5_300), UdpService::Echo).unwrap();
    // It shows its address, to which the forward leads.
    assert!(pings(other, cell.gateway(), WAIT));
    for guest in [one, other] {
        let sent = guest.run(|| udp::probe(at(cell.host(), 5_353), b"x", WAIT));
        assert!(matches!(sent, Ok(UdpOutcome::Answered(_))), "{sent:?}");
    }
    let [(socket, mapped), _] = pair.ends();
    socket.set_read_timeout(Some(WAIT)).unwrap();
    socket.send_to(b"loop", mapped).unwrap();
    let (len, from) = socket.recv_from(&mut [0; 16]).unwrap();
    assert_eq!((len, from), (4, mapped));
    let flow = pair.flow("tap0", mapped);
    let bytes = cell.headers() as u64 + 8 + 4;
    assert_eq!(counts(&flow), [(1, bytes); 2]);
    // A port of the host's that leads to no guest stays the host's.
    let address = (cell.host(), 4_000);
    let server = UdpServer::start(&pair.stand.world.host, address, UdpService::Echo).unwrap();
    let refused = one.run(|| udp::probe(server.address(), b"x", BRIEFLY));
    assert!(
        !matches!(refused, Ok(UdpOutcome::Answered(_))),
        "{refused:?}"
    );
    assert_eq!(server.datagrams(), 0);
}

fn a_hairpin_lives_through_a_reload_and_the_engines_death(cell: Cell) {
    let allowing = asking_for("address-and-port-dependent");
    let mut pair = Pair::of(cell, &allowing, &[]);
    let ends = pair.ends();
    assert!(pair.punch(&ends, WAIT));
    pair.stand.slipgate.kill_engine().unwrap();
    assert!(pair.punch(&ends, WAIT), "after the engine's death");
    let apply = |pair: &Pair, denied: &str| {
        let rules = format!("rules = [{{ deny = \"{denied}\" }}]\n");
        fs::write(pair.policy.path(), rules + &allowing).unwrap();
        let done = pair.stand.slipgate.run(&["policy", "apply"]).unwrap();
        assert!(done.status.success(), "{done:?}");
        String::from_utf8_lossy(&done.stdout).into_owned()
    };
    let said = apply(
        &pair,
        ["192.0.2.0/24", "2001:db8:9::/64"][usize::from(cell.is_ipv6())],
    );
    assert!(said.contains("0 flows cut"), "{said}");
    assert!(pair.punch(&ends, WAIT), "after a reload");
    let said = apply(&pair, &cell.host().to_string());
    assert!(said.contains("2 flows cut"), "{said}");
    assert!(!pair.punch(&ends, 2 * BRIEFLY), "denied");
    assert!(pair.stand.refused("rule") > 0);
}
