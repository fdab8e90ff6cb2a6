//! Tests of endpoint-independent mappings, and of what the world may send to them.
use slipgate_abi::{
    DropReason, FlowRef, Handover, Ip4, Protocol, Refusal, SlotIndex, Tuple, VmId, VmRow,
};
use slipgate_model::MappingCounts;
use slipgate_policy::{
    Action, Destination, Filtering, Mapping, NatBehaviour, NatSettings, Policy, Rule, Settings,
};

use super::rig::*;
use crate::{clock::SECOND_NS, control::Reload};

const OTHER: At = (
    Ip4 {
        octets: [198, 51, 100, 8],
    },
    3_478,
);
const STRANGER: At = (
    Ip4 {
        octets: [203, 0, 113, 9],
    },
    5_000,
);
const PORTS: std::ops::RangeInclusive<u16> = 50_000..=50_009;

fn settings(filtering: Filtering) -> NatSettings {
    let mapped = NatBehaviour {
        mapping: Mapping::EndpointIndependent,
        filtering,
        hairpin: false,
    };
    NatSettings {
        udp: mapped,
        tcp: mapped,
    }
}

fn setup(filtering: Filtering) -> Setup {
    Setup {
        nat: settings(filtering),
        eim_ports: Some(PORTS),
        ..Setup::default()
    }
}

/// A rig whose VMs have endpoint-independent mapping.
fn mapped(filtering: Filtering) -> Rig {
    Rig::with(setup(filtering))
}

/// Sends a datagram and returns the address and port that its destination sees, if it goes out.
fn try_sent_by(rig: &mut Rig, row: u16, port: u16, to: At) -> Option<At> {
    rig.at_world();
    rig.guest(row, &udp((GUEST, port), to, b"x"));
    let sent = rig.at_world().pop()?;
    let octets = [sent[12], sent[13], sent[14], sent[15]];
    Some((Ip4 { octets }, u16::from_be_bytes([sent[20], sent[21]])))
}

/// Sends a datagram, which goes out.
fn sent_by(rig: &mut Rig, row: u16, port: u16, to: At) -> At {
    try_sent_by(rig, row, port, to).expect("the datagram goes out")
}

/// The server, as a rule sees it.
fn server() -> Destination {
    Destination {
        addr: SERVER.0.into(),
        port: SERVER.1,
        protocol: Protocol::Udp,
    }
}

fn open_ports(rig: &Rig) -> usize {
    rig.kernel.borrow().forwards.len()
}

#[test]
fn rfc4787_req_1_every_destination_sees_the_same_port() {
    let mut rig = mapped(Filtering::AddressAndPortDependent);
    let first = sent_by(&mut rig, 1, 5_001, SERVER);
    assert!(PORTS.contains(&first.1), "a port of the range of its own");
    assert_eq!(first.1 % 2, 1, "the parity is kept (REQ-4)");
    let other_port = (SERVER.0, 9);
    for to in [OTHER, other_port, STRANGER] {
        assert_eq!(sent_by(&mut rig, 1, 5_001, to), first);
    }
    assert_eq!(rig.flows(), 4, "each destination has its flow");
    assert_ne!(sent_by(&mut rig, 1, 5_003, SERVER), first, "another port");
    assert_ne!(sent_by(&mut rig, 2, 5_001, SERVER), first, "another guest");
    rig.assert_paired();
    let mappings = rig.tell(|engine| engine.inventory(0)).mappings;
    let udp = |udp| MappingCounts {
        udp,
        ..MappingCounts::default()
    };
    assert_eq!(mappings, [("vm1".into(), udp(2)), ("vm2".into(), udp(1))]);
}

#[test]
fn without_the_option_no_port_is_shared_with_a_flow_elsewhere() {
    let mut rig = Rig::with(Setup {
        eim_ports: Some(PORTS),
        ..Setup::default()
    });
    for port in 5_000..5_020 {
        let first = sent_by(&mut rig, 1, port, SERVER);
        assert!(!PORTS.contains(&first.1));
    }
    assert_eq!(open_ports(&rig), 0);
}

#[test]
fn rfc4787_req_1_a_mapping_lasts_as_long_as_a_flow_and_its_port_rests() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    let first = sent_by(&mut rig, 1, 5_001, SERVER);
    rig.pass(200 * SECOND_NS);
    assert_eq!(sent_by(&mut rig, 1, 5_001, OTHER), first);
    // The first flow has ended; the second one keeps the port.
    rig.pass(200 * SECOND_NS);
    assert_eq!(rig.flows(), 1);
    assert_eq!(sent_by(&mut rig, 1, 5_001, SERVER), first);
    rig.pass(302 * SECOND_NS);
    rig.assert_empty();
    assert_eq!(open_ports(&rig), 0, "nobody is let in any more");
    // While it rests it is the same guest's.
    assert_eq!(sent_by(&mut rig, 1, 5_001, SERVER), first);
    rig.pass(302 * SECOND_NS);
    assert_eq!(rig.engine.core.nat.flows.mappings.len(), 1);
    rig.pass(121 * SECOND_NS);
    assert!(rig.engine.core.nat.flows.mappings.is_empty());
}

#[test]
fn no_port_left_refuses_the_flow_and_harms_no_other() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    // Three VMs: two in ten are kept for each that has fewer.
    let mut ports = Vec::new();
    for port in 5_000..5_020 {
        rig.guest(1, &udp((GUEST, port), SERVER, b"x"));
        ports.extend(rig.at_world());
    }
    assert_eq!(
        ports.len(),
        10,
        "{:?}",
        rig.refused(1, Refusal::PortsExhausted)
    );
    assert_eq!(rig.refused(1, Refusal::PortsExhausted), 10);
    assert_eq!(rig.flows(), 10);
    // A port that has one is not refused.
    rig.guest(1, &udp((GUEST, 5_000), OTHER, b"x"));
    assert_eq!(rig.flows(), 11);
}

#[test]
fn a_full_map_refuses_the_flow() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    rig.kernel.borrow_mut().faults.open_port_full = 1;
    rig.guest(1, &udp((GUEST, 5_001), SERVER, b"x"));
    assert_eq!(rig.refused(1, Refusal::TableFull), 1);
    assert!(rig.engine.core.nat.flows.mappings.is_empty());
    sent_by(&mut rig, 1, 5_001, SERVER);
    assert_eq!(open_ports(&rig), 1);
}

#[test]
fn another_processs_port_or_tuple_is_passed_over() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    for port in PORTS.skip(1) {
        let key = (NAT, port, 17);
        rig.kernel.borrow_mut().forwards.insert(key, (9, 999));
    }
    // Each try is by chance; the guest sends again.
    let mut tries = 0;
    while rig.flows() == 0 {
        rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
        tries += 1;
        assert!(tries < 1_000);
    }
    assert_eq!(sent_by(&mut rig, 1, 5_000, SERVER).1, 50_000);
    rig.pass(430 * SECOND_NS);
    assert_eq!(open_ports(&rig), 9, "the others' are left");
    // Toward this server another process has the tuple with each port but one.
    let mut rig = mapped(Filtering::AddressAndPortDependent);
    for port in PORTS.skip(1) {
        let tuple = Tuple::of_words(Tuple::WORLD, (NAT, port), SERVER, 17);
        let flow = FlowRef::new(SlotIndex::new(2_000), 9);
        rig.kernel.borrow_mut().flows.insert(tuple, flow);
    }
    let mut tries = 0;
    while rig.flows() == 0 {
        rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
        tries += 1;
        assert!(tries < 1_000);
    }
    assert_eq!(sent_by(&mut rig, 1, 5_000, OTHER).1, 50_000);
}

/// Opens flows of so many ports of a VM; returns the translated ports.
fn open_from(rig: &mut Rig, row: u16, ports: std::ops::Range<u16>) -> Vec<u16> {
    ports
        .filter_map(|port| try_sent_by(rig, row, port, OTHER))
        .map(|(_, port)| port)
        .collect()
}

#[test]
fn a_port_of_a_flow_still_to_be_adopted_is_given_to_nobody_else() {
    let filtering = Filtering::AddressAndPortDependent;
    let mut rig = mapped(filtering);
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    let mut rig = rig.restart_in_steps(&setup(filtering));
    rig.engine.adopting.slots_per_turn = 0;
    let others = open_from(&mut rig, 2, 5_000..5_020);
    assert_eq!(others.len(), 9);
    assert!(!others.contains(&nat.1));
    assert_eq!(sent_by(&mut rig, 1, 5_001, OTHER), nat);
    rig.engine.adopting.slots_per_turn = 256;
    rig.engine.finish_adoption().unwrap();
    rig.pass(500 * SECOND_NS);
    assert_eq!(open_from(&mut rig, 2, 5_000..5_020).len(), 10, "then it is");
}

#[test]
fn another_process_has_a_part_of_the_ports() {
    let mut rig = Rig::with(Setup {
        eim_ports: Some(50_000..=50_099),
        ..setup(Filtering::AddressAndPortDependent)
    });
    rig.kernel.borrow_mut().owners = 0b101;
    rig.pass(10 * SECOND_NS);
    let ports = open_from(&mut rig, 1, 5_000..5_110);
    assert!((1..60).contains(&ports.len()), "{ports:?}");
    // The others are gone.
    rig.kernel.borrow_mut().owners = 0;
    rig.pass(10 * SECOND_NS);
    let others = open_from(&mut rig, 1, 6_000..6_110);
    assert_eq!(ports.len() + others.len(), 76, "the rest is kept for VMs");
}

#[test]
fn a_port_that_is_given_again_at_once_stays_open() {
    let one = || Setup {
        eim_ports: Some(50_000..=50_000),
        max_flows: 1,
        ..setup(Filtering::EndpointIndependent)
    };
    let mut rig = Rig::with(one());
    sent_by(&mut rig, 1, 5_001, SERVER);
    rig.kernel.borrow_mut().now_ns += 40 * SECOND_NS;
    // The first flow gives way, and its port to the second.
    let nat = sent_by(&mut rig, 1, 5_002, OTHER);
    rig.turn();
    assert_eq!(open_ports(&rig), 1);
    let handed = Handling::Engine(Handover::Forward);
    assert_eq!(rig.world(&udp(STRANGER, nat, b"hello")), handed);
}

#[test]
fn why_refuses_where_no_port_is_left_for_the_vm() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    for port in 5_000..5_010 {
        let why = rig.tell(|engine| engine.why(VmRow::new(1), server(), None));
        assert!(why.admitted, "{}", why.explanation);
        sent_by(&mut rig, 1, port, OTHER);
    }
    let why = rig.tell(|engine| engine.why(VmRow::new(1), server(), None));
    assert_eq!(why.refusal.as_deref(), Some(Refusal::PortsExhausted.name()));
    assert!(
        why.explanation.contains("--eim-ports"),
        "{}",
        why.explanation
    );
    rig.guest(1, &udp((GUEST, 5_010), SERVER, b"x"));
    assert_eq!(rig.refused(1, Refusal::PortsExhausted), 1);
    // A port that has one is admitted.
    sent_by(&mut rig, 1, 5_000, SERVER);
}

#[test]
fn rfc4787_req_8_anybody_is_let_in_with_endpoint_independent_filtering() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    assert_eq!(
        rig.world(&udp(STRANGER, nat, b"hello")),
        Handling::Engine(Handover::Forward),
        "userspace decides about the first packet"
    );
    let got = rig.at_guest();
    assert_eq!(got.len(), 1);
    assert_eq!(got[0].1[20..24], [0x13, 0x88, 0x13, 0x89], "5000 to 5001");
    assert_eq!(rig.flows(), 2);
    // It is a flow like any other: the next packets are the kernel's, both ways.
    assert_eq!(rig.world(&udp(STRANGER, nat, b"again")), Handling::Fast);
    assert_eq!(
        rig.guest(1, &udp((GUEST, 5_001), STRANGER, b"answer")),
        Handling::Fast
    );
    let out = rig.at_world().pop().unwrap();
    assert_eq!(u16::from_be_bytes([out[20], out[21]]), nat.1);
    rig.assert_paired();
}

#[test]
fn rfc4787_req_8_filtering_by_address_lets_other_ports_of_a_peer_in() {
    let mut rig = mapped(Filtering::AddressDependent);
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    let other_port = (SERVER.0, 9);
    rig.world(&udp(STRANGER, nat, b"no"));
    assert!(rig.at_guest().is_empty());
    assert_eq!(rig.dropped(1, DropReason::NoFlow), 1);
    rig.world(&udp(other_port, nat, b"yes"));
    assert_eq!(rig.at_guest().len(), 1);
    assert_eq!(rig.flows(), 2);
}

#[test]
fn rfc4787_req_8_filtering_by_address_and_port_leaves_strangers_to_the_host() {
    let mut rig = mapped(Filtering::AddressAndPortDependent);
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    for from in [STRANGER, (SERVER.0, 9)] {
        assert_eq!(rig.world(&udp(from, nat, b"no")), Handling::Passed);
    }
    assert_eq!(rig.world(&udp(SERVER, nat, b"yes")), Handling::Fast);
    assert_eq!(open_ports(&rig), 0);
}

#[test]
fn a_sender_to_whom_the_rules_let_nobody_send_is_refused() {
    let mut rig = Rig::with(Setup {
        default: Action::Deny,
        rules: vec![
            Rule::parse(Action::Allow, "198.51.100.7:443/udp").unwrap(),
            Rule::parse(Action::Inspect, "198.51.100.8:443").unwrap(),
        ],
        ..setup(Filtering::EndpointIndependent)
    });
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    rig.world(&udp(STRANGER, nat, b"no"));
    rig.world(&udp((SERVER.0, 444), nat, b"no"));
    assert_eq!(rig.refused(1, Refusal::Default), 2);
    rig.world(&udp((OTHER.0, 443), nat, b"no"));
    assert_eq!(rig.refused(1, Refusal::Inspection), 1);
    // Its source can't be a host's.
    rig.world(&udp((NAT, 7), nat, b"no"));
    assert!(rig.at_guest().is_empty());
    assert_eq!(rig.flows(), 1);
}

#[test]
fn rfc4787_req_6_strangers_do_not_keep_a_mapping() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    for _ in 0..35 {
        rig.world(&udp(STRANGER, nat, b"hello"));
        rig.pass(10 * SECOND_NS);
    }
    assert_eq!(open_ports(&rig), 0, "the guest has said nothing for 300 s");
    let mut other = STRANGER;
    other.1 += 1;
    assert_eq!(rig.world(&udp(other, nat, b"hello")), Handling::Passed);
}

#[test]
fn rfc4787_req_6_a_guest_that_answers_keeps_its_mapping() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    for _ in 0..35 {
        rig.world(&udp(STRANGER, nat, b"hello"));
        rig.guest(1, &udp((GUEST, 5_001), STRANGER, b"answer"));
        rig.pass(10 * SECOND_NS);
    }
    assert_eq!(rig.flows(), 1);
    let mut other = STRANGER;
    other.1 += 1;
    assert_eq!(
        rig.world(&udp(other, nat, b"hello")),
        Handling::Engine(Handover::Forward)
    );
    assert_eq!(sent_by(&mut rig, 1, 5_001, OTHER), nat);
}

#[test]
fn a_flood_of_strangers_takes_nothing_of_the_guests_own() {
    let mut rig = Rig::with(Setup {
        max_flows: 8,
        ..setup(Filtering::EndpointIndependent)
    });
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    for number in 0..100 {
        rig.world(&udp((STRANGER.0, 6_000 + number), nat, b"flood"));
    }
    // Six are the world's share; the unproven make room for each other.
    assert_eq!(rig.engine.core.nat.flows.count(VmRow::new(1)), 7);
    sent_by(&mut rig, 1, 5_001, OTHER);
    // It has its eight now: one of the unproven makes room.
    rig.pass(SECOND_NS);
    sent_by(&mut rig, 1, 5_005, OTHER);
}

#[test]
fn a_successor_keeps_the_port_and_its_entry() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    rig.world(&udp(STRANGER, nat, b"hello"));
    let dangling = (NAT, 50_000 + u16::from(nat.1 == 50_000), 17);
    rig.kernel.borrow_mut().forwards.insert(dangling, (2, 102));
    // A new flow meets the mapping before its flows are walked over.
    let mut rig = rig.restart_in_steps(&setup(Filtering::EndpointIndependent));
    assert_eq!(sent_by(&mut rig, 1, 5_001, OTHER), nat);
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 3);
    assert_eq!(open_ports(&rig), 1, "what no flow uses is closed");
    let mut other = STRANGER;
    other.1 += 1;
    assert_eq!(
        rig.world(&udp(other, nat, b"hello")),
        Handling::Engine(Handover::Forward)
    );
    assert_eq!(rig.flows(), 4);
    rig.assert_paired();
}

#[test]
fn a_look_up_that_fails_during_adoption_is_left_to_the_walk() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    sent_by(&mut rig, 1, 5_001, SERVER);
    let mut rig = rig.restart_in_steps(&setup(Filtering::EndpointIndependent));
    rig.engine.adopting.slots_per_turn = 0;
    rig.kernel.borrow_mut().faults.get_fails = 100_000;
    rig.guest(1, &udp((GUEST, 5_001), OTHER, b"x"));
    let looks = 100_000 - rig.kernel.borrow().faults.get_fails;
    assert!(looks < 100, "{looks} look-ups for one frame");
    rig.kernel.borrow_mut().faults.get_fails = 0;
    rig.engine.adopting.slots_per_turn = 256;
    rig.engine.finish_adoption().unwrap();
    rig.assert_paired();
}

#[test]
fn a_frame_has_few_flows_adopted_and_finds_its_mapping() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    for port in 1_000..1_100 {
        sent_by(&mut rig, 1, 5_001, (OTHER.0, port));
        sent_by(&mut rig, 1, 5_003, (OTHER.0, port));
    }
    let all = rig.flows();
    let mut rig = rig.restart_in_steps(&setup(Filtering::EndpointIndependent));
    rig.engine.adopting.slots_per_turn = 0;
    let left = |rig: &Rig| rig.engine.core.nat.flows.left_in_all();
    // A port without a mapping, a port with one, and a stranger.
    let other = sent_by(&mut rig, 1, 5_005, STRANGER);
    assert_ne!(other, nat);
    assert_eq!(left(&rig), all);
    assert_eq!(sent_by(&mut rig, 1, 5_001, STRANGER), nat);
    rig.world(&udp((STRANGER.0, 9), nat, b"hello"));
    assert_eq!(rig.at_guest().len(), 1, "it is let in as ever");
    assert!(left(&rig) > all - 50, "{} of {all}", left(&rig));
    rig.engine.adopting.slots_per_turn = 256;
    rig.engine.finish_adoption().unwrap();
    rig.assert_paired();
}

fn put_in_force(rig: &mut Rig, nat: NatSettings, rules: Vec<Rule>) {
    let policy = Policy::new(Action::Allow, rules).with(Settings {
        nat,
        ..Settings::default()
    });
    let vms = vec![spec(1, &Setup::default())];
    rig.tell(move |engine| {
        engine.reload(Reload {
            id: 1,
            policies: vec![(0, Some(policy))],
            local: network().local,
            vms,
            strictly: Vec::new(),
        });
    });
}

#[test]
fn many_ports_are_closed_some_in_each_turn_and_the_loop_does_not_sleep() {
    let mut rig = Rig::with(Setup {
        eim_ports: Some(50_000..=51_999),
        ..setup(Filtering::EndpointIndependent)
    });
    for port in 5_000..5_600 {
        sent_by(&mut rig, 1, port, SERVER);
    }
    assert_eq!(open_ports(&rig), 600);
    put_in_force(&mut rig, NatSettings::default(), Vec::new());
    let mut before = 600;
    while before > 0 {
        let now = open_ports(&rig);
        assert!(before - now <= 256, "{before} to {now}");
        let is_awake = rig.engine.timeout_ns() == Some(0);
        assert!(now == 0 || is_awake, "{now} are left");
        before = now;
        rig.turn();
    }
}

#[test]
fn another_policy_closes_the_port_and_cuts_whom_it_let_in() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    rig.world(&udp(STRANGER, nat, b"hello"));
    assert_eq!(rig.flows(), 2);
    put_in_force(&mut rig, NatSettings::default(), Vec::new());
    rig.pass(SECOND_NS);
    assert_eq!(open_ports(&rig), 0);
    assert_eq!(rig.flows(), 1, "the guest's own flow lives on");
    assert!(!PORTS.contains(&sent_by(&mut rig, 1, 5_001, OTHER).1));
}

#[test]
fn a_rule_that_denies_a_stranger_cuts_its_flow() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    rig.world(&udp(STRANGER, nat, b"hello"));
    let deny = Rule::parse(Action::Deny, "203.0.113.0/24").unwrap();
    let settings = settings(Filtering::EndpointIndependent);
    put_in_force(&mut rig, settings, vec![deny]);
    rig.pass(SECOND_NS);
    assert_eq!((rig.flows(), open_ports(&rig)), (1, 1));
}

#[test]
fn rfc5382_req_1_and_3_a_connection_has_the_port_and_lets_others_in() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    rig.guest(1, &syn((GUEST, 5_001), SERVER, 100));
    let out = rig.at_world().pop().unwrap();
    let nat = (NAT, u16::from_be_bytes([out[20], out[21]]));
    rig.guest(1, &syn((GUEST, 5_001), OTHER, 100));
    let out = rig.at_world().pop().unwrap();
    assert_eq!(u16::from_be_bytes([out[20], out[21]]), nat.1);
    rig.world(&syn(STRANGER, nat, 900));
    assert_eq!(rig.at_guest().len(), 1);
    rig.guest(1, &syn_ack((GUEST, 5_001), STRANGER, 700, 901));
    assert_eq!(rig.at_world().len(), 1);
    assert_eq!(rig.world(&ack(STRANGER, nat, 0, 901, 701)), Handling::Fast);
}

#[test]
fn a_vm_that_goes_leaves_no_port_open() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    sent_by(&mut rig, 1, 5_001, SERVER);
    rig.tell(|engine| engine.remove_vm(VmRow::new(1), VmId::new(101)));
    rig.pass(SECOND_NS);
    assert_eq!(open_ports(&rig), 0);
}

#[test]
fn why_says_how_the_port_behaves() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    let answer = rig.tell(|engine| engine.why(VmRow::new(1), server(), None));
    assert!(answer.admitted);
    assert!(
        answer
            .explanation
            .contains("endpoint-independent mapping, endpoint-independent filtering"),
        "{}",
        answer.explanation
    );
}
