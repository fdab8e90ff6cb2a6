//! ICMP errors of a router: time exceeded, packets too large, unreachable; and MSS clamping.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
};

use slipgate_testbed::{
    Capture, WorldConfig,
    clients::{tcp, udp, udp::UdpOutcome},
    frame::{FrameBuilder, Packet},
    pump::FrameTap,
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::{SERVER, UPLINK},
};

use crate::{
    BRIEFLY, Cell, GATEWAY_MAC, GUEST_MAC, Stand, WAIT,
    matrix::{at, matrix},
};

matrix! {
    a_port_unreachable_comes_through: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_spent_ttl_is_answered_by_the_gateway: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_smaller_uplink_clamps_mss_and_asks_for_smaller_datagrams: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    errors_about_nobodys_flow_reach_no_guest: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_route_s_mtu_is_told_like_a_link_s_and_followed_when_it_changes: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's own TCP follows its routes, and the guest is told of none";
    a_route_s_mtu_that_falls_does_not_hang_what_is_open: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

/// The guest's port, from which the frames of these tests are.
pub(crate) const PORT: u16 = 4_000;

/// A packet that came to the guest.
pub(crate) struct Answer {
    pub(crate) from: SocketAddr,
    pub(crate) protocol: u8,
    /// Type and code of ICMP.
    pub(crate) icmp: Option<(u8, u8)>,
    /// From the transport header on.
    bytes: Vec<u8>,
}

impl Answer {
    /// The MTU that a packet was too large for.
    pub(crate) fn mtu(&self) -> u32 {
        // Of IPv4 the upper half is unused, and zero.
        u32::from_be_bytes(*self.bytes[4..].first_chunk().unwrap())
    }
}

/// A guest whose frames are made here, and a port of its own that answers nothing.
pub(crate) struct Scene {
    pub(crate) stand: Stand,
    pub(crate) frames: FrameTap,
    _echo: UdpServer<IpAddr>,
    /// The guest's at that port.
    pub(crate) socket: UdpSocket,
}

impl Scene {
    pub(crate) fn new(cell: Cell, world: WorldConfig) -> Self {
        let stand = Stand::of_several(cell, world, &[], &[], &[]);
        let _echo = echo(&stand);
        let socket = stand
            .run(|| UdpSocket::bind(at(cell.guest(), PORT)))
            .unwrap();
        let frames = stand.guest.frames().unwrap();
        Self {
            stand,
            frames,
            _echo,
            socket,
        }
    }

    fn datagram(&self) -> FrameBuilder {
        let cell = self.stand.cell;
        cell.datagram(PORT, at(cell.server(), 7))
    }

    /// Sends a frame as the guest; what comes back, besides what neighbours say to each other.
    pub(crate) fn send(&self, frame: &FrameBuilder) -> Answer {
        let (vnet, frame) = frame.build();
        self.stand.guest.inject(vnet, &frame).unwrap();
        let guest = self.stand.cell.guest();
        let is_answer = |packet: &Packet<'_, SocketAddr>| {
            let is_of_neighbours = (133..=137).contains(&packet.icmp().unwrap_or_default().0);
            // Nor what is left of a stream.
            packet.destination.ip() == guest && !is_of_neighbours && packet.protocol != 6
        };
        let answer = self.frames.wait_for(WAIT, |frame| {
            frame.packet_of_either().as_ref().is_some_and(is_answer)
        });
        let answer = answer.expect("an answer");
        let packet = answer.packet_of_either().unwrap();
        Answer {
            from: packet.source,
            protocol: packet.protocol,
            icmp: packet.icmp(),
            bytes: packet.transport().to_vec(),
        }
    }

    /// Sends a datagram of this length. Returns the MTU that is told if it is too large.
    fn send_of(&self, ip_bytes: usize) -> Option<u32> {
        let cell = self.stand.cell;
        let payload = vec![7; ip_bytes - cell.headers() - 8];
        let answer = self.send(&self.datagram().payload(&payload));
        if answer.protocol == 17 {
            return None;
        }
        let from = (answer.icmp, answer.from.ip());
        assert_eq!(from, (Some(cell.too_large()), cell.gateway()));
        Some(answer.mtu())
    }
}

fn echo(stand: &Stand) -> UdpServer<IpAddr> {
    let at = (stand.cell.server(), 7);
    UdpServer::start(&stand.world.net, at, UdpService::Echo).unwrap()
}

fn streams(stand: &Stand) -> TcpServer<IpAddr> {
    let at = (stand.cell.server(), 7000);
    TcpServer::start(&stand.world.net, at, TcpService::Streams).unwrap()
}

fn a_port_unreachable_comes_through(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let closed = at(cell.server(), 9);
    let told = stand.run(|| udp::probe(closed, b"x", WAIT)).unwrap();
    let [_, port] = cell.unreachable();
    assert!(
        matches!(told, UdpOutcome::Refused(error, _) if (error.kind, error.code) == port),
        "{told:?}"
    );
}

fn a_spent_ttl_is_answered_by_the_gateway(cell: Cell) {
    let scene = Scene::new(cell, WorldConfig::default());
    let ping = FrameBuilder::ping(cell.guest(), cell.server(), 7, 1).macs(GUEST_MAC, GATEWAY_MAC);
    let expired = (Some(cell.time_exceeded()), cell.gateway());
    for frame in [scene.datagram(), ping] {
        // Of a flow that is none yet, of a live one, and what has just enough.
        let answers = [1, 64, 1, 2].map(|ttl| scene.send(&frame.clone().ttl(ttl)));
        let [refused, passed, spent, enough] = answers;
        for answer in [refused, spent] {
            assert_eq!((answer.icmp, answer.from.ip()), expired);
        }
        for answer in [passed, enough] {
            assert_eq!(answer.from.ip(), cell.server());
        }
    }
    assert_eq!(scene.stand.dropped("ttl_expired"), 4);
}

fn a_smaller_uplink_clamps_mss_and_asks_for_smaller_datagrams(cell: Cell) {
    let world = WorldConfig {
        mtu: 1400,
        ..WorldConfig::default()
    };
    let scene = Scene::new(cell, world);
    transfers_of(&scene.stand, 1400);
    for (bytes, told) in [(1400, None), (1401, Some(1400)), (1400, None)] {
        assert_eq!(scene.send_of(bytes), told, "{bytes}");
    }
}

/// Checks the longest packets of a stream each way.
fn transfers_of(stand: &Stand, longest: u64) {
    let server = streams(stand);
    let capture = Capture::start(&stand.world.host, UPLINK).unwrap();
    stand.run(|| {
        tcp::upload(server.address(), 4 << 20, 1, WAIT).unwrap();
        tcp::download(server.address(), 4 << 20, 1, WAIT).unwrap();
    });
    let seen = capture.finish().unwrap();
    assert_eq!(seen.sent.longest_segment_bytes, longest);
    assert!(seen.received.longest_segment_bytes <= longest);
}

fn errors_about_nobodys_flow_reach_no_guest(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let echo = echo(&stand);
    let answered = stand
        .run(|| udp::probe(echo.address(), b"x", WAIT))
        .unwrap();
    assert!(matches!(answered, UdpOutcome::Answered(_)));
    let nat: SocketAddr = stand.flow_to(echo.address()).nat.parse().unwrap();
    let frames = stand.guest.frames().unwrap();
    let [host, _] = cell.unreachable();
    // An error from the world, by a raw socket there, that quotes a packet from `source`.
    let report = |source: SocketAddr| {
        let quoted = FrameBuilder::udp(source, echo.address())
            .payload(b"x")
            .build_ip();
        let error = FrameBuilder::icmp(cell.server(), nat.ip(), host.0, host.1, [0; 4])
            .payload(&quoted)
            .build_ip();
        let message = &error[cell.headers()..];
        stand.world.net.run(|| send_raw(nat.ip(), message));
        frames.wait_for(BRIEFLY, |frame| {
            frame
                .packet_of_either()
                .is_some_and(|packet| packet.icmp() == Some(host))
        })
    };
    assert!(report(at(nat.ip(), nat.port() ^ 1)).is_none());
    let mine = report(nat).expect("the error about our flow");
    let packet = mine.packet_of_either().unwrap();
    assert!(packet.checksums_are_right(&mine.vnet));
    let quoted = Packet::of_ip(packet.payload()).unwrap();
    assert_eq!(
        quoted.source.ip(),
        cell.guest(),
        "the quoted packet is the guest's own"
    );
}

/// Sends an ICMP message, of the family of the address, from a namespace's own address.
pub(crate) fn send_raw(to: impl Into<IpAddr>, message: &[u8]) {
    use std::os::fd::{FromRawFd, OwnedFd};
    let to = to.into();
    let (domain, protocol) = match to {
        IpAddr::V4(_) => (libc::AF_INET, libc::IPPROTO_ICMP),
        IpAddr::V6(_) => (libc::AF_INET6, libc::IPPROTO_ICMPV6),
    };
    // SAFETY: socket takes numbers; the result is checked before it is owned.
    let fd = unsafe { libc::socket(domain, libc::SOCK_RAW, protocol) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: a fresh descriptor that nothing else owns. Sending is the same call for all sockets.
    let socket = UdpSocket::from(unsafe { OwnedFd::from_raw_fd(fd) });
    assert_eq!(socket.send_to(message, (to, 0)).unwrap(), message.len());
}

/// Gives the host's default route of the cell's family this MTU.
fn set_route(stand: &Stand, mtu: &str) {
    let host = &stand.world.host;
    let family = if stand.cell.is_ipv6() { "-6" } else { "-4" };
    let shown = host.ip(&format!("{family} route show default")).unwrap();
    let route = shown.lines().next().expect("a default route");
    let route = route.split(" mtu").next().unwrap().trim();
    host.ip(&format!("{family} route change {route} {mtu}"))
        .unwrap();
    // The broker hears of it, and the engine of the broker.
    std::thread::sleep(BRIEFLY);
}

/// As a router's next hop behind a tunnel has it: the link says 1,500, the route less. The guest is
/// told of what it may send, and peers by the MSS; and again when the route changes.
fn a_route_s_mtu_is_told_like_a_link_s_and_followed_when_it_changes(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let locked = if cell.is_ipv6() { 1290 } else { 1200 };
    for (mtu, longest) in [
        ("mtu 1300".to_owned(), 1300),
        (format!("mtu lock {locked}"), locked),
    ] {
        set_route(&stand, &mtu);
        transfers_of(&stand, longest);
    }
}

/// A flow that is open when the route's MTU falls goes on in smaller packets.
fn a_route_s_mtu_that_falls_does_not_hang_what_is_open(cell: Cell) {
    let scene = Scene::new(cell, WorldConfig::default());
    // One flow, opened before.
    assert_eq!(scene.send_of(1_428), None);
    set_route(&scene.stand, "mtu 1300");
    assert_eq!(scene.send_of(1_300), None);
    assert_eq!(scene.send_of(1_301), Some(1_300));
    set_route(&scene.stand, "");
    assert_eq!(scene.send_of(1_428), None);
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
