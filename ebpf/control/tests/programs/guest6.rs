//! IPv6 packets of a guest that have no flow: what is dropped, and why; what the engine gets.
use std::net::Ipv6Addr;

use slipgate_abi::{DropReason, Handover, Protocol, Verdict, portframe::PortFlags, tcp::Flags};

use crate::{datapath::*, flow6::*, frame6::*, loaded};

const EGRESS: &str = "guest_egress";
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_DHCP_AGENTS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
const GROUP_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];

/// A datagram of the guest to a port.
fn udp(ports: (u16, u16)) -> Frame6 {
    Frame6 {
        l4: l4_of(Protocol::Udp, 0, ports, 0, b"data"),
        ..Frame6::tx(Protocol::Udp)
    }
}

/// A message of ICMPv6 to all nodes.
fn icmp(kind: u8) -> Frame6 {
    Frame6 {
        l4: l4_of(Protocol::Icmpv6, kind, (0, 0), 0, &[0; 16]),
        hop_limit: 255,
        source: GUEST_LOCAL,
        destination: ALL_NODES,
        destination_mac: GROUP_MAC,
        ..Frame6::tx(Protocol::Icmpv6)
    }
}

/// A report of multicast listener discovery, behind a router alert.
fn listener_report(kind: u8, header_len: u8) -> Frame6 {
    let l4 = [
        &[58, header_len, 5, 2, 0, 0, 1, 0][..],
        &[kind, 0, 0, 0],
        &[0; 24],
    ]
    .concat();
    Frame6 {
        l4,
        next_header: 0,
        hop_limit: 1,
        ..icmp(kind)
    }
}

#[test]
fn what_a_guest_may_not_send_is_dropped_for_its_reason() {
    use DropReason as D;
    let tcp = |flags| Frame6 {
        l4: l4_of(Protocol::Tcp, 0, (1, 2), flags, b""),
        ..Frame6::tx(Protocol::Tcp)
    };
    let with_header = |next_header| Frame6 {
        next_header,
        l4: vec![59, 0, 1, 4, 0, 0, 0, 0],
        ..Frame6::tx(Protocol::Udp)
    };
    let from = |source| Frame6 {
        source,
        ..udp((40_000, 443))
    };
    let cases = [
        ("hop-by-hop", with_header(0), D::ExtensionHeader),
        ("routing", with_header(43), D::ExtensionHeader),
        ("destination options", with_header(60), D::ExtensionHeader),
        ("no next header", with_header(59), D::IpProtocol),
        ("IPv4's ICMP", with_header(1), D::IpProtocol),
        (
            "a long router alert",
            listener_report(143, 1),
            D::ExtensionHeader,
        ),
        (
            "a query of listeners",
            listener_report(130, 0),
            D::ExtensionHeader,
        ),
        ("router advertisement", icmp(134), D::RouterAdvertisement),
        ("redirect", icmp(137), D::RouterAdvertisement),
        (
            "a solicitation that was forwarded",
            Frame6 {
                hop_limit: 254,
                ..icmp(135)
            },
            D::Malformed,
        ),
        ("foreign", from(REMOTE6), D::Spoofed),
        ("the gateway's", from(GATEWAY6), D::Spoofed),
        ("the gateway's on the link", from(GATEWAY_LOCAL), D::Spoofed),
        ("unspecified", from(Ipv6Addr::UNSPECIFIED), D::Spoofed),
        ("link-local to the world", from(GUEST_LOCAL), D::Spoofed),
        (
            "an advertisement from nowhere",
            Frame6 {
                source: Ipv6Addr::UNSPECIFIED,
                ..icmp(136)
            },
            D::Spoofed,
        ),
        (
            "to a group",
            Frame6 {
                destination: ALL_NODES,
                destination_mac: GROUP_MAC,
                ..udp((5_353, 5_353))
            },
            D::Group,
        ),
        (
            "to a group of Ethernet only",
            Frame6 {
                destination_mac: GROUP_MAC,
                ..udp((40_000, 443))
            },
            D::Group,
        ),
        ("SYN and FIN", tcp(Flags::SYN | Flags::FIN), D::BadTcpFlags),
        (
            "a short header",
            Frame6 {
                l4: vec![0; 10],
                ..Frame6::tx(Protocol::Tcp)
            },
            D::Malformed,
        ),
    ];
    for (what, frame, reason) in cases {
        let datapath = loaded!();
        println!("{what}");
        datapath.expect_drop(EGRESS, &frame.bytes(), ROW, reason);
    }
}

/// Whatever is behind the packet's end: what a live flow's packet would be without the header, or a
/// listener's message.
#[test]
fn a_packet_that_ends_in_or_right_behind_an_extension_header_is_dropped() {
    const HEADER_LEN: usize = 8;
    /// Of a frame that the link may have padded.
    const MOST_PADDED: usize = 64 - 54;
    let set_payload_len =
        |bytes: &mut [u8], len: usize| bytes[18..20].copy_from_slice(&(len as u16).to_be_bytes());
    let of_flow = |number, protocol| {
        let packet = Frame6::tx(protocol);
        let header = [protocol as u8, 0, 1, 4, 0, 0, 0, 0];
        Frame6 {
            next_header: number,
            l4: [&header[..], &packet.l4].concat(),
            ..packet
        }
    };
    let mut packets = vec![listener_report(143, 0)];
    for number in [0, 43, 60] {
        let each = [Protocol::Tcp, Protocol::Udp, Protocol::Icmpv6];
        packets.extend(each.map(|protocol| of_flow(number, protocol)));
    }
    for packet in packets {
        let mut datapath = loaded!();
        let all = [Protocol::Tcp, Protocol::Udp, Protocol::Icmpv6];
        for (slot, protocol) in (1..).zip(all) {
            let mut flow = flow6(protocol);
            flow.slot = slot;
            datapath.admit6(flow);
        }
        let expect = |bytes: &[u8], reason, l3_len: u64| {
            datapath
                .drops
                .change(ROW, |drops| *drops = Default::default());
            datapath.expect_drop(EGRESS, bytes, ROW, reason);
            assert_eq!(datapath.drops.get(ROW).get(reason).bytes, l3_len);
        };
        // Up to the last byte in front of a message of ICMPv6, of which a listener's has eight at least.
        for len in 0..2 * HEADER_LEN {
            let mut short = packet.clone();
            short.l4.truncate(len);
            let reason = DropReason::ExtensionHeader;
            expect(&short.bytes(), reason, 40 + len as u64);
            let mut padded = packet.bytes();
            set_payload_len(&mut padded, len);
            if len <= MOST_PADDED {
                expect(&padded[..54 + MOST_PADDED], reason, 40 + len as u64);
            }
            // No link pads as much: the guest lies about the length.
            let all = (padded.len() - 14) as u64;
            expect(&padded, DropReason::Malformed, all);
        }
        let mut beyond = packet.bytes();
        let len = packet.l4.len();
        set_payload_len(&mut beyond, len + 1);
        expect(&beyond, DropReason::Malformed, 40 + len as u64);
        // The header says that it is longer than the packet.
        let mut long = packet.clone();
        long.l4[1] = u8::MAX;
        expect(&long.bytes(), DropReason::ExtensionHeader, 40 + len as u64);
    }
    let datapath = loaded!();
    let whole = Frame6 {
        l4: listener_report(143, 0).l4[..2 * HEADER_LEN].to_vec(),
        ..listener_report(143, 0)
    };
    datapath.expect_handover(EGRESS, &whole.bytes(), Handover::Ndp, PortFlags::GROUP);
}

/// A first fragment, and a later one.
fn fragments(of: &Frame6) -> [Frame6; 2] {
    [1, 24].map(|field| Frame6 {
        next_header: 44,
        l4: fragment_of(of.next_header, field, 7, &of.l4),
        ..of.clone()
    })
}

#[test]
fn fragments_are_handed_over_whatever_flow_they_are_of() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmpv6] {
        for is_live in [true, false] {
            let mut datapath = loaded!();
            if is_live {
                datapath.admit6(flow6(protocol));
            }
            for frame in fragments(&Frame6::tx(protocol)) {
                let bytes = frame.bytes();
                let run = datapath.run(EGRESS, &bytes);
                assert_eq!(run.action, REDIRECT);
                let (header, rest) = crate::frame::handed(&run.frame);
                assert_eq!(header.code, Handover::Fragment as u8);
                assert_eq!(rest, &bytes[12..]);
            }
            assert_eq!(datapath.handed_over(), 2, "a credit for each");
        }
    }
}

#[test]
fn fragments_that_a_guest_may_not_send_are_dropped() {
    use DropReason as D;
    let frame = || Frame6::tx(Protocol::Udp);
    let cases = [
        (
            Frame6 {
                source: REMOTE6,
                ..frame()
            },
            D::Spoofed,
        ),
        (
            Frame6 {
                source: GUEST_LOCAL,
                ..frame()
            },
            D::Spoofed,
        ),
        (
            Frame6 {
                destination: ALL_NODES,
                ..frame()
            },
            D::Group,
        ),
        (
            Frame6 {
                destination_mac: GROUP_MAC,
                ..frame()
            },
            D::Group,
        ),
    ];
    for (frame, reason) in cases {
        for fragment in fragments(&frame) {
            let datapath = loaded!();
            datapath.expect_drop(EGRESS, &fragment.bytes(), ROW, reason);
        }
    }
}

#[test]
fn without_ipv6_all_is_dropped() {
    for (frame, reason) in [
        (udp((40_000, 443)), DropReason::Ipv6),
        (icmp(133), DropReason::Group),
    ] {
        let datapath = loaded!();
        datapath.vms6.change(ROW, |row| row.flags = 0);
        datapath.expect_drop(EGRESS, &frame.bytes(), ROW, reason);
    }
}

#[test]
fn without_programs_for_ipv6_a_guests_is_dropped_and_the_worlds_is_the_hosts() {
    for (frame, reason) in [
        (udp((40_000, 443)), DropReason::Ipv6),
        (icmp(133), DropReason::Group),
    ] {
        let mut datapath = loaded!();
        datapath.without_programs6(|datapath| {
            datapath.expect_drop(EGRESS, &frame.bytes(), ROW, reason);
        });
    }
    for (program, l2) in [("uplink_ingress", 14), ("uplink_ingress_l3", 0)] {
        let mut datapath = loaded!();
        let frame = Frame6::rx(Protocol::Udp).bytes();
        datapath.without_programs6(|datapath| {
            datapath.expect_unnoticed(program, &frame[14 - l2..]);
        });
    }
}

#[test]
fn a_length_that_is_not_the_frames_is_malformed() {
    for change in [-1_i16, 1, 100] {
        let datapath = loaded!();
        let mut frame = udp((40_000, 443)).bytes();
        frame.extend([0; 8]);
        let len = 12_i16 + 8 + change;
        frame[18..20].copy_from_slice(&len.to_be_bytes());
        let run = datapath.run(EGRESS, &frame);
        assert_eq!(run.action, SHOT, "{change}");
        assert_eq!(datapath.only_drop(ROW), DropReason::Malformed, "{change}");
    }
}

#[test]
fn what_needs_a_decision_is_handed_over_with_its_reason() {
    use Handover as H;
    let to = |destination, frame: Frame6| Frame6 {
        destination,
        ..frame
    };
    let group = PortFlags::GROUP;
    let dhcp = Frame6 {
        source: GUEST_LOCAL,
        destination_mac: GROUP_MAC,
        ..to(ALL_DHCP_AGENTS, udp((546, 547)))
    };
    let error = Frame6 {
        l4: l4_of(Protocol::Icmpv6, 3, (0, 0), 0, &[0; 60]),
        ..Frame6::tx(Protocol::Icmpv6)
    };
    let cases = [
        ("a new flow", udp((40_000, 443)), H::Miss, 0),
        ("an echo", Frame6::tx(Protocol::Icmpv6), H::Miss, 0),
        ("DNS", udp((40_000, 53)), H::Miss, 0),
        ("an error", error, H::Icmp, 0),
        ("DHCPv6", dhcp.clone(), H::Dhcp, group),
        (
            "to the gateway",
            to(GATEWAY6, udp((40_000, 53))),
            H::Local,
            0,
        ),
        ("to a neighbour", to(UNBOUND, udp((40_000, 9))), H::Local, 0),
        (
            "on the link",
            Frame6 {
                source: GUEST_LOCAL,
                ..to(GATEWAY_LOCAL, udp((40_000, 9)))
            },
            H::Local,
            0,
        ),
        ("router solicitation", icmp(133), H::Ndp, group),
        (
            "router solicitation from nowhere",
            Frame6 {
                source: Ipv6Addr::UNSPECIFIED,
                ..icmp(133)
            },
            H::Ndp,
            group,
        ),
        (
            "duplicate address detection",
            Frame6 {
                source: Ipv6Addr::UNSPECIFIED,
                ..icmp(135)
            },
            H::Ndp,
            group,
        ),
        ("neighbour advertisement", icmp(136), H::Ndp, group),
        ("listener report", listener_report(143, 0), H::Ndp, group),
        (
            "from another address",
            Frame6 {
                source: UNBOUND,
                ..udp((40_000, 443))
            },
            H::Address,
            0,
        ),
    ];
    for (what, frame, why, flags) in cases {
        let datapath = loaded!();
        println!("{what}");
        datapath.expect_handover(EGRESS, &frame.bytes(), why, flags);
    }
}

#[test]
fn a_packet_that_is_handed_over_notes_the_use_of_its_address() {
    let datapath = loaded!();
    datapath.run(EGRESS, &udp((40_000, 443)).bytes());
    let used = datapath.vms6.get(ROW).used_ns;
    assert_ne!(used[3], 0);
    assert!(used.iter().enumerate().all(|(at, ns)| at == 3 || *ns == 0));
    // An address that was bound since opens flows.
    datapath.bind6(8, UNBOUND);
    let other = Frame6 {
        source: UNBOUND,
        ..udp((40_000, 443))
    };
    let run = datapath.run(EGRESS, &other.bytes());
    let (header, _) = crate::frame::handed(&run.frame);
    assert_eq!(header.code, Handover::Miss as u8);
    assert_ne!(datapath.vms6.get(ROW).used_ns[8], 0);
}

#[test]
fn hop_limit_mtu_and_verdicts_are_observed() {
    type Change = fn(&Loaded);
    let cases: [(Verdict, u8, Change, Option<Handover>); 5] = [
        (Verdict::Fast, 1, |_| {}, Some(Handover::TtlExpired)),
        (
            Verdict::Fast,
            64,
            |loaded| loaded.hops.change(HOP, |hop| hop.mtu = 60),
            Some(Handover::TooBig),
        ),
        (Verdict::Engine, 64, |_| {}, Some(Handover::Verdict)),
        (Verdict::Closing, 64, |_| {}, Some(Handover::Verdict)),
        (Verdict::Drop, 64, |_| {}, None),
    ];
    for (verdict, hop_limit, change, why) in cases {
        let mut datapath = loaded!();
        datapath.admit6(Flow {
            verdict,
            ..flow6(Protocol::Udp)
        });
        change(&datapath);
        let frame = Frame6 {
            hop_limit,
            ..Frame6::tx(Protocol::Udp)
        };
        match why {
            Some(why) => datapath.expect_handover(EGRESS, &frame.bytes(), why, 0),
            None => datapath.expect_drop(EGRESS, &frame.bytes(), ROW, DropReason::Denied),
        }
    }
}
