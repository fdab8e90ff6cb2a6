//! A refusal, an ICMP error and silence are told apart; a lease is what the server gave.

use std::{
    net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket},
    time::Duration,
};

use nix::sys::socket::{getsockopt, sockopt::TcpCongestion};

use slipgate_testbed::{
    CONGESTION_CONTROL, GUEST_DEVICE, Guest, GuestConfig, NetNs, World,
    clients::{IcmpError, icmp, tcp, tcp::ConnectOutcome, udp, udp::UdpOutcome},
    dhcp, require_root_and_tun,
    servers::{TcpServer, TcpService},
    world::SERVER,
};
use smoltcp::wire::{DhcpMessageType, DhcpOption, DhcpPacket, DhcpRepr};

use super::{GATEWAY, GUEST, WAIT, at, forwarding, masqueraded};

const BRIEFLY: Duration = Duration::from_millis(300);

#[test]
fn refusals_are_told_from_silence() {
    require_root_and_tun!();
    let (world, guest) = masqueraded(forwarding(), GuestConfig::new("tap0"));
    let server = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Close).unwrap();
    let rules = "table ip filter {
        chain forward {
            type filter hook forward priority filter;
            tcp dport 1 drop
            tcp dport 2 reject with icmp admin-prohibited
            udp dport 1 drop
            udp dport 2 reject with icmp admin-prohibited
            ip ttl 63 icmp type echo-request ip length 128 reject with icmp admin-prohibited
        }
    }";
    world.host.nft(rules).unwrap();
    guest.run(|| {
        let connect = |port| tcp::connect_outcome(at(SERVER, port), BRIEFLY).unwrap();
        assert!(matches!(connect(7000), ConnectOutcome::Connected(_)));
        assert!(matches!(connect(1), ConnectOutcome::TimedOut(took) if took >= BRIEFLY));
        assert!(matches!(
            connect(2),
            ConnectOutcome::Unreachable(libc::EHOSTUNREACH, _)
        ));
        assert!(matches!(connect(3), ConnectOutcome::Refused(_)));
        tcp::expect_refused(at(SERVER, 3)).unwrap();
        tcp::expect_refused(server.address()).unwrap_err();
        let send = |port| udp::probe(at(SERVER, port), b"x", BRIEFLY).unwrap();
        assert_eq!(send(1), UdpOutcome::TimedOut);
        assert!(matches!(
            send(2),
            UdpOutcome::Refused(IcmpError::PROHIBITED, _)
        ));
        assert!(matches!(
            send(3),
            UdpOutcome::Refused(IcmpError { kind: 3, code: 3 }, _)
        ));
        let refused = icmp::ping(SERVER, 1, 100, BRIEFLY).unwrap();
        assert_eq!(refused.errors, [(IcmpError::PROHIBITED, GATEWAY)]);
        assert!(refused.replies.is_empty());
        let expired = icmp::ping_with_ttl(SERVER, 1, 10, 1, BRIEFLY).unwrap();
        assert_eq!(expired.errors, [(IcmpError { kind: 11, code: 0 }, GATEWAY)]);
        let nobody = icmp::ping(Ipv4Addr::new(198, 18, 0, 99), 1, 10, BRIEFLY).unwrap();
        assert_eq!((nobody.sent, nobody.replies.len()), (1, 0));
    });
}

/// Answers DISCOVER and REQUEST on the TAP until nobody asks for a second.
fn serve_leases(socket: &UdpSocket) -> Vec<DhcpMessageType> {
    let mut asked = Vec::new();
    let mut buffer = [0; 2048];
    while let Ok((len, _)) = socket.recv_from(&mut buffer) {
        let packet = DhcpPacket::new_checked(&buffer[..len]).unwrap();
        let query = DhcpRepr::parse(&packet).unwrap();
        asked.push(query.message_type);
        let options = [
            DhcpOption {
                kind: 26,
                data: &[5, 0x50],
            },
            DhcpOption {
                kind: 6,
                data: &[10, 0, 2, 3],
            },
        ];
        let reply = DhcpRepr {
            message_type: match query.message_type {
                DhcpMessageType::Discover => DhcpMessageType::Offer,
                _ => DhcpMessageType::Ack,
            },
            your_ip: GUEST,
            router: Some(GATEWAY),
            subnet_mask: Some(Ipv4Addr::new(255, 255, 255, 0)),
            server_identifier: Some(GATEWAY),
            lease_duration: Some(3600),
            client_identifier: None,
            requested_ip: None,
            parameter_request_list: None,
            max_size: None,
            additional_options: &options,
            ..query
        };
        // A late OFFER of another address, which the client must not take for the ACK.
        let stray = DhcpRepr {
            message_type: DhcpMessageType::Offer,
            your_ip: Ipv4Addr::new(10, 0, 2, 99),
            ..reply.clone()
        };
        let stray = (query.message_type == DhcpMessageType::Request).then_some(stray);
        for message in stray.iter().chain([&reply]) {
            let mut bytes = vec![0; message.buffer_len()];
            message
                .emit(&mut DhcpPacket::new_unchecked(&mut bytes))
                .unwrap();
            socket.send_to(&bytes, "255.255.255.255:68").unwrap();
        }
    }
    asked
}

#[test]
fn a_lease_is_taken_applied_and_renewed() {
    require_root_and_tun!();
    let world = World::with(forwarding()).unwrap();
    let guest = Guest::new(&world, GuestConfig::new("tap0").unconfigured()).unwrap();
    world.host.ip("addr add 10.0.2.2/24 dev tap0").unwrap();
    world.host.ip("link set tap0 up").unwrap();
    // The limited broadcast goes where the default route points.
    world
        .host
        .ip("route add 255.255.255.255/32 dev tap0")
        .unwrap();
    let socket = world.host.run(|| UdpSocket::bind("0.0.0.0:67")).unwrap();
    socket.set_broadcast(true).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    let server = world
        .host
        .thread("dhcp-server", move || serve_leases(&socket));
    let lease = guest.dhcp(WAIT).unwrap();
    assert_eq!(
        (lease.address, lease.prefix, lease.router),
        (GUEST, 24, Some(GATEWAY))
    );
    assert_eq!(
        (lease.mtu, lease.duration),
        (Some(1360), Duration::from_secs(3600))
    );
    assert_eq!(lease.dns, [Ipv4Addr::new(10, 0, 2, 3)]);
    let again = dhcp::renew(&guest.ns, GUEST_DEVICE, guest.config().mac, &lease, WAIT).unwrap();
    assert_eq!(again.address, lease.address);
    let ping = guest.run(|| icmp::ping(GATEWAY, 1, 10, WAIT)).unwrap();
    assert_eq!(ping.replies.len(), 1);
    assert!(guest.ns.ip("link show eth0").unwrap().contains("mtu 1360"));
    let (discover, request) = (DhcpMessageType::Discover, DhcpMessageType::Request);
    assert_eq!(server.join().unwrap(), [discover, request, request]);
    let silence = dhcp::acquire(&guest.ns, GUEST_DEVICE, guest.config().mac, BRIEFLY);
    assert!(
        silence
            .unwrap_err()
            .to_string()
            .contains("no DHCP answer to Discover")
    );
}

fn congestion_control(connection: &TcpStream) -> String {
    let name = getsockopt(connection, TcpCongestion).unwrap();
    name.to_string_lossy().trim_end_matches('\0').to_owned()
}

/// The expectation holds for every algorithm that the machine has and a namespace may set.
#[test]
fn connections_have_the_congestion_control_that_was_asked_for() {
    require_root_and_tun!();
    let (world, guest) = masqueraded(forwarding(), GuestConfig::new("tap0"));
    let server = world
        .net
        .run(|| TcpListener::bind(at(SERVER, 7000)).unwrap());
    let both_ends = |from: &NetNs| {
        let client = from.run(|| tcp::connect(at(SERVER, 7000), WAIT)).unwrap();
        let (accepted, _) = server.accept().unwrap();
        [client, accepted].map(|end| congestion_control(&end))
    };
    for name in ["cubic", "reno", "cubic"] {
        for ns in [&guest.ns, &world.host, &world.net] {
            ns.set_congestion_control(name).unwrap();
        }
        assert_eq!(both_ends(&guest.ns), [name, name]);
        assert_eq!(both_ends(&world.host), [name, name]);
        // By loopback, too.
        assert_eq!(both_ends(&world.net), [name, name]);
    }
}

#[test]
fn a_new_namespace_has_linuxs_own_congestion_control() {
    require_root_and_tun!();
    let (world, guest) = masqueraded(forwarding(), GuestConfig::new("tap0"));
    let server = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Echo).unwrap();
    let client = guest.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    assert_eq!(congestion_control(&client), CONGESTION_CONTROL);
}
