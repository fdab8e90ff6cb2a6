//! Fragments, of which only the first shows where they go.

use std::net::SocketAddr;

use slipgate_testbed::{
    Capture, Guest, GuestConfig, World, WorldConfig, baseline,
    frame::{FrameBuilder, tcp_flags},
    require_root_and_tun,
    world::WORLD_LINK,
};

use super::{
    ALLOW, ALLOWED, Arrivals, Cell, DENIED, HTTPS, Host, OFF, RESOLVER, Stage, at, https, matrix,
    stage::DISCARD,
};
use crate::{
    GATEWAY_MAC, GUEST_MAC, Mode, eventually,
    matrix::{Family, cells},
};

matrix! {
    fragments_of_any_kind: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

/// Packets in fragments, each a way by which a filter was once passed.
fn fragments(cell: Cell) -> Vec<FrameBuilder> {
    let guest = SocketAddr::new(cell.guest(), 20_500);
    let ip = |host: Host| host.ip(cell.family);
    let header = if cell.is_ipv6() { 40 } else { 20 };
    let toward = |frame: FrameBuilder| frame.macs(GUEST_MAC, GATEWAY_MAC);
    let syn = |host| {
        let frame = FrameBuilder::tcp(guest, SocketAddr::new(ip(host), HTTPS));
        toward(frame.flags(tcp_flags::SYN)).build_ip()[header..].to_vec()
    };
    let datagram = |host| {
        let frame = FrameBuilder::udp(guest, SocketAddr::new(ip(host), DISCARD));
        toward(frame.payload(&[b'x'; 24])).build_ip()[header..].to_vec()
    };
    let mut all = Vec::new();
    for (ident, host) in [(1, ALLOWED), (2, DENIED)] {
        let part = |protocol, ident, place: usize, bytes: &[u8], more| {
            toward(FrameBuilder::ip(guest.ip(), ip(host), protocol))
                .ident(ident)
                .fragment((place / 8) as u16, more)
                .payload(bytes)
        };
        let (syn, datagram) = (syn(host), datagram(host));
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

fn inject(cell: Cell, guest: &Guest) {
    for fragment in fragments(cell) {
        let (vnet, frame) = fragment.build();
        guest.inject(vnet, &frame).unwrap();
    }
}

/// Nobody but slipgate is in their way: a host that only forwards lets them by.
#[test]
fn fragments_past_a_host_that_only_forwards() {
    require_root_and_tun!();
    let forwarding = WorldConfig {
        ip_forward: true,
        server_addresses: [RESOLVER, ALLOWED, DENIED].map(Host::ipv4).to_vec(),
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
    inject(cells::hybrid_ipv4, &guest);
    eventually("all fragments, past a host that only forwards", || {
        let seen = Arrivals::new(Family::Ipv4, capture.frames());
        let wanted = fragments(cells::hybrid_ipv4).len() / 2;
        (seen.at(ALLOWED) == wanted && seen.at(DENIED) == wanted).then_some(())
    });
}

fn fragments_of_any_kind(cell: Cell) {
    for (args, on) in [(OFF, false), (ALLOW, true)] {
        let stage = Stage::new(cell, args);
        stage.ask("api.example.test");
        inject(cell, &stage.stand.guest);
        stage.settle();
        // The whole is judged: a SYN and a datagram. Tiny fragments leave in one packet, and the
        // datagram without a first fragment stays behind. In IPv6 a first fragment has all headers
        // (RFC 7112), so there a SYN that was cut stays behind, too.
        let seen = stage.arrivals();
        let wanted = if cell.is_ipv6() { 1 } else { 2 };
        let got = [ALLOWED, DENIED].map(|host| match cell.mode {
            Mode::Hybrid => seen.at(host),
            // The engine's own connection has more packets than a SYN.
            Mode::User => seen.opened(https(host)) + seen.datagrams(at(host, DISCARD)).len(),
        });
        assert_eq!(got, [wanted, if on { 0 } else { wanted }], "{seen}");
        assert!(!on || seen.at(DENIED) == 0, "{seen}");
        let refused = stage.stand.dropped("refused");
        assert_eq!(refused, if on { wanted as u64 } else { 0 }, "{seen}");
        // The same datagram in one packet.
        for host in [ALLOWED, DENIED] {
            stage.sends(at(host, DISCARD), &[b'x'; 24]);
        }
        let seen = stage.arrivals();
        let got = [ALLOWED, DENIED].map(|address| seen.datagrams(at(address, DISCARD)).len());
        assert_eq!(got, [2, if on { 0 } else { 2 }], "{seen}");
    }
}
