//! ICMP errors of a router: time exceeded, fragmentation needed, unreachable; and MSS clamping.

use std::{
    net::{Ipv4Addr, UdpSocket},
    os::fd::AsRawFd as _,
    time::Duration,
};

use slipgate_testbed::{
    Capture, GuestConfig, NetNs, WorldConfig,
    clients::{IcmpError, icmp, tcp, udp, udp::UdpOutcome},
    frame::FrameBuilder,
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::{SERVER, UPLINK},
};

use crate::{BRIEFLY, GATEWAY, GUEST, Stand, WAIT, at, datagram};

#[test]
fn a_spent_ttl_is_answered_by_the_gateway_and_a_port_unreachable_comes_through() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    stand.run(|| {
        let expired = icmp::ping_with_ttl(SERVER, 1, 32, 1, WAIT).unwrap();
        assert_eq!(expired.errors, [(IcmpError { kind: 11, code: 0 }, GATEWAY)]);
        let arrived = icmp::ping_with_ttl(SERVER, 1, 32, 2, WAIT).unwrap();
        assert_eq!(arrived.replies.len(), 1, "{arrived:?}");
        let closed = udp::probe(at(SERVER, 9), b"x", WAIT).unwrap();
        assert!(
            matches!(
                closed,
                UdpOutcome::Refused(IcmpError { kind: 3, code: 3 }, _)
            ),
            "{closed:?}"
        );
    });
}

#[test]
fn ttl_is_spent_on_established_flows_too() {
    require_root_and_tun!();
    let stand = Stand::with(
        WorldConfig::default(),
        GuestConfig::new("tap0").hand_made(),
        &[],
    );
    let echo = UdpServer::start(&stand.world.net, (SERVER, 7), UdpService::Echo).unwrap();
    let frames = stand.guest.frames().unwrap();
    let send = |ttl| {
        let datagram = datagram(4000, echo.address()).ttl(ttl);
        let (vnet, frame) = datagram.payload(b"hello").build();
        stand.guest.inject(vnet, &frame).unwrap();
        let answer = frames.wait_for(WAIT, |frame| {
            frame.packet().is_some_and(|packet| packet.protocol != 2)
        });
        let answer = answer.expect("an answer");
        let packet = answer.packet().unwrap();
        (packet.icmp(), *packet.source.ip())
    };
    assert_eq!(send(64), (None, SERVER));
    assert_eq!(send(1), (Some((11, 0)), GATEWAY));
    assert_eq!(send(2), (None, SERVER));
    assert_eq!(stand.dropped("ttl_expired"), 1);
    assert_eq!(echo.datagrams(), 2);
}

#[test]
fn a_smaller_uplink_clamps_mss_and_asks_for_smaller_datagrams() {
    require_root_and_tun!();
    let world = WorldConfig {
        mtu: 1400,
        ..Default::default()
    };
    let stand = Stand::with(world, GuestConfig::new("tap0"), &[]);
    let server = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    let capture = Capture::start(&stand.world.host, UPLINK).unwrap();
    stand
        .run(|| tcp::upload(server.address(), 8 << 20, 1, WAIT))
        .unwrap();
    stand
        .run(|| tcp::download(server.address(), 8 << 20, 1, WAIT))
        .unwrap();
    let seen = capture.finish().unwrap();
    assert_eq!(seen.sent.longest_segment_bytes, 1400);
    assert!(seen.received.longest_segment_bytes <= 1400);

    let frames = stand.guest.frames().unwrap();
    let _echo = UdpServer::start(&stand.world.net, (SERVER, 7), UdpService::Echo).unwrap();
    let send = |size| {
        let datagram = datagram(4000, at(SERVER, 7));
        let (vnet, frame) = datagram.payload(&vec![7; size]).build();
        stand.guest.inject(vnet, &frame).unwrap();
        frames.wait_for(WAIT, |frame| {
            frame.packet().is_some_and(|packet| {
                *packet.destination.ip() == GUEST
                    && (packet.destination.port() == 4000 || packet.protocol == 1)
            })
        })
    };
    for (size, fits) in [(1372, true), (1373, false), (1372, true)] {
        let answer = send(size).expect("an answer");
        let packet = answer.packet().unwrap();
        match fits {
            true => assert_eq!(packet.protocol, 17, "{size}"),
            false => {
                assert_eq!(
                    (packet.icmp(), *packet.source.ip()),
                    (Some((3, 4)), GATEWAY)
                );
                assert_eq!(
                    packet.transport()[6..8],
                    1400u16.to_be_bytes(),
                    "the MTU to use"
                );
            }
        }
    }
}

#[test]
fn errors_about_nobodys_flow_reach_no_guest() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let echo = UdpServer::start(&stand.world.net, (SERVER, 7), UdpService::Echo).unwrap();
    let answered = stand
        .run(|| udp::probe(echo.address(), b"x", WAIT))
        .unwrap();
    assert!(matches!(answered, UdpOutcome::Answered(_)));
    let nat = stand.flow_to(echo.address()).nat;
    let nat: std::net::SocketAddrV4 = nat.parse().unwrap();
    let frames = stand.guest.frames().unwrap();
    // An error from the world, by a raw socket there, that quotes a packet from `source`.
    let report = |source| {
        let quoted = FrameBuilder::udp(source, echo.address())
            .payload(b"x")
            .build_ip();
        let error = FrameBuilder::icmp(SERVER, *nat.ip(), 3, 1, [0; 4])
            .payload(&quoted)
            .build_ip();
        stand.world.net.run(|| send_raw(*nat.ip(), &error[20..]));
        frames.wait_for(BRIEFLY, |frame| {
            frame
                .packet()
                .is_some_and(|packet| packet.icmp() == Some((3, 1)))
        })
    };
    assert!(report(at(*nat.ip(), nat.port() ^ 1)).is_none());
    let mine = report(nat).expect("the error about our flow");
    let packet = mine.packet().unwrap();
    assert!(packet.checksums_are_right(&mine.vnet));
    let quoted = slipgate_testbed::frame::Packet::parse_ip(packet.payload()).unwrap();
    assert_eq!(
        *quoted.source.ip(),
        GUEST,
        "the quoted packet is the guest's own"
    );
    std::thread::sleep(Duration::from_millis(1));
}

/// Sends an ICMP message from a namespace's own address.
pub(crate) fn send_raw(to: Ipv4Addr, message: &[u8]) {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    // SAFETY: socket takes numbers; the result is checked before it is owned.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: a fresh descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sockaddr_in is plain data, for which zeroes are valid.
    let mut address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    address.sin_family = libc::AF_INET as u16;
    address.sin_addr.s_addr = u32::from_ne_bytes(to.octets());
    // SAFETY: message and address are readable for the lengths given.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            message.as_ptr().cast(),
            message.len(),
            0,
            (&raw const address).cast(),
            size_of_val(&address) as u32,
        )
    };
    assert_eq!(sent, message.len() as isize);
}

/// The default route of a namespace, as `ip route change` takes it.
fn default_route(host: &NetNs) -> String {
    let shown = host.ip("route show default").unwrap();
    let route = shown.lines().next().expect("a default route");
    route.trim().to_owned()
}

/// As a router's next hop behind a tunnel has it: the link says 1,500, the route less. The guest is
/// told of what it may send, and peers by the MSS; and again when the route changes.
#[test]
fn a_route_s_mtu_is_told_like_a_link_s_and_followed_when_it_changes() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let host = &stand.world.host;
    let default = default_route(host);
    let server = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    for (mtu, largest) in [("mtu 1300", 1300), ("mtu lock 1200", 1200)] {
        host.ip(&format!("route change {default} {mtu}")).unwrap();
        // The broker hears of it, and the engine of the broker.
        std::thread::sleep(BRIEFLY);
        let capture = Capture::start(host, UPLINK).unwrap();
        stand
            .run(|| tcp::upload(server.address(), 4 << 20, 1, WAIT))
            .unwrap_or_else(|error| panic!("{mtu:?}: {error}"));
        stand
            .run(|| tcp::download(server.address(), 4 << 20, 1, WAIT))
            .unwrap_or_else(|error| panic!("{mtu:?}: {error}"));
        let seen = capture.finish().unwrap();
        assert_eq!(seen.sent.longest_segment_bytes, largest, "{mtu:?}");
        assert!(seen.received.longest_segment_bytes <= largest, "{mtu:?}");
    }
}

/// A connection that is open when the route's MTU falls goes on in smaller segments.
#[test]
fn a_route_s_mtu_that_falls_does_not_hang_what_is_open() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let host = &stand.world.host;
    let default = default_route(host);
    let frames = stand.guest.frames().unwrap();
    let _echo = UdpServer::start(&stand.world.net, (SERVER, 7), UdpService::Echo).unwrap();
    let send = |size| {
        let datagram = datagram(4000, at(SERVER, 7));
        let (vnet, frame) = datagram.payload(&vec![7; size]).build();
        stand.guest.inject(vnet, &frame).unwrap();
        let answer = frames.wait_for(WAIT, |frame| {
            frame.packet().is_some_and(|packet| {
                *packet.destination.ip() == GUEST
                    && (packet.destination.port() == 4000 || packet.protocol == 1)
            })
        });
        let answer = answer.expect("an answer");
        let packet = answer.packet().unwrap();
        let told = packet.transport()[6..8].try_into().unwrap();
        (packet.protocol == 1).then(|| (packet.icmp(), u16::from_be_bytes(told)))
    };
    // One flow, opened before.
    assert_eq!(send(1400), None);
    host.ip(&format!("route change {default} mtu 1300"))
        .unwrap();
    std::thread::sleep(BRIEFLY);
    assert_eq!(send(1272), None);
    assert_eq!(send(1273), Some((Some((3, 4)), 1300)));
    host.ip(&format!("route change {default}")).unwrap();
    std::thread::sleep(BRIEFLY);
    assert_eq!(send(1400), None);
}

#[test]
fn ip_options_are_refused_by_a_parameter_problem() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let echo = UdpServer::start(&stand.world.net, (SERVER, 7), UdpService::Echo).unwrap();
    stand.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        socket.connect(echo.address()).unwrap();
        socket.send(b"without").unwrap();
        socket.recv(&mut [0; 16]).unwrap();
        // No operation, twice, and the end.
        let options = [1_u8, 1, 1, 0];
        // SAFETY: the option's value is four readable bytes.
        let set = unsafe {
            let value = options.as_ptr().cast();
            let fd = socket.as_raw_fd();
            libc::setsockopt(fd, libc::IPPROTO_IP, libc::IP_OPTIONS, value, 4)
        };
        assert_eq!(set, 0);
        socket.send(b"with").unwrap();
        let refused = socket.recv(&mut [0; 16]).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EPROTO), "{refused}");
    });
    assert_eq!(echo.datagrams(), 1);
    assert_eq!(stand.dropped("ip_options"), 1);
}
