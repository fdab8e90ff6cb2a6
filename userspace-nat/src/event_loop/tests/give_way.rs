//! Tests that every flow that carries packets counts, and that flows with nothing to lose give way.
use slipgate_abi::{
    FlowRef, Protocol, Refusal, RuleIndex, Tuple, VmId, VmRow, slot::SlotFlags, tcp::Flags,
};

use super::rig::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    nat_ports::DEFAULT_RANGE,
    state::Forward,
};

fn guest(port: u16) -> At {
    (GUEST, port)
}

/// Sends a segment behind the FIN from both ends of these connections. Returns for how many both
/// arrived.
fn chat(rig: &mut Rig, flows: &[(u16, At)]) -> usize {
    let heard = flows.iter().filter(|(port, nat)| {
        rig.guest(1, &ack(guest(*port), SERVER, 0, 3, 3));
        rig.world(&ack(SERVER, *nat, 0, 3, 3));
        let (there, back) = (rig.at_world().len(), rig.at_guest().len());
        there == 1 && back == 1
    });
    heard.count()
}

/// The method that made 23 working tuples of a cap of 8: two ends that go on sending behind both
/// FINs.
#[test]
fn no_more_tuples_carry_packets_than_a_vm_may_have_flows() {
    let mut rig = Rig::with(Setup {
        max_flows: 8,
        ..Setup::default()
    });
    let mut opened: Vec<(u16, At)> = Vec::new();
    let mut most = 0;
    for number in 0..40 {
        let port = 40_000 + number;
        rig.guest(1, &syn(guest(port), SERVER, 7));
        if let Some(sent) = rig.at_world().pop() {
            let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
            rig.world(&syn_ack(SERVER, nat, 9_000, 8));
            rig.guest(1, &ack(guest(port), SERVER, 0, 8, 9_001));
            if number < 32 {
                rig.close(port, nat, true);
            }
            opened.push((port, nat));
        }
        for _ in 0..5 {
            rig.at_world();
            rig.at_guest();
            most = most.max(chat(&mut rig, &opened));
            rig.pass(20 * MILLISECOND_NS);
        }
    }
    assert!(most <= 8, "{most} tuples carry packets");
    // The last eight live, and closed ones made room for them.
    assert_eq!(
        (rig.flows(), chat(&mut rig, &opened[opened.len() - 8..])),
        (8, 8)
    );
    rig.assert_paired();
}

/// The world has its share of the cap for flows that a forward admits, closed connections among
/// them.
#[test]
fn closed_connections_of_the_worlds_count_and_make_room_for_its_own() {
    let mut rig = Rig::with(Setup {
        max_flows: 4,
        ..Setup::default()
    });
    let forward = Forward {
        protocol: Protocol::Tcp,
        host: [0, 0, 0, 0].into(),
        host_port: 8_080,
        vm: VmId::new(101),
        vm_row: VmRow::new(1),
        guest_port: 80,
        rule: RuleIndex::new(12),
        is_own: false,
    };
    rig.tell(move |engine| engine.set_forwards(vec![forward]));
    let (host, inside) = ((NAT, 8_080), guest(80));
    let mut kernel = rig.kernel.borrow_mut();
    kernel.forwards.insert((NAT, 8_080, 6), (1, 101));
    drop(kernel);
    // One of the guest's own is closed, and is no room for the world beyond its share.
    let own = rig.connect(40_000, 7);
    rig.close(40_000, own, true);
    for number in 0..6 {
        let client = (PEER, 50_000 + number);
        rig.world(&syn(client, host, 7));
        assert_eq!(rig.at_guest().len(), 1, "client {number}");
        rig.guest(1, &syn_ack(inside, client, 9_000, 8));
        rig.world(&ack(client, host, 0, 8, 9_001));
        rig.world(&ack(client, host, Flags::FIN, 8, 9_001));
        rig.guest(1, &ack(inside, client, Flags::FIN, 9_001, 9));
        assert_eq!(rig.world(&ack(client, host, 0, 9, 9_002)), Handling::Fast);
        rig.at_guest();
        assert!(rig.engine.core.nat.flows.count_from_world(VmRow::new(1)) <= 3);
        assert!(rig.engine.core.nat.flows.count(VmRow::new(1)) <= 4);
        rig.pass(10 * MILLISECOND_NS);
    }
    // A fourth that lives is one too many.
    for number in 10..14 {
        let client = (PEER, 50_000 + number);
        rig.world(&syn(client, host, 7));
        rig.guest(1, &syn_ack(inside, client, 9_000, 8));
        rig.world(&ack(client, host, 0, 8, 9_001));
        rig.pass(10 * MILLISECOND_NS);
    }
    assert_eq!(rig.refused(1, Refusal::FlowCap), 1);
    assert_eq!(rig.engine.core.nat.flows.count_from_world(VmRow::new(1)), 3);
}

/// Tries a closed port so often a second.
fn refused_connections(rig: &mut Rig, row: u16, a_second: u64, seconds: u64) {
    for number in 0..a_second * seconds {
        let port = guest(1_024 + (number % 60_000) as u16);
        rig.guest(row, &syn(port, SERVER, number as u32));
        if let Some(sent) = rig.at_world().pop() {
            let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
            let refusal = Flags::RST | Flags::ACK;
            rig.world(&ack(SERVER, nat, refusal, 0, number as u32 + 1));
        }
        rig.at_guest();
        rig.pass(SECOND_NS / a_second);
    }
}

#[test]
fn a_guest_that_tries_a_closed_port_finds_ports_for_as_long_as_it_tries() {
    let mut rig = Rig::with(Setup {
        slots: 32_768,
        max_flows: 16_384,
        ..Setup::default()
    });
    refused_connections(&mut rig, 1, 100, 70);
    assert_eq!(rig.refused(1, Refusal::PortsExhausted), 0);
    rig.assert_paired();
}

#[test]
fn a_guest_whose_datagrams_nobody_answers_finds_ports_for_as_long_as_it_sends() {
    let mut rig = Rig::with(Setup {
        slots: 32_768,
        max_flows: 16_384,
        ..Setup::default()
    });
    for number in 0..7_000u16 {
        rig.guest(1, &udp(guest(1_024 + number), SERVER, b"x"));
        rig.at_world();
        rig.pass(SECOND_NS / 100);
    }
    assert_eq!(rig.refused(1, Refusal::PortsExhausted), 0);
    rig.assert_paired();
}

/// A guest's own source port, again and again.
#[test]
fn one_source_port_again_and_again_finds_ports_too() {
    let mut rig = Rig::with(Setup {
        slots: 32_768,
        max_flows: 16_384,
        ..Setup::default()
    });
    for number in 0..7_000 {
        rig.guest(1, &syn(guest(40_000), SERVER, number));
        let sent = rig.at_world().pop();
        if let Some(sent) = sent.filter(|_| number % 2 == 0) {
            let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
            rig.world(&ack(SERVER, nat, Flags::RST, 0, number + 1));
        }
        rig.at_guest();
        rig.pass(SECOND_NS / 100);
    }
    assert_eq!(rig.refused(1, Refusal::PortsExhausted), 0);
}

/// Flows of one question and one answer: the least lifetime of a mapping is cut short only for its
/// own VM.
#[test]
fn questions_and_answers_by_datagrams_find_ports_for_as_long_as_they_are_asked() {
    let mut rig = Rig::with(Setup {
        slots: 32_768,
        max_flows: 16_384,
        ..Setup::default()
    });
    for number in 0..9_000u16 {
        rig.guest(1, &udp(guest(1_024 + number), SERVER, b"x"));
        let sent = rig.at_world().pop();
        let sent = sent.unwrap_or_else(|| {
            let counters = rig.kernel.borrow().stats(1).snapshot();
            panic!("flow {number}: {:?}, {:?}", counters.0.refused, counters.1)
        });
        let nat = nat_of(&sent);
        assert_eq!(rig.world(&udp(SERVER, nat, b"y")), Handling::Fast);
        rig.at_guest();
        rig.pass(SECOND_NS / 100);
    }
    assert_eq!(rig.refused(1, Refusal::PortsExhausted), 0);
    rig.assert_paired();
}

fn few_ports(last: u16) -> Rig {
    Rig::with(Setup {
        nat_ports: 61_000..=last,
        ..Setup::default()
    })
}

fn nat_of(sent: &[u8]) -> At {
    (NAT, u16::from_be_bytes([sent[20], sent[21]]))
}

#[test]
fn nothing_that_lives_gives_way() {
    // Four of eight ports are one VM's at least: the others' two parts are two each.
    let mut rig = few_ports(61_007);
    let connection = rig.connect(40_000, 7);
    let half_closed = rig.connect(40_001, 7);
    rig.guest(1, &ack(guest(40_001), SERVER, Flags::FIN, 8, 9_001));
    rig.world(&ack(SERVER, half_closed, 0, 9_001, 9));
    // Toward the same server and port, by datagrams: a pool of its own.
    let mut talks = Vec::new();
    for port in 5_000..5_003 {
        for _ in 0..2 {
            rig.guest(1, &udp(guest(port), SERVER, b"x"));
        }
        talks.push(nat_of(&rig.at_world().pop().unwrap()));
        rig.world(&udp(SERVER, talks[talks.len() - 1], b"y"));
    }
    // It was reset by who knows whom, and lives on.
    let reset = rig.connect(40_002, 7);
    rig.world(&ack(SERVER, reset, Flags::RST, 9_001, 8));
    for second in 0..100 {
        // A SYN and a datagram that nobody answers, each of a flow of its own.
        rig.guest(1, &syn(guest(41_000 + second), SERVER, 7));
        rig.guest(1, &udp(guest(6_000 + second), SERVER, b"x"));
        if second % 5 == 0 {
            assert_eq!(
                rig.guest(1, &ack(guest(40_002), SERVER, 0, 8, 9_001)),
                Handling::Fast
            );
        }
        rig.at_guest();
        rig.pass(SECOND_NS);
    }
    assert!(
        rig.refused(1, Refusal::PortsExhausted) > 0,
        "there was need"
    );
    rig.at_world();
    for nat in [connection, half_closed, reset] {
        assert_eq!(rig.world(&ack(SERVER, nat, 0, 9_001, 9)), Handling::Fast);
    }
    for nat in talks {
        assert_eq!(rig.world(&udp(SERVER, nat, b"z")), Handling::Fast);
    }
    rig.assert_paired();
}

/// A VM's flows that it still needs do not end for another VM; flows that are over give way to any
/// VM.
#[test]
fn only_what_is_over_gives_way_to_another_vm() {
    let mut rig = few_ports(61_002);
    for port in 40_000..40_003 {
        rig.guest(1, &syn(guest(port), SERVER, 7));
    }
    let nats: Vec<At> = rig.at_world().iter().map(|sent| nat_of(sent)).collect();
    rig.pass(20 * SECOND_NS);
    rig.guest(2, &syn(guest(50_000), SERVER, 7));
    assert_eq!(rig.refused(2, Refusal::PortsExhausted), 1);
    // To its own VM the one gives way that was silent longest.
    rig.guest(1, &syn(guest(40_000), SERVER, 7));
    rig.at_world();
    rig.guest(1, &syn(guest(50_000), SERVER, 7));
    let taken = nat_of(&rig.at_world().pop().expect("it finds a port"));
    assert!(nats[1..].contains(&taken), "{taken:?} of {nats:?}");
    // One that was refused: not at once, the RST may be anybody's.
    rig.world(&ack(SERVER, nats[0], Flags::RST, 0, 8));
    rig.guest(2, &syn(guest(50_001), SERVER, 7));
    assert_eq!(rig.refused(2, Refusal::PortsExhausted), 2);
    rig.pass(SECOND_NS);
    assert_eq!(rig.connect_from(2, 50_002, 7), nats[0]);
    rig.assert_paired();
}

#[test]
fn a_vm_at_its_cap_loses_what_has_nothing_to_lose() {
    let mut rig = Rig::with(Setup {
        max_flows: 4,
        ..Setup::default()
    });
    rig.connect(40_000, 7);
    for port in 40_001..40_004 {
        rig.guest(1, &syn(guest(port), SERVER, 7));
    }
    rig.pass(5 * SECOND_NS);
    rig.guest(1, &syn(guest(50_000), SERVER, 7));
    assert_eq!(rig.refused(1, Refusal::FlowCap), 1);
    rig.pass(6 * SECOND_NS);
    for port in 50_001..50_004 {
        rig.connect(port, 7);
        rig.pass(10 * MILLISECOND_NS);
    }
    rig.guest(1, &syn(guest(50_004), SERVER, 7));
    assert_eq!(rig.refused(1, Refusal::FlowCap), 2);
    assert_eq!(rig.engine.core.nat.flows.count(VmRow::new(1)), 4);
    assert!(rig.records().iter().all(|record| record["end"] == "idle"));
}

/// The sender of the RST is unknown: the server may go on, which does not concern other VMs.
#[test]
fn the_port_of_a_reset_connection_goes_to_its_own_vm_only() {
    let mut rig = few_ports(61_000);
    let nat = rig.connect(40_000, 7);
    rig.world(&ack(SERVER, nat, Flags::RST, 9_001, 8));
    rig.pass(11 * SECOND_NS);
    rig.guest(2, &syn(guest(50_000), SERVER, 7));
    assert_eq!(rig.refused(2, Refusal::PortsExhausted), 1);
    assert_eq!(rig.connect(40_001, 7), nat);
    rig.pass(SECOND_NS);
    assert_eq!(rig.records()[0]["end"], "reset");
    // When a new connection of its guest's takes its name, it rests, for its own VM a while.
    rig.guest(1, &ack(guest(40_001), SERVER, Flags::RST, 8, 9_001));
    rig.guest(1, &syn(guest(40_001), SERVER, 1_000));
    assert_eq!(rig.refused(1, Refusal::PortsExhausted), 1);
    rig.pass(10 * SECOND_NS);
    rig.guest(2, &syn(guest(50_000), SERVER, 7));
    assert_eq!(rig.refused(2, Refusal::PortsExhausted), 2);
    assert_eq!(rig.connect(40_001, 1_000), nat);
}

/// A table that its own flows fill: those that have nothing to lose make room for the next.
#[test]
fn a_vm_that_has_no_slot_left_finds_one_when_it_asks_again() {
    let mut rig = Rig::with(Setup {
        slots: 1_024,
        max_flows: 100_000,
        ..Setup::default()
    });
    rig.connect(10_000, 7);
    for port in 10_001..11_024 {
        rig.guest(1, &syn(guest(port), SERVER, 7));
    }
    let full = rig.refused(1, Refusal::TableFull);
    assert!(full > 0);
    rig.pass(11 * SECOND_NS);
    rig.guest(1, &syn(guest(20_000), SERVER, 7));
    assert_eq!(rig.refused(1, Refusal::TableFull), full + 1);
    rig.pass(SECOND_NS + 100 * MILLISECOND_NS);
    rig.at_guest();
    rig.at_world();
    rig.connect(20_000, 7);
    rig.assert_paired();
}

/// Another process has every port toward a server that is not kept for us.
#[test]
fn another_process_leaves_a_vm_ports_toward_any_server() {
    let mut rig = Rig::new();
    rig.kernel.borrow_mut().owners = 0b11;
    rig.pass(2 * SECOND_NS);
    let theirs = FlowRef {
        slot: 2_000,
        generation: 1,
    };
    let world = |local_port| Tuple {
        scope: Tuple::WORLD,
        local: NAT,
        remote: SERVER.0,
        local_port,
        remote_port: SERVER.1,
        protocol: 6,
        pad: [0; 3],
    };
    // A quarter, in 64 parts of 17 each, is at the end; ours is the first.
    let kept = 65_536 - 64 * 17;
    let kept = kept as u16..kept as u16 + 17;
    for port in DEFAULT_RANGE.filter(|port| !kept.contains(port)) {
        rig.kernel.borrow_mut().flows.insert(world(port), theirs);
    }
    for number in 0..5 {
        let nat = rig.connect(40_000 + number, 7);
        assert!(kept.contains(&nat.1), "{}", nat.1);
    }
}

/// An adopter knows which flows were inspected, whatever its rules say.
#[test]
fn an_adopters_ports_of_inspected_flows_rest_to_the_end_too() {
    let setup = || Setup {
        nat_ports: 61_000..=61_000,
        ..Setup::default()
    };
    let mut rig = Rig::with(setup());
    let nat = rig.connect(40_000, 7);
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let live = rig.kernel.borrow().slot(slot);
    // SAFETY: a live slot; one thread.
    unsafe { (*live.as_ptr()).flags |= SlotFlags::INSPECTED };
    let (mut rig, _) = rig.restart(&setup());
    rig.close(40_000, nat, true);
    let mut refused = 0;
    for port in 50_000..50_118 {
        rig.guest(1, &syn(guest(port), SERVER, 7));
        refused += 1;
        assert_eq!(rig.refused(1, Refusal::PortsExhausted), refused);
        rig.pass(SECOND_NS);
    }
    rig.pass(3 * SECOND_NS);
    rig.connect(51_000, 7);
}
