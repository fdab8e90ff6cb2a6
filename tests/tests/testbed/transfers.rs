//! Traffic arrives whole, GSO frames stay whole, and all who count agree.

use std::{collections::HashMap, time::Duration};

use slipgate_testbed::{
    Capture, Direction, GUEST_DEVICE, Guest, GuestConfig, Uplink, World, WorldConfig,
    accounting::FlowKey,
    baseline,
    clients::{dns, http, icmp, tcp, udp},
    impairment::Impairment,
    require_root_and_tun,
    servers::{Answer, DnsServer, HttpServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    skipped, turns,
    world::{HOST, SERVER, SERVER_2, UPLINK},
};

use super::{GUEST, WAIT, at, forwarding, masqueraded};

fn both_ways(world: &World, guest: &Guest, len: u64) {
    let server = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    for len in [0, 1, len] {
        let up = guest
            .run(|| tcp::upload(server.address(), len, 1, WAIT))
            .unwrap();
        let down = guest
            .run(|| tcp::download(server.address(), len, 1, WAIT))
            .unwrap();
        assert_eq!(up.receipt, down.receipt);
    }
    assert_eq!(server.accepted(), 6);
}

/// A stream that stands still is measured by what was taken until then.
#[test]
fn a_stalled_stream_has_a_rate() {
    require_root_and_tun!();
    let world = World::new().unwrap();
    let server = TcpServer::start(&world.net, (SERVER, 7001), TcpService::Hold).unwrap();
    let still = Duration::from_millis(300);
    let measure = || tcp::rate_up(server.address(), WAIT, still);
    let rate = world.host.run(measure).unwrap();
    assert!(rate.stalled && rate.took >= still, "{rate:?}");
    // What the server's buffer holds, at least a few segments.
    assert!(rate.bytes > 10_000, "{rate:?}");
    let measure = || tcp::rate_down(server.address(), WAIT, still);
    let rate = world.host.run(measure).unwrap();
    assert!(rate.stalled && rate.bytes == 0, "{rate:?}");
}

/// Whoever writes all of it before reading waits for good, and so does the server.
#[test]
fn an_echo_of_more_than_all_buffers_hold_comes_back() {
    require_root_and_tun!();
    let world = World::new().unwrap();
    let server = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Echo).unwrap();
    let connect = || tcp::connect(server.address(), WAIT);
    let mut stream = world.host.run(connect).unwrap();
    tcp::EchoSession::new(&mut stream).round(64 << 20).unwrap();
}

#[test]
fn gso_frames_stay_whole() {
    require_root_and_tun!();
    let _turn = turns::alone("it measures rates");
    for uplink in [Uplink::Veth, Uplink::Tun] {
        let (world, guest) = masqueraded(
            WorldConfig {
                uplink,
                ..forwarding()
            },
            GuestConfig::new("tap0"),
        );
        both_ways(&world, &guest, 20_000_000);
        let server = TcpServer::start(&world.net, (SERVER, 7001), TcpService::Streams).unwrap();
        let briefly = Duration::from_millis(500);
        let up = guest
            .run(|| tcp::rate_up(server.address(), briefly, WAIT))
            .unwrap();
        let down = guest
            .run(|| tcp::rate_down(server.address(), briefly, WAIT))
            .unwrap();
        for (way, rate) in [("up", up), ("down", down)] {
            println!("{uplink:?} {way}: {:.2} Gb/s", rate.bits_per_second() / 1e9);
            assert!(
                rate.bits_per_second() > 1e8 && rate.took >= briefly,
                "{rate:?}"
            );
        }
        for direction in [Direction::Out, Direction::In] {
            let flows = guest.flows(direction);
            assert!(
                flows.longest_bytes > 30_000,
                "{uplink:?} {direction:?}: {flows:?}"
            );
            assert!(
                flows.longest_segment_bytes <= 1500,
                "{uplink:?} {direction:?}: {flows:?}"
            );
            assert_eq!(guest.moved(direction).failed, 0);
        }
    }
}

#[test]
fn without_offloads_no_frame_is_above_the_mtu() {
    require_root_and_tun!();
    let (world, guest) = masqueraded(
        WorldConfig {
            offloads: false,
            ..forwarding()
        },
        GuestConfig {
            offloads: false,
            ..GuestConfig::new("tap0")
        },
    );
    both_ways(&world, &guest, 5_000_000);
    for direction in [Direction::Out, Direction::In] {
        let flows = guest.flows(direction);
        assert_eq!(
            (flows.gso_frames, flows.longest_bytes),
            (0, 1500),
            "{direction:?}"
        );
    }
}

#[test]
fn a_multi_queue_tap_and_a_jumbo_mtu_work() {
    require_root_and_tun!();
    let world = WorldConfig {
        mtu: 9000,
        ..forwarding()
    };
    let config = GuestConfig {
        queues: 2,
        mtu: 9000,
        ..GuestConfig::new("tap0")
    };
    let (world, guest) = masqueraded(world, config);
    assert_eq!(guest.queues().len(), 2);
    both_ways(&world, &guest, 20_000_000);
    assert!(guest.flows(Direction::Out).longest_segment_bytes > 8000);
}

/// The counts at the guest, on the pump and at the uplink, of a TCP flow each way and a UDP flow.
fn counts_agree(offloads: bool) {
    let (world, guest) = masqueraded(
        WorldConfig {
            offloads,
            ..forwarding()
        },
        GuestConfig {
            offloads,
            ..GuestConfig::new("tap0")
        },
    );
    let streams = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    let echo = UdpServer::start(&world.net, (SERVER_2, 7), UdpService::Echo).unwrap();
    let inside = Capture::start(&guest.ns, GUEST_DEVICE).unwrap();
    let outside = Capture::start(&world.host, UPLINK).unwrap();
    guest.run(|| {
        tcp::upload(streams.address(), 10_000_000, 1, WAIT).unwrap();
        tcp::download(streams.address(), 10_000_000, 2, WAIT).unwrap();
        let report = udp::paced(echo.address(), 200, 700, Duration::from_micros(200), WAIT);
        assert_eq!(report.unwrap().received, 200);
    });
    // The last ACK of a close may still be on its way.
    std::thread::sleep(Duration::from_millis(200));
    let (inside, outside) = (inside.finish().unwrap(), outside.finish().unwrap());
    for (server, protocol) in [(streams.address(), 6), (echo.address(), 17)] {
        let to = |key: &FlowKey| key.destination == server.into() && key.protocol == protocol;
        let from = |key: &FlowKey| key.source == server.into() && key.protocol == protocol;
        let sent = inside.sent.sum(to);
        assert!(sent.packets > 100, "{sent:?}");
        assert_eq!(
            sent,
            outside.sent.sum(to),
            "toward {server}, offloads {offloads}"
        );
        assert_eq!(sent, guest.flows(Direction::Out).sum(to));
        let received = inside.received.sum(from);
        assert_eq!(
            received,
            outside.received.sum(from),
            "from {server}, offloads {offloads}"
        );
        assert_eq!(received, guest.flows(Direction::In).sum(from));
    }
    assert_eq!(inside.sent.gso_frames > 0, offloads);
    let translated = outside.sent.flows.keys().filter(|key| key.protocol == 6);
    assert!(
        translated.clone().count() >= 2 && translated.clone().all(|key| key.source.ip() == HOST)
    );
    let own = inside.sent.flows.keys().filter(|key| key.protocol == 6);
    assert!(own.clone().all(|key| key.source.ip() == GUEST));
    let peers = streams.peers();
    assert!(peers.iter().all(|peer| *peer.ip() == HOST), "{peers:?}");
    // Exactly what was ordered, and nothing beside it: 200 datagrams of 28 + 700 bytes.
    let udp = outside.sent.sum(|key| key.protocol == 17);
    assert_eq!((udp.packets, udp.bytes), (200, 200 * 728));
}

#[test]
fn udp_segmentation_is_kept_and_counted() {
    require_root_and_tun!();
    let (world, guest) = masqueraded(forwarding(), GuestConfig::new("tap0"));
    let echo = UdpServer::start(&world.net, (SERVER, 7), UdpService::Echo).unwrap();
    let (count, size) = (40, 1200);
    let service = UdpService::Burst { count, size };
    let bursts = UdpServer::start(&world.net, (SERVER, 8), service).unwrap();
    let outside = Capture::start(&world.host, UPLINK).unwrap();
    guest.run(|| {
        let there = udp::burst(echo.address(), count, size, WAIT).unwrap();
        assert_eq!((there.received, there.corrupt), (count, 0), "{there:?}");
        let back = udp::ask_burst(bursts.address(), count, size, WAIT).unwrap();
        assert_eq!((back.received, back.corrupt), (count, 0), "{back:?}");
    });
    let outside = outside.finish().unwrap();
    let whole = (count, count * (28 + u64::from(size)));
    let sent = outside
        .sent
        .sum(|key| key.destination == echo.address().into());
    assert_eq!((sent.packets, sent.bytes), whole);
    let received = outside
        .received
        .sum(|key| key.source == bursts.address().into());
    assert_eq!((received.packets, received.bytes), whole);
    let (out, back) = (guest.flows(Direction::Out), guest.flows(Direction::In));
    assert_eq!(
        out.sum(|key| key.destination == echo.address().into()),
        sent
    );
    assert_eq!(
        back.sum(|key| key.source == bursts.address().into()),
        received
    );
    if !guest.queues()[0].takes_udp_gso() {
        skipped!("UDP GSO frames whole through a TAP: it needs Linux 6.2");
        return;
    }
    assert!(
        out.gso_frames > 0 && back.gso_frames > 0,
        "{out:?} {back:?}"
    );
    assert!(outside.sent.gso_frames > 0 && outside.received.gso_frames > 0);
}

#[test]
fn captures_and_pump_agree_with_offloads() {
    require_root_and_tun!();
    counts_agree(true);
}

#[test]
fn captures_and_pump_agree_without_offloads() {
    require_root_and_tun!();
    counts_agree(false);
}

#[test]
fn a_bad_link_loses_and_reorders_and_streams_are_whole() {
    require_root_and_tun!();
    let uplink = Uplink::Impaired(Impairment::rough(7));
    let (world, guest) = masqueraded(
        WorldConfig {
            uplink,
            ..forwarding()
        },
        GuestConfig::new("tap0"),
    );
    both_ways(&world, &guest, 3_000_000);
    let echo = UdpServer::start(&world.net, (SERVER, 7), UdpService::Echo).unwrap();
    let interval = Duration::from_micros(100);
    let linger = Duration::from_millis(500);
    let paced = guest
        .run(|| udp::paced(echo.address(), 2000, 100, interval, linger))
        .unwrap();
    assert!(
        paced.lost() > 5 && paced.duplicated > 0 && paced.reordered > 0,
        "{paced:?}"
    );
    assert_eq!(paced.corrupt, 0);
    for direction in [Direction::Out, Direction::In] {
        let done = world.impaired(direction);
        assert!(
            done.lost > 10 && done.duplicated > 5 && done.reordered > 10,
            "{done:?}"
        );
    }
}

#[test]
fn plain_forwarding_keeps_the_guests_address() {
    require_root_and_tun!();
    let world = World::with(forwarding()).unwrap();
    let guest = Guest::new(&world, GuestConfig::new("tap0")).unwrap();
    baseline::plain_forwarding(&world, &guest).unwrap();
    let server = TcpServer::start(&world.net, (SERVER, 0), TcpService::Echo).unwrap();
    let rounds = guest
        .run(|| tcp::request_response(server.address(), 20, 100, WAIT))
        .unwrap();
    assert_eq!(rounds.len(), 20);
    assert_eq!(*server.peers()[0].ip(), GUEST);
}

#[test]
fn small_services_answer() {
    require_root_and_tun!();
    let (world, guest) = masqueraded(forwarding(), GuestConfig::new("tap0"));
    let zone = Zone::from([
        ("web.example".into(), Answer::a(SERVER, 30)),
        ("big.example".into(), Answer::a(SERVER_2, 30).truncated()),
        (
            "slow.example".into(),
            Answer::a(SERVER, 1).delayed(Duration::from_millis(300)),
        ),
        ("broken.example".into(), Answer::code(2)),
        ("mute.example".into(), Answer::silence()),
    ]);
    let names = DnsServer::start(&world.net, (SERVER, 53), zone).unwrap();
    let pages = HashMap::from([("/".to_owned(), b"hello".to_vec())]);
    let web = HttpServer::start(&world.net, (SERVER, 80), pages).unwrap();
    let close = TcpServer::start(&world.net, (SERVER, 9), TcpService::Close).unwrap();
    guest.run(|| {
        let ask = |name| dns::query_udp(names.address(), name, Duration::from_secs(1));
        let found = ask("web.example").unwrap();
        assert_eq!(
            (found.addresses(), found.reply.records[0].ttl),
            (vec![SERVER], 30)
        );
        assert_eq!(ask("broken.example").unwrap().reply.code, 2);
        assert_eq!(ask("none.example").unwrap().reply.code, 3);
        let cut = ask("big.example").unwrap().reply;
        assert!(cut.truncated && cut.records.is_empty());
        assert!(ask("slow.example").unwrap().took >= Duration::from_millis(300));
        assert!(ask("mute.example").is_err());
        let whole = dns::query_tcp(names.address(), "big.example", WAIT).unwrap();
        assert_eq!(whole.addresses(), [SERVER_2]);
        assert_eq!(
            http::get(web.address(), "/", WAIT).unwrap(),
            (200, b"hello".to_vec())
        );
        assert_eq!(http::get(web.address(), "/x", WAIT).unwrap().0, 404);
        let ping = icmp::ping(SERVER_2, 3, 1000, WAIT).unwrap();
        assert_eq!(
            (ping.replies.len(), ping.corrupt, ping.errors.len()),
            (3, 0, 0)
        );
        assert!(tcp::connect_close(close.address(), WAIT).unwrap() < WAIT);
        let probe = udp::probe(at(SERVER, 53), b"no DNS", Duration::from_millis(200)).unwrap();
        assert_eq!(probe, udp::UdpOutcome::TimedOut);
    });
    assert_eq!(names.udp_queries("big.example"), 1);
    assert_eq!(names.tcp_queries("big.example"), 1);
    assert_eq!(names.udp_sources().len(), 6);
    assert_eq!(close.accepted(), 1);
}
