//! ICMP errors of both families, and what gets none.
use slipgate_abi::{DropReason, Handover, tcp::Flags};

use super::*;
use crate::port::VirtioNetHdr;

#[test]
fn an_error_from_the_world_is_translated_inward() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let router: IpAddr = match family.version {
            Version::V4 => "203.0.113.9".parse().unwrap(),
            Version::V6 => "2001:db8:99::9".parse().unwrap(),
        };
        for opener in family.openers(5_000) {
            rig.guest(1, &opener);
            let sent = rig.at_world().pop().unwrap();
            let [kind, code] = family.expired;
            let error = icmp_error(router, family.nat, kind, code, &sent);
            assert_eq!(
                rig.world(&error),
                Handling::Engine(Handover::Icmp),
                "{family:?}"
            );
            let (vm, got) = rig.at_guest().pop().expect("the error arrives");
            assert_eq!((vm, icmp(&got)), (101, family.expired));
            let outer = read(&got);
            assert_eq!(
                (outer.ip.source, outer.ip.destination),
                (router, family.guest)
            );
            // What is quoted is what the guest sent, but for the TTL that it had on its way, and a
            // SYN's clamped MSS.
            let quoted = with_ttl(outer.ip.payload()[8..].to_vec(), read(&opener).ip.ttl);
            match read(&quoted).transport {
                Transport::Tcp(tcp) => assert_eq!((tcp.source, tcp.sequence), (5_000, 7)),
                _ => assert_eq!(quoted, opener),
            }
        }
    }
}

#[test]
fn an_error_of_the_guest_is_translated_outward() {
    for family in families() {
        let mut rig = Rig::with(setup());
        rig.guest(1, &family.openers(5_000)[1]);
        let sent = rig.at_world().pop().unwrap();
        rig.world(&family.answer(&sent));
        let (_, delivered) = rig.at_guest().pop().unwrap();
        let [kind, code] = family.prohibited;
        let error = icmp_error(family.guest, family.peer, kind, code, &delivered);
        assert_eq!(rig.guest(1, &error), Handling::Engine(Handover::Icmp));
        let out = rig.at_world().pop().expect("the error goes out");
        assert_eq!(icmp(&out), family.prohibited);
        let outer = read(&out);
        assert_eq!(
            (outer.ip.source, outer.ip.destination),
            (family.nat, family.peer)
        );
        let quoted = read(&outer.ip.payload()[8..]);
        assert_eq!(quoted.ip.destination, family.nat);
        assert_eq!(
            quoted.transport.ports().unwrap().1,
            read(&sent).transport.ports().unwrap().0
        );
        // To another than the sender of the packet that it is about; and about no flow.
        let elsewhere: IpAddr = "2001:db8:99::9".parse().unwrap();
        if family.version == Version::V6 {
            rig.guest(
                1,
                &icmp_error(family.guest, elsewhere, kind, code, &delivered),
            );
        }
        let never = udp(family.server(), (family.guest, 5_001), b"y");
        rig.guest(
            1,
            &icmp_error(family.guest, family.peer, kind, code, &never),
        );
        assert!(rig.at_world().is_empty());
    }
}

#[test]
fn what_is_too_large_for_the_uplink_has_its_sender_told_the_mtu() {
    for family in families() {
        let mut rig = Rig::with(setup());
        rig.guest(1, &udp((family.guest, 5_000), family.server(), &[7; 1_400]));
        let (_, error) = rig.at_guest().pop().expect("an error");
        let parsed = read(&error);
        assert_eq!(parsed.ip.source, family.gateway);
        let payload = parsed.ip.payload();
        let (expected, mtu) = match family.version {
            Version::V4 => ([3, 4], &payload[6..8]),
            Version::V6 => ([2, 0], &payload[6..8]),
        };
        assert_eq!(icmp(&error), expected, "{family:?}");
        assert_eq!(mtu, 1_400u16.to_be_bytes());
        assert!(error.len() <= family.version.least_mtu() as usize);
        assert_eq!(rig.dropped(1, DropReason::TooBig), 1);
        assert!(rig.at_world().is_empty());
        // From the world, of a flow, for the guest's link.
        rig.guest(1, &udp((family.guest, 5_000), family.server(), b"x"));
        let sent = rig.at_world().pop().unwrap();
        let nat = (family.nat, read(&sent).transport.ports().unwrap().0);
        let large = udp(family.server(), nat, &[1; 1_500]);
        assert_eq!(rig.world(&large), Handling::Engine(Handover::TooBig));
        let error = rig.at_world().pop().expect("an error goes out");
        assert_eq!(icmp(&error), expected);
        let parsed = read(&error);
        assert_eq!(
            (parsed.ip.source, parsed.ip.destination),
            (family.nat, family.peer)
        );
        assert_eq!(parsed.ip.payload()[6..8], 1_500u16.to_be_bytes());
    }
}

#[test]
fn a_used_up_ttl_is_told_by_the_gateway() {
    for family in families() {
        let mut rig = Rig::with(setup());
        for opener in family.openers(5_000) {
            rig.guest(1, &with_ttl(opener, 1));
            let (_, error) = rig.at_guest().pop().expect("an error");
            assert_eq!(
                (icmp(&error), read(&error).ip.source),
                (family.expired, family.gateway)
            );
        }
        assert_eq!(rig.dropped(1, DropReason::TtlExpired), 3, "{family:?}");
        assert_eq!(rig.flows(), 0);
    }
}

#[test]
fn what_the_engine_must_not_pass_is_counted_by_its_reason() {
    let six = families()[1];
    let mut rig = Rig::with(setup());
    let packet = udp((six.guest, 5_000), six.server(), b"x");
    // Handed over as if the programs had missed it.
    let with = |next: u8| {
        let mut packet = packet.clone();
        packet[6] = next;
        packet
    };
    let mut spoofed = packet.clone();
    spoofed[8..24].copy_from_slice(&PEER6.octets());
    let cases = [
        (with(44), DropReason::Fragment),
        (with(0), DropReason::ExtensionHeader),
        (with(43), DropReason::ExtensionHeader),
        (with(60), DropReason::ExtensionHeader),
        (with(1), DropReason::IpProtocol),
        (with(132), DropReason::IpProtocol),
        (packet[..30].to_vec(), DropReason::Malformed),
        (spoofed, DropReason::Spoofed),
    ];
    for (packet, reason) in cases {
        let before = rig.dropped(1, reason);
        let vnet = VirtioNetHdr::default();
        rig.kernel
            .borrow_mut()
            .hand_over(1, Handover::Miss, 0, vnet, &packet);
        rig.turn();
        assert_eq!(rig.dropped(1, reason), before + 1, "{reason:?}");
    }
    let four = families()[0];
    let mut echo = echo(four.guest, four.peer, true, 9, b"x");
    echo[9] = 58;
    crate::packet::ipv4::fill_checksum(&mut echo, 20);
    let before = rig.dropped(1, DropReason::IpProtocol);
    rig.kernel
        .borrow_mut()
        .hand_over(1, Handover::Miss, 0, VirtioNetHdr::default(), &echo);
    rig.turn();
    assert_eq!(rig.dropped(1, DropReason::IpProtocol), before + 1);
    assert_eq!((rig.flows(), rig.at_world().len()), (0, 0));
}

#[test]
fn the_gateway_answers_a_ping_and_refuses_the_rest_of_its_network() {
    for family in families() {
        let mut rig = Rig::with(setup());
        rig.guest(1, &echo(family.guest, family.gateway, true, 9, b"data"));
        let (_, answer) = rig.at_guest().pop().expect("an answer");
        let packet = read(&answer);
        assert_eq!(
            (packet.ip.source, packet.ip.destination),
            (family.gateway, family.guest)
        );
        assert!(
            matches!(packet.transport, Transport::Icmp(icmp) if icmp.is_echo() && !icmp.is_echo_request())
        );
        assert_eq!(packet.ip.payload()[8..], *b"data");
        rig.guest(1, &syn((family.guest, 4_000), (family.gateway, 80), 7));
        let (_, reset) = rig.at_guest().pop().expect("an answer");
        assert!(matches!(read(&reset).transport, Transport::Tcp(tcp) if tcp.has(Flags::RST)));
        assert_eq!(rig.flows(), 0, "{family:?}");
    }
}
