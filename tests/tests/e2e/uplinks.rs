//! Other uplinks than a veth, and an uplink that changes.

use slipgate_testbed::{
    GuestConfig, Uplink, WorldConfig,
    census::Census,
    clients::{dns, icmp, tcp, udp},
    require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    world::SERVER,
};

use crate::{DNS, Stand, WAIT, at};

#[test]
fn an_uplink_without_ethernet_header_carries_everything() {
    require_root_and_tun!();
    let world = WorldConfig {
        uplink: Uplink::Tun,
        ..Default::default()
    };
    let stand = Stand::with(world, GuestConfig::new("tap0"), &["--dns", "203.0.113.10"]);
    let net = &stand.world.net;
    let zone = Zone::from([("a.test".into(), Answer::a(SERVER, 60))]);
    let _names = DnsServer::start(net, (SERVER, 53), zone).unwrap();
    let server = TcpServer::start(net, (SERVER, 7000), TcpService::Streams).unwrap();
    let echo = UdpServer::start(net, (SERVER, 7), UdpService::Echo).unwrap();
    let census = Census::start(&stand.guest).unwrap();
    let before = stand.handed_over();
    stand.run(|| {
        let found = dns::query_udp(at(DNS, 53), "a.test", WAIT).unwrap();
        assert_eq!(found.addresses(), [SERVER]);
        tcp::download(server.address(), 32 << 20, 1, WAIT).unwrap();
        tcp::upload(server.address(), 32 << 20, 2, WAIT).unwrap();
        let report = udp::burst(echo.address(), 20, 1000, WAIT).unwrap();
        assert_eq!((report.received, report.corrupt), (20, 0));
        assert_eq!(icmp::ping(SERVER, 3, 100, WAIT).unwrap().replies.len(), 3);
    });
    let sent = census.finish(&stand.guest).unwrap();
    assert_eq!((sent.syn, sent.dns), (2, 1), "{sent:?}");
    // And what opens the other two flows: the burst, one frame that takes a credit for each datagram,
    // and an echo request.
    assert_eq!(
        stand.handed_over() - before,
        sent.for_the_engine() + 20 + 1,
        "{sent:?}"
    );
}

#[test]
fn a_tap_that_goes_and_comes_again_is_served_again() {
    require_root_and_tun!();
    let mut stand = Stand::new(&[]);
    let server = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    stand
        .run(|| tcp::download(server.address(), 1 << 20, 1, WAIT))
        .unwrap();
    let old = stand.world.host.ifindex("tap0");
    stand.guest.unplug();
    // A program that another test starts has its descriptor for a moment.
    crate::eventually("the TAP is gone", || {
        stand.world.host.ifindex("tap0").is_none().then_some(())
    });
    stand.guest.plug().unwrap();
    assert_ne!(stand.world.host.ifindex("tap0"), old);
    let pinged = || {
        let wait = std::time::Duration::from_millis(200);
        let ping = stand.run(|| icmp::ping(SERVER, 1, 10, wait)).unwrap();
        (ping.replies.len() == 1).then_some(())
    };
    crate::eventually("an echo through the TAP that came again", pinged);
    stand
        .run(|| tcp::download(server.address(), 1 << 20, 1, WAIT))
        .unwrap();
}

#[test]
fn a_uplink_whose_mtu_shrinks_is_followed() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let server = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    stand
        .run(|| tcp::upload(server.address(), 4 << 20, 1, WAIT))
        .unwrap();
    stand.world.host.ip("link set up0 mtu 1300").unwrap();
    stand.world.net.ip("link set w0 mtu 1300").unwrap();
    std::thread::sleep(crate::BRIEFLY);
    let capture = slipgate_testbed::Capture::start(&stand.world.host, "up0").unwrap();
    stand
        .run(|| tcp::upload(server.address(), 4 << 20, 1, WAIT))
        .unwrap();
    let seen = capture.finish().unwrap();
    assert_eq!(seen.sent.longest_segment_bytes, 1300);
}
