//! Tests of endpoint-independent mappings, and of what the world may send to them.
use slipgate_abi::{DropReason, Handover, Ip4, Protocol, Refusal, VmId, VmRow};
use slipgate_policy::{
    Action, Filtering, Mapping, NatBehaviour, NatSettings, Policy, Rule, Settings,
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
    };
    NatSettings {
        udp: mapped,
        tcp: mapped,
    }
}

/// A rig whose VMs have endpoint-independent mapping.
fn mapped(filtering: Filtering) -> Rig {
    Rig::with(Setup {
        nat: settings(filtering),
        eim_ports: Some(PORTS),
        ..Setup::default()
    })
}

/// Sends a datagram and returns the address and port that its destination sees.
fn sent_by(rig: &mut Rig, row: u16, port: u16, to: At) -> At {
    rig.at_world();
    rig.guest(row, &udp((GUEST, port), to, b"x"));
    let sent = rig.at_world().pop().expect("the datagram goes out");
    let octets = [sent[12], sent[13], sent[14], sent[15]];
    (Ip4 { octets }, u16::from_be_bytes([sent[20], sent[21]]))
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
        nat: settings(Filtering::EndpointIndependent),
        eim_ports: Some(PORTS),
        default: Action::Deny,
        rules: vec![
            Rule::parse(Action::Allow, "198.51.100.7:443/udp").unwrap(),
            Rule::parse(Action::Inspect, "198.51.100.8:443").unwrap(),
        ],
        ..Setup::default()
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
        nat: settings(Filtering::EndpointIndependent),
        eim_ports: Some(PORTS),
        max_flows: 8,
        ..Setup::default()
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
    let setup = || Setup {
        nat: settings(Filtering::EndpointIndependent),
        eim_ports: Some(PORTS),
        ..Setup::default()
    };
    let mut rig = Rig::with(setup());
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    rig.world(&udp(STRANGER, nat, b"hello"));
    let dangling = (NAT, 50_000 + u16::from(nat.1 == 50_000), 17);
    rig.kernel.borrow_mut().forwards.insert(dangling, (2, 102));
    // A new flow meets the mapping before its flows are walked over.
    let mut rig = rig.restart_in_steps(&setup());
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
    rig.pass(SECOND_NS);
}

#[test]
fn another_policy_closes_the_port_and_cuts_whom_it_let_in() {
    let mut rig = mapped(Filtering::EndpointIndependent);
    let nat = sent_by(&mut rig, 1, 5_001, SERVER);
    rig.world(&udp(STRANGER, nat, b"hello"));
    assert_eq!(rig.flows(), 2);
    put_in_force(&mut rig, NatSettings::default(), Vec::new());
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
    let to = slipgate_policy::Destination {
        addr: SERVER.0.into(),
        port: SERVER.1,
        protocol: Protocol::Udp,
    };
    let answer = rig.tell(move |engine| engine.why(VmRow::new(1), to, None));
    assert!(answer.admitted);
    assert!(
        answer
            .explanation
            .contains("endpoint-independent mapping, endpoint-independent filtering"),
        "{}",
        answer.explanation
    );
}
