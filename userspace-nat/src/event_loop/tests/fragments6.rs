//! Fragments of IPv6, of guests and of the world.
use std::{collections::HashSet, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{DropReason, Handover, Refusal, VmId, tcp::Flags};
use slipgate_policy::{Action, Name, Rule, wire};

use super::{
    fragments::{ORDERS, data, guest_sends},
    rig::*,
};
use crate::{
    clock::SECOND_NS,
    dns::{
        NamePolicy,
        chain::tests::{aaaa, answer},
    },
    fake::hellos::{self, records},
    name_gate::ByRules,
    packet::{Fragment, Ipv6},
};

/// Data of each fragment but the last, bytes.
const STEP: usize = 1_248;
const FROM: (std::net::Ipv6Addr, u16) = (GUEST6, 5_000);
const SERVER6: (std::net::Ipv6Addr, u16) = (PEER6, 443);
const HEADERS: usize = 48;

fn setup() -> Setup {
    Setup {
        ipv6: Some("fd00:0:0:2::/64".parse().unwrap()),
        ..Setup::default()
    }
}

/// A fragment of a packet: these bytes of its data.
fn part(packet: &[u8], id: u32, begin: usize, data: &[u8], has_more: bool) -> Vec<u8> {
    let mut fragment = packet[..40].to_vec();
    fragment[4..6].copy_from_slice(&(8 + data.len() as u16).to_be_bytes());
    fragment[6] = 44;
    fragment.extend([packet[6], 0]);
    fragment.extend((begin as u16 | u16::from(has_more)).to_be_bytes());
    fragment.extend(id.to_be_bytes());
    fragment.extend(data);
    fragment
}

/// The packet in fragments.
fn cut_as(packet: &[u8], id: u32, step: usize) -> Vec<Vec<u8>> {
    let data = &packet[40..];
    let all = data.chunks(step).enumerate().map(|(number, chunk)| {
        let begin = number * step;
        part(packet, id, begin, chunk, begin + chunk.len() < data.len())
    });
    all.collect()
}

fn cut(packet: &[u8]) -> Vec<Vec<u8>> {
    cut_as(packet, 7, STEP)
}

/// Joins fragments, in their order; returns the packet and their identification.
fn joined(fragments: &[Vec<u8>]) -> (Vec<u8>, u32) {
    let mut whole = fragments[0][..40].to_vec();
    let id = Fragment::parse(&fragments[0]).unwrap().identification;
    for (number, bytes) in fragments.iter().enumerate() {
        let fragment = Fragment::parse(bytes).unwrap();
        assert_eq!(fragment.begin, whole.len() - 40);
        assert_eq!(fragment.identification, id);
        assert_eq!(fragment.has_more, number + 1 < fragments.len());
        whole[6] = fragment.protocol;
        whole.extend_from_slice(fragment.data);
    }
    let len = (whole.len() - 40) as u16;
    whole[4..6].copy_from_slice(&len.to_be_bytes());
    (whole, id)
}

fn datagram() -> Vec<u8> {
    udp(FROM, SERVER6, &data())
}

/// The translated end of a flow that a datagram opens.
fn open(rig: &mut Rig) -> (std::net::Ipv6Addr, u16) {
    rig.guest(1, &udp(FROM, SERVER6, b"x"));
    let sent = rig.at_world().pop().unwrap();
    (NAT6, u16::from_be_bytes([sent[40], sent[41]]))
}

/// Type and code of the only ICMPv6 message at the guest.
fn error_at_guest(rig: &mut Rig) -> ([u8; 2], Vec<u8>) {
    let mut got = rig.at_guest();
    assert_eq!(got.len(), 1, "{got:02x?}");
    let (_, packet) = got.remove(0);
    assert!(is_right(&packet) && packet[6] == 58);
    ([packet[40], packet[41]], packet)
}

#[test]
fn a_guests_ipv6_fragments_in_any_order_are_one_packet() {
    let mut ids = HashSet::new();
    for order in ORDERS {
        let mut rig = Rig::with(setup());
        let fragments = cut(&datagram());
        let [a, b, last] = order.map(|at| fragments[at].clone());
        guest_sends(&mut rig, &[a, b]);
        assert_eq!((rig.flows(), rig.at_world().len()), (0, 0), "{order:?}");
        guest_sends(&mut rig, &[last]);
        let sent = rig.at_world();
        let sizes: Vec<_> = sent.iter().map(Vec::len).collect();
        let came: Vec<_> = fragments.iter().map(Vec::len).collect();
        assert_eq!(sizes, came, "in the size that they came in");
        let (whole, id) = joined(&sent);
        assert!(is_right(&whole));
        assert_eq!(
            (&whole[48..], &whole[8..24]),
            (&data()[..], &NAT6.octets()[..])
        );
        ids.insert(id);
        let kernel = rig.kernel.borrow();
        let live = kernel.slot(kernel.slots_in_use()[0]);
        let counted = (
            live.tx_packets().load(Relaxed),
            live.tx_bytes().load(Relaxed),
        );
        assert_eq!(counted, (1, 3_048));
    }
    // RFC 7739: not the guest's, and none follows from another.
    let steps: HashSet<_> = ids.iter().map(|id| ids.contains(&(id + 1))).collect();
    assert_eq!((ids.len(), ids.contains(&7)), (6, false));
    assert_eq!(steps, HashSet::from([false]));
}

#[test]
fn the_worlds_ipv6_fragments_reach_the_guest() {
    for order in [[0, 1, 2], [0, 2, 1]] {
        let mut rig = Rig::with(setup());
        let nat = open(&mut rig);
        let fragments = cut(&udp(SERVER6, nat, &data()));
        for at in order {
            let handled = rig.world(&fragments[at]);
            assert_eq!(handled, Handling::Engine(Handover::Fragment));
        }
        let came: Vec<_> = rig.at_guest().into_iter().map(|(_, l3)| l3).collect();
        assert_eq!(came.len(), 3);
        let (whole, _) = joined(&came);
        assert!(is_right(&whole));
        assert_eq!(
            (&whole[48..], &whole[24..40]),
            (&data()[..], &GUEST6.octets()[..])
        );
        let kernel = rig.kernel.borrow();
        let live = kernel.slot(kernel.slots_in_use()[0]);
        assert_eq!(live.rx_packets().load(Relaxed), 1);
    }
}

/// What is behind the packet's end is no part of it, whatever it looks like.
#[test]
fn a_packet_that_ends_in_its_fragment_header_is_malformed() {
    let mut rig = Rig::with(setup());
    let fragments = cut(&datagram());
    guest_sends(&mut rig, &fragments[..1]);
    for (dropped, payload_len) in (1..).zip([0, 1, 4, 7]) {
        let mut ends = fragments[1].clone();
        ends[4..6].copy_from_slice(&[0, payload_len]);
        let handled = rig.guest(1, &ends);
        assert_eq!(handled, Handling::Dropped(DropReason::Malformed));
        assert_eq!(rig.dropped(1, DropReason::Malformed), dropped);
    }
    assert!(rig.at_world().is_empty() && rig.at_guest().is_empty());
    // Those of the datagram are as they were.
    guest_sends(&mut rig, &fragments[1..]);
    assert_eq!(rig.at_world().len(), 3);
    assert_eq!(rig.dropped(1, DropReason::Fragment), 0);
}

#[test]
fn ipv6_fragments_of_no_flow_are_the_hosts() {
    let mut rig = Rig::with(setup());
    for fragment in cut(&udp(SERVER6, (NAT6, 61_500), &data())) {
        assert_eq!(rig.world(&fragment), Handling::Passed);
    }
    // Before the first one nobody can tell.
    let nat = open(&mut rig);
    let fragments = cut(&udp(SERVER6, nat, &data()));
    assert_eq!(rig.world(&fragments[1]), Handling::Passed);
}

#[test]
fn ipv6_fragments_to_where_a_rule_denies_go_nowhere() {
    let mut rig = Rig::with(Setup {
        default: Action::Deny,
        ..setup()
    });
    guest_sends(&mut rig, &cut(&datagram()));
    assert!(rig.at_world().is_empty());
    assert_eq!(rig.refused(1, Refusal::Default), 1);
    assert_eq!(rig.dropped(1, DropReason::Refused), 1);
    assert_eq!(error_at_guest(&mut rig).0, [1, 1]);
}

#[test]
fn a_guest_is_told_of_an_ipv6_datagram_that_lacks_fragments_but_not_the_first() {
    let mut rig = Rig::with(setup());
    let fragments = cut(&datagram());
    guest_sends(&mut rig, &fragments[..2]);
    rig.pass(59 * SECOND_NS);
    assert_eq!(rig.dropped(1, DropReason::Fragment), 0);
    rig.at_guest();
    rig.pass(2 * SECOND_NS);
    assert_eq!(rig.dropped(1, DropReason::Fragment), 2);
    let (kind, packet) = error_at_guest(&mut rig);
    assert_eq!(kind, [3, 1], "time exceeded in reassembly");
    let quote = Ipv6::parse_truncated(&packet[48..]).unwrap();
    assert_eq!((quote.source, quote.next_header), (GUEST6, 44));
    assert_eq!(packet[48..], fragments[0][..packet.len() - 48]);
    guest_sends(&mut rig, &fragments[1..]);
    assert!(rig.at_world().is_empty());
    rig.pass(61 * SECOND_NS);
    assert!(rig.at_guest().is_empty(), "the first never came");
}

#[test]
fn rfc5722_ipv6_fragments_that_overlap_end_their_datagram_silently() {
    let mut rig = Rig::with(setup());
    // The first router advertisement.
    rig.pass(SECOND_NS);
    rig.at_guest();
    let packet = datagram();
    let mut fragments = cut(&packet);
    fragments.insert(1, part(&packet, 7, 8, &[0; 16], true));
    guest_sends(&mut rig, &fragments);
    rig.pass(61 * SECOND_NS);
    assert!(rig.at_world().is_empty() && rig.at_guest().is_empty());
    assert_eq!(rig.dropped(1, DropReason::Fragment), 4);
}

#[test]
fn rfc6946_an_atomic_fragment_is_a_packet_by_itself() {
    let mut rig = Rig::with(setup());
    let fragments = cut(&datagram());
    guest_sends(&mut rig, &fragments[..2]);
    let small = udp(FROM, SERVER6, b"small");
    guest_sends(&mut rig, &[part(&small, 7, 0, &small[40..], false)]);
    let sent = rig.at_world();
    assert_eq!(sent.len(), 1);
    // RFC 8021: without a fragment header.
    assert!(is_right(&sent[0]) && sent[0][6] == 17 && sent[0].ends_with(b"small"));
    guest_sends(&mut rig, &fragments[2..]);
    assert_eq!(
        rig.at_world().len(),
        3,
        "the other datagram is not concerned"
    );
}

#[test]
fn rfc7112_a_first_ipv6_fragment_without_all_headers_is_refused() {
    let mut rig = Rig::with(setup());
    let packet = syn(FROM, SERVER6, 7);
    let fragments = cut_as(&packet, 7, 16);
    guest_sends(&mut rig, &fragments);
    assert!(rig.at_world().is_empty());
    assert_eq!(error_at_guest(&mut rig).0, [4, 3]);
    assert_eq!(rig.dropped(1, DropReason::Malformed), 1);
    // Behind a fragment header there are no other extension headers.
    let mut routed = datagram();
    routed[6] = 43;
    guest_sends(&mut rig, &cut_as(&routed, 8, STEP)[..1]);
    assert_eq!(rig.dropped(1, DropReason::ExtensionHeader), 1);
}

#[test]
fn ipv6_fragments_with_impossible_lengths_are_told() {
    let mut rig = Rig::with(setup());
    let packet = datagram();
    guest_sends(&mut rig, &[part(&packet, 7, 8, &[0; 9], true)]);
    let (kind, error) = error_at_guest(&mut rig);
    assert_eq!((kind, &error[44..48]), ([4, 0], &[0, 0, 0, 4][..]));
    guest_sends(&mut rig, &[part(&packet, 7, 65_528, &[0; 16], false)]);
    let (kind, error) = error_at_guest(&mut rig);
    assert_eq!((kind, &error[44..48]), ([4, 0], &[0, 0, 0, 42][..]));
}

#[test]
fn ipv6_fragments_larger_than_the_next_link_are_told_its_mtu() {
    let mut rig = Rig::with(setup());
    guest_sends(&mut rig, &cut_as(&datagram(), 7, 1_448));
    assert!(rig.at_world().is_empty());
    let (kind, error) = error_at_guest(&mut rig);
    assert_eq!(
        (kind, &error[44..48]),
        ([2, 0], &1_400_u32.to_be_bytes()[..])
    );
    assert_eq!(rig.dropped(1, DropReason::TooBig), 1);
    // As small as every link carries, they go joined to that size.
    guest_sends(&mut rig, &cut_as(&datagram(), 8, 600));
    let sizes: Vec<_> = rig.at_world().iter().map(Vec::len).collect();
    assert_eq!(sizes, [1_280, 1_280, HEADERS + 3_008 - 2 * 1_232]);
}

#[test]
fn the_largest_ipv6_datagram_goes_both_ways() {
    let data = vec![7; 65_527];
    let mut rig = Rig::with(setup());
    guest_sends(&mut rig, &cut(&udp(FROM, SERVER6, &data)));
    let sent = rig.at_world();
    let (whole, _) = joined(&sent);
    assert!(is_right(&whole) && whole.len() == 40 + 65_535);
    let nat = (NAT6, u16::from_be_bytes([whole[40], whole[41]]));
    for fragment in cut(&udp(SERVER6, nat, &data)) {
        rig.world(&fragment);
    }
    let came: Vec<_> = rig.at_guest().into_iter().map(|(_, l3)| l3).collect();
    assert!(is_right(&joined(&came).0));
}

#[test]
fn a_ping_in_ipv6_fragments_is_answered_and_neighbour_discovery_is_not() {
    let mut rig = Rig::with(setup());
    guest_sends(&mut rig, &cut(&echo(GUEST6, PEER6, true, 7, &data())));
    let (whole, _) = joined(&rig.at_world());
    assert!(is_right(&whole));
    let id = u16::from_be_bytes([whole[44], whole[45]]);
    for fragment in cut(&echo(PEER6, NAT6, false, id, &data())) {
        rig.world(&fragment);
    }
    assert_eq!(rig.at_guest().len(), 3);
    // RFC 6980: a solicitation for the gateway.
    let gateway: std::net::Ipv6Addr = "fd00:0:0:2::1".parse().unwrap();
    let mut asks = echo(GUEST6, gateway, true, 0, &gateway.octets());
    asks[40] = 135;
    guest_sends(&mut rig, &cut_as(&asks, 9, 16));
    assert!(rig.at_guest().is_empty());
    assert_eq!(rig.dropped(1, DropReason::Fragment), 1);
}

#[test]
fn ipv6_fragments_whose_hop_limit_is_used_up_are_answered_once() {
    let mut rig = Rig::with(setup());
    guest_sends(&mut rig, &cut(&with_ttl(datagram(), 1)));
    assert!(rig.at_world().is_empty());
    assert_eq!(error_at_guest(&mut rig).0, [3, 0]);
    assert_eq!(rig.dropped(1, DropReason::TtlExpired), 1);
}

/// An address is bound by a datagram, not by a fragment that may be alone.
#[test]
fn an_address_is_bound_by_a_datagram_that_came_in_fragments() {
    let mut rig = Rig::with(setup());
    let other: std::net::Ipv6Addr = "fd00:0:0:2::99".parse().unwrap();
    let is_bound = |rig: &Rig| {
        let row = rig.kernel.borrow().vm6(1);
        row.place_of(other.into()).is_some()
    };
    let fragments = cut(&udp((other, 5_000), SERVER6, &data()));
    guest_sends(&mut rig, &fragments[..2]);
    assert!(!is_bound(&rig));
    guest_sends(&mut rig, &fragments[2..]);
    assert!(is_bound(&rig));
    assert_eq!(rig.at_world().len(), 3);
}

/// A guest that sends first fragments only takes the room of its own datagrams.
#[test]
fn a_flood_of_ipv6_fragments_harms_nobody_else() {
    let mut rig = Rig::with(setup());
    let packet = datagram();
    let mut other = cut(&udp(FROM, (PEER6, 444), &data()));
    let last = other.pop().unwrap();
    let id = 1_000_000;
    for fragment in &other {
        rig.guest(2, fragment);
    }
    for number in 0..2_000 {
        rig.guest(1, &part(&packet, id + number, 0, &packet[40..56], true));
    }
    assert_eq!(rig.dropped(1, DropReason::Fragment), 2_000 - 16);
    rig.guest(2, &last);
    assert_eq!(rig.at_world().len(), 3);
    assert_eq!(rig.dropped(2, DropReason::Fragment), 0);
}

/// How a guest learns the path's MTU: the packet that did not fit is a fragment.
#[test]
fn errors_about_ipv6_fragments_reach_the_guest() {
    let mut rig = Rig::with(setup());
    for packet in [datagram(), echo(GUEST6, PEER6, true, 7, &data())] {
        guest_sends(&mut rig, &cut(&packet));
        let sent = rig.at_world();
        let router: std::net::Ipv6Addr = "2001:db8:99::9".parse().unwrap();
        let error = icmp_error(router, NAT6, 2, 0, &sent[0]);
        assert_eq!(rig.world(&error), Handling::Engine(Handover::Icmp));
        let (kind, got) = error_at_guest(&mut rig);
        assert_eq!((kind, &got[8..24]), ([2, 0], &router.octets()[..]));
        let quote = &got[48..];
        assert_eq!(quote[8..24], GUEST6.octets());
        // Fragment header and ports, or query id.
        assert_eq!(quote[40..42], [packet[6], 0]);
        let id = if packet[6] == 58 { 52..54 } else { 48..50 };
        assert_eq!(quote[id.clone()], packet[id.start - 8..id.end - 8]);
        // Later ones show no flow.
        let error = icmp_error(router, NAT6, 2, 0, &sent[1]);
        assert_eq!(rig.world(&error), Handling::Passed);
    }
}

/// The fragments of an inspected connection are judged as a whole, with an allowed and with a
/// denied name.
#[test]
fn ipv6_fragments_of_an_inspected_connection_are_judged_as_one_segment() {
    for (said, passes) in [("ok.test", true), ("evil.test", false)] {
        let mut rig = Rig::with(Setup {
            default: Action::Deny,
            rules: vec![Rule::parse(Action::Inspect, "ok.test").unwrap()],
            ..setup()
        });
        let mut dns = ByRules(rig.engine.core.rules.judge.clone());
        let (name, now_ns) = (wire("ok.test").unwrap(), rig.kernel.borrow().now_ns);
        let told = answer("ok.test", &[aaaa("ok.test", 60, PEER6)]);
        let verdict = dns.answer(VmId::new(101), Name(&name), &told, 0, now_ns);
        assert_eq!(verdict, Ok(()));
        let (guest, mss) = ((GUEST6, 40_000), [2, 4, 5, 0xb4]);
        rig.guest(1, &tcp(guest, SERVER6, Flags::SYN, 7, 0, &mss, b""));
        let sent = rig.at_world().pop().expect("the SYN goes out");
        let nat = (NAT6, u16::from_be_bytes([sent[40], sent[41]]));
        let both = Flags::SYN | Flags::ACK;
        rig.world(&tcp(SERVER6, nat, both, 9_000, 8, &mss, b""));
        rig.guest(1, &ack(guest, SERVER6, 0, 8, 9_001));
        rig.at_world();
        let hello = records(&hellos::client_hello(said), 1_000);
        let segment = tcp(guest, SERVER6, Flags::ACK, 8, 9_001, &[], &hello);
        let mut fragments = cut_as(&segment, 7, 24);
        assert!(fragments.len() > 2);
        fragments.reverse();
        guest_sends(&mut rig, &fragments);
        let reached: Vec<u8> = rig
            .at_world()
            .iter()
            .flat_map(|packet| packet[60..].to_vec())
            .collect();
        assert_eq!(reached == hello, passes, "{said}");
        assert!(passes || reached.is_empty());
        if !passes {
            continue;
        }
        // Options by which something could be told pass no more in a fragment than without.
        let odd = [30, 4, 0, 1, 254, 4, 0xbe, 0xef];
        let next = 8 + hello.len() as u32;
        let segment = tcp(guest, SERVER6, Flags::ACK, next, 9_001, &odd, b"");
        guest_sends(&mut rig, &[part(&segment, 8, 0, &segment[40..], false)]);
        let sent = rig.at_world().pop().expect("it goes on");
        assert!(is_right(&sent));
        assert_eq!(sent[60..], [1; 8]);
    }
}
