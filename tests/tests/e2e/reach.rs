//! Destinations that a guest's own stack reaches: the world by the host's address, and those that
//! rules open.

use std::{
    net::{IpAddr, SocketAddr},
    process::{Command, Stdio},
};

use slipgate_testbed::{
    clients::{icmp, tcp, udp, udp::UdpOutcome},
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    streams::Receipt,
    world::{HOST, SERVER, SERVER_2},
    world_ipv6::{HOST6, SERVER6, SERVER6_2},
};

use crate::{
    Cell, Stand, WAIT,
    matrix::{Family, matrix},
};

matrix! {
    tcp_udp_and_ping_reach_the_world_from_the_hosts_address: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    where_nobody_may_ping_an_echo_is_answered_as_prohibited_and_doctor_says_why: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "the kernel's programs send echoes without a socket";
    rules_by_prefix_hold_for_the_family_they_name: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

const BYTES: u64 = 2_000_000;

fn tcp_udp_and_ping_reach_the_world_from_the_hosts_address(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let ip = cell.family.choose(SERVER, SERVER6);
    let host = cell.family.choose(HOST, HOST6);
    let service = SocketAddr::new(ip, 7000);
    let net = &stand.world.net;
    let by_tcp = TcpServer::start(net, (ip, 7000), TcpService::Streams).unwrap();
    let by_udp = UdpServer::start(net, (ip, 7000), UdpService::Echo).unwrap();
    stand.run(|| {
        tcp::upload(service, BYTES, 1, WAIT).unwrap();
        let down = tcp::download(service, BYTES, 2, WAIT).unwrap();
        assert_eq!(down.receipt, Receipt::expected(BYTES, 2));
        let sent = udp::probe(service, b"datagram", WAIT).unwrap();
        assert!(matches!(sent, UdpOutcome::Answered(_)), "{sent:?}");
        match ip {
            IpAddr::V4(ip) => {
                let ping = icmp::ping(ip, 1, 1_000, WAIT).unwrap();
                assert_eq!((ping.replies.len(), ping.corrupt), (1, 0), "{ping:?}");
            }
            IpAddr::V6(ip) => assert!(icmp::ping6(ip, 1_000, WAIT).unwrap().is_some()),
        }
    });
    let peers = by_tcp.peers().into_iter().chain(by_udp.peers().into_keys());
    let peers: Vec<IpAddr> = peers.map(|peer| peer.ip()).collect();
    assert_eq!(peers, [host; 3], "the servers see the host");

    let flows = stand.flows_to(service);
    let of = |proto: &'static str| flows.iter().filter(move |flow| flow.proto == proto);
    let nat = SocketAddr::new(host, 1).to_string();
    let nat = nat.trim_end_matches('1');
    assert_eq!((of("tcp").count(), of("udp").count()), (2, 1), "{flows:?}");
    assert!(
        flows.iter().all(|flow| flow.nat.starts_with(nat)),
        "{flows:?}"
    );
    assert!(of("tcp").any(|flow| flow.tx_bytes > BYTES), "{flows:?}");
    assert!(of("tcp").any(|flow| flow.rx_bytes > BYTES), "{flows:?}");
    if cell.is_hybrid() {
        // Established packets pass the kernel alone: the engine has seen few of these frames.
        assert!(stand.port_frames() < 200, "{}", stand.port_frames());
    }
    assert!(stand.slipgate.stop().unwrap().success());
    let records = stand.records();
    for proto in ["tcp", "udp", "icmp"] {
        let ip = ip.to_string();
        let is_recorded = records
            .iter()
            .any(|end| end["proto"] == proto && end.to_string().contains(&ip));
        assert!(is_recorded, "{proto}: {records:#?}");
    }
}

fn where_nobody_may_ping_an_echo_is_answered_as_prohibited_and_doctor_says_why(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let udp = UdpServer::start(&stand.world.net, (cell.server(), 7000), UdpService::Echo).unwrap();
    let may_ping = |range| {
        let host = &stand.world.host;
        host.sysctl("net.ipv4.ping_group_range", range).unwrap();
    };
    let doctor = || {
        let mut command = stand.slipgate.command(&["doctor"]).unwrap();
        command.stdout(Stdio::piped());
        let doctor = stand.world.host.spawn(command).unwrap();
        // Its status is about hybrid mode.
        String::from_utf8(doctor.wait_with_output().unwrap().stdout).unwrap()
    };
    let server = cell.server().to_string();
    let ping = || {
        let command = || {
            Command::new("ping")
                .args(["-n", "-c1", "-W30", &server])
                .output()
        };
        let output = stand.run(command).unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    may_ping("1 0");
    let said = ping();
    // 3/13 of ICMP and 1/1 of ICMPv6, as iputils call them.
    let told = match cell.is_ipv6() {
        false => "Packet filtered",
        true => "Administratively prohibited",
    };
    assert!(
        said.contains(told) && said.contains(" 0 received"),
        "{said}"
    );
    let sent = stand
        .run(|| udp::probe(udp.address(), b"datagram", WAIT))
        .unwrap();
    assert!(matches!(sent, UdpOutcome::Answered(_)), "{sent:?}");
    let said = doctor();
    assert!(
        said.contains("no ping sockets") && said.contains("net.ipv4.ping_group_range"),
        "{said}"
    );
    // The next one may.
    may_ping("0 2147483647");
    let said = ping();
    assert!(said.contains(" 1 received"), "{said}");
    let said = doctor();
    assert!(said.contains("guests in user mode can ping"), "{said}");
}

fn rules_by_prefix_hold_for_the_family_they_name(cell: Cell) {
    let (ip, other) = (
        cell.family.choose(SERVER, SERVER6),
        cell.family.choose(SERVER_2, SERVER6_2),
    );
    let host = cell.family.choose(HOST, HOST6);
    let rule = match cell.is_ipv6() {
        false => format!("{ip}/32:7000/tcp"),
        true => format!("[{ip}/128]:7000/tcp"),
    };
    // The guest has both families, in each cell.
    let both = Cell {
        family: Family::Ipv6,
        ..cell
    };
    let stand = Stand::of(both, &["--default", "deny", "--allow", &rule]);
    let serve = |ip, port| {
        let net = &stand.world.net;
        TcpServer::start(net, (ip, port), TcpService::Echo).unwrap()
    };
    let allowed = serve(ip, 7000);
    // The same server's address of the other family, too.
    let of_other_family = match cell.family {
        Family::Ipv4 => SERVER6.into(),
        Family::Ipv6 => SERVER.into(),
    };
    let denied = [
        serve(ip, 7001),
        serve(other, 7000),
        serve(of_other_family, 7000),
    ];
    stand.run(|| {
        tcp::connect(allowed.address(), WAIT).unwrap();
        for server in &denied {
            tcp::expect_refused(server.address()).unwrap();
            assert_eq!(server.accepted(), 0);
        }
        let sent = udp::probe(allowed.address(), b"x", WAIT).unwrap();
        assert!(matches!(sent, UdpOutcome::Refused(..)), "{sent:?}");
    });
    let why = |to: SocketAddr| stand.slipgate.why("tap0", &to.to_string(), "tcp").unwrap();
    // The host is protected, whatever the rules say.
    let (admitted, said) = why(SocketAddr::new(host, 22));
    assert!(!admitted, "{said}");
    let (admitted, said) = why(allowed.address());
    assert!(admitted && said.contains(&host.to_string()), "{said}");
}
