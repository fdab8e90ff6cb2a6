//! Ports of the gateway that lead to the host's loopback: listed ports are reachable as from the
//! host, and no others.

use std::{
    collections::HashSet,
    fs,
    io::{ErrorKind, Read},
    net::{IpAddr, Shutdown, SocketAddr, SocketAddrV6},
    path::Path,
    time::Duration,
};

use nix::net::if_::if_nametoindex;
use slipgate_testbed::{
    GUEST_DEVICE, GuestConfig, WorldConfig,
    clients::{
        tcp::{self, EchoSession},
        udp::{self, UdpOutcome},
    },
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    streams::Receipt,
    turns, world_ipv6,
};

use crate::{
    Cell, Stand, WAIT, eventually,
    matrix::{at, matrix},
};

matrix! {
    a_listed_port_is_a_stream_both_ways_to_the_hosts_service: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    what_is_not_listed_is_refused_whatever_listens: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_service_of_the_other_family_is_not_reached: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    datagrams_come_back_to_the_port_that_asked: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    half_closed_reset_and_held_up_it_goes_as_between_two_hosts: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    another_vms_list_is_nobody_elses: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each VM has an engine of its own, which has one list";
    a_deny_beats_the_list: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_port_taken_out_by_apply_ends: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its two VMs share a process; of one VM it is tested with other changes of the policy";
    freeze_and_cut_hold_for_a_listed_port: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

/// Bytes of a stream.
const BYTES: u64 = 4 << 20;
const MINUTE: Duration = Duration::from_secs(60);

fn serve(stand: &Stand, port: u16, service: TcpService) -> TcpServer<IpAddr> {
    let address = (stand.cell.loopback(), port);
    TcpServer::start(&stand.world.host, address, service).unwrap()
}

/// A port of the gateway.
fn gateway(stand: &Stand, port: u16) -> SocketAddr {
    at(stand.cell.gateway(), port)
}

fn a_listed_port_is_a_stream_both_ways_to_the_hosts_service(cell: Cell) {
    let stand = Stand::of(
        cell,
        &["--default", "deny", "--host-loopback", "8080:80/tcp"],
    );
    let server = serve(&stand, 80, TcpService::Streams);
    let to = gateway(&stand, 8080);
    let down = stand.run(|| tcp::download(to, BYTES, 1, MINUTE)).unwrap();
    assert_eq!(down.receipt, Receipt::expected(BYTES, 1));
    // It ends its side, and the receipt comes the other way after.
    stand.run(|| tcp::upload(to, BYTES, 2, MINUTE)).unwrap();
    // The service sees the host itself.
    let peers = server.peers();
    assert_eq!(peers.len(), 2);
    assert!(
        peers.iter().all(|peer| peer.ip() == cell.loopback()),
        "{peers:?}"
    );
    let host = at(cell.loopback(), 80).to_string();
    let remote = to.to_string();
    let (yes, said) = stand.slipgate.why("tap0", &remote, "tcp").unwrap();
    assert!(yes && said.contains(&host), "{said}");
    let ends = eventually("both ends are recorded", || {
        let ends = stand.events("flow_end");
        (ends.len() == 2).then_some(ends)
    });
    assert_eq!(stand.events("flow_start").len(), 2);
    // The one that ended first need not have begun first.
    let nats: HashSet<_> = ends
        .iter()
        .map(|end| end["nat"].as_str().unwrap())
        .collect();
    let peers: Vec<_> = peers.iter().map(SocketAddr::to_string).collect();
    assert_eq!(nats, peers.iter().map(String::as_str).collect());
    for end in &ends {
        assert_eq!(end["remote"], remote, "{end}");
        assert_eq!(end["host"], host);
        assert_eq!(end["rule_text"], "--host-loopback 8080:80/tcp");
        assert_eq!(
            (&end["path"], &end["end"]),
            (&"relay".into(), &"closed".into())
        );
        assert_eq!(end["direction"], "outbound");
        assert!(end["connect_us"].as_u64() > Some(0));
        let bytes = |way: &str| end[way].as_u64().unwrap();
        assert!(bytes("tx_bytes") + bytes("rx_bytes") > BYTES, "{end}");
    }
}

fn what_is_not_listed_is_refused_whatever_listens(cell: Cell) {
    let [rule, loopback] = [cell.gateway(), cell.loopback()].map(|ip| ip.to_string());
    let none = Stand::of(cell, &["--allow", &rule, "--allow", &loopback]);
    let _server = serve(&none, 80, TcpService::Echo);
    let _others = serve(&none, 8080, TcpService::Echo);
    for port in [80, 8080] {
        none.run(|| tcp::expect_refused(gateway(&none, port)))
            .unwrap();
    }
    let to = gateway(&none, 80).to_string();
    let (yes, said) = none.slipgate.why("tap0", &to, "tcp").unwrap();
    assert!(!yes, "{said}");
    drop(none);

    let stand = Stand::of(
        cell,
        &[
            "--host-loopback",
            "8080:80/tcp",
            "--host-loopback",
            "9000/udp",
        ],
    );
    let server = serve(&stand, 80, TcpService::Echo);
    let _beside = serve(&stand, 8081, TcpService::Echo);
    let _tcp = serve(&stand, 9000, TcpService::Echo);
    for port in [80, 8081, 9000] {
        stand
            .run(|| tcp::expect_refused(gateway(&stand, port)))
            .unwrap();
    }
    let echo =
        UdpServer::start(&stand.world.host, (cell.loopback(), 8080), UdpService::Echo).unwrap();
    let probe = |port| {
        stand
            .run(|| udp::probe(gateway(&stand, port), b"x", WAIT))
            .unwrap()
    };
    assert!(matches!(probe(8080), UdpOutcome::Refused(..)));
    assert_eq!((server.accepted(), echo.datagrams()), (0, 0));
    if cell.is_ipv6() {
        // The gateway's address of the link is none of these.
        let refused = stand.run(|| {
            let device = if_nametoindex(GUEST_DEVICE).unwrap();
            let local = "fe80::53:4cff:fe47:1".parse().unwrap();
            tcp::expect_refused(SocketAddrV6::new(local, 8080, 0, device))
        });
        refused.unwrap();
    }
    // The positive control.
    stand
        .run(|| tcp::request_response(gateway(&stand, 8080), 10, 1, WAIT))
        .unwrap();
    assert_eq!(server.accepted(), 1);
    // Nobody there: refused, as on the host, and at once.
    drop(server);
    stand
        .run(|| tcp::expect_refused(gateway(&stand, 8080)))
        .unwrap();
    assert!(matches!(probe(9000), UdpOutcome::Refused(..)));
}

fn a_service_of_the_other_family_is_not_reached(cell: Cell) {
    let stand = Stand::of(cell, &["--host-loopback", "8080:80"]);
    let other: IpAddr = match cell.is_ipv6() {
        false => "::1".parse().unwrap(),
        true => "127.0.0.1".parse().unwrap(),
    };
    // A host without IPv6 has no such address.
    if !cell.is_ipv6() {
        world_ipv6::enable(&stand.world.host, &["lo"]).unwrap();
    }
    let host = &stand.world.host;
    let others = TcpServer::start(host, (other, 80), TcpService::Echo).unwrap();
    let to = gateway(&stand, 8080);
    stand.run(|| tcp::expect_refused(to)).unwrap();
    let ours = serve(&stand, 80, TcpService::Echo);
    stand
        .run(|| tcp::request_response(to, 10, 1, WAIT))
        .unwrap();
    assert_eq!((others.accepted(), ours.accepted()), (0, 1));
}

fn datagrams_come_back_to_the_port_that_asked(cell: Cell) {
    let _turn =
        turns::alone("a datagram each millisecond waits for the engine only as far as credits go");
    let stand = Stand::of(
        cell,
        &[
            "--default",
            "deny",
            "--host-loopback",
            "5300-5301:5353-5354/udp",
        ],
    );
    let echo =
        UdpServer::start(&stand.world.host, (cell.loopback(), 5354), UdpService::Echo).unwrap();
    let pace = Duration::from_millis(1);
    let to = gateway(&stand, 5301);
    let report = stand
        .run(|| udp::paced(to, 200, 1_200, pace, WAIT))
        .unwrap();
    assert_eq!((report.received, report.corrupt), (200, 0), "{report:?}");
    // As one frame with UDP_SEGMENT: the service has them one by one.
    let report = stand.run(|| udp::burst(to, 20, 1_000, WAIT)).unwrap();
    assert_eq!((report.received, report.corrupt), (20, 0), "{report:?}");
    assert_eq!(echo.datagrams(), 220);
    eventually("both flows are recorded", || {
        (stand.events("flow_start").len() == 2).then_some(())
    });
}

fn half_closed_reset_and_held_up_it_goes_as_between_two_hosts(cell: Cell) {
    let stand = Stand::of(cell, &["--host-loopback", "7000-7002"]);
    let _digest = serve(&stand, 7000, TcpService::Digest);
    let _hold = serve(&stand, 7001, TcpService::Hold);
    let reset = serve(&stand, 7002, TcpService::Reset);
    // The guest ends, the service says what it got.
    let mut stream = stand
        .run(|| tcp::connect(gateway(&stand, 7000), WAIT))
        .unwrap();
    std::io::Write::write_all(&mut stream, b"abc").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut digest = String::new();
    stream.read_to_string(&mut digest).unwrap();
    assert!(digest.starts_with("ba7816bf8f01cfea"), "{digest}");
    // A service that does not read: the guest is held up, within bounds.
    let mut stream = stand
        .run(|| tcp::connect(gateway(&stand, 7001), WAIT))
        .unwrap();
    stream.set_write_timeout(Some(crate::BRIEFLY)).unwrap();
    let piece = vec![0; 1 << 20];
    let mut sent = 0;
    while let Ok(len @ 1..) = std::io::Write::write(&mut stream, &piece) {
        sent += len;
        assert!(sent < 64 << 20, "nobody reads, and it takes {sent} bytes");
    }
    // A service that resets, which may be sooner than the guest has looked at its connection, or
    // than its SYN is answered: the relay connects to the service first.
    let said = match stand.run(|| tcp::connect(gateway(&stand, 7002), WAIT)) {
        Ok(mut stream) => format!("{:?}", stream.read(&mut [0; 1])),
        Err(error) => format!("{error:?}"),
    };
    let ends = ["ConnectionReset", "ConnectionRefused"];
    assert!(ends.iter().any(|end| said.contains(end)), "{said}");
    assert_eq!(reset.accepted(), 1);
}

/// Two VMs with a policy each, of which the first one's list is `lists`.
fn two(cell: Cell, scratch: &Path, lists: &str) -> (Stand, String) {
    let file = scratch.join("policy.toml");
    fs::write(&file, policy(cell, lists)).unwrap();
    let name = file.display().to_string();
    let neighbour = GuestConfig::new("tap1");
    let stand = Stand::of_several(
        cell,
        WorldConfig::default(),
        &[],
        &[neighbour],
        &["--policy", &name],
    );
    (stand, name)
}

fn policy(cell: Cell, lists: &str) -> String {
    format!(
        "[policy.a]\ndefault = \"deny\"\nhost_loopback = {{ ports = [{lists}] }}\n\
         [policy.b]\ndefault = \"allow\"\nrules = [{{ allow = \"{}\" }}]\n\
         [vms]\ntap0 = \"a\"\ntap1 = \"b\"\n",
        cell.gateway()
    )
}

fn another_vms_list_is_nobody_elses(cell: Cell) {
    let scratch = tempfile::tempdir().unwrap();
    let (stand, _) = two(cell, scratch.path(), "8080");
    let server = serve(&stand, 8080, TcpService::Echo);
    let to = gateway(&stand, 8080);
    stand
        .run(|| tcp::request_response(to, 10, 1, WAIT))
        .unwrap();
    stand.neighbours[0].run(|| tcp::expect_refused(to)).unwrap();
    assert_eq!(server.accepted(), 1);
    let (yes, said) = stand.slipgate.why("tap1", &to.to_string(), "tcp").unwrap();
    assert!(!yes, "{said}");
}

fn a_deny_beats_the_list(cell: Cell) {
    let denied = cell.destination(cell.gateway(), "8081");
    let flags = ["--deny", &denied, "--host-loopback", "8080-8081"];
    let stand = Stand::of(cell, &[&["--default", "deny"], &flags[..]].concat());
    let [open, shut] = [8080, 8081].map(|port| serve(&stand, port, TcpService::Echo));
    let [to, beside] = [8080, 8081].map(|port| gateway(&stand, port));
    stand
        .run(|| tcp::request_response(to, 10, 1, WAIT))
        .unwrap();
    stand.run(|| tcp::expect_refused(beside)).unwrap();
    assert_eq!((open.accepted(), shut.accepted()), (1, 0));
    let (yes, said) = stand
        .slipgate
        .why("tap0", &beside.to_string(), "tcp")
        .unwrap();
    assert!(!yes && said.contains(&format!("deny {denied}")), "{said}");
    assert_eq!(stand.refused("rule"), 1);
}

fn echoing(stand: &Stand, port: u16) -> std::net::TcpStream {
    let to = gateway(stand, port);
    let mut stream = stand.run(|| tcp::connect(to, WAIT)).unwrap();
    EchoSession::new(&mut stream).round(100).unwrap();
    stream
}

fn is_reset(stream: &mut std::net::TcpStream) {
    let error = stream.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// How the connections of the guest have ended, by the flow log.
fn ends(stand: &Stand, count: usize) -> Vec<String> {
    let ends = eventually("the ends are recorded", || {
        let ends = stand.events("flow_end");
        (ends.len() == count).then_some(ends)
    });
    let guest = at(stand.cell.guest(), 1).to_string();
    let guest = guest.trim_end_matches('1');
    let how = ends.iter().map(|end| {
        assert!(end["guest"].as_str().unwrap().starts_with(guest), "{end}");
        end["end"].as_str().unwrap().to_owned()
    });
    how.collect()
}

fn a_port_taken_out_by_apply_ends(cell: Cell) {
    let scratch = tempfile::tempdir().unwrap();
    let (stand, file) = two(cell, scratch.path(), "8080, 8081");
    let _servers = [8080, 8081].map(|port| serve(&stand, port, TcpService::Echo));
    let (mut stays, mut goes) = (echoing(&stand, 8080), echoing(&stand, 8081));
    fs::write(&file, policy(cell, "8080")).unwrap();
    let said = stand.slipgate.run(&["policy", "apply"]).unwrap().stdout;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains('1'), "{said}");
    is_reset(&mut goes);
    let out = gateway(&stand, 8081);
    stand.run(|| tcp::expect_refused(out)).unwrap();
    EchoSession::new(&mut stays).round(100).unwrap();
    assert_eq!(ends(&stand, 1), ["policy"]);
}

fn freeze_and_cut_hold_for_a_listed_port(cell: Cell) {
    let stand = Stand::of(cell, &["--host-loopback", "8080"]);
    let _server = serve(&stand, 8080, TcpService::Echo);
    let mut stream = echoing(&stand, 8080);
    stand.slipgate.run(&["freeze", "tap0"]).unwrap();
    stream.set_read_timeout(Some(crate::BRIEFLY)).unwrap();
    EchoSession::new(&mut stream).round(100).unwrap_err();
    stand.slipgate.run(&["thaw", "tap0"]).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    stream.read_exact(&mut [0; 100]).unwrap();
    stand.slipgate.run(&["cut", "tap0"]).unwrap();
    is_reset(&mut stream);
    assert_eq!(ends(&stand, 1), ["cut"]);
}
