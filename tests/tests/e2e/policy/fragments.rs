//! Fragments, of which only the first shows where they go.

use slipgate_testbed::{
    Capture, Guest, GuestConfig, World, WorldConfig, baseline,
    frame::{FrameBuilder, tcp_flags},
    require_root_and_tun,
    world::WORLD_LINK,
};

use super::{ALLOW, ALLOWED, Arrivals, DENIED, OFF, RESOLVER, Stage, https, stage::DISCARD};
use crate::{GATEWAY_MAC, GUEST, GUEST_MAC, at, eventually};

/// Packets in fragments, each a way by which a filter was once passed.
fn fragments() -> Vec<FrameBuilder> {
    let toward = |frame: FrameBuilder| frame.macs(GUEST_MAC, GATEWAY_MAC);
    let syn = |address| {
        let frame = FrameBuilder::tcp(at(GUEST, 20_500), https(address));
        toward(frame.flags(tcp_flags::SYN)).build_ip()[20..].to_vec()
    };
    let datagram = |address| {
        let frame = FrameBuilder::udp(at(GUEST, 20_500), at(address, DISCARD));
        toward(frame.payload(&[b'x'; 24])).build_ip()[20..].to_vec()
    };
    let mut all = Vec::new();
    for (ident, address) in [(1, ALLOWED), (2, DENIED)] {
        let part = |protocol, ident, place: usize, bytes: &[u8], more| {
            toward(FrameBuilder::ip(GUEST, address, protocol))
                .ident(ident)
                .fragment((place / 8) as u16, more)
                .payload(bytes)
        };
        let (syn, datagram) = (syn(address), datagram(address));
        // Cut before the flags (RFC 1858, 3), in and out of order.
        all.push(part(6, ident, 0, &syn[..8], true));
        all.push(part(6, ident, 8, &syn[8..], false));
        all.push(part(17, ident + 10, 16, &datagram[16..], false));
        all.push(part(17, ident + 10, 0, &datagram[..16], true));
        // No first one at all.
        all.push(part(17, ident + 20, 8, &datagram[8..], false));
    }
    all
}

fn inject(guest: &Guest) {
    for fragment in fragments() {
        let (vnet, frame) = fragment.build();
        guest.inject(vnet, &frame).unwrap();
    }
}

#[test]
fn fragments_of_any_kind() {
    require_root_and_tun!();
    // Nobody but slipgate is in their way: a host that only forwards lets them by.
    let forwarding = WorldConfig {
        ip_forward: true,
        server_addresses: vec![RESOLVER, ALLOWED, DENIED],
        ..WorldConfig::default()
    };
    let world = World::with(forwarding).unwrap();
    let guest = Guest::new(&world, GuestConfig::new("tap0")).unwrap();
    baseline::plain_forwarding(&world, &guest).unwrap();
    let [a, b, c, d, e, f] = GATEWAY_MAC;
    let mac = format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
    world
        .host
        .ip(&format!("link set tap0 address {mac}"))
        .unwrap();
    let capture = Capture::keeping(&world.net, WORLD_LINK).unwrap();
    inject(&guest);
    eventually("all fragments, past a host that only forwards", || {
        let seen = Arrivals::new(capture.frames());
        let wanted = fragments().len() / 2;
        (seen.at(ALLOWED) == wanted && seen.at(DENIED) == wanted).then_some(())
    });
    drop((capture, guest, world));

    for (args, on) in [(OFF, false), (ALLOW, true)] {
        let stage = Stage::new(args);
        stage.ask("api.example.test");
        inject(&stage.stand.guest);
        stage.settle();
        // The whole is judged: a SYN and a datagram. Tiny fragments leave in one packet, and the
        // datagram without a first fragment stays behind.
        let seen = stage.arrivals();
        let got = [ALLOWED, DENIED].map(|address| seen.at(address));
        assert_eq!(got, [2, if on { 0 } else { 2 }], "{seen}");
        let refused = stage.stand.dropped("refused");
        assert_eq!(refused, if on { 2 } else { 0 }, "{seen}");
        // The same datagram in one packet.
        for address in [ALLOWED, DENIED] {
            stage.sends(at(address, DISCARD), &[b'x'; 24]);
        }
        let seen = stage.arrivals();
        let got = [ALLOWED, DENIED].map(|address| seen.datagrams(at(address, DISCARD)).len());
        assert_eq!(got, [2, if on { 0 } else { 2 }], "{seen}");
    }
}
