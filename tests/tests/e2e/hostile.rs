//! Invalid frames: each is dropped and counted by its reason, and the guest's valid traffic
//! continues.

use std::time::Duration;

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World, WorldConfig,
    clients::tcp,
    frame::{BROADCAST, Checksum, FrameBuilder},
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    tap::VnetHdr,
    world::{SERVER, SERVER_2, UPLINK},
};

use crate::{GATEWAY_MAC, GUEST, GUEST_MAC, Stand, WAIT, at, datagram, eventually};

fn udp(port: u16) -> FrameBuilder {
    datagram(port, at(SERVER, 7))
}

#[test]
fn each_hostile_frame_is_dropped_under_its_own_reason() {
    require_root_and_tun!();
    let stand = Stand::with(WorldConfig::default(), GuestConfig::new("tap0"), &[]);
    let echo = UdpServer::start(&stand.world.net, (SERVER, 7), UdpService::Echo).unwrap();
    let server = TcpServer::start(&stand.world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    let toward = |frame: FrameBuilder| frame.macs(GUEST_MAC, GATEWAY_MAC).payload(b"x");
    let spoofed = toward(FrameBuilder::udp("10.0.2.77:5000", at(SERVER, 7)));
    let bomb = toward(FrameBuilder::tcp(at(GUEST, 5000), at(SERVER, 7000)))
        .payload(&[1; 4000])
        .gso(8);
    let late = toward(FrameBuilder::tcp(at(GUEST, 5001), at(SERVER, 7000)));
    let broken = {
        let (vnet, mut frame) = udp(5002).payload(&[0; 200]).build();
        // The IP header says more than came.
        frame.truncate(100);
        (vnet, frame)
    };
    let ipv6 = {
        let mut frame = [GATEWAY_MAC, GUEST_MAC].concat();
        frame.extend_from_slice(&[0x86, 0xdd, 0x60]);
        frame.resize(70, 0);
        (VnetHdr::default(), frame)
    };
    let strange = {
        let mut frame = [GATEWAY_MAC, GUEST_MAC].concat();
        frame.extend_from_slice(&[0x88, 0xb5]);
        frame.resize(64, 0);
        (VnetHdr::default(), frame)
    };
    let cases = [
        ("group", udp(5006).macs(GUEST_MAC, BROADCAST).build()),
        ("tagged", udp(5003).vlan(7).build()),
        ("spoofed", spoofed.build()),
        ("malformed", broken),
        ("ipv6", ipv6),
        ("ether_type", strange),
        (
            "fragment",
            udp(5004)
                .macs(GUEST_MAC, BROADCAST)
                .fragment(0, true)
                .build(),
        ),
        (
            "ip_options",
            udp(5005).ip_options(&[7, 7, 4, 0, 0, 0, 0]).build(),
        ),
        (
            "ip_protocol",
            toward(FrameBuilder::ip(GUEST, SERVER, 47)).build(),
        ),
        ("gso_bomb", bomb.build()),
        ("no_flow", late.build()),
    ];
    for (reason, (vnet, frame)) in cases {
        let before = stand.dropped(reason);
        stand.guest.inject(vnet, &frame).unwrap();
        let mut drops = serde_json::Value::Null;
        let counted = (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            drops = stand.total()["drops"].take();
            drops[reason]["packets"].as_u64().unwrap_or(0) > before
        });
        assert!(counted, "a drop counted as {reason}: {drops}");
    }
    assert_eq!(echo.datagrams(), 0, "none of it reached the world");
    assert_eq!(server.accepted(), 0);
    let (vnet, frame) = udp(5010).build();
    stand.guest.inject(vnet, &frame).unwrap();
    eventually("the honest datagram", || {
        (echo.datagrams() == 1).then_some(())
    });
    stand
        .run(|| tcp::download(server.address(), 1 << 20, 1, WAIT))
        .unwrap();
}

#[test]
fn every_injected_packet_is_counted_exactly_once() {
    require_root_and_tun!();
    let guest = GuestConfig::new("tap0").hand_made();
    let stand = Stand::with(WorldConfig::default(), guest, &["--deny", "203.0.113.20"]);
    let echo = UdpServer::start(&stand.world.net, (SERVER, 7), UdpService::Sink).unwrap();
    let denied = |port| datagram(port, at(SERVER_2, 7));
    let toward = |frame: FrameBuilder| frame.macs(GUEST_MAC, GATEWAY_MAC).payload(b"x");
    let spoofed = toward(FrameBuilder::udp("10.0.2.77:5000", at(SERVER, 7)));
    let late = toward(FrameBuilder::tcp(at(GUEST, 5001), at(SERVER, 7000)));
    let (mut packets, mut bytes) = (0, 0);
    let mut inject = |frame: &FrameBuilder| {
        bytes += frame.build_ip().len() as u64;
        packets += 1;
        let (vnet, frame) = frame.build();
        stand.guest.inject(vnet, &frame).unwrap();
    };
    for round in 0..50u16 {
        inject(&udp(6000 + round % 7).checksum(Checksum::Partial));
        inject(&udp(6000 + round % 7));
        inject(&denied(6100 + round));
        inject(&spoofed);
        inject(&late);
    }
    eventually("100 datagrams at the server", || {
        (echo.datagrams() == 100).then_some(())
    });
    let settled = || {
        let total = stand.total();
        let number = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
        let drops = total["drops"].as_object().unwrap();
        let dropped = |what: &str| drops.values().map(|drop| number(&drop[what])).sum::<u64>();
        let kernel = &total["kernel"];
        let counted = (
            number(&kernel["tx_packets"]) + dropped("packets"),
            number(&kernel["tx_bytes"]) + dropped("bytes"),
        );
        (counted.0 >= packets).then_some((counted, total))
    };
    let (counted, total) = eventually("all packets counted", settled);
    assert_eq!(counted, (packets, bytes), "{total}");
    assert_eq!(total["kernel"]["tx_packets"], 100, "{total}");
    assert_eq!(total["drops"]["spoofed"]["packets"], 50, "{total}");
    assert_eq!(total["drops"]["refused"]["packets"], 50, "{total}");
    assert_eq!(total["drops"]["no_flow"]["packets"], 50, "{total}");
}

#[test]
fn a_guest_with_another_mac_than_its_vm_s_is_named_with_both() {
    require_root_and_tun!();
    let world = World::new().unwrap();
    let guest = Guest::new(&world, GuestConfig::new("tap0").hand_made()).unwrap();
    let vm = [
        "--vm",
        "name=a,tap=tap0,mac=02:00:00:00:00:77",
        "--xdp",
        "off",
    ];
    let args = [&vm[..], &["--uplink", UPLINK]].concat();
    let slipgate = Slipgate::attach(&world.host, &PinDir::new().unwrap(), &args).unwrap();
    let why = || slipgate.why("a", "203.0.113.10:7", "udp").unwrap();
    assert!(!why().1.contains("MAC"));
    let (vnet, frame) = udp(5000).build();
    guest.inject(vnet, &frame).unwrap();
    let both = "frames come from MAC 52:54:00:12:34:56, but the VM is configured with \
                02:00:00:00:00:77";
    eventually("the reason", || why().1.contains(both).then_some(()));
    let stats = slipgate.stats().unwrap();
    let named = &stats["vms"][0]["mac_mismatch"];
    assert_eq!(named["seen"], "52:54:00:12:34:56", "{stats}");
    assert_eq!(named["configured"], "02:00:00:00:00:77", "{stats}");
    let text = slipgate.run(&["stats"]).unwrap().stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains(&format!("a: {both}")), "{text}");
}
