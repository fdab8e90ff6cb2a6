//! What leads to the guest or to the host by IPv6: forwards, DNS over TCP, ports of the host's loopback.
use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread::{self, JoinHandle},
    time::Duration,
};

use slipgate_testbed::{
    NetNs,
    census::Census,
    clients::dns,
    dns_wire::{Reply, types},
    require_root_and_tun,
    servers::{Answer, DnsServer, Zone},
    world::SERVER,
};

use super::{RESOLVER, aaaa, scene::*};
use crate::{Stand, WAIT};

/// A connection that a namespace's thread accepts, and from whom it came.
fn accepting(ns: &NetNs, address: &str, port: u16) -> JoinHandle<(TcpStream, SocketAddr)> {
    let listener = ns.run(|| TcpListener::bind(at6(address, port)).unwrap());
    thread::spawn(move || {
        let (stream, peer) = listener.accept().unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        (stream, peer)
    })
}

/// Answers datagrams of the guest's port as they come.
fn echo_datagrams(stand: &Stand, port: u16) -> JoinHandle<()> {
    let socket = stand.run(|| UdpSocket::bind(at6("::", port)).unwrap());
    socket
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2_000];
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            socket.send_to(&buffer[..len], from).unwrap();
            if buffer[..len] == *b"end" {
                return;
            }
        }
    })
}

#[test]
fn ipv6_forward_from_the_uplink_runs_in_the_kernel() {
    require_root_and_tun!();
    let stand = stand6(&["--forward", "tcp:8080:80", "--forward", "udp:5353:5300"]);
    let guest = address_of(&stand).unwrap();
    let accepted = accepting(&stand.guest.ns, "::", 80);
    let census = Census::start(&stand.guest).unwrap();
    let before = stand.port_frames();
    let mut client = connect_from(&stand.world.net, at6(HOST6, 8080)).unwrap();
    let (mut server, peer) = accepted.join().unwrap();
    assert_eq!(
        peer.ip(),
        IpAddr::from(ip6(ROUTER6)),
        "it sees who connects"
    );
    let sent: Vec<u8> = (0..4_000_000_u32).map(|at| (at ^ at >> 7) as u8).collect();
    let got = thread::scope(|scope| {
        scope.spawn(|| {
            client.write_all(&sent).unwrap();
            client.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut got = Vec::new();
        server.read_to_end(&mut got).unwrap();
        got
    });
    assert!(got == sent, "the guest gets what the client sent");
    let back = thread::scope(|scope| {
        scope.spawn(|| {
            server.write_all(&sent).unwrap();
            server.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut back = Vec::new();
        client.read_to_end(&mut back).unwrap();
        back
    });
    assert!(back == sent, "and the client what the guest sent");
    let counted = census.finish(&stand.guest).unwrap();
    let handed_over = stand.port_frames() - before;
    assert!(
        handed_over < 20 && counted.ipv6 > 50,
        "{handed_over} of {counted:?}"
    );
    let flows = stand.slipgate.flows().unwrap();
    let flow = flows.iter().find(|flow| flow.proto == "tcp").unwrap();
    assert_eq!(
        (flow.guest.as_str(), flow.nat.as_str()),
        (
            &*SocketAddr::new(guest.into(), 80).to_string(),
            &*at6(HOST6, 8080).to_string()
        )
    );
    assert!(
        flow.rx_bytes > 4_000_000 && flow.tx_bytes > 4_000_000,
        "{flow:?}"
    );
    assert!(
        flow.rule.as_str().unwrap().contains("tcp:8080:80"),
        "{flow:?}"
    );

    let echo = echo_datagrams(&stand, 5300);
    for payload in [&b"one"[..], b"two", b"end"] {
        assert_eq!(
            datagram_from(&stand.world.net, at6(HOST6, 5353), payload).unwrap(),
            payload
        );
    }
    echo.join().unwrap();
    // A port beside it leads nowhere.
    assert!(connect_from(&stand.world.net, at6(HOST6, 8081)).is_err());
}

#[test]
fn ipv6_forward_of_no_address_is_of_both_families_and_of_one_of_that_alone() {
    require_root_and_tun!();
    let ours = format!("tcp:[{HOST6}]:8081:80");
    let stand = stand6(&["--forward", "tcp:8080:80"]);
    let listening = stand.world.host.run(|| {
        let four = TcpListener::bind("0.0.0.0:8080").is_err();
        let six = TcpListener::bind("[::1]:8080").is_err();
        (four, six)
    });
    assert_eq!(listening, (true, true), "both are held");
    drop(stand);
    let stand = stand6_with_address(&ours);
    let accepted = accepting(&stand.guest.ns, "::", 80);
    let mut client = connect_from(&stand.world.net, at6(HOST6, 8081)).unwrap();
    let (mut server, _) = accepted.join().unwrap();
    client.write_all(b"x").unwrap();
    server.read_exact(&mut [0]).unwrap();
    let is_free = stand
        .world
        .host
        .run(|| TcpListener::bind("0.0.0.0:8081").is_ok());
    assert!(is_free, "its port by IPv4 is nobody's");
}

/// A stand whose host has its address before slipgate starts, which takes a port of it.
fn stand6_with_address(forward: &str) -> Stand {
    let mut stand = stand6(&[]);
    stand.slipgate.kill_both().unwrap();
    stand.slipgate = stand.slipgate.again_with(&["--forward", forward]).unwrap();
    stand
}

#[test]
fn ipv6_forward_waits_for_an_address_of_the_guest() {
    require_root_and_tun!();
    let stand = unconfigured6(Default::default(), &["--forward", "tcp:8080:80"]);
    give_world(&stand.world);
    let to = at6(HOST6, 8080);
    let brief = Duration::from_millis(500);
    let refused = stand
        .world
        .net
        .run(|| TcpStream::connect_timeout(&to, brief));
    assert!(refused.is_err());
    assert!(stand.refused("no_address") > 0, "{}", stand.total());
    configure(&stand);
    let accepted = accepting(&stand.guest.ns, "::", 80);
    connect_from(&stand.world.net, to).unwrap();
    accepted.join().unwrap();
}

#[test]
fn ipv6_forward_from_the_host_itself_is_relayed() {
    require_root_and_tun!();
    let stand = stand6(&["--forward", "tcp:8080:80", "--forward", "udp:5353:5300"]);
    for host in ["::1", HOST6] {
        let accepted = accepting(&stand.guest.ns, "::", 80);
        let mut client = connect_from(&stand.world.host, at6(host, 8080)).unwrap();
        let (mut server, peer) = accepted.join().unwrap();
        assert_eq!(peer.ip(), IpAddr::from(ip6(GATEWAY6)));
        client.write_all(b"question").unwrap();
        let mut got = [0; 8];
        server.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"question");
        server.write_all(b"answered").unwrap();
        client.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"answered");
        let echo = echo_datagrams(&stand, 5300);
        assert_eq!(
            datagram_from(&stand.world.host, at6(host, 5353), b"end").unwrap(),
            b"end"
        );
        echo.join().unwrap();
    }
}

#[test]
fn ipv6_answers_that_udp_truncates_come_by_tcp() {
    require_root_and_tun!();
    let stand = stand6(&RESOLVER);
    let records = (0..100).map(|at| aaaa(&format!("2001:db8:ff::{at:x}")));
    let long = Answer::records(records.collect());
    let zone = Zone::from([("long.test".to_owned(), long.truncated())]);
    let _names = DnsServer::start(&stand.world.net, (SERVER, 53), zone).unwrap();
    let question = dns::question("long.test", types::AAAA).to_bytes();
    let by_udp = datagram_to(&stand, at6(GATEWAY6, 53), &question).unwrap();
    let by_udp = Reply::parse(&by_udp).unwrap();
    assert!(by_udp.truncated, "{by_udp:?}");
    for resolver in [GATEWAY6, "2001:4860:4860::8888"] {
        let mut stream = connect(&stand, at6(resolver, 53)).unwrap();
        let length = (question.len() as u16).to_be_bytes();
        stream
            .write_all(&[&length[..], &question].concat())
            .unwrap();
        let reply = dns::read_reply(&mut stream).unwrap();
        assert_eq!((reply.code, reply.records.len()), (0, 100));
    }
}

#[test]
fn ipv6_listed_port_leads_to_the_hosts_loopback_by_ipv6() {
    require_root_and_tun!();
    let stand = stand6(&["--default", "deny", "--host-loopback", "8080:80"]);
    let (yes, said) = stand
        .slipgate
        .why("tap0", &format!("[{GATEWAY6}]:8080"), "tcp")
        .unwrap();
    assert!(yes && said.contains("[::1]:80"), "{said}");
    // Nobody listens at ::1: refused at once, whoever does at 127.0.0.1.
    let _four = stand
        .world
        .host
        .run(|| TcpListener::bind("127.0.0.1:80").unwrap());
    assert!(connect(&stand, at6(GATEWAY6, 8080)).is_err());
    let accepted = accepting(&stand.world.host, "::1", 80);
    let mut client = connect(&stand, at6(GATEWAY6, 8080)).unwrap();
    let (mut service, peer) = accepted.join().unwrap();
    assert_eq!(peer.ip(), IpAddr::from(Ipv6Addr::LOCALHOST));
    client.write_all(b"by six").unwrap();
    let mut got = [0; 6];
    service.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"by six");
    let udp = stand
        .world
        .host
        .run(|| UdpSocket::bind("[::1]:80").unwrap());
    let answering = thread::spawn(move || {
        let mut buffer = [0; 100];
        let (len, from) = udp.recv_from(&mut buffer).unwrap();
        udp.send_to(&buffer[..len], from).unwrap();
    });
    assert_eq!(
        datagram_to(&stand, at6(GATEWAY6, 8080), b"datagram").unwrap(),
        b"datagram"
    );
    answering.join().unwrap();
    // A port that is not listed is refused, and so is the link-local address of the gateway.
    assert!(connect(&stand, at6(GATEWAY6, 80)).is_err());
    let local = stand.run(|| on_link("fe80::53:4cff:fe47:1", 8080));
    assert!(connect(&stand, local).is_err());
}
