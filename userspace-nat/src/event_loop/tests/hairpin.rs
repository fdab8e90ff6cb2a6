//! Tests of guests that reach each other by their translated addresses.
use slipgate_abi::{
    DropReason, Handover, IfIndex, Ip4, Protocol, Rate, Refusal, RuleIndex, SlotRef, VmId, VmRates,
    VmRow, slot::SlotFlags,
};
use slipgate_policy::{
    Action, AddressPool, Destination, Filtering, Mapping, NatBehaviour, NatSettings, Policy, Rule,
    Settings,
};

use super::{
    follow::{by_table, with_table},
    rig::*,
};
use crate::{
    clock::SECOND_NS,
    control::{Forward, Reload},
    packet::{Ipv4, checksum::Sum},
    port::{ETHERNET_LEN, VirtioNetHdr},
    vm::VmSpec,
};

const PORTS: std::ops::RangeInclusive<u16> = 50_000..=50_009;
/// Port of a guest, of a second one, and a forward's.
const ONE: u16 = 5_001;
const OTHER: u16 = 5_003;
const FORWARDED: At = (NAT, 8_080);

fn settings(filtering: Filtering, hairpin: bool) -> NatSettings {
    let mapped = NatBehaviour {
        mapping: Mapping::EndpointIndependent,
        filtering,
        hairpin,
    };
    NatSettings {
        udp: mapped,
        tcp: mapped,
    }
}

fn setup(filtering: Filtering) -> Setup {
    Setup {
        nat: settings(filtering, true),
        eim_ports: Some(PORTS),
        ..Setup::default()
    }
}

fn rig(filtering: Filtering) -> Rig {
    Rig::with(setup(filtering))
}

/// Sends a datagram to a server. Returns the translated address.
fn learn(rig: &mut Rig, row: u16, port: u16) -> At {
    rig.guest(row, &udp((GUEST, port), SERVER, b"x"));
    let sent = rig.at_world().pop().expect("the datagram goes out");
    ends(&sent).0
}

/// Source and destination of a packet.
fn ends(packet: &[u8]) -> (At, At) {
    let addr = |at: usize| Ip4 {
        octets: packet[at..at + 4].try_into().unwrap(),
    };
    let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
    ((addr(12), port(20)), (addr(16), port(22)))
}

/// Takes the packet that arrived at a guest, with its VM's row and its ends.
fn got(rig: &mut Rig) -> Option<(u32, At, At)> {
    let (vm, packet) = rig.at_guest().pop()?;
    assert!(is_right(&packet), "{packet:?}");
    let (from, to) = ends(&packet);
    Some((vm - 100, from, to))
}

/// Packets and bytes that a VM's flows have counted, from it and to it.
fn counted(rig: &Rig, row: u16) -> [u64; 4] {
    let kernel = rig.kernel.borrow();
    let mut sums = [0; 4];
    for slot in kernel.slots_in_use() {
        let live: SlotRef = kernel.slot(slot);
        if live.row() == VmRow::new(row) && live.flags() & SlotFlags::HAIRPIN != 0 {
            let counters = [
                live.tx_packets(),
                live.tx_bytes(),
                live.rx_packets(),
                live.rx_bytes(),
            ];
            for (sum, counter) in sums.iter_mut().zip(counters) {
                *sum += counter.load(std::sync::atomic::Ordering::Relaxed);
            }
        }
    }
    sums
}

#[test]
fn guests_meet_by_the_addresses_of_their_pools() {
    let pool = Setup {
        nat_addresses: &["192.0.2.16/30"],
        ..setup(Filtering::EndpointIndependent)
    };
    let mut rig = Rig::with(pool);
    let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    assert!(one.0 != NAT && other.0 != NAT, "{one:?} {other:?}");
    rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
    assert_eq!(got(&mut rig), Some((2, one, (GUEST, OTHER))));
    rig.guest(2, &udp((GUEST, OTHER), one, b"answer"));
    assert_eq!(got(&mut rig), Some((1, other, (GUEST, ONE))));
    // Of a pool that the host does not have there is no source for a new port.
    let elsewhere = VmSpec {
        nat_addresses: AddressPool::parse(&["198.51.100.1"]).unwrap(),
        ..spec(1, &Setup::default())
    };
    rig.tell(|engine| engine.set_vm(elsewhere));
    rig.at_guest();
    rig.guest(1, &udp((GUEST, ONE + 1), other, b"hello"));
    assert!(rig.at_guest().iter().all(|(vm, _)| *vm == 101), "an error");
    assert_eq!(rig.refused(1, Refusal::NoAddress), 1);
    let to = Destination {
        addr: other.0.into(),
        port: other.1,
        protocol: Protocol::Udp,
    };
    let why = rig.tell(move |engine| engine.why(VmRow::new(1), to, None));
    let none = "none of the VM's nat_addresses";
    assert!(why.outcome.contains(none), "{}", why.outcome);
    // Nor for one whose mapping rests.
    let third = learn(&mut rig, 3, OTHER);
    rig.guest(1, &udp((GUEST, ONE), third, b"hello"));
    assert!(rig.at_guest().iter().all(|(vm, _)| *vm == 101), "an error");
    assert_eq!(rig.refused(1, Refusal::NoAddress), 2);
}

#[test]
fn rfc4787_req_9_a_guest_reaches_another_and_has_its_external_source() {
    let mut rig = rig(Filtering::EndpointIndependent);
    let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    let hello = udp((GUEST, ONE), other, b"hello");
    assert_eq!(rig.guest(1, &hello), Handling::Engine(Handover::Miss));
    assert_eq!(got(&mut rig), Some((2, one, (GUEST, OTHER))));
    assert!(rig.at_world().is_empty(), "nothing leaves by the uplink");
    assert_eq!(rig.flows(), 4, "the sender's and the receiver's");
    rig.guest(2, &udp((GUEST, OTHER), one, b"answer"));
    assert_eq!(got(&mut rig), Some((1, other, (GUEST, ONE))));
    // Each packet goes by the engine, and opens no more.
    assert_eq!(rig.guest(1, &hello), Handling::Engine(Handover::Verdict));
    assert_eq!(got(&mut rig), Some((2, one, (GUEST, OTHER))));
    assert_eq!(rig.flows(), 4);
    rig.assert_paired();
    // Each VM's books have each packet once.
    assert_eq!(counted(&rig, 1), [2, 2 * 33, 1, 34]);
    assert_eq!(counted(&rig, 2), [1, 34, 2, 2 * 33]);
    rig.pass(302 * SECOND_NS);
    rig.assert_empty();
    let records = rig.records();
    let hairpins = records.iter().filter(|line| line["path"] == "hairpin");
    assert_eq!(hairpins.count(), 2, "{records:?}");
}

#[test]
fn rfc4787_req_9_two_guests_punch_a_hole_through_the_strictest_filtering() {
    let mut rig = rig(Filtering::AddressAndPortDependent);
    let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    rig.guest(1, &udp((GUEST, ONE), other, b"punch"));
    assert_eq!(got(&mut rig), None, "the other has not sent yet");
    assert_eq!(rig.dropped(2, DropReason::NoFlow), 1);
    rig.guest(2, &udp((GUEST, OTHER), one, b"punch"));
    assert_eq!(got(&mut rig), Some((1, other, (GUEST, ONE))));
    rig.guest(1, &udp((GUEST, ONE), other, b"punch"));
    assert_eq!(got(&mut rig), Some((2, one, (GUEST, OTHER))));
    assert_eq!(rig.flows(), 4, "each has opened one");
    assert_eq!(rig.dropped(2, DropReason::NoFlow), 1);
    rig.assert_paired();
}

#[test]
fn a_guest_reaches_its_own_port_from_it_and_from_another() {
    let mut rig = rig(Filtering::AddressAndPortDependent);
    let own = learn(&mut rig, 1, ONE);
    rig.guest(1, &udp((GUEST, ONE), own, b"loop"));
    assert_eq!(got(&mut rig), Some((1, own, (GUEST, ONE))));
    assert_eq!(rig.flows(), 2, "one flow is both");
    assert_eq!(counted(&rig, 1), [1, 32, 1, 32]);
    rig.assert_paired();
    let mut rig = self::rig(Filtering::EndpointIndependent);
    let (own, second) = (learn(&mut rig, 1, ONE), learn(&mut rig, 1, OTHER));
    rig.guest(1, &udp((GUEST, OTHER), own, b"loop"));
    assert_eq!(got(&mut rig), Some((1, second, (GUEST, ONE))));
    assert_eq!(rig.flows(), 4);
}

#[test]
fn rfc5382_req_8_a_connection_between_guests() {
    let mut rig = rig(Filtering::EndpointIndependent);
    for (row, port) in [(1, ONE), (2, OTHER)] {
        rig.guest(row, &syn((GUEST, port), SERVER, 100));
    }
    let sent = rig.at_world();
    let port = |at: usize| ends(&sent[at]).0;
    let (one, other) = (port(0), port(1));
    rig.guest(1, &syn((GUEST, ONE), other, 700));
    let (_, packet) = rig.at_guest().pop().expect("the SYN arrives");
    assert_eq!(ends(&packet), (one, (GUEST, OTHER)));
    assert!(is_right(&packet));
    assert_eq!(packet[42..44], 1_460u16.to_be_bytes(), "the MSS is clamped");
    rig.guest(2, &syn_ack((GUEST, OTHER), one, 900, 701));
    assert_eq!(got(&mut rig), Some((1, other, (GUEST, ONE))));
    rig.guest(1, &ack((GUEST, ONE), other, 0, 701, 901));
    assert_eq!(got(&mut rig), Some((2, one, (GUEST, OTHER))));
    assert_eq!(rig.flows(), 4);
    // An established connection outlives the opening timer.
    rig.pass(500 * SECOND_NS);
    assert_eq!(rig.flows(), 2);
    // When one goes, the other's segments are answered.
    rig.tell(|engine| engine.remove_vm(VmRow::new(2), VmId::new(102)));
    rig.guest(1, &ack((GUEST, ONE), other, 0, 701, 901));
    assert_eq!(got(&mut rig), Some((1, other, (GUEST, ONE))), "by RST");
    assert_eq!(rig.dropped(1, DropReason::NoFlow), 1);
}

#[test]
fn where_one_of_the_two_does_not_ask_for_it_the_port_is_the_hosts() {
    let mut rig = Rig::with(Setup {
        nat: settings(Filtering::EndpointIndependent, false),
        ..setup(Filtering::EndpointIndependent)
    });
    let other = learn(&mut rig, 2, OTHER);
    rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
    assert_eq!(rig.refused(1, Refusal::Protected), 1);
    assert_eq!(rig.flows(), 1);
    let mut rig = self::rig(Filtering::EndpointIndependent);
    // No mapping has the port, and so may the host.
    rig.guest(1, &udp((GUEST, ONE), (NAT, 50_003), b"hello"));
    rig.guest(1, &udp((GUEST, ONE), (NAT, 22), b"hello"));
    rig.guest(1, &echo(GUEST, NAT, true, 7, b"ping"));
    assert_eq!(rig.refused(1, Refusal::Protected), 3);
    assert_eq!(rig.flows(), 0);
}

#[test]
fn the_senders_rules_judge_the_address_as_sent_and_the_receivers_the_external_one() {
    let deny = |pattern: &str| Rule::parse(Action::Deny, pattern).unwrap();
    let mut rig = Rig::with(Setup {
        rules: vec![deny("192.0.2.1:50000-50029/udp")],
        eim_ports: Some(50_000..=50_059),
        ..setup(Filtering::EndpointIndependent)
    });
    let mut ports: Vec<u16> = Vec::new();
    for port in 5_000..5_016 {
        ports.push(learn(&mut rig, 2, port).1);
    }
    let open = ports.iter().position(|port| *port > 50_029).unwrap();
    let denied = ports.iter().position(|port| *port <= 50_029).unwrap();
    // A port of the sender's on each side.
    let own: Vec<u16> = (5_000..5_016)
        .map(|port| learn(&mut rig, 1, port).1)
        .collect();
    let low = own.iter().position(|port| *port <= 50_029).unwrap() as u16;
    let high = own.iter().position(|port| *port > 50_029).unwrap() as u16;
    rig.guest(1, &udp((GUEST, 5_000 + high), (NAT, ports[denied]), b"no"));
    assert_eq!(rig.refused(1, Refusal::Rule), 1);
    rig.at_guest();
    // The receiver's rules deny one of the two.
    rig.guest(1, &udp((GUEST, 5_000 + low), (NAT, ports[open]), b"hello"));
    assert_eq!(got(&mut rig), None);
    assert_eq!(rig.refused(2, Refusal::Rule), 1);
    rig.guest(1, &udp((GUEST, 5_000 + high), (NAT, ports[open]), b"hello"));
    assert_eq!(got(&mut rig).map(|got| got.0), Some(2));
    // Where nothing is allowed by default, a rule has to.
    let mut rig = Rig::with(Setup {
        default: Action::Deny,
        rules: vec![Rule::parse(Action::Allow, "198.51.100.0/24").unwrap()],
        ..setup(Filtering::EndpointIndependent)
    });
    let other = learn(&mut rig, 2, OTHER);
    rig.guest(1, &udp((GUEST, ONE), other, b"no"));
    assert_eq!(rig.refused(1, Refusal::Default), 1);
    let mut rig = Rig::with(Setup {
        rules: vec![Rule::parse(Action::Inspect, "192.0.2.1:50000-50009").unwrap()],
        ..setup(Filtering::EndpointIndependent)
    });
    let other = learn(&mut rig, 2, OTHER);
    rig.guest(1, &udp((GUEST, ONE), other, b"no"));
    assert_eq!(rig.refused(1, Refusal::Inspection), 1);
}

fn forward() -> Forward {
    Forward {
        protocol: Protocol::Udp,
        host: NAT.into(),
        host_port: FORWARDED.1,
        vm: VmId::new(101),
        vm_row: VmRow::new(1),
        guest_port: 80,
        rule: RuleIndex::new(12),
        is_own: false,
    }
}

#[test]
fn a_forward_is_reached_by_its_external_address() {
    let with_forward = |nat| Setup {
        forwards: vec![forward()],
        nat,
        ..setup(Filtering::AddressAndPortDependent)
    };
    let mut rig = Rig::with(with_forward(settings(
        Filtering::AddressAndPortDependent,
        true,
    )));
    let other = learn(&mut rig, 2, OTHER);
    rig.guest(2, &udp((GUEST, OTHER), FORWARDED, b"hello"));
    assert_eq!(got(&mut rig), Some((1, other, (GUEST, 80))));
    rig.guest(1, &udp((GUEST, 80), other, b"answer"));
    assert_eq!(got(&mut rig), Some((2, FORWARDED, (GUEST, OTHER))));
    // Its own guest, by an external address that it gets now.
    rig.guest(1, &udp((GUEST, ONE), FORWARDED, b"hello"));
    let (row, from, to) = got(&mut rig).unwrap();
    assert_eq!((row, from.0, to), (1, NAT, (GUEST, 80)));
    assert!(PORTS.contains(&from.1));
    rig.assert_paired();
    // By none whose uplink is another than that of the forward's VM.
    let by = |uplink| VmSpec {
        uplink: Some(uplink),
        ..spec(1, &Setup::default())
    };
    rig.tell(move |engine| engine.set_vm(by(IfIndex::new(9))));
    rig.at_guest();
    rig.guest(2, &udp((GUEST, OTHER + 1), FORWARDED, b"hello"));
    assert_eq!(rig.refused(2, Refusal::Protected), 1);
    assert!(rig.at_guest().iter().all(|(vm, _)| *vm == 102));
    rig.tell(move |engine| engine.set_vm(by(UPLINK)));
    rig.guest(2, &udp((GUEST, OTHER + 1), FORWARDED, b"hello"));
    assert_eq!(got(&mut rig).map(|got| got.0), Some(1));
    // Nor by one whose routes are others.
    rig.follow(with_table());
    rig.tell(|engine| engine.set_vm(by_table(1, None)));
    rig.at_guest();
    rig.guest(2, &udp((GUEST, OTHER + 2), FORWARDED, b"hello"));
    assert_eq!(rig.refused(2, Refusal::Protected), 2);
    assert!(rig.at_guest().iter().all(|(vm, _)| *vm == 102));
    rig.tell(|engine| engine.set_vm(by_table(2, None)));
    rig.guest(2, &udp((GUEST, OTHER + 2), FORWARDED, b"hello"));
    assert_eq!(got(&mut rig).map(|got| got.0), Some(1));
    // A broadcast address is nobody's forward, whatever an address of any says.
    let mut rig = Rig::with(Setup {
        forwards: vec![Forward {
            host: [0, 0, 0, 0].into(),
            ..forward()
        }],
        ..setup(Filtering::AddressAndPortDependent)
    });
    let mut with_broadcast = network();
    with_broadcast.routes.addresses[0].broadcast = Some([192, 0, 2, 255].into());
    rig.follow(with_broadcast);
    let broadcast = Ip4 {
        octets: [192, 0, 2, 255],
    };
    rig.guest(2, &udp((GUEST, OTHER), (broadcast, FORWARDED.1), b"hello"));
    assert_eq!(rig.flows(), 0);
    rig.guest(2, &udp((GUEST, OTHER), FORWARDED, b"hello"));
    assert_eq!(rig.flows(), 2);
    // Not without hairpinning.
    let mut rig = Rig::with(with_forward(NatSettings::default()));
    rig.guest(2, &udp((GUEST, OTHER), FORWARDED, b"hello"));
    assert_eq!(rig.refused(2, Refusal::Protected), 1);
    let only_refusal = rig.at_guest().iter().all(|(vm, _)| *vm == 102);
    assert!(only_refusal);
}

#[test]
fn a_forged_source_from_the_world_meets_no_hairpin() {
    let mut rig = rig(Filtering::EndpointIndependent);
    let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
    rig.at_guest();
    for (from, to) in [(one, other), (other, one)] {
        let forged = rig.world(&udp(from, to, b"forged"));
        assert_eq!(forged, Handling::Dropped(DropReason::NoFlow));
    }
    // Nor does one that matches no flow open one.
    rig.world(&udp((NAT, 50_111), other, b"forged"));
    assert_eq!(rig.refused(2, Refusal::Protected), 1);
    assert!(rig.at_guest().is_empty());
    assert_eq!(rig.flows(), 4);
}

#[test]
fn rfc5508_req_7_an_error_is_translated_by_both_flows() {
    let mut rig = rig(Filtering::EndpointIndependent);
    let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    let hello = udp((GUEST, ONE), other, b"hello");
    rig.guest(1, &hello);
    let (_, arrived) = rig.at_guest().pop().unwrap();
    assert_eq!(arrived[8], hello[8] - 1, "one hop");
    let error = icmp_error(GUEST, one.0, 3, 3, &arrived);
    assert_eq!(rig.guest(2, &error), Handling::Engine(Handover::Icmp));
    let (vm, got) = rig.at_guest().pop().expect("the error arrives");
    assert_eq!((vm, got[20], got[21]), (101, 3, 3));
    assert!(is_right(&got) && is_right(&got[28..]));
    assert_eq!(got[12..20], [NAT.octets, GUEST.octets].concat());
    assert_eq!(ends(&got[28..]), ((GUEST, ONE), other), "as it was sent");
    assert_eq!(got[8], error[8] - 1, "one hop");
    // The engine's own, about a packet that the receiver's link does not carry.
    let large = udp((GUEST, ONE), other, &[0; 1_473]);
    rig.kernel.borrow_mut().at_guest.clear();
    rig.guest(1, &large);
    let (vm, got) = rig.at_guest().pop().expect("the error arrives");
    assert_eq!((vm, got[20], got[21]), (101, 3, 4));
    assert_eq!(got[26..28], 1_500u16.to_be_bytes(), "the MTU");
    assert_eq!(ends(&got[28..]), ((GUEST, ONE), other));
    assert_eq!(rig.dropped(2, DropReason::TooBig), 1);
    // And about its TTL: the sender's side answers.
    rig.guest(1, &with_ttl(hello, 1));
    let (vm, got) = rig.at_guest().pop().expect("the error arrives");
    assert_eq!((vm, got[20]), (101, 11));
}

#[test]
fn what_may_be_fragmented_is_and_fragments_arrive() {
    let mut rig = rig(Filtering::EndpointIndependent);
    let (_, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    let large = may_fragment(udp((GUEST, ONE), other, &[0; 2_000]));
    rig.guest(1, &large);
    let frames = rig.at_guest();
    assert_eq!(frames.len(), 2);
    assert!(
        frames
            .iter()
            .all(|(vm, packet)| *vm == 102 && packet.len() <= 1_500)
    );
    assert_eq!(counted(&rig, 1)[..2], [1, 2_028]);
    assert_eq!(counted(&rig, 2)[2..], [1, 2_028]);
    // In fragments of the guest's own.
    let from_world = |rig: &Rig, row| {
        let (counters, _) = rig.kernel.borrow().stats(row).snapshot();
        counters.engine_rx_from_world
    };
    let before = from_world(&rig, 2);
    let whole = udp((GUEST, ONE), other, &[7; 1_000]);
    for (at, more) in [(0, true), (512, false)] {
        let payload = &whole[20 + at..(20 + at + 512).min(whole.len())];
        let mut fragment = [&whole[..20], payload].concat();
        let len = fragment.len() as u16;
        fragment[2..4].copy_from_slice(&len.to_be_bytes());
        let word = (at as u16 / 8) | if more { 0x2000 } else { 0 };
        fragment[6..8].copy_from_slice(&word.to_be_bytes());
        crate::packet::ipv4::fill_checksum(&mut fragment, 20);
        rig.guest(1, &fragment);
    }
    let frames = rig.at_guest();
    assert_eq!(frames.len(), 2, "they leave as they came");
    assert_eq!(counted(&rig, 2)[2..], [2, 2_028 + 1_028]);
    let now = from_world(&rig, 2);
    assert_eq!(
        (now.packets - before.packets, now.bytes - before.bytes),
        (1, 1_028)
    );
}

#[test]
fn partial_checksums_and_gso_frames_stay_as_they_are() {
    let mut rig = rig(Filtering::EndpointIndependent);
    let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    let mut frame = udp((GUEST, ONE), other, &[3; 4_000]);
    let pseudo = |packet: &[u8]| {
        let ip = Ipv4::parse(packet).unwrap();
        let len = packet.len() - 20;
        Sum::default()
            .pseudo(ip.source, ip.destination, 17, len)
            .folded()
            .to_be_bytes()
    };
    let partial = pseudo(&frame);
    frame[26..28].copy_from_slice(&partial);
    let vnet = VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        gso_type: VirtioNetHdr::GSO_UDP_L4,
        hdr_len: 42,
        gso_size: 1_000,
        csum_start: (ETHERNET_LEN + 20) as u16,
        csum_offset: 6,
    };
    rig.kernel.borrow_mut().guest_sends(1, vnet, &frame);
    rig.turn();
    let (vm, got) = rig.at_guest().pop().expect("the frame arrives whole");
    assert_eq!((vm, ends(&got)), (102, (one, (GUEST, OTHER))));
    assert_eq!(got[26..28], pseudo(&got), "still the pseudo-header's sum");
    assert_eq!(counted(&rig, 1)[..2], [4, 4 * 1_028], "as if segmented");
    assert_eq!(counted(&rig, 2)[2..], [4, 4 * 1_028]);
    // The guest may not choose another place.
    let elsewhere = VirtioNetHdr {
        csum_offset: 0,
        ..vnet
    };
    rig.kernel.borrow_mut().guest_sends(1, elsewhere, &frame);
    rig.turn();
    assert!(rig.at_guest().is_empty());
    assert_eq!(rig.dropped(1, DropReason::Malformed), 4);
}

#[test]
fn a_successor_goes_on_with_hairpins() {
    let filtering = Filtering::AddressAndPortDependent;
    let mut rig = rig(filtering);
    let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    rig.guest(1, &udp((GUEST, ONE), other, b"punch"));
    rig.guest(2, &udp((GUEST, OTHER), one, b"punch"));
    rig.at_guest();
    let mut rig = rig.restart_in_steps(&setup(filtering));
    rig.engine.adopting.slots_per_turn = 0;
    // Neither end is adopted yet.
    rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
    assert_eq!(got(&mut rig), Some((2, one, (GUEST, OTHER))));
    rig.guest(2, &udp((GUEST, OTHER), one, b"hello"));
    assert_eq!(got(&mut rig), Some((1, other, (GUEST, ONE))));
    rig.engine.adopting.slots_per_turn = 256;
    rig.engine.finish_adoption().unwrap();
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 4);
    rig.assert_paired();
    let (mut rig, _) = rig.restart(&setup(filtering));
    let again = udp((GUEST, ONE), other, b"hello");
    assert_eq!(rig.guest(1, &again), Handling::Engine(Handover::Verdict));
    assert_eq!(got(&mut rig), Some((2, one, (GUEST, OTHER))));
}

#[test]
fn a_new_flow_after_a_restart_finds_the_receivers_mapping() {
    let filtering = Filtering::EndpointIndependent;
    let mut rig = rig(filtering);
    let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    let mut rig = rig.restart_in_steps(&setup(filtering));
    rig.engine.adopting.slots_per_turn = 0;
    rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
    assert_eq!(got(&mut rig), Some((2, one, (GUEST, OTHER))));
}

fn put_in_force(rig: &mut Rig, nat: NatSettings, rules: Vec<Rule>) {
    let policy = Policy::new(Action::Allow, rules).with(Settings {
        nat,
        ..Settings::default()
    });
    let vms = vec![spec(1, &Setup::default()), spec(2, &Setup::default())];
    rig.tell(move |engine| {
        engine.reload(Reload {
            id: 1,
            policies: vec![(0, Some(policy))],
            local: network().local,
            vms,
            strictly: Vec::new(),
        });
    });
    rig.pass(SECOND_NS);
}

#[test]
fn a_reload_keeps_what_is_allowed_and_cuts_the_rest() {
    let filtering = Filtering::EndpointIndependent;
    let hairpin = || {
        let mut rig = rig(filtering);
        let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
        rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
        rig.at_guest();
        (rig, one, other)
    };
    let deny = |pattern: &str| Rule::parse(Action::Deny, pattern).unwrap();
    let (mut rig, one, other) = hairpin();
    put_in_force(
        &mut rig,
        settings(filtering, true),
        vec![deny("203.0.113.0/24")],
    );
    rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
    assert_eq!(got(&mut rig), Some((2, one, (GUEST, OTHER))));
    assert_eq!(rig.flows(), 4);
    let (mut rig, _, other) = hairpin();
    put_in_force(&mut rig, settings(filtering, true), vec![deny("192.0.2.1")]);
    assert_eq!(rig.flows(), 2, "both sides are cut");
    rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
    assert_eq!(rig.refused(1, Refusal::Rule), 1);
    let (mut rig, _, other) = hairpin();
    put_in_force(&mut rig, settings(filtering, false), Vec::new());
    assert_eq!(rig.flows(), 2, "both sides are cut");
    rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
    assert_eq!(rig.refused(1, Refusal::Protected), 1);
}

#[test]
fn a_receiver_whose_policy_does_not_ask_for_it_is_out_of_reach() {
    let filtering = Filtering::EndpointIndependent;
    let mut rig = rig(filtering);
    let other = learn(&mut rig, 2, OTHER);
    let policy = move |hairpin| {
        Policy::new(Action::Allow, Vec::<Rule>::new()).with(Settings {
            nat: settings(filtering, hairpin),
            ..Settings::default()
        })
    };
    let second = VmSpec {
        policy: 1,
        ..spec(2, &Setup::default())
    };
    let vms = vec![spec(1, &Setup::default()), second];
    rig.tell(move |engine| {
        engine.reload(Reload {
            id: 1,
            policies: vec![(0, Some(policy(true))), (1, Some(policy(false)))],
            local: network().local,
            vms,
            strictly: Vec::new(),
        });
    });
    rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
    assert_eq!(rig.refused(1, Refusal::Protected), 1);
    // Nor does it reach others.
    let one = learn(&mut rig, 1, ONE);
    rig.guest(2, &udp((GUEST, OTHER), one, b"hello"));
    assert_eq!(rig.refused(2, Refusal::Protected), 1);
    assert_eq!(rig.flows(), 2);
}

#[test]
fn a_hairpin_is_charged_to_both_ends() {
    let mut rig = rig(Filtering::EndpointIndependent);
    let (_, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    let limit = |packets_per_second| Rate {
        packets_per_second,
        ..Rate::default()
    };
    let tx = VmRates {
        tx: limit(100),
        ..VmRates::default()
    };
    let rx = VmRates {
        rx: limit(50),
        ..VmRates::default()
    };
    rig.kernel.borrow().set_rates(1, tx);
    rig.kernel.borrow().set_rates(2, rx);
    for _ in 0..40 {
        rig.guest(1, &udp((GUEST, ONE), other, b"flood"));
    }
    let sent = counted(&rig, 1)[0];
    let received = counted(&rig, 2)[2];
    assert_eq!(sent + rig.dropped(1, DropReason::PacketRate), 40);
    assert_eq!(received + rig.dropped(2, DropReason::PacketRate), sent);
    assert!(
        received > 0 && received < sent && sent < 40,
        "{received} of {sent}"
    );
}

#[test]
fn both_ends_of_a_connection_that_is_cut_are_reset() {
    let mut rig = rig(Filtering::EndpointIndependent);
    for (row, port) in [(1, ONE), (2, OTHER)] {
        rig.guest(row, &syn((GUEST, port), SERVER, 100));
    }
    let sent = rig.at_world();
    let (one, other) = (ends(&sent[0]).0, ends(&sent[1]).0);
    rig.guest(1, &syn((GUEST, ONE), other, 700));
    rig.guest(2, &syn_ack((GUEST, OTHER), one, 900, 701));
    rig.guest(1, &ack((GUEST, ONE), other, 0, 701, 901));
    rig.at_guest();
    rig.tell(|engine| {
        let slots = engine.core.nat.flows.slots_of(VmRow::new(1)).to_vec();
        let hairpin = |slot: &slipgate_abi::SlotIndex| engine.core.nat.is_hairpin(*slot);
        let slots: Vec<_> = slots.into_iter().filter(hairpin).collect();
        assert_eq!(engine.cut_slots(&slots, crate::flow::EndReason::Cut), 1);
    });
    rig.at_guest();
    rig.guest(1, &ack((GUEST, ONE), other, 0, 701, 901));
    let resets: Vec<u32> = rig
        .at_guest()
        .iter()
        .filter(|(_, packet)| packet[33] & slipgate_abi::tcp::Flags::RST != 0)
        .map(|(vm, _)| *vm)
        .collect();
    assert!(resets.contains(&101) && resets.contains(&102), "{resets:?}");
}

#[test]
fn a_guest_that_sleeps_gets_it_when_it_wakes() {
    let mut rig = rig(Filtering::EndpointIndependent);
    let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    rig.tell(|engine| engine.sleep(VmRow::new(2)));
    for data in [b"1", b"2"] {
        rig.guest(1, &udp((GUEST, ONE), other, data));
    }
    assert!(rig.at_guest().is_empty(), "they are held");
    assert!(rig.tell(|engine| engine.wake(VmRow::new(2))));
    let arrived = rig.at_guest();
    let of = |(vm, packet): &(u32, Vec<u8>)| (*vm, ends(packet), packet[28]);
    let expected = [b'1', b'2'].map(|data| (102, (one, (GUEST, OTHER)), data));
    assert_eq!(arrived.iter().map(of).collect::<Vec<_>>(), expected);
    assert_eq!(counted(&rig, 2)[2..], [2, 58]);
}

#[test]
fn a_guest_that_is_frozen_gets_no_flow() {
    let mut rig = rig(Filtering::EndpointIndependent);
    let (_, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    rig.kernel.borrow().set_frozen(2, true);
    rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
    assert!(rig.at_guest().is_empty());
    assert_eq!(rig.dropped(2, DropReason::Frozen), 1);
    assert_eq!(rig.flows(), 3, "only the sender has one");
}

#[test]
fn why_says_hairpin_and_to_whom() {
    let mut rig = rig(Filtering::EndpointIndependent);
    let other = learn(&mut rig, 2, OTHER);
    let to = |port| Destination {
        addr: NAT.into(),
        port,
        protocol: Protocol::Udp,
    };
    let why = rig.tell(move |engine| engine.why(VmRow::new(1), to(other.1), None));
    assert!(why.admitted);
    assert!(
        why.outcome.contains("(hairpin) to VM vm2"),
        "{}",
        why.outcome
    );
    assert!(
        why.explanation.contains("filtering, hairpinning"),
        "{}",
        why.explanation
    );
    let why = rig.tell(move |engine| engine.why(VmRow::new(1), to(22), None));
    assert_eq!(why.refusal.as_deref(), Some(Refusal::Protected.name()));
    let server = Destination {
        addr: SERVER.0.into(),
        port: SERVER.1,
        protocol: Protocol::Udp,
    };
    let why = rig.tell(move |engine| engine.why(VmRow::new(1), server, None));
    assert!(
        why.explanation.contains("filtering, hairpinning"),
        "{}",
        why.explanation
    );
}
