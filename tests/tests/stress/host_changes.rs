//! The host changes under slipgate: a TAP goes and comes, the uplink gets another address or MTU.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use slipgate_testbed::{
    Capture, NetNs,
    clients::tcp,
    servers::{TcpServer, TcpService},
    world::{HOST, ROUTER, SERVER, UPLINK, WORLD_LINK},
    world_ipv6::{HOST6, ROUTER6, SERVER6},
};

use super::{
    BOTH_SERVERS, WAIT, eventually,
    scene::Scene,
    traffic::{Stream, local_address},
};

const BRIEFLY: Duration = Duration::from_millis(500);

/// Whether a new connection works: opened, used, closed.
fn connects(scene: &Scene, to: SocketAddr) -> bool {
    let used = scene
        .guest
        .run(|| tcp::request_response(to, 1, 100, BRIEFLY));
    used.is_ok()
}

#[test]
fn a_tap_goes_and_comes_and_its_flows_live() {
    begin!();
    let mut scene = Scene::new(&[]);
    let net = &scene.world.net;
    let echo = BOTH_SERVERS.map(|ip| TcpServer::start(net, (ip, 7000), TcpService::Echo).unwrap());
    let start = |to| Stream::start(&scene.guest, to, 4_000, Duration::ZERO);
    let streams = echo.each_ref().map(|echo| start(echo.address()));
    for _ in 0..3 {
        streams.iter().for_each(Stream::expect_progress);
        scene.guest.unplug();
        assert_eq!(scene.world.host.ifindex("tap0"), None);
        scene.guest.plug().unwrap();
        // The stack goes on where it was: its connections, too.
        streams.iter().for_each(Stream::expect_progress);
        for echo in &echo {
            eventually("a new connection", || connects(&scene, echo.address()));
        }
    }
    streams.into_iter().for_each(Stream::finish);
    scene.detach();
    let records = scene.records();
    let ids: std::collections::HashSet<_> = records.iter().map(|record| &record.id).collect();
    assert_eq!(ids.len(), records.len(), "{records:?}");
    assert!(records.len() >= 8, "{records:?}");
}

/// The host's addresses on the uplink in one family, and what they need.
struct Addresses {
    server: IpAddr,
    router: IpAddr,
    first: IpAddr,
    second: IpAddr,
    /// `ip` of the family.
    family: &'static str,
    prefix_len: u8,
    /// How an address is added that may be used at once.
    at_once: &'static str,
}

impl Addresses {
    fn both() -> [Addresses; 2] {
        [
            Addresses {
                server: SERVER.into(),
                router: ROUTER.into(),
                first: HOST.into(),
                second: Ipv4Addr::new(198, 18, 0, 77).into(),
                family: "-4",
                prefix_len: 24,
                at_once: "",
            },
            Addresses {
                server: SERVER6.into(),
                router: ROUTER6.into(),
                first: HOST6.into(),
                second: Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 0x77).into(),
                family: "-6",
                prefix_len: 64,
                at_once: "nodad",
            },
        ]
    }

    fn ip(&self, host: &NetNs, arguments: &str) -> String {
        host.ip(&format!("{} {arguments}", self.family)).unwrap()
    }

    fn add(&self, host: &NetNs, address: IpAddr) {
        let (prefix_len, at_once) = (self.prefix_len, self.at_once);
        let address = format!("addr add {address}/{prefix_len} dev {UPLINK} {at_once}");
        self.ip(host, &address);
    }

    /// Replaces the default route. `prefers`: what it says of the source.
    fn set_route(&self, host: &NetNs, prefers: &str) {
        let router = self.router;
        let route = format!("route replace default via {router} dev {UPLINK} {prefers}");
        self.ip(host, &route);
    }
}

#[test]
fn new_flows_leave_by_the_new_address() {
    begin!();
    let mut scene = Scene::new(&[]);
    let host = scene.world.host.clone();
    let both = Addresses::both().map(|of| {
        let server = TcpServer::start(&scene.world.net, (of.server, 7000), TcpService::Echo);
        (of, server.unwrap())
    });
    let last_peer = |server: &TcpServer<IpAddr>| server.peers().last().map(|peer| peer.ip());
    for (of, server) in &both {
        assert!(connects(&scene, server.address()));
        assert_eq!(last_peer(server), Some(of.first));
    }

    // The old address stays for a while, so its flows do too.
    let streams = both
        .each_ref()
        .map(|(_, server)| Stream::start(&scene.guest, server.address(), 4_000, Duration::ZERO));
    for (of, _) in &both {
        of.add(&host, of.second);
        of.set_route(&host, &format!("src {}", of.second));
    }
    for (of, server) in &both {
        eventually("a connection from the new address", || {
            connects(&scene, server.address()) && last_peer(server) == Some(of.second)
        });
    }
    streams.iter().for_each(Stream::expect_progress);
    streams.into_iter().for_each(Stream::finish);

    for (of, _) in &both {
        let first = format!("addr del {}/{} dev {UPLINK}", of.first, of.prefix_len);
        of.ip(&host, &first);
        // Removing a primary address of IPv4 takes the others of its network, and routes by them, with
        // it.
        let shown = of.ip(&host, &format!("addr show dev {UPLINK}"));
        if !shown.contains(&format!("{}/", of.second)) {
            of.add(&host, of.second);
        }
        of.set_route(&host, "");
    }
    for (of, server) in &both {
        eventually("a connection after the old address is gone", || {
            connects(&scene, server.address()) && last_peer(server) == Some(of.second)
        });
        for _ in 0..10 {
            assert!(connects(&scene, server.address()));
            assert_eq!(last_peer(server), Some(of.second));
        }
    }
    scene.detach();
}

#[test]
fn a_smaller_mtu_is_followed_by_streams_under_way() {
    begin!();
    let mut scene = Scene::new(&[]);
    let (host, net) = (scene.world.host.clone(), scene.world.net.clone());
    let servers =
        BOTH_SERVERS.map(|ip| TcpServer::start(&net, (ip, 7000), TcpService::Echo).unwrap());
    let start = |to| Stream::start(&scene.guest, to, 128 << 10, Duration::ZERO);
    let streams = servers.each_ref().map(|server| start(server.address()));
    streams.iter().for_each(Stream::expect_progress);
    for mtu in [1_400, 1_300, 1_500] {
        for (ns, device) in [(&host, UPLINK), (&net, WORLD_LINK)] {
            ns.ip(&format!("link set {device} mtu {mtu}")).unwrap();
        }
        // Once more than a window went through, all of it has the new size.
        for _ in 0..5 {
            streams.iter().for_each(Stream::expect_progress);
        }
        let capture = Capture::start(&host, UPLINK).unwrap();
        for _ in 0..5 {
            streams.iter().for_each(Stream::expect_progress);
        }
        for (server, stream) in servers.iter().zip(&streams) {
            let mut new = scene
                .guest
                .run(|| tcp::connect(server.address(), WAIT))
                .unwrap();
            let mut session = tcp::EchoSession::new(&mut new);
            scene.guest.run(|| session.round(100_000)).unwrap();
            assert_ne!(local_address(&new), stream.local);
        }
        let seen = capture.finish().unwrap();
        assert!(
            seen.sent.longest_segment_bytes <= mtu,
            "MTU {mtu}: {} bytes sent",
            seen.sent.longest_segment_bytes
        );
        assert!(seen.sent.longest_segment_bytes > 1_000);
    }
    streams.into_iter().for_each(Stream::finish);
    scene.detach();
}
