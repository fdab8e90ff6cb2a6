//! Other uplinks than a veth, and an uplink that changes.

use std::net::IpAddr;

use slipgate_testbed::{
    Uplink, WorldConfig,
    census::Census,
    clients::{dns, tcp, udp},
    servers::{Answer, DnsServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    world::SERVER,
};

use crate::{
    Cell, Stand, WAIT,
    matrix::{at, matrix, pings},
};

matrix! {
    an_uplink_without_ethernet_header_carries_everything: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's kernel routes its sockets";
    a_tap_that_goes_and_comes_again_is_served_again: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its guest has a socket in place of a TAP";
    an_uplink_whose_mtu_shrinks_is_followed: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "TCP's segments are made by the host's stack there, which follows the path";
}

fn streams(stand: &Stand) -> TcpServer<IpAddr> {
    let address = (stand.cell.server(), 7000);
    TcpServer::start(&stand.world.net, address, TcpService::Streams).unwrap()
}

fn an_uplink_without_ethernet_header_carries_everything(cell: Cell) {
    let world = WorldConfig {
        uplink: Uplink::Tun,
        ..Default::default()
    };
    let stand = Stand::of_several(cell, world, &[], &[], &["--dns", "203.0.113.10"]);
    let net = &stand.world.net;
    let zone = Zone::from([("a.test".into(), Answer::address(cell.server(), 60))]);
    let _names = DnsServer::start(net, (SERVER, 53), zone).unwrap();
    let server = streams(&stand);
    let echo = UdpServer::start(net, (cell.server(), 7), UdpService::Echo).unwrap();
    // Its address is known from now on.
    assert!(pings(&stand.guest, cell.gateway(), WAIT));
    let census = Census::start(&stand.guest).unwrap();
    let before = stand.handed_over();
    stand.run(|| {
        let question = cell.question("a.test");
        let found = dns::ask_udp(at(cell.dns(), 53), &question, WAIT).unwrap();
        assert_eq!(found.reply.records[0].ip(), Some(cell.server()));
        tcp::download(server.address(), 32 << 20, 1, WAIT).unwrap();
        tcp::upload(server.address(), 32 << 20, 2, WAIT).unwrap();
        let report = udp::burst(echo.address(), 20, 1000, WAIT).unwrap();
        assert_eq!((report.received, report.corrupt), (20, 0));
    });
    assert!(pings(&stand.guest, cell.server(), WAIT));
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

fn a_tap_that_goes_and_comes_again_is_served_again(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let server = streams(&stand);
    let download = |stand: &Stand| {
        stand
            .run(|| tcp::download(server.address(), 1 << 20, 1, WAIT))
            .unwrap();
    };
    download(&stand);
    let old = stand.world.host.ifindex("tap0");
    stand.guest.unplug();
    // A program that another test starts has its descriptor for a moment.
    crate::eventually("the TAP is gone", || {
        stand.world.host.ifindex("tap0").is_none().then_some(())
    });
    stand.guest.plug().unwrap();
    assert_ne!(stand.world.host.ifindex("tap0"), old);
    crate::eventually("an echo through the TAP that came again", || {
        let wait = std::time::Duration::from_millis(200);
        pings(&stand.guest, cell.server(), wait).then_some(())
    });
    download(&stand);
}

fn an_uplink_whose_mtu_shrinks_is_followed(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let server = streams(&stand);
    let upload = || {
        stand
            .run(|| tcp::upload(server.address(), 4 << 20, 1, WAIT))
            .unwrap();
    };
    upload();
    stand.world.host.ip("link set up0 mtu 1300").unwrap();
    stand.world.net.ip("link set w0 mtu 1300").unwrap();
    std::thread::sleep(crate::BRIEFLY);
    let capture = slipgate_testbed::Capture::start(&stand.world.host, "up0").unwrap();
    upload();
    let seen = capture.finish().unwrap();
    assert_eq!(seen.sent.longest_segment_bytes, 1300);
}
