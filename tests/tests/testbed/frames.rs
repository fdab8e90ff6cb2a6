//! Hand-made frames, filters, pauses and unplugging.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use slipgate_testbed::{
    Direction, GuestConfig,
    clients::{icmp, tcp},
    frame::{BROADCAST, Checksum, FrameBuilder, Packet, arp, tcp_flags},
    pump::Fate,
    require_root_and_tun,
    servers::{TcpServer, TcpService},
    tap::VnetHdr,
    world::SERVER,
};

use super::{GATEWAY, GUEST, WAIT, at, forwarding, masqueraded};

const MAC: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];

#[test]
fn a_hand_made_guest_shakes_hands() {
    require_root_and_tun!();
    let (world, guest) = masqueraded(forwarding(), GuestConfig::new("tap0").hand_made());
    let server = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Hold).unwrap();
    let frames = guest.frames().unwrap();
    let question = arp(1, (MAC, GUEST), ([0; 6], GATEWAY));
    guest.inject(VnetHdr::default(), &question).unwrap();
    let is_arp = |bytes: &[u8]| bytes[12..14] == [8, 6] && bytes[21] == 2;
    let answer = frames.wait_for(WAIT, |frame| is_arp(&frame.bytes)).unwrap();
    let gateway: [u8; 6] = answer.bytes[22..28].try_into().unwrap();
    assert_ne!(gateway, BROADCAST);

    for (port, checksum) in [(4001, Checksum::Full), (4002, Checksum::Partial)] {
        let syn = FrameBuilder::tcp(at(GUEST, port), server.address())
            .macs(MAC, gateway)
            .flags(tcp_flags::SYN)
            .numbers(1000, 0)
            .checksum(checksum);
        let (vnet, bytes) = syn.build();
        guest.inject(vnet, &bytes).unwrap();
        let mine = |packet: Packet<'_>| packet.destination == at(GUEST, port);
        let reply = frames
            .wait_for(WAIT, |frame| frame.packet().is_some_and(mine))
            .unwrap();
        let packet = reply.packet().unwrap();
        assert_eq!(packet.tcp_flags(), Some(tcp_flags::SYN | tcp_flags::ACK));
        assert_eq!(packet.tcp_numbers().unwrap().1, 1001);
        assert!(packet.checksums_are_right(&reply.vnet));
    }
    // A wrong checksum never gets an answer.
    let wrong = FrameBuilder::tcp(at(GUEST, 4003), server.address())
        .macs(MAC, gateway)
        .flags(tcp_flags::SYN)
        .checksum(Checksum::Wrong);
    guest.inject(VnetHdr::default(), &wrong.build().1).unwrap();
    let to_it = |packet: Packet<'_>| packet.destination == at(GUEST, 4003);
    let silence = Duration::from_millis(200);
    assert!(
        frames
            .wait_for(silence, |frame| frame.packet().is_some_and(to_it))
            .is_none()
    );

    let beyond = VnetHdr {
        flags: VnetHdr::NEEDS_CSUM,
        csum_start: 60_000,
        ..Default::default()
    };
    let refused = guest.inject(beyond, &wrong.build().1).unwrap_err();
    assert_eq!(refused.os_error(), Some(libc::EINVAL), "{refused}");
    assert_eq!(frames.missed(), 0);
}

#[test]
fn a_filter_loses_and_repeats_what_it_is_told_to() {
    require_root_and_tun!();
    let (world, guest) = masqueraded(forwarding(), GuestConfig::new("tap0"));
    let server = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Close).unwrap();
    let connect = || {
        guest
            .run(|| tcp::connect_close(server.address(), WAIT))
            .unwrap()
    };
    assert!(connect() < Duration::from_millis(900));

    let syns = Arc::new(AtomicU32::new(0));
    let seen = syns.clone();
    let filter = move |_, _: &VnetHdr, bytes: &[u8]| {
        let flags = Packet::parse_ethernet(bytes).and_then(|packet| packet.tcp_flags());
        match flags == Some(tcp_flags::SYN) && seen.fetch_add(1, Ordering::SeqCst) == 0 {
            true => Fate::Lose,
            false => Fate::Repeat(2),
        }
    };
    guest.set_filter(Some(Box::new(filter))).unwrap();
    assert!(
        connect() >= Duration::from_secs(1),
        "the first SYN was lost"
    );
    assert_eq!(syns.load(Ordering::SeqCst), 2);
    let before = guest.moved(Direction::Out).frames;
    let ping = guest.run(|| icmp::ping(SERVER, 1, 0, WAIT)).unwrap();
    assert_eq!(ping.replies.len(), 1);
    assert!(
        guest.moved(Direction::Out).frames >= before + 2,
        "each frame went out twice"
    );
    guest.set_filter(None).unwrap();
    assert!(connect() < Duration::from_millis(900));
}

#[test]
fn a_paused_pump_moves_nothing_and_goes_on() {
    require_root_and_tun!();
    let (_world, guest) = masqueraded(forwarding(), GuestConfig::new("tap0"));
    let ping = |wait| {
        guest
            .run(|| icmp::ping(SERVER, 1, 0, wait))
            .unwrap()
            .replies
            .len()
    };
    assert_eq!(ping(WAIT), 1);
    guest.set_paused(true).unwrap();
    assert_eq!(ping(Duration::from_millis(200)), 0);
    guest.set_paused(false).unwrap();
    assert_eq!(ping(WAIT), 1);
}

#[test]
fn a_tap_is_unplugged_and_plugged_again() {
    require_root_and_tun!();
    let (world, mut guest) = masqueraded(forwarding(), GuestConfig::new("tap0"));
    let before = world.host.ifindex("tap0").unwrap();
    guest.unplug();
    assert_eq!(world.host.ifindex("tap0"), None);
    assert!(guest.inject(VnetHdr::default(), &[0; 60]).is_err());
    guest.plug().unwrap();
    assert_ne!(world.host.ifindex("tap0").unwrap(), before);
    let down = guest.inject(VnetHdr::default(), &[0; 60]).unwrap_err();
    assert_eq!(
        down.os_error(),
        Some(libc::EIO),
        "a TAP that is down takes nothing: {down}"
    );
    world.host.ip("addr add 10.0.2.2/24 dev tap0").unwrap();
    world.host.ip("link set tap0 up").unwrap();
    assert_eq!(
        guest
            .run(|| icmp::ping(SERVER, 1, 0, WAIT))
            .unwrap()
            .replies
            .len(),
        1
    );
}
