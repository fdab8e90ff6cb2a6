//! Invalid frames: each is dropped and counted by its reason, and the guest's valid traffic
//! continues.

use std::net::IpAddr;

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World,
    clients::tcp,
    frame::{BROADCAST, Checksum, FrameBuilder},
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    tap::VnetHdr,
    world::{SERVER, UPLINK},
};

use crate::{
    Cell, GATEWAY_MAC, GUEST_MAC, Stand, WAIT, datagram, eventually,
    matrix::{at, matrix},
};

matrix! {
    each_hostile_frame_is_dropped_under_its_own_reason: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    every_injected_packet_is_counted_exactly_once: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

type Frame = (VnetHdr, Vec<u8>);

fn toward(frame: FrameBuilder) -> FrameBuilder {
    frame.macs(GUEST_MAC, GATEWAY_MAC).payload(b"x")
}

/// A datagram from an address that is not the guest's.
fn spoofed(cell: Cell) -> FrameBuilder {
    let text = if cell.is_ipv6() {
        "2001:db8:77::7"
    } else {
        "10.0.2.77"
    };
    let source: IpAddr = text.parse().unwrap();
    toward(FrameBuilder::udp(at(source, 5000), at(cell.server(), 7)))
}

/// A segment of no connection.
fn late(cell: Cell) -> FrameBuilder {
    let (from, to) = (at(cell.guest(), 5001), at(cell.server(), 7000));
    toward(FrameBuilder::tcp(from, to))
}

/// A frame that is nothing but these bytes behind the MAC addresses.
fn bare(bytes: &[u8]) -> Frame {
    let mut frame = [&GATEWAY_MAC[..], &GUEST_MAC, bytes].concat();
    frame.resize(70, 0);
    (VnetHdr::default(), frame)
}

/// Frames, each with the reason for which it is dropped.
fn hostile(cell: Cell) -> Vec<(&'static str, Frame)> {
    let udp = |port| cell.datagram(port, at(cell.server(), 7));
    let broken = {
        let (vnet, mut frame) = udp(5002).payload(&[0; 200]).build();
        // The IP header says more than came.
        frame.truncate(100);
        (vnet, frame)
    };
    let strange = FrameBuilder::ip(cell.guest(), cell.server(), 47);
    let mut cases = vec![
        ("group", udp(5006).macs(GUEST_MAC, BROADCAST).build()),
        ("tagged", udp(5003).vlan(7).build()),
        ("spoofed", spoofed(cell).build()),
        ("malformed", broken),
        ("ether_type", bare(&[0x88, 0xb5])),
        ("ip_protocol", toward(strange).build()),
        ("no_flow", late(cell).build()),
    ];
    if !cell.is_ipv6() {
        let fragment = udp(5004).macs(GUEST_MAC, BROADCAST).fragment(0, true);
        let options = udp(5005).ip_options(&[7, 7, 4, 0, 0, 0, 0]);
        cases.extend([
            // Of a VM that has none.
            ("ipv6", bare(&[0x86, 0xdd, 0x60])),
            ("fragment", fragment.build()),
            ("ip_options", options.build()),
        ]);
    }
    // The stream socket has no offloads.
    if cell.is_hybrid() {
        let (from, to) = (at(cell.guest(), 5000), at(cell.server(), 7000));
        let bomb = toward(FrameBuilder::tcp(from, to)).payload(&[1; 4000]);
        cases.push(("gso_bomb", bomb.gso(8).build()));
    }
    cases
}

fn each_hostile_frame_is_dropped_under_its_own_reason(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let (net, server) = (&stand.world.net, cell.server());
    let echo = UdpServer::start(net, (server, 7), UdpService::Echo).unwrap();
    let server = TcpServer::start(net, (server, 7000), TcpService::Streams).unwrap();
    for (reason, (vnet, frame)) in hostile(cell) {
        let before = stand.dropped(reason);
        stand.guest.inject(vnet, &frame).unwrap();
        eventually(&format!("a drop counted as {reason}"), || {
            (stand.dropped(reason) > before).then_some(())
        });
    }
    assert_eq!(echo.datagrams(), 0, "none of it reached the world");
    assert_eq!(server.accepted(), 0);
    let (vnet, frame) = cell.datagram(5010, echo.address()).build();
    stand.guest.inject(vnet, &frame).unwrap();
    eventually("the honest datagram", || {
        (echo.datagrams() == 1).then_some(())
    });
    stand
        .run(|| tcp::download(server.address(), 1 << 20, 1, WAIT))
        .unwrap();
}

fn every_injected_packet_is_counted_exactly_once(cell: Cell) {
    let denied = cell.server_2().to_string();
    let stand = Stand::of_hand_made(cell, &["--deny", &denied]);
    let to = (cell.server(), 7);
    let echo = UdpServer::start(&stand.world.net, to, UdpService::Sink).unwrap();
    let udp = |port| cell.datagram(port, echo.address());
    let denied = |port| cell.datagram(port, at(cell.server_2(), 7));
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
        inject(&spoofed(cell));
        inject(&late(cell));
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
    let (vnet, frame) = datagram(5000, crate::at(SERVER, 7)).build();
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
