//! The host changes under slipgate: a TAP goes and comes, the uplink gets another address or MTU.

use std::{net::Ipv4Addr, time::Duration};

use slipgate_testbed::{
    Capture,
    clients::tcp,
    servers::{TcpServer, TcpService},
    world::{HOST, SERVER, UPLINK, WORLD_LINK},
};

use super::{
    WAIT, eventually,
    scene::Scene,
    traffic::{Stream, local_address},
};

const BRIEFLY: Duration = Duration::from_millis(500);

/// Whether a new connection works: opened, used, closed.
fn connects(scene: &Scene, server: &TcpServer) -> bool {
    let to = server.address();
    let used = scene
        .guest
        .run(|| tcp::request_response(to, 1, 100, BRIEFLY));
    used.is_ok()
}

#[test]
fn a_tap_goes_and_comes_and_its_flows_live() {
    begin!();
    let mut scene = Scene::new(&[]);
    let echo = TcpServer::start(&scene.world.net, (SERVER, 7000), TcpService::Echo).unwrap();
    let stream = Stream::start(&scene.guest, echo.address(), 4_000, Duration::ZERO);
    for _ in 0..3 {
        stream.expect_progress();
        scene.guest.unplug();
        assert_eq!(scene.world.host.ifindex("tap0"), None);
        scene.guest.plug().unwrap();
        // The stack goes on where it was: its connection, too.
        stream.expect_progress();
        eventually("a new connection", || connects(&scene, &echo));
    }
    stream.finish();
    scene.detach();
    let records = scene.records();
    let ids: std::collections::HashSet<_> = records.iter().map(|record| &record.id).collect();
    assert_eq!(ids.len(), records.len(), "{records:?}");
    assert!(records.len() >= 4, "{records:?}");
}

#[test]
fn new_flows_leave_by_the_new_address() {
    begin!();
    let mut scene = Scene::new(&[]);
    let host = scene.world.host.clone();
    let server = TcpServer::start(&scene.world.net, (SERVER, 7000), TcpService::Echo).unwrap();
    let second = Ipv4Addr::new(198, 18, 0, 77);
    let last_peer = |server: &TcpServer| server.peers().last().map(|peer| *peer.ip());
    assert!(connects(&scene, &server));
    assert_eq!(last_peer(&server), Some(HOST));

    // The old address stays for a while, so its flows do too.
    let stream = Stream::start(&scene.guest, server.address(), 4_000, Duration::ZERO);
    host.ip(&format!("addr add {second}/24 dev {UPLINK}"))
        .unwrap();
    host.ip(&format!(
        "route replace default via 198.18.0.1 dev {UPLINK} src {second}"
    ))
    .unwrap();
    eventually("a connection from the new address", || {
        connects(&scene, &server) && last_peer(&server) == Some(second)
    });
    stream.expect_progress();
    stream.finish();

    host.ip(&format!("addr del {HOST}/24 dev {UPLINK}"))
        .unwrap();
    // Removing a primary address takes the others of its network, and routes by them, with it.
    if !host
        .ip(&format!("addr show dev {UPLINK}"))
        .unwrap()
        .contains("198.18.0.77")
    {
        host.ip(&format!("addr add {second}/24 dev {UPLINK}"))
            .unwrap();
    }
    host.ip(&format!(
        "route replace default via 198.18.0.1 dev {UPLINK}"
    ))
    .unwrap();
    eventually("a connection after the old address is gone", || {
        connects(&scene, &server) && last_peer(&server) == Some(second)
    });
    for _ in 0..20 {
        assert!(connects(&scene, &server));
        assert_eq!(last_peer(&server), Some(second));
    }
    scene.detach();
}

#[test]
fn a_smaller_mtu_is_followed_by_streams_under_way() {
    begin!();
    let mut scene = Scene::new(&[]);
    let (host, net) = (scene.world.host.clone(), scene.world.net.clone());
    let server = TcpServer::start(&net, (SERVER, 7000), TcpService::Echo).unwrap();
    let stream = Stream::start(&scene.guest, server.address(), 128 << 10, Duration::ZERO);
    stream.expect_progress();
    for mtu in [1_400, 1_300, 1_500] {
        for (ns, device) in [(&host, UPLINK), (&net, WORLD_LINK)] {
            ns.ip(&format!("link set {device} mtu {mtu}")).unwrap();
        }
        // Once more than a window went through, all of it has the new size.
        for _ in 0..5 {
            stream.expect_progress();
        }
        let capture = Capture::start(&host, UPLINK).unwrap();
        for _ in 0..5 {
            stream.expect_progress();
        }
        let mut new = scene
            .guest
            .run(|| tcp::connect(server.address(), WAIT))
            .unwrap();
        let mut session = tcp::EchoSession::new(&mut new);
        scene.guest.run(|| session.round(100_000)).unwrap();
        assert_ne!(local_address(&new), stream.local);
        drop(new);
        let seen = capture.finish().unwrap();
        assert!(
            seen.sent.longest_segment_bytes <= mtu,
            "MTU {mtu}: {} bytes sent",
            seen.sent.longest_segment_bytes
        );
        assert!(seen.sent.longest_segment_bytes > 1_000);
    }
    stream.finish();
    scene.detach();
}
