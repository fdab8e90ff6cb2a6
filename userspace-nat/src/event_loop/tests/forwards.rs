//! Tests of flows that the world opens through a forward, and of packets that open none.
use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    sync::atomic::Ordering::Relaxed,
};

use slipgate_abi::{
    DropReason, Handover, Ip4, Protocol, Refusal, RuleIndex, Verdict, VmId, VmRow,
    portframe::PortFlags, tcp::Flags,
};

use super::{
    follow::{by_table, with_table},
    rig::*,
};
use crate::{
    admission::rejudge::judge_again,
    clock::{MILLISECOND_NS, SECOND_NS},
    control::ForwardChange,
    datapath::Tables as _,
    flow::{Insertion, NewFlow},
    port::VirtioNetHdr,
    relay::{self, Standing},
    state::Forward,
};
use slipgate_model::FlowTuple;
use slipgate_policy::Action;

/// The host's ports 8,080 (TCP) and 5,353 (UDP) of any address lead to VM 1, and 9,090 of loopback.
pub(super) fn with_forwards(setup: Setup) -> Rig {
    let rig = Rig::with(forwarding(setup));
    {
        let mut kernel = rig.kernel.borrow_mut();
        kernel.forwards.insert((NAT, 8_080, 6), (1, 101));
        kernel.forwards.insert((NAT, 5_353, 17), (1, 101));
    }
    rig
}

fn forwarding(setup: Setup) -> Setup {
    let forward = |protocol, host: [u8; 4], host_port, guest_port| Forward {
        protocol,
        host: host.into(),
        host_port,
        vm: VmId::new(101),
        vm_row: VmRow::new(1),
        guest_port,
        rule: RuleIndex::new(12),
        is_own: false,
    };
    let forwards = vec![
        forward(Protocol::Tcp, [0; 4], 8_080, 80),
        forward(Protocol::Udp, [0; 4], 5_353, 5_300),
        forward(Protocol::Tcp, [127, 0, 0, 1], 9_090, 90),
    ];
    Setup { forwards, ..setup }
}

pub(super) const HTTP: At = (NAT, 8_080);
const WEB: At = (GUEST, 80);

const fn ip(octets: [u8; 4]) -> Ip4 {
    Ip4 { octets }
}

/// Hands a packet over as one to a forward, whatever the programs would do.
fn hand_over(rig: &mut Rig, packet: &[u8]) {
    let vnet = VirtioNetHdr::default();
    rig.kernel
        .borrow_mut()
        .hand_over(1, Handover::Forward, PortFlags::FROM_UPLINK, vnet, packet);
    rig.turn();
}

#[test]
fn what_a_link_brings_for_loopback_is_no_forwards() {
    let mut rig = with_forwards(Setup::default());
    for port in [8_080, 9_090] {
        hand_over(&mut rig, &syn(SERVER, (ip([127, 0, 0, 1]), port), 5));
    }
    hand_over(&mut rig, &udp(SERVER, (ip([127, 8, 8, 8]), 5_353), b"x"));
    assert_eq!((rig.flows(), rig.dropped(1, DropReason::NoFlow)), (0, 3));
    assert!(rig.at_guest().is_empty());
}

/// As its numbers are not known, it is asked by an acknowledgement that is old.
#[test]
fn a_client_of_a_former_generation_is_asked_where_it_stands() {
    let mut rig = with_forwards(Setup::default());
    rig.world(&syn(SERVER, HTTP, 5_000));
    rig.guest(1, &syn_ack(WEB, SERVER, 700, 5_001));
    rig.world(&ack(SERVER, HTTP, 0, 5_001, 701));
    rig.at_world();
    rig.tell(|engine| engine.end_generation(VmRow::new(1)));
    let asked = rig.at_world();
    assert_eq!(asked.len(), 1);
    let tcp = super::changes::tcp_of(&asked[0]);
    assert_eq!((tcp.source, tcp.destination), (HTTP.1, SERVER.1));
    assert_eq!((tcp.flags, tcp.acknowledgement), (Flags::ACK, 5_000));
}

#[test]
fn a_forward_of_a_vm_with_routes_is_reached_at_their_addresses_only() {
    let mut rig = with_forwards(Setup::default());
    rig.follow(with_table());
    rig.tell(|engine| engine.set_vm(by_table(1, None)));
    rig.world(&syn(SERVER, HTTP, 5));
    assert_eq!((rig.flows(), rig.refused(1, Refusal::NoRoute)), (0, 1));
    assert!(rig.at_guest().is_empty());
    let there = (ip([10, 8, 0, 2]), 8_080);
    hand_over(&mut rig, &syn(SERVER, there, 5));
    assert_eq!((rig.flows(), rig.at_guest().len()), (1, 1));
}

#[test]
fn a_predecessors_flow_of_loopback_ends() {
    let mut rig = with_forwards(Setup::default());
    let core = &mut rig.engine.core;
    for (inbound, port) in [(true, 9_090), (false, 61_000)] {
        let flow = NewFlow {
            hairpin: false,
            guest: FlowTuple {
                scope: 101,
                local: GUEST.into(),
                remote: PEER.into(),
                local_port: if inbound { 90 } else { 91 },
                remote_port: 443,
                protocol: 6,
            },
            vm_row: VmRow::new(1),
            protocol: Protocol::Tcp,
            nat: ip([127, 0, 0, 1]).into(),
            nat_port: port,
            rule: RuleIndex::new(12),
            uplink_ifindex: UPLINK,
            next_hop: 0,
            isn: 5,
            inbound,
            verdict: Verdict::Fast,
            insertion: Insertion::Engine,
        };
        let now_ns = rig.kernel.borrow().now_ns;
        core.nat
            .flows
            .open(&mut core.nat.datapath, &flow, now_ns)
            .unwrap();
    }
    let (mut rig, _) = rig.restart(&forwarding(Setup::default()));
    rig.pass(SECOND_NS);
    rig.assert_empty();
    let ends: Vec<_> = rig.records().iter().map(|r| r["end"].clone()).collect();
    assert_eq!(ends, ["address-gone", "address-gone"]);
}

#[test]
fn a_guests_syn_on_a_flow_of_the_world_is_judged() {
    let mut rig = with_forwards(Setup {
        default: Action::Deny,
        ..Setup::default()
    });
    // The first number is the forged SYN's own.
    for isn in [5, 7] {
        rig.world(&syn(SERVER, HTTP, 5));
        assert_eq!(rig.at_guest().len(), 1);
        rig.guest(1, &syn(WEB, SERVER, isn));
        assert!(rig.at_world().is_empty(), "{isn}");
        assert_eq!(rig.at_guest().pop().unwrap().1[33] & Flags::RST, Flags::RST);
    }
    assert_eq!(rig.refused(1, Refusal::Default), 2);
    // The same when the engine carries the flow.
    rig.world(&syn(SERVER, HTTP, 5));
    let slot = rig.kernel.borrow().slots_in_use().pop().unwrap();
    rig.kernel.borrow().slot(slot).set_verdict(Verdict::Engine);
    rig.guest(1, &syn(WEB, SERVER, 5));
    assert!(rig.at_world().is_empty());
    assert_eq!(rig.refused(1, Refusal::Default), 3);
    // Who answers is not asked for a rule.
    rig.at_guest();
    rig.world(&syn(SERVER, HTTP, 5));
    assert_eq!(rig.guest(1, &syn_ack(WEB, SERVER, 9, 6)), Handling::Fast);
    assert_eq!(rig.at_world().len(), 1);
    rig.assert_paired();
}

#[test]
fn a_guests_syn_that_the_rules_let_out_is_a_flow_of_the_guests() {
    let mut rig = with_forwards(Setup::default());
    rig.world(&syn(SERVER, HTTP, 5));
    rig.at_guest();
    rig.guest(1, &syn(WEB, SERVER, 5));
    let sent = rig.at_world().pop().expect("the SYN goes out");
    assert_ne!(sent[20..22], 8_080u16.to_be_bytes());
    let inbound = rig.engine.core.nat.flows.count_from_world(VmRow::new(1));
    assert_eq!(
        (rig.engine.core.nat.flows.count(VmRow::new(1)), inbound),
        (1, 0)
    );
    // It is that SYN which opened it, so the same one again is a retransmission.
    assert_eq!(rig.guest(1, &syn(WEB, SERVER, 5)), Handling::Fast);
    rig.assert_paired();
}

#[test]
fn whom_a_forward_lets_in() {
    let mut rig = with_forwards(Setup::default());
    let never = [
        [0, 0, 0, 0],
        [0, 1, 2, 3],
        // The gateway, the resolver, the guest, nobody: of the guest's own network.
        [10, 0, 2, 2],
        [10, 0, 2, 3],
        [10, 0, 2, 15],
        [10, 0, 2, 77],
        [127, 0, 0, 1],
        [169, 254, 9, 9],
        [169, 254, 169, 254],
        [100, 100, 100, 200],
        [168, 63, 129, 16],
        // The host.
        [192, 0, 2, 1],
        [224, 0, 0, 251],
        [240, 0, 0, 1],
        [255, 255, 255, 255],
    ];
    for octets in never {
        rig.world(&syn((ip(octets), 50_000), HTTP, 5));
        rig.world(&udp((ip(octets), 50_000), (NAT, 5_353), b"x"));
        assert_eq!(rig.flows(), 0, "{octets:?}");
    }
    assert_eq!(
        rig.refused(1, Refusal::Protected),
        2 * never.len() as u64,
        "each packet is in the books"
    );
    assert!(rig.at_guest().is_empty());
    let clients = [
        [198, 51, 100, 7],
        [10, 9, 9, 9],
        [172, 16, 3, 4],
        [192, 168, 1, 2],
        [100, 64, 1, 1],
    ];
    for octets in clients {
        rig.world(&syn((ip(octets), 50_000), HTTP, 5));
        rig.world(&udp((ip(octets), 50_000), (NAT, 5_353), b"x"));
    }
    assert_eq!(rig.flows(), 2 * clients.len());
}

#[test]
fn flows_of_whom_a_forward_would_not_let_in_are_not_taken_over() {
    let mut rig = with_forwards(Setup::default());
    let client = (ip([10, 9, 9, 9]), 50_000);
    rig.world(&syn(client, HTTP, 5));
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let looked_at = rig.engine.core.nat.datapath.slot(slot);
    assert_eq!(looked_at.verdict().load(Relaxed), Verdict::Fast as u32);
    let standing = |rig: &Rig| judge_again(&rig.engine.core, slot, 0, |_| false);
    assert_eq!(standing(&rig), Some(Standing::Stands));
    // The address is the host's own from now on.
    let mut network = network();
    network.local.host.push(client.0.into());
    rig.follow(network);
    assert_eq!(standing(&rig), Some(Standing::Cut));
}

#[test]
fn flows_through_a_forward_that_goes_are_cut_and_others_go_on() {
    let mut rig = with_forwards(Setup::default());
    let datagram = |port| udp((PEER, 50_000), (NAT, port), b"x");
    rig.world(&syn((PEER, 50_000), HTTP, 5));
    rig.world(&datagram(5_353));
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    assert_eq!(rig.flows(), 3);
    let (vm, row) = (VmId::new(101), VmRow::new(1));
    let change = |removed: Vec<(Protocol, SocketAddr)>, added: Vec<Forward>| {
        let relayed = |forward: Forward| {
            let socket = TcpListener::bind("127.0.0.1:0").unwrap().into();
            let relayed = relay::Forward {
                vm,
                protocol: forward.protocol,
                guest_port: forward.guest_port,
                rule: forward.rule,
                socket,
            };
            (forward, Some(relayed))
        };
        let added = added.into_iter().map(relayed).collect();
        ForwardChange {
            vm,
            row,
            removed,
            added,
        }
    };
    let any = |port| SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
    let gone = change(vec![(Protocol::Tcp, any(8_080))], Vec::new());
    rig.tell(move |engine| engine.change_forwards(gone).unwrap());
    rig.at_guest();
    rig.world(&ack((PEER, 50_000), HTTP, 0, 6, 1));
    // Both ends are told that it was cut.
    const RST: u8 = 4;
    let mut told = rig.at_guest().into_iter();
    assert!(told.all(|(_, packet)| packet[33] & RST != 0));
    rig.world(&syn((PEER, 50_001), HTTP, 5));
    assert!(rig.at_guest().is_empty());
    rig.world(&datagram(5_353));
    assert_eq!(rig.at_guest().len(), 1);
    // It comes again, to another port of the guest.
    let again = Forward {
        guest_port: 81,
        ..forwarding(Setup::default()).forwards[0]
    };
    let again = change(Vec::new(), vec![again]);
    rig.tell(move |engine| engine.change_forwards(again).unwrap());
    rig.world(&syn((PEER, 50_002), HTTP, 5));
    let (_, first) = &rig.at_guest()[0];
    assert_eq!(first[22..24], 81u16.to_be_bytes());
    // It goes with its VM.
    rig.tell(move |engine| engine.remove_vm(row, vm));
    rig.world(&syn((PEER, 50_003), HTTP, 5));
    assert!(rig.at_guest().is_empty());
}

/// A client whose handshake takes a tenth of a second. Its SYN is sent again after 1, 3 and 7 s;
/// the connection is proven once the guest has answered.
struct Client {
    at: At,
    next_try_ns: u64,
    tries: u32,
    answer: Option<u64>,
    connected: bool,
}

/// Floods the port with `flood` forged SYNs a second for `seconds`, all of which the guest answers,
/// while five clients a second connect. Returns how many clients of the second half connected, of
/// how many, and the most slots that were examined for one SYN.
fn connected_under_flood(setup: Setup, flood: u64, seconds: u64) -> (usize, usize, u64) {
    let mut rig = with_forwards(setup);
    let begin_ns = rig.kernel.borrow().now_ns;
    let (mut clients, mut most_looks) = (Vec::<Client>::new(), 0);
    for forged in 0..seconds * flood {
        let at_ns = forged * SECOND_NS / flood;
        rig.kernel.borrow_mut().now_ns = begin_ns + at_ns;
        rig.turn();
        let now_ns = rig.kernel.borrow().now_ns;
        if at_ns * 5 / SECOND_NS > clients.len() as u64 {
            let number = clients.len() as u16;
            clients.push(Client {
                at: (ip([203, 0, 113, number as u8]), 1_024 + number),
                next_try_ns: now_ns,
                tries: 0,
                answer: None,
                connected: false,
            });
        }
        let before = rig.kernel.borrow().slots_looked_at.get();
        let source = ip([198, (forged >> 16) as u8, (forged >> 8) as u8, forged as u8]);
        rig.kernel
            .borrow_mut()
            .world_sends(VirtioNetHdr::default(), &syn((source, 999), HTTP, 1));
        rig.engine.read_port().unwrap();
        let looks = rig.kernel.borrow().slots_looked_at.get() - before;
        most_looks = most_looks.max(looks);
        for client in clients.iter_mut().filter(|client| !client.connected) {
            if client.answer.is_some_and(|at_ns| at_ns <= now_ns) {
                let last = ack(client.at, HTTP, 0, 6, 10);
                client.answer = None;
                client.connected = rig.world(&last) == Handling::Fast;
            } else if client.next_try_ns <= now_ns && client.tries < 4 {
                client.next_try_ns = now_ns + (SECOND_NS << client.tries);
                client.tries += 1;
                rig.world(&syn(client.at, HTTP, 5));
            }
        }
        // The guest answers what has arrived, whoever it is from.
        for (_, packet) in rig.at_guest() {
            if packet[33] == Flags::SYN {
                let from = (
                    ip([packet[12], packet[13], packet[14], packet[15]]),
                    u16::from_be_bytes([packet[20], packet[21]]),
                );
                rig.guest(1, &syn_ack(WEB, from, 9, 6));
                for client in clients.iter_mut().filter(|client| client.at == from) {
                    client.answer = Some(now_ns + 100 * MILLISECOND_NS);
                }
            }
        }
        rig.at_world();
    }
    // Those who had time for all their tries, when the flood had had its time before.
    let (from, to) = (clients.len() / 2, clients.len() - 40);
    let judged = &clients[from..to];
    let connected = judged.iter().filter(|client| client.connected).count();
    rig.assert_paired();
    (connected, judged.len(), most_looks)
}

#[test]
fn a_flood_of_forged_syns_shuts_no_real_client_out() {
    // The share is full of forged ones after 25 s, and an answered SYN would live for 2 hours.
    let setup = Setup {
        slots: 16_384,
        max_flows: 10_000,
        rate: 2_000,
        ..Setup::default()
    };
    let (connected, of, most_looks) = connected_under_flood(setup, 300, 50);
    assert!(connected * 100 >= of * 95, "{connected} of {of}");
    // A chunk of 1,024 is looked through when it is claimed.
    assert!(
        most_looks <= 1_100,
        "a SYN had {most_looks} slots looked at"
    );
}

#[test]
fn a_flood_beyond_the_rate_shuts_no_real_client_out() {
    let setup = Setup {
        slots: 4_096,
        max_flows: 2_000,
        rate: 100,
        ..Setup::default()
    };
    let (connected, of, _) = connected_under_flood(setup, 300, 40);
    assert!(connected * 100 >= of * 95, "{connected} of {of}");
}

/// Half-open connections that the guest does not answer either, because its backlog is full.
#[test]
fn what_nobody_answered_makes_room_oldest_first_and_the_guests_own_part_stays() {
    let setup = Setup {
        max_flows: 100,
        ..Setup::default()
    };
    let mut rig = with_forwards(setup);
    let source = |forged: u16| (ip([198, 18, (forged >> 8) as u8, forged as u8]), 999);
    let live = |rig: &Rig, forged: u16| {
        let flows = &rig.engine.core.nat.flows;
        let tuple = FlowTuple {
            scope: FlowTuple::WORLD,
            local: HTTP.0.into(),
            remote: source(forged).0.into(),
            local_port: HTTP.1,
            remote_port: source(forged).1,
            protocol: 6,
        };
        flows.by_world(&tuple).is_some()
    };
    for forged in 0..1_000u16 {
        rig.world(&syn(source(forged), HTTP, 1));
        // The guest's own begin while the world's part is full.
        if (300..325).contains(&forged) {
            rig.guest(1, &syn((GUEST, 5_000 + forged), SERVER, 1));
        }
        rig.pass(10 * MILLISECOND_NS);
        if forged >= 100 {
            // The newest have the place of the oldest: 75 of the world's in all.
            assert!(live(&rig, forged), "{forged}");
            assert!(live(&rig, forged - 70), "{forged}");
            assert!(!live(&rig, forged - 76), "{forged}");
        }
    }
    // Those that made room last are on their way out.
    rig.pass(SECOND_NS);
    let of_world = rig.engine.core.nat.flows.count_from_world(VmRow::new(1));
    assert_eq!((rig.flows(), of_world), (100, 75));
    assert_eq!(rig.refused(1, Refusal::FlowCap), 0);
    rig.assert_paired();
}

#[test]
fn an_unproven_connection_lives_sixty_seconds_whatever_is_sent_again() {
    let mut rig = with_forwards(Setup::default());
    rig.world(&syn(SERVER, HTTP, 5));
    for _ in 0..5 {
        rig.guest(1, &syn_ack(WEB, SERVER, 9, 6));
        rig.pass(11 * SECOND_NS);
        // Whoever forges it does not know what the guest has said.
        rig.world(&ack(SERVER, HTTP, 0, 6, 1_000_000));
    }
    assert_eq!(rig.flows(), 1);
    rig.pass(8 * SECOND_NS);
    rig.assert_empty();
    // Who knows it stays.
    rig.world(&syn(SERVER, HTTP, 5));
    rig.guest(1, &syn_ack(WEB, SERVER, 9, 6));
    rig.world(&ack(SERVER, HTTP, 0, 6, 10));
    rig.pass(600 * SECOND_NS);
    assert_eq!(rig.flows(), 1);
}

#[test]
fn only_who_is_unproven_and_had_time_makes_room() {
    let mut rig = with_forwards(Setup {
        max_flows: 8,
        ..Setup::default()
    });
    let client = |number: u8| (ip([203, 0, 113, number]), 50_000);
    let connect = |rig: &mut Rig, number: u8| {
        rig.world(&syn(client(number), HTTP, 5));
        rig.guest(1, &syn_ack(WEB, client(number), 9, 6));
    };
    let prove = |rig: &mut Rig, number: u8| rig.world(&ack(client(number), HTTP, 0, 6, 10));
    // The world's six: the first, third and fifth are proven.
    for number in 1..=6 {
        connect(&mut rig, number);
        rig.pass(10 * MILLISECOND_NS);
    }
    for number in [1, 3, 5] {
        assert_eq!(prove(&mut rig, number), Handling::Fast);
    }
    rig.world(&syn(client(7), HTTP, 5));
    assert_eq!(
        rig.refused(1, Refusal::FlowCap),
        1,
        "all had too little time"
    );
    rig.pass(300 * MILLISECOND_NS);
    for number in [7, 8, 9] {
        connect(&mut rig, number);
        rig.pass(300 * MILLISECOND_NS);
        assert_eq!(prove(&mut rig, number), Handling::Fast);
    }
    let ends: Vec<_> = rig.records();
    let remote = |n: u8| format!("203.0.113.{n}:50000");
    let ended: Vec<_> = ends
        .iter()
        .map(|r| (r["remote"].as_str().unwrap(), r["end"].as_str().unwrap()))
        .collect();
    let (two, four, six) = (remote(2), remote(4), remote(6));
    let made_room = "made-room";
    assert_eq!(
        ended,
        [(&*two, made_room), (&*four, made_room), (&*six, made_room)]
    );
    // Everybody is proven now: the new one is refused, and those go on.
    rig.world(&syn(client(10), HTTP, 5));
    assert_eq!(rig.refused(1, Refusal::FlowCap), 2);
    for number in [1, 3, 5, 7, 8, 9] {
        assert_eq!(prove(&mut rig, number), Handling::Fast);
    }
    // A reset one makes room when it was silent for a while.
    rig.world(&ack(client(3), HTTP, Flags::RST, 6, 10));
    rig.pass(11 * SECOND_NS);
    rig.world(&syn(client(10), HTTP, 5));
    rig.pass(100 * MILLISECOND_NS);
    assert_eq!(rig.records().last().unwrap()["end"], "reset");
    connect(&mut rig, 10);
    assert_eq!(prove(&mut rig, 10), Handling::Fast);
    rig.assert_paired();
}

#[test]
fn datagrams_that_nobody_is_behind_make_room() {
    let mut rig = with_forwards(Setup {
        max_flows: 8,
        ..Setup::default()
    });
    let client = |number: u8| (ip([203, 0, 113, number]), 50_000);
    let sends = |rig: &mut Rig, number| rig.world(&udp(client(number), (NAT, 5_353), b"x"));
    // The guest answers all; the first client goes on.
    for number in 1..=6 {
        sends(&mut rig, number);
        rig.guest(1, &udp((GUEST, 5_300), client(number), b"y"));
    }
    assert_eq!(sends(&mut rig, 1), Handling::Fast);
    for number in 7..=30 {
        rig.pass(300 * MILLISECOND_NS);
        sends(&mut rig, number);
        assert_eq!(rig.at_guest().last().unwrap().0, 101);
    }
    assert_eq!(rig.refused(1, Refusal::FlowCap), 0);
    assert_eq!(sends(&mut rig, 1), Handling::Fast);
    // A guest that is silent keeps its flows from the world for a minute.
    rig.pass(62 * SECOND_NS);
    assert_eq!(rig.engine.core.nat.flows.count(VmRow::new(1)), 1);
}

#[test]
fn a_successor_knows_who_is_unproven() {
    let setup = || Setup {
        max_flows: 8,
        ..Setup::default()
    };
    let mut rig = with_forwards(setup());
    for number in 1..=6 {
        rig.world(&syn((ip([203, 0, 113, number]), 50_000), HTTP, 5));
    }
    let (mut rig, adoption) = rig.restart(&forwarding(setup()));
    assert_eq!(adoption.live, 6);
    rig.pass(300 * MILLISECOND_NS);
    rig.world(&syn((ip([203, 0, 113, 7]), 50_000), HTTP, 5));
    assert_eq!(rig.refused(1, Refusal::FlowCap), 0);
    assert_eq!(rig.at_guest().len(), 7);
}

#[test]
fn the_worlds_flood_takes_no_credit_and_no_turn_of_the_guests() {
    let mut rig = with_forwards(Setup::default());
    let nat = rig.connect(40_000, 7);
    let slot = rig.kernel.borrow().slots_in_use()[0];
    rig.kernel.borrow().slot(slot).set_verdict(Verdict::Engine);
    let vnet = VirtioNetHdr::default();
    // The engine has no time.
    let mut kernel = rig.kernel.borrow_mut();
    let first = |number: u8| syn((ip([203, 0, 113, number]), 50_000), HTTP, 5);
    let went: Vec<bool> = (0..200)
        .map(|number| {
            kernel.world_sends(vnet, &first(number)) == Handling::Engine(Handover::Forward)
        })
        .collect();
    assert_eq!(went.iter().filter(|went| **went).count(), 32);
    // What a server answers has the rest of the world's credits, the guest all of its own.
    let answer = ack(SERVER, nat, 0, 9_001, 8);
    for _ in 0..32 {
        let way = kernel.world_sends(vnet, &answer);
        assert_eq!(way, Handling::Engine(Handover::Verdict));
    }
    let no_credit = Handling::Dropped(DropReason::NoCredit);
    assert_eq!(kernel.world_sends(vnet, &answer), no_credit);
    for port in 0..64 {
        let way = kernel.guest_sends(1, vnet, &udp((GUEST, 5_000 + port), (PEER, 1_234), b"x"));
        assert_eq!(way, Handling::Engine(Handover::Miss));
    }
    drop(kernel);
    rig.turn();
    assert_eq!(rig.flows(), 1 + 32 + 64);
    // What was lost in the port's queue is given back to whom it was taken from.
    rig.kernel.borrow_mut().faults.queue_len = 1;
    for number in 0..32 {
        let port = 60_000 + number;
        let mut kernel = rig.kernel.borrow_mut();
        kernel.world_sends(vnet, &syn((PEER, port), HTTP, 5));
    }
    rig.kernel.borrow_mut().faults.queue_len = 0;
    let way = rig.world(&syn((PEER, 60_100), HTTP, 5));
    assert_eq!(way, no_credit);
    rig.pass(100 * MILLISECOND_NS);
    let way = rig.world(&syn((PEER, 60_101), HTTP, 5));
    assert_eq!(way, Handling::Engine(Handover::Forward));
    let counters = rig.kernel.borrow().stats(1).snapshot().0;
    assert_eq!(counters.lost_after_redirect, 31);
}

#[test]
fn a_guests_first_packet_waits_for_a_turn_of_the_worlds() {
    let mut rig = with_forwards(Setup::default());
    let vnet = VirtioNetHdr::default();
    for number in 0..30 {
        let client = (ip([203, 0, 113, number]), 50_000);
        let mut kernel = rig.kernel.borrow_mut();
        kernel.world_sends(vnet, &syn(client, HTTP, 5));
    }
    let first = udp((GUEST, 5_000), SERVER, b"x");
    rig.kernel.borrow_mut().guest_sends(1, vnet, &first);
    rig.turn();
    // Its flow was the second to be opened.
    let slot = rig.kernel.borrow().slots_in_use();
    let place = slot
        .iter()
        .map(|slot| rig.kernel.borrow().slot(*slot).guest_tuple().protocol)
        .position(|protocol| protocol == 17);
    assert_eq!(place, Some(1));
}

#[test]
fn a_table_that_forged_syns_fill_has_room_for_who_asks_again() {
    let mut rig = with_forwards(Setup {
        slots: 1_024,
        max_flows: 100_000,
        ..Setup::default()
    });
    // A quarter is kept for those that have less than a third of it.
    for number in 0..769u16 {
        let [high, low] = number.to_be_bytes();
        rig.world(&syn((ip([203, 0, high, low]), 50_000), HTTP, 5));
    }
    assert_eq!(rig.flows(), 769);
    rig.pass(300 * MILLISECOND_NS);
    rig.at_guest();
    let (client, own) = (syn(SERVER, HTTP, 5), udp((GUEST, 5_000), SERVER, b"x"));
    rig.world(&client);
    rig.guest(1, &own);
    assert_eq!(rig.refused(1, Refusal::TableFull), 2);
    rig.pass(SECOND_NS + 100 * MILLISECOND_NS);
    rig.at_guest();
    rig.world(&client);
    rig.guest(1, &own);
    assert_eq!(rig.refused(1, Refusal::TableFull), 2);
    assert_eq!((rig.at_guest().len(), rig.at_world().len()), (1, 1));
}
