//! Ports of the gateway that lead to the host's loopback: listed ports are reachable as from the
//! host, and no others.

use std::{
    fs,
    io::Read,
    net::{Ipv4Addr, Shutdown},
    path::Path,
};

use slipgate_testbed::{
    GuestConfig, WorldConfig,
    clients::{
        tcp::{self, EchoSession},
        udp::{self, UdpOutcome},
    },
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    streams::Receipt,
};

use crate::{GATEWAY, GUEST, Stand, WAIT, at, eventually};

const BYTES: u64 = 16 << 20;
const HOSTS: Ipv4Addr = Ipv4Addr::LOCALHOST;

fn serve(stand: &Stand, port: u16, service: TcpService) -> TcpServer {
    TcpServer::start(&stand.world.host, (HOSTS, port), service).unwrap()
}

#[test]
fn a_listed_port_is_a_stream_both_ways_to_the_hosts_service() {
    require_root_and_tun!();
    let stand = Stand::new(&["--default", "deny", "--host-loopback", "8080:80/tcp"]);
    let server = serve(&stand, 80, TcpService::Streams);
    let to = at(GATEWAY, 8080);
    let down = stand.run(|| tcp::download(to, BYTES, 1, WAIT)).unwrap();
    assert_eq!(down.receipt, Receipt::expected(BYTES, 1));
    // It ends its side, and the receipt comes the other way after.
    stand.run(|| tcp::upload(to, BYTES, 2, WAIT)).unwrap();
    // The service sees the host itself.
    let peers = server.peers();
    assert_eq!(peers.len(), 2);
    assert!(peers.iter().all(|peer| *peer.ip() == HOSTS), "{peers:?}");
    let (yes, said) = stand.slipgate.why("tap0", "10.0.2.2:8080", "tcp").unwrap();
    assert!(yes && said.contains("127.0.0.1:80"), "{said}");
    let ends = eventually("both ends are recorded", || {
        let ends = stand.events("flow_end");
        (ends.len() == 2).then_some(ends)
    });
    assert_eq!(stand.events("flow_start").len(), 2);
    for (end, peer) in ends.iter().zip(&peers) {
        assert_eq!(end["remote"], "10.0.2.2:8080", "{end}");
        assert_eq!(end["host"], "127.0.0.1:80");
        assert_eq!(end["nat"], peer.to_string());
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

#[test]
fn what_is_not_listed_is_refused_whatever_listens() {
    require_root_and_tun!();
    let none = Stand::new(&["--allow", "10.0.2.2", "--allow", "127.0.0.1"]);
    let _server = serve(&none, 80, TcpService::Echo);
    let _others = serve(&none, 8080, TcpService::Echo);
    for to in [at(GATEWAY, 80), at(GATEWAY, 8080)] {
        none.run(|| tcp::expect_refused(to)).unwrap();
    }
    let (yes, said) = none.slipgate.why("tap0", "10.0.2.2:80", "tcp").unwrap();
    assert!(!yes, "{said}");
    drop(none);

    let stand = Stand::new(&[
        "--host-loopback",
        "8080:80/tcp",
        "--host-loopback",
        "9000/udp",
    ]);
    let server = serve(&stand, 80, TcpService::Echo);
    let _beside = serve(&stand, 8081, TcpService::Echo);
    let _tcp = serve(&stand, 9000, TcpService::Echo);
    for port in [80, 8081, 9000] {
        stand
            .run(|| tcp::expect_refused(at(GATEWAY, port)))
            .unwrap();
    }
    let echo = UdpServer::start(&stand.world.host, (HOSTS, 8080), UdpService::Echo).unwrap();
    let probe = |port| {
        stand
            .run(|| udp::probe(at(GATEWAY, port), b"x", WAIT))
            .unwrap()
    };
    assert!(matches!(probe(8080), UdpOutcome::Refused(..)));
    assert_eq!((server.accepted(), echo.datagrams()), (0, 0));
    // The positive control.
    stand
        .run(|| tcp::request_response(at(GATEWAY, 8080), 10, 1, WAIT))
        .unwrap();
    assert_eq!(server.accepted(), 1);
    // Nobody there: refused, as on the host, and at once.
    drop(server);
    stand
        .run(|| tcp::expect_refused(at(GATEWAY, 8080)))
        .unwrap();
    assert!(matches!(probe(9000), UdpOutcome::Refused(..)));
}

#[test]
fn datagrams_come_back_to_the_port_that_asked() {
    require_root_and_tun!();
    let stand = Stand::new(&[
        "--default",
        "deny",
        "--host-loopback",
        "5300-5301:5353-5354/udp",
    ]);
    let echo = UdpServer::start(&stand.world.host, (HOSTS, 5354), UdpService::Echo).unwrap();
    let pace = std::time::Duration::from_millis(1);
    let to = at(GATEWAY, 5301);
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

#[test]
fn half_closed_reset_and_held_up_it_goes_as_between_two_hosts() {
    require_root_and_tun!();
    let stand = Stand::new(&["--host-loopback", "7000-7002"]);
    let _digest = serve(&stand, 7000, TcpService::Digest);
    let _hold = serve(&stand, 7001, TcpService::Hold);
    let reset = serve(&stand, 7002, TcpService::Reset);
    // The guest ends, the service says what it got.
    let mut stream = stand.run(|| tcp::connect(at(GATEWAY, 7000), WAIT)).unwrap();
    std::io::Write::write_all(&mut stream, b"abc").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut digest = String::new();
    stream.read_to_string(&mut digest).unwrap();
    assert!(digest.starts_with("ba7816bf8f01cfea"), "{digest}");
    // A service that does not read: the guest is held up, within bounds.
    let mut stream = stand.run(|| tcp::connect(at(GATEWAY, 7001), WAIT)).unwrap();
    stream.set_write_timeout(Some(crate::BRIEFLY)).unwrap();
    let piece = vec![0; 1 << 20];
    let mut sent = 0;
    while let Ok(len @ 1..) = std::io::Write::write(&mut stream, &piece) {
        sent += len;
        assert!(sent < 64 << 20, "nobody reads, and it takes {sent} bytes");
    }
    // A service that resets, which may be sooner than the guest has looked at its connection, or
    // than its SYN is answered: the relay connects to the service first.
    let said = match stand.run(|| tcp::connect(at(GATEWAY, 7002), WAIT)) {
        Ok(mut stream) => format!("{:?}", stream.read(&mut [0; 1])),
        Err(error) => format!("{error:?}"),
    };
    let ends = ["ConnectionReset", "ConnectionRefused"];
    assert!(ends.iter().any(|end| said.contains(end)), "{said}");
    assert_eq!(reset.accepted(), 1);
}

/// Two VMs with a policy each, of which the first one's is `lists`.
fn two(scratch: &Path, lists: &str, rules: &str) -> (Stand, String) {
    let file = scratch.join("policy.toml");
    let write = |text: &str| fs::write(&file, text).unwrap();
    write(&policy(lists, rules));
    let name = file.display().to_string();
    let neighbour = GuestConfig::new("tap1");
    let stand = Stand::beside(
        WorldConfig::default(),
        GuestConfig::new("tap0"),
        &[neighbour],
        &["--policy", &name],
    );
    (stand, name)
}

fn policy(lists: &str, rules: &str) -> String {
    format!(
        "[policy.a]\ndefault = \"deny\"\nrules = [{rules}]\nhost_loopback = {{ ports = [{lists}] }}\n\
         [policy.b]\ndefault = \"allow\"\nrules = [{{ allow = \"10.0.2.2\" }}]\n\
         [vms]\ntap0 = \"a\"\ntap1 = \"b\"\n"
    )
}

#[test]
fn another_vms_list_is_nobody_elses_and_a_deny_beats_it() {
    require_root_and_tun!();
    let scratch = tempfile::tempdir().unwrap();
    let rules = "{ deny = \"10.0.2.2:8081\" }";
    let (stand, _) = two(scratch.path(), "8080, 8081", rules);
    let allowed = serve(&stand, 8080, TcpService::Echo);
    let denied = serve(&stand, 8081, TcpService::Echo);
    stand
        .run(|| tcp::request_response(at(GATEWAY, 8080), 10, 1, WAIT))
        .unwrap();
    stand.neighbours[0]
        .run(|| tcp::expect_refused(at(GATEWAY, 8080)))
        .unwrap();
    let (yes, said) = stand.slipgate.why("tap1", "10.0.2.2:8080", "tcp").unwrap();
    assert!(!yes, "{said}");
    stand
        .run(|| tcp::expect_refused(at(GATEWAY, 8081)))
        .unwrap();
    assert_eq!((allowed.accepted(), denied.accepted()), (1, 0));
    let (yes, said) = stand.slipgate.why("tap0", "10.0.2.2:8081", "tcp").unwrap();
    assert!(!yes && said.contains("deny 10.0.2.2:8081"), "{said}");
    assert_eq!(stand.refused("rule"), 1);
}

#[test]
fn a_port_taken_out_by_apply_ends_and_freeze_and_cut_hold_for_it() {
    require_root_and_tun!();
    let scratch = tempfile::tempdir().unwrap();
    let (stand, file) = two(scratch.path(), "8080, 8081", "");
    let _one = serve(&stand, 8080, TcpService::Echo);
    let _two = serve(&stand, 8081, TcpService::Echo);
    let connect = |port| stand.run(|| tcp::connect(at(GATEWAY, port), WAIT)).unwrap();
    let (mut stays, mut goes) = (connect(8080), connect(8081));
    EchoSession::new(&mut stays).round(100).unwrap();
    EchoSession::new(&mut goes).round(100).unwrap();
    fs::write(&file, policy("8080", "")).unwrap();
    let said = stand.slipgate.run(&["policy", "apply"]).unwrap().stdout;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains('1'), "{said}");
    let error = goes.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    stand
        .run(|| tcp::expect_refused(at(GATEWAY, 8081)))
        .unwrap();
    EchoSession::new(&mut stays).round(100).unwrap();

    stand.slipgate.run(&["freeze", "tap0"]).unwrap();
    stays.set_read_timeout(Some(crate::BRIEFLY)).unwrap();
    EchoSession::new(&mut stays).round(100).unwrap_err();
    stand.slipgate.run(&["thaw", "tap0"]).unwrap();
    stays.set_read_timeout(Some(WAIT)).unwrap();
    stays.read_exact(&mut [0; 100]).unwrap();
    stand.slipgate.run(&["cut", "tap0"]).unwrap();
    let error = stays.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    let ends = eventually("both ends are recorded", || {
        let ends = stand.events("flow_end");
        (ends.len() == 2).then_some(ends)
    });
    let how: Vec<_> = ends
        .iter()
        .map(|end| end["end"].as_str().unwrap())
        .collect();
    assert_eq!(how, ["policy", "cut"]);
    assert!(ends.iter().all(|end| {
        end["guest"]
            .as_str()
            .unwrap()
            .starts_with(&GUEST.to_string())
    }));
}
