//! Packets of the world to a prefix that the network routes to this host, and whose addresses are a
//! guest's.
use std::net::Ipv6Addr;

use slipgate_abi::{DropReason, Handover, Protocol, portframe::PortFlags, tcp::Flags};

use crate::{datapath::*, early::kept, flow6::*, frame6::*, loaded};

const INGRESS: &str = "uplink_ingress";
/// A neighbour on the uplink.
const NEIGHBOUR: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 0x77);

fn routed(datapath: &mut Loaded, vm: u32) {
    datapath.forward6((PREFIX, 0, Protocol::Icmpv6), (vm, 0));
    let link = datapath.uplink;
    datapath.vms6.change(ROW, |row| {
        row.proxy_ifindex = link;
        row.proxy_mac = words(UPLINK_MAC);
    });
}

fn words(mac: [u8; 6]) -> [u16; 3] {
    [[mac[0], mac[1]], [mac[2], mac[3]], [mac[4], mac[5]]].map(u16::from_ne_bytes)
}

/// Packets to the guest's prefix that are no flow's.
fn strangers() -> Vec<Frame6> {
    let to_guest = |of: Frame6| Frame6 {
        destination: GUEST6,
        ..of
    };
    let with = |protocol, flags| Frame6 {
        l4: l4_of(protocol, 128, (443, 80), flags, b"twenty-one bytes long"),
        ..to_guest(Frame6::rx(protocol))
    };
    let error = Frame6 {
        l4: l4_of(
            Protocol::Icmpv6,
            1,
            (0, 0),
            0,
            &Frame6::tx(Protocol::Udp).bytes()[14..],
        ),
        ..to_guest(Frame6::rx(Protocol::Icmpv6))
    };
    let unknown = Frame6 {
        next_header: 50,
        ..to_guest(Frame6::rx(Protocol::Udp))
    };
    let to_nobody = Frame6 {
        destination: UNBOUND,
        ..Frame6::rx(Protocol::Udp)
    };
    // Of what only neighbours send. Without an L2 address it is no neighbour's that could be answered.
    let solicitations = [GUEST6, UNBOUND].into_iter().flat_map(|target| {
        [64, 255].map(|hop_limit| {
            let mut asked = Frame6 {
                hop_limit,
                source: Frame6::rx(Protocol::Icmpv6).source,
                ..probe(target)
            };
            if hop_limit == 255 && target == GUEST6 {
                asked.l4.truncate(24);
            }
            asked
        })
    });
    let mut all = vec![
        with(Protocol::Tcp, Flags::SYN),
        with(Protocol::Tcp, Flags::ACK),
        with(Protocol::Udp, 0),
        with(Protocol::Icmpv6, 0),
        error,
        unknown,
        to_nobody,
    ];
    all.extend(solicitations);
    all
}

/// The address shows whose they are, so they are the engine's in any order.
#[test]
fn fragments_to_a_guests_prefix_go_to_its_engine() {
    let fragment = |field| Frame6 {
        next_header: 44,
        l4: fragment_of(17, field, 7, b"of a datagram"),
        destination: GUEST6,
        ..Frame6::rx(Protocol::Udp)
    };
    for (program, from) in [(INGRESS, 0), ("uplink_ingress_l3", 14)] {
        let mut datapath = loaded!();
        routed(&mut datapath, VM);
        for field in [24, 1, 24, 0] {
            let run = datapath.run(program, &fragment(field).bytes()[from..]);
            assert_eq!(run.action, REDIRECT, "{program} {field}");
            let (header, _) = crate::frame::handed(&run.frame);
            let flags = PortFlags::FROM_UPLINK | PortFlags::STRANGER;
            assert_eq!(
                (header.code, header.flags),
                (Handover::Fragment as u8, flags)
            );
        }
        assert_eq!(datapath.drops_of(ROW), []);
        // Nobody's are kept for anybody.
        assert_eq!(kept(&datapath), 0);
    }
}

#[test]
fn what_is_no_flows_is_dropped_and_not_the_hosts() {
    for frame in strangers() {
        for (program, from) in [(INGRESS, 0), ("uplink_ingress_l3", 14)] {
            let mut datapath = loaded!();
            datapath.expect_unnoticed(program, &frame.bytes()[from..]);
            routed(&mut datapath, VM);
            let run = datapath.run(program, &frame.bytes()[from..]);
            assert_eq!(run.action, SHOT, "{program} {frame:?}");
            assert_eq!(datapath.only_reason(ROW), DropReason::NoFlow);
        }
        // A VM that is gone has no prefix.
        let mut datapath = loaded!();
        routed(&mut datapath, VM + 1);
        datapath.expect_unnoticed(INGRESS, &frame.bytes());
    }
}

#[test]
fn a_probe_for_duplicates_is_to_a_group() {
    let from_nowhere = Frame6 {
        source: Ipv6Addr::UNSPECIFIED,
        ..probe(GUEST6)
    };
    let mut datapath = loaded!();
    routed(&mut datapath, VM);
    assert_eq!(datapath.run(INGRESS, &from_nowhere.bytes()).action, SHOT);
    assert_eq!(datapath.only_reason(ROW), DropReason::NoFlow);
}

#[test]
fn a_forward_of_any_address_is_none_of_a_guests_prefix() {
    let any = (Ipv6Addr::UNSPECIFIED, 80, Protocol::Udp);
    let frame = |destination| Frame6 {
        destination,
        l4: l4_of(Protocol::Udp, 0, (443, 80), 0, b"payload"),
        ..Frame6::rx(Protocol::Udp)
    };
    for (destination, is_handed_over) in [(GUEST6, 0), (NAT6, 1)] {
        let mut datapath = loaded!();
        routed(&mut datapath, VM);
        datapath.forward6(any, (VM, 80));
        datapath.run(INGRESS, &frame(destination).bytes());
        assert_eq!(datapath.handed_over(), is_handed_over, "{destination}");
    }
}

/// The first address of the guest's /64 stands for all of it, with a protocol of its own.
#[test]
fn a_port_of_the_guests_own_addresses_goes_to_its_engine() {
    let whole = Protocol::Udp as u8 | 0x80;
    let frame = |destination, port| Frame6 {
        destination,
        l4: l4_of(Protocol::Udp, 0, (443, port), 0, b"payload"),
        ..Frame6::rx(Protocol::Udp)
    };
    let cases = [
        ((PREFIX, 80, whole), GUEST6, true),
        ((PREFIX, 80, whole), UNBOUND, true),
        ((PREFIX, 80, whole), NAT6, false),
        // A forward of the host's address is none of the /64's.
        ((PREFIX, 80, Protocol::Udp as u8), GUEST6, false),
        ((GUEST6, 80, Protocol::Udp as u8), GUEST6, true),
        ((GUEST6, 80, Protocol::Udp as u8), UNBOUND, false),
        ((GUEST6, 80, Protocol::Tcp as u8), GUEST6, false),
    ];
    for (program, from) in [(INGRESS, 0), ("uplink_ingress_l3", 14)] {
        for (key, destination, is_handed_over) in cases {
            let mut datapath = loaded!();
            routed(&mut datapath, VM);
            datapath.forward6_of(key, (VM, 80));
            let run = datapath.run(program, &frame(destination, 80).bytes()[from..]);
            let handed_over = u64::from(is_handed_over);
            assert_eq!(datapath.handed_over(), handed_over, "{key:?} {destination}");
            if is_handed_over {
                let (header, _) = crate::frame::handed(&run.frame);
                assert_eq!(header.code, Handover::Forward as u8);
            }
            let other = datapath.run(program, &frame(destination, 81).bytes()[from..]);
            assert_ne!(other.action, REDIRECT);
        }
    }
}

/// A neighbour that would take a guest's address asks whether somebody has it.
#[test]
fn a_probe_for_a_duplicate_of_a_bound_address_is_answered_to_all() {
    let bare = Frame6 {
        source: Ipv6Addr::UNSPECIFIED,
        l4: solicitation(GUEST6).l4[..24].to_vec(),
        ..solicitation(GUEST6)
    };
    // With a nonce, as Linux sends it (RFC 7527).
    let nonce = [14, 1, 9, 8, 7, 6, 5, 4];
    let with_nonce = Frame6 {
        l4: [&bare.l4[..], &nonce].concat(),
        ..bare.clone()
    };
    for asked in [bare, with_nonce] {
        let mut datapath = loaded!();
        routed(&mut datapath, VM);
        let run = datapath.run(INGRESS, &asked.bytes());
        assert_eq!(run.action, REDIRECT);
        let option = [&[2, 1][..], &UPLINK_MAC].concat();
        let l4 = [&[136, 0, 0, 0, 0, 0, 0, 0][..], &GUEST6.octets(), &option].concat();
        let expected = Frame6 {
            destination_mac: [0x33, 0x33, 0, 0, 0, 1],
            source_mac: UPLINK_MAC,
            source: GUEST6,
            destination: Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
            l4,
            ..asked.clone()
        };
        assert_eq!(run.frame, expected.bytes());
        assert_eq!(datapath.vms6.get(ROW).neighbours_answered, 1);
        // Of no other address, and on no other link.
        let mut other = asked.clone();
        other.l4[8..24].copy_from_slice(&UNBOUND.octets());
        datapath.expect_unnoticed(INGRESS, &other.bytes());
        datapath.vms6.change(ROW, |row| row.proxy_ifindex += 1);
        datapath.expect_unnoticed(INGRESS, &asked.bytes());
    }
}

/// A neighbour on the uplink asks for an address.
fn solicitation(target: Ipv6Addr) -> Frame6 {
    let option = [&[1, 1][..], &ROUTER_MAC].concat();
    let l4 = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target.octets(), &option].concat();
    Frame6 {
        destination_mac: [0x33, 0x33, 0xff, 1, 2, 3],
        source: NEIGHBOUR,
        destination: Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff01, 0x203),
        hop_limit: 255,
        l4,
        ..Frame6::rx(Protocol::Icmpv6)
    }
}

/// The same, to the address itself: it is known and may be stale.
fn probe(target: Ipv6Addr) -> Frame6 {
    Frame6 {
        destination_mac: HOST_MAC,
        destination: target,
        ..solicitation(target)
    }
}

#[test]
fn neighbours_that_ask_for_a_bound_address_are_answered() {
    for asked in [solicitation(GUEST6), probe(GUEST6)] {
        let mut datapath = loaded!();
        routed(&mut datapath, VM);
        let run = datapath.run(INGRESS, &asked.bytes());
        assert_eq!(run.action, REDIRECT);
        let option = [&[2, 1][..], &UPLINK_MAC].concat();
        let l4 = [
            // Solicited: a proxy overrides nothing.
            &[136, 0, 0, 0, 0x40, 0, 0, 0][..],
            &GUEST6.octets(),
            &option,
        ]
        .concat();
        let expected = Frame6 {
            destination_mac: ROUTER_MAC,
            source_mac: UPLINK_MAC,
            source: GUEST6,
            destination: NEIGHBOUR,
            l4,
            ..asked
        };
        assert_eq!(run.frame, expected.bytes());
        assert_eq!(datapath.handed_over(), 0);
        assert_eq!(datapath.vms6.get(ROW).neighbours_answered, 1);
    }
}

/// RFC 4861 section 7.1.1: of another code it is none.
#[test]
fn a_solicitation_of_another_code_is_not_answered() {
    let bare = Frame6 {
        source: Ipv6Addr::UNSPECIFIED,
        l4: solicitation(GUEST6).l4[..24].to_vec(),
        ..solicitation(GUEST6)
    };
    for mut asked in [solicitation(GUEST6), bare] {
        asked.l4[1] = 1;
        let mut datapath = loaded!();
        routed(&mut datapath, VM);
        datapath.expect_unnoticed(INGRESS, &asked.bytes());
    }
    let mut asked = probe(GUEST6);
    asked.l4[1] = 1;
    let mut datapath = loaded!();
    routed(&mut datapath, VM);
    assert_eq!(datapath.run(INGRESS, &asked.bytes()).action, SHOT);
    assert_eq!(datapath.only_reason(ROW), DropReason::NoFlow);
    assert_eq!(datapath.vms6.get(ROW).neighbours_answered, 0);
}

/// A second option is none that an answer has room for, and neither is what is behind the packet where
/// the answer becomes longer than the question.
#[test]
fn more_bytes_behind_a_solicitation_are_never_part_of_an_answer() {
    let with = |asked: Frame6, more: &[u8]| Frame6 {
        l4: [&asked.l4[..], more].concat(),
        ..asked
    };
    let nonce = [14, 1, 9, 8, 7, 6, 5, 4];
    let bare = Frame6 {
        source: Ipv6Addr::UNSPECIFIED,
        l4: solicitation(GUEST6).l4[..24].to_vec(),
        ..solicitation(GUEST6)
    };
    let behind = |asked: &Frame6| [&asked.bytes()[..], &[7; 6]].concat();
    let two_options = with(solicitation(GUEST6), &nonce).bytes();
    let half_an_option = with(bare.clone(), &[14, 1, 9, 8]).bytes();
    for frame in [two_options, half_an_option, behind(&bare)] {
        let mut datapath = loaded!();
        routed(&mut datapath, VM);
        datapath.expect_unnoticed(INGRESS, &frame);
    }
    // The answer is as long as the question: what is behind stays behind.
    let asked = solicitation(GUEST6);
    let mut datapath = loaded!();
    routed(&mut datapath, VM);
    let answer = datapath.run(INGRESS, &asked.bytes()).frame;
    let run = datapath.run(INGRESS, &behind(&asked));
    assert_eq!(run.action, REDIRECT);
    assert_eq!(run.frame, [&answer[..], &[7; 6]].concat());
}

#[test]
fn other_neighbours_are_the_hosts() {
    let mut by_router = solicitation(GUEST6);
    by_router.hop_limit = 254;
    let mut without_mac = solicitation(GUEST6);
    without_mac.l4.truncate(24);
    let mut another_option = solicitation(GUEST6);
    another_option.l4[24] = 14;
    let duplicate_with_mac = Frame6 {
        source: Ipv6Addr::UNSPECIFIED,
        ..solicitation(GUEST6)
    };
    for asked in [
        solicitation(UNBOUND),
        solicitation(GUEST_LOCAL),
        solicitation(NAT6),
        by_router,
        without_mac,
        another_option,
        duplicate_with_mac,
    ] {
        let mut datapath = loaded!();
        routed(&mut datapath, VM);
        datapath.expect_unnoticed(INGRESS, &asked.bytes());
    }
    // Another link's neighbours.
    let mut datapath = loaded!();
    routed(&mut datapath, VM);
    datapath.vms6.change(ROW, |row| row.proxy_ifindex += 1);
    datapath.expect_unnoticed(INGRESS, &solicitation(GUEST6).bytes());
}
