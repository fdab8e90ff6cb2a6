use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{DropReason, Handover, Refusal, RuleIndex, VmId, VmRow, tcp::Flags};

use super::rig::*;
use crate::{
    clock::SECOND_NS,
    fake::Faults,
    port::{VNET_LEN, VirtioNetHdr},
    state::Forward,
};
use slipgate_policy::{Action, Rule};

fn rule(action: Action, pattern: &str) -> Rule {
    Rule::Match(action, pattern.parse().unwrap())
}

#[test]
fn a_syn_is_admitted_and_what_follows_stays_in_the_kernel() {
    let mut rig = Rig::new();
    let syn = syn((GUEST, 40_000), SERVER, 7);
    assert_eq!(rig.guest(1, &syn), Handling::Engine(Handover::Miss));
    let sent = rig.at_world();
    assert_eq!(sent.len(), 1);
    assert!(is_right(&sent[0]));
    assert_eq!(&sent[0][12..16], &NAT.octets);
    // Clamped to the uplink's 1,400.
    assert_eq!(sent[0][42..44], 1_360u16.to_be_bytes());
    let nat = (NAT, u16::from_be_bytes([sent[0][20], sent[0][21]]));
    assert_eq!(rig.world(&syn_ack(SERVER, nat, 1, 8)), Handling::Fast);
    assert_eq!(
        rig.guest(1, &ack((GUEST, 40_000), SERVER, 0, 8, 2)),
        Handling::Fast
    );
    assert_eq!(rig.flows(), 1);
    rig.assert_paired();
}

#[test]
fn a_retransmitted_syn_makes_no_second_flow() {
    let mut rig = Rig::new();
    let packet = syn((GUEST, 40_000), SERVER, 7);
    // Both are on their way before the engine looks.
    for _ in 0..2 {
        rig.kernel
            .borrow_mut()
            .guest_sends(1, VirtioNetHdr::default(), &packet);
    }
    rig.turn();
    assert_eq!(rig.guest(1, &packet), Handling::Fast);
    assert_eq!(rig.flows(), 1);
    assert_eq!(rig.at_world().len(), 3);
    assert_eq!(rig.kernel.borrow().stats(1).snapshot().0.admitted, 1);
}

#[test]
fn two_datagrams_at_once_are_one_flow_and_both_arrive() {
    let mut rig = Rig::new();
    let packet = udp((GUEST, 5_000), SERVER, b"x");
    for _ in 0..2 {
        rig.kernel
            .borrow_mut()
            .guest_sends(1, VirtioNetHdr::default(), &packet);
    }
    rig.turn();
    assert_eq!((rig.flows(), rig.at_world().len()), (1, 2));
}

#[test]
fn a_syn_with_another_sequence_number_is_another_connection() {
    let mut rig = Rig::new();
    let first = rig.connect(40_000, 7);
    assert_eq!(
        rig.guest(1, &syn((GUEST, 40_000), SERVER, 999)),
        Handling::Engine(Handover::Syn)
    );
    let sent = rig.at_world().pop().unwrap();
    assert_ne!(
        u16::from_be_bytes([sent[20], sent[21]]),
        first.1,
        "the old port rests"
    );
    rig.assert_paired();
    rig.pass(SECOND_NS);
    let records = rig.records();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0]["end"], "tuple-reused");
    assert_eq!(rig.flows(), 1);
}

#[test]
fn three_guests_with_one_address_have_three_flows() {
    let mut rig = Rig::new();
    let ports: Vec<u16> = (1..=3)
        .map(|row| rig.connect_from(row, 40_000, 7).1)
        .collect();
    assert!(ports[0] != ports[1] && ports[1] != ports[2] && ports[0] != ports[2]);
    for (port, vm) in ports.iter().zip([101, 102, 103]) {
        rig.world(&ack(SERVER, (NAT, *port), 0, 9_001, 8));
        assert_eq!(rig.at_guest().pop().unwrap().0, vm);
    }
}

#[test]
fn a_late_segment_is_reset_as_rfc9293_3_10_7_1_has_it() {
    let mut rig = Rig::new();
    rig.guest(1, &ack((GUEST, 40_000), SERVER, 0, 77, 88));
    let (_, rst) = rig.at_guest().pop().expect("an RST");
    assert!(is_right(&rst));
    assert_eq!(rst[33], Flags::RST);
    assert_eq!(rst[24..28], 88u32.to_be_bytes());
    assert_eq!(rig.dropped(1, DropReason::NoFlow), 1);
    assert!(rig.at_world().is_empty());
}

#[test]
fn a_denied_syn_is_reset_and_never_seen_outside() {
    let mut rig = Rig::with(Setup {
        rules: vec![rule(Action::Deny, "198.51.100.0/24")],
        ..Setup::default()
    });
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
    let (_, rst) = rig.at_guest().pop().expect("an RST");
    assert_eq!(rst[33], Flags::RST | Flags::ACK);
    assert_eq!(rst[28..32], 8u32.to_be_bytes());
    assert_eq!(
        (
            rig.refused(1, Refusal::Rule),
            rig.dropped(1, DropReason::Refused)
        ),
        (1, 1)
    );
    assert!(rig.at_world().is_empty());
    assert_eq!(rig.flows(), 0);
    // The positive control.
    rig.guest(
        1,
        &syn((GUEST, 40_000), ([203, 0, 113, 1].into_ip(), 443), 7),
    );
    assert_eq!(rig.at_world().len(), 1);
}

#[test]
fn rfc5508_req_8_a_denied_ping_and_datagram_get_code_13() {
    let mut rig = Rig::with(Setup {
        rules: vec![rule(Action::Deny, "198.51.100.0/24")],
        ..Setup::default()
    });
    for packet in [
        echo(GUEST, PEER, true, 9, b"hi"),
        udp((GUEST, 5_000), SERVER, b"x"),
    ] {
        rig.guest(1, &packet);
        let (_, error) = rig.at_guest().pop().expect("an ICMP error");
        assert!(is_right(&error));
        assert_eq!((error[20], error[21]), (3, 13));
        assert_eq!(error[12..16], GATEWAY.octets);
        assert_eq!(error[28..], packet[..]);
    }
}

#[test]
fn refusals_are_answered_within_a_rate() {
    let mut rig = Rig::with(Setup {
        rules: vec![rule(Action::Deny, "0.0.0.0/0")],
        ..Setup::default()
    });
    for i in 0..2_000 {
        rig.guest(1, &syn((GUEST, 10_000 + i), SERVER, 7));
    }
    let answered = rig.at_guest().len();
    assert_eq!(answered, crate::reply::BURST as usize);
    assert_eq!(rig.refused(1, Refusal::Rule), 2_000);
}

#[test]
fn the_cap_holds_and_closed_flows_give_way() {
    let mut rig = Rig::with(Setup {
        max_flows: 3,
        ..Setup::default()
    });
    let nats: Vec<At> = (0..3).map(|i| rig.connect(40_000 + i, 7)).collect();
    assert_told_at_once(&mut rig);
    // Pings count as connections and datagrams do.
    assert_eq!(rig.refused(1, Refusal::FlowCap), 2);
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    assert_eq!(rig.refused(1, Refusal::FlowCap), 3);
    // Another VM is not concerned.
    rig.connect_from(2, 50_000, 7);
    rig.close(40_000, nats[0], true);
    rig.pass(10_000_000);
    rig.connect(50_001, 7);
    assert_eq!(rig.refused(1, Refusal::FlowCap), 3);
}

/// What is refused now is told: a connection by a reset that answers its SYN, a ping by ICMP.
fn assert_told_at_once(rig: &mut Rig) {
    rig.at_guest();
    rig.guest(1, &syn((GUEST, 50_000), SERVER, 7));
    let (_, rst) = rig.at_guest().pop().expect("an RST");
    assert_eq!((rst[9], rst[33]), (6, Flags::RST | Flags::ACK));
    assert_eq!(rst[28..32], 8u32.to_be_bytes());
    rig.guest(1, &echo(GUEST, PEER, true, 9, b"hi"));
    let (_, error) = rig.at_guest().pop().expect("an ICMP error");
    assert_eq!((error[9], error[20], error[21]), (1, 3, 13));
}

#[test]
fn the_rate_of_new_flows_holds() {
    let mut rig = Rig::with(Setup {
        rate: 10,
        ..Setup::default()
    });
    for i in 0..20 {
        rig.guest(1, &udp((GUEST, 5_000 + i), SERVER, b"x"));
    }
    assert_eq!((rig.flows(), rig.refused(1, Refusal::FlowRate)), (10, 10));
    assert_told_at_once(&mut rig);
    assert_eq!((rig.flows(), rig.refused(1, Refusal::FlowRate)), (10, 12));
    rig.pass(SECOND_NS);
    rig.guest(1, &udp((GUEST, 9_000), SERVER, b"x"));
    assert_eq!(rig.flows(), 11);
}

#[test]
fn rfc6888_req_8_exhausted_ports_refuse_and_harm_nobody() {
    let mut rig = Rig::with(Setup {
        nat_ports: 61_000..=61_002,
        ..Setup::default()
    });
    let nats: Vec<At> = (0..3).map(|i| rig.connect(40_000 + i, 7)).collect();
    rig.guest(1, &syn((GUEST, 50_000), SERVER, 7));
    assert_eq!(rig.refused(1, Refusal::PortsExhausted), 1);
    for nat in &nats {
        assert_eq!(rig.world(&ack(SERVER, *nat, 0, 9_001, 8)), Handling::Fast);
    }
    // Toward another destination the same ports are free.
    rig.guest(1, &syn((GUEST, 50_000), (PEER, 80), 7));
    assert_eq!(rig.refused(1, Refusal::PortsExhausted), 1);
    // A connection that the guest closed first makes room, but not before all that either side sent
    // is acknowledged: what the link lost of it is sent again by a living flow.
    let guest = (GUEST, 40_000);
    rig.guest(1, &ack(guest, SERVER, Flags::FIN, 2, 2));
    rig.world(&ack(SERVER, nats[0], Flags::FIN, 2, 3));
    let duplicate = ack(guest, SERVER, 0, 3, 2);
    for i in 1..=2 {
        assert_eq!(rig.guest(1, &duplicate), Handling::Fast);
        rig.guest(1, &syn((GUEST, 50_001), SERVER, 7));
        assert_eq!(rig.refused(1, Refusal::PortsExhausted), 1 + i);
        rig.kernel.borrow_mut().now_ns += SECOND_NS;
    }
    assert_eq!(
        rig.world(&ack(SERVER, nats[0], Flags::FIN, 2, 3)),
        Handling::Fast
    );
    assert_eq!(rig.guest(1, &ack(guest, SERVER, 0, 3, 3)), Handling::Fast);
    rig.at_guest();
    rig.at_world();
    assert_eq!(rig.connect(50_001, 7), nats[0]);
    rig.assert_paired();
}

#[test]
fn a_full_table_refuses_and_harms_nobody() {
    let mut rig = Rig::with(Setup {
        slots: 1_024,
        max_flows: 100_000,
        ..Setup::default()
    });
    // A quarter is kept for those that have less than a third of it.
    let open = |rig: &mut Rig, row| {
        for i in 0..1_024 {
            rig.guest(row, &udp((GUEST, 1_000 + i), SERVER, b"x"));
        }
        (rig.flows(), rig.refused(row, Refusal::TableFull))
    };
    assert_eq!(open(&mut rig, 1), (769, 255));
    assert_eq!(open(&mut rig, 2), (769 + 85, 1_024 - 85));
    assert_eq!(open(&mut rig, 3), (769 + 170, 1_024 - 85));
    for row in 1..=3 {
        let known = udp((GUEST, 1_000), SERVER, b"x");
        assert_eq!(rig.guest(row, &known), Handling::Fast);
    }
    rig.assert_paired();
}

#[test]
fn slots_that_rest_are_no_reason_to_refuse_while_there_are_others() {
    let mut rig = Rig::with(Setup {
        slots: 4_096,
        max_flows: 100_000,
        ..Setup::default()
    });
    // Within a second: far fewer flows at once than there are slots, but many that have ended.
    for isn in 1..=5 {
        for port in 0..300 {
            rig.guest(1, &syn((GUEST, 40_000 + port), SERVER, isn));
        }
        rig.pass(SECOND_NS / 10);
    }
    assert_eq!(rig.refused(1, Refusal::TableFull), 0);
    assert_eq!((rig.flows(), rig.records().len()), (300, 1_200));
}

#[test]
fn rfc6888_req_4_a_vm_s_flood_leaves_ports_to_another() {
    let mut rig = Rig::with(Setup {
        nat_ports: 61_000..=61_063,
        ..Setup::default()
    });
    for i in 0..64 {
        rig.guest(1, &syn((GUEST, 40_000 + i), SERVER, 7));
        rig.guest(2, &syn((GUEST, 40_000 + i % 5), SERVER, 7));
    }
    // Five each of the sixteen kept; the second has its five at first already.
    assert_eq!(rig.flows(), 49);
    assert_eq!(rig.refused(1, Refusal::PortsExhausted), 20);
    rig.connect_from(3, 40_000, 7);
    for row in [1, 2] {
        rig.guest(row, &syn((GUEST, 50_000), SERVER, 7));
        assert!(rig.refused(row, Refusal::PortsExhausted) > 0);
    }
    rig.assert_paired();
}

#[test]
fn the_kernel_s_refusals_leave_nothing_behind() {
    let mut rig = Rig::new();
    // The world tuple fails, then the guest tuple.
    for skip in 0..2 {
        let mut faults = crate::fake::Faults::default();
        if skip == 0 {
            faults.order_fails.set(1);
            faults.insert_fails = 1;
        } else {
            faults.map_capacity = 1;
        }
        rig.kernel.borrow_mut().faults = faults;
        rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
        assert_eq!(rig.flows(), 0);
        rig.kernel.borrow_mut().faults = Default::default();
        rig.assert_empty();
    }
    assert_eq!(rig.refused(1, Refusal::Insertion), 1);
    assert_eq!(rig.refused(1, Refusal::TableFull), 1);
    rig.connect(40_000, 7);
}

#[test]
fn a_translated_tuple_of_another_process_is_passed_over() {
    let mut rig = Rig::new();
    rig.kernel.borrow_mut().faults.order_fails.set(1);
    rig.kernel.borrow_mut().faults.insert_exists = 3;
    rig.connect(40_000, 7);
    rig.assert_paired();
}

/// A guest's SYN, for which an order fails in the given way: the flow is open all the same, and
/// everything is counted once.
fn order_that_fails(fail: impl FnOnce(&mut Faults)) -> Rig {
    let mut rig = Rig::new();
    fail(&mut rig.kernel.borrow_mut().faults);
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
    assert_eq!(rig.at_world().len(), 1);
    assert_eq!(rig.flows(), 1);
    rig.assert_paired();
    assert_eq!(rig.kernel.borrow().stats(1).snapshot().0.admitted, 1);
    assert_eq!(rig.kernel.borrow().dropped, 0);
    let packets = {
        let kernel = rig.kernel.borrow();
        let flow = kernel.flows.values().next().unwrap();
        kernel.slot(flow.index()).tx_packets().load(Relaxed)
    };
    assert_eq!(packets, 1);
    // A retransmission is translated in the kernel.
    let again = rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
    assert_eq!(again, Handling::Fast);
    rig
}

#[test]
fn a_flow_that_the_program_can_not_open_is_opened_by_the_engine() {
    let mut rig = order_that_fails(|faults| faults.order_fails.set(1));
    assert!(rig.tell(|engine| engine.core.nat.flows.takes_orders));
    // The port does not take the order, but the packet.
    order_that_fails(|faults| faults.port_refuses = 1);
}

#[test]
fn an_order_that_is_not_run_at_once_is_withdrawn_for_good() {
    let mut rig = order_that_fails(|faults| faults.orders_lost = 1);
    assert!(!rig.tell(|engine| engine.core.nat.flows.takes_orders));
    // Run late, it does nothing.
    let flows = rig.kernel.borrow().flows.clone();
    let frame = rig.kernel.borrow().lost_order[VNET_LEN..].to_vec();
    let mut kernel = rig.kernel.borrow_mut();
    let late = kernel.engine_sends_frame(VirtioNetHdr::default(), &frame);
    assert_eq!(late, Handling::Discarded);
    assert_eq!(kernel.flows, flows);
    // The retransmission only.
    assert_eq!(kernel.at_world.len(), 1);
}

#[test]
fn a_dangling_tuple_of_ours_is_swept() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    // Deleting the guest's tuple fails once.
    rig.kernel.borrow_mut().faults.remove_fails = 1;
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 8));
    assert_eq!(rig.at_world().len(), 1);
    assert_eq!(rig.flows(), 2);
    assert_eq!(rig.kernel.borrow().flows.len(), 2);
}

#[test]
fn rfc5508_req_1_pings_are_told_apart_by_id() {
    let mut rig = Rig::new();
    rig.guest(1, &echo(GUEST, PEER, true, 9, b"hi"));
    rig.guest(2, &echo(GUEST, PEER, true, 9, b"hi"));
    let sent = rig.at_world();
    let id = |p: &[u8]| u16::from_be_bytes([p[24], p[25]]);
    assert_ne!(id(&sent[0]), id(&sent[1]));
    rig.world(&echo(PEER, NAT, false, id(&sent[1]), b"hi"));
    let (vm, reply) = rig.at_guest().pop().unwrap();
    assert_eq!((vm, id(&reply)), (102, 9));
    assert!(is_right(&reply));
}

#[test]
fn the_gateway_answers_pings_and_refuses_the_rest() {
    let mut rig = Rig::new();
    rig.guest(1, &echo(GUEST, GATEWAY, true, 9, b"hi"));
    let (_, reply) = rig.at_guest().pop().unwrap();
    assert!(is_right(&reply));
    assert_eq!((reply[20], &reply[28..]), (0, &b"hi"[..]));
    rig.guest(1, &syn((GUEST, 40_000), (GATEWAY, 80), 7));
    assert_eq!(rig.at_guest().pop().unwrap().1[33], Flags::RST | Flags::ACK);
    rig.guest(1, &udp((GUEST, 40_000), (GATEWAY, 80), b"x"));
    let (_, error) = rig.at_guest().pop().unwrap();
    assert_eq!((error[20], error[21]), (3, 3));
    assert_eq!(rig.flows(), 0);
}

#[test]
fn port_53_never_becomes_a_flow() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 40_000), (PEER, 53), b"x"));
    rig.guest(1, &syn((GUEST, 40_000), (PEER, 53), 1));
    assert_eq!(rig.flows(), 0);
    assert!(rig.at_world().is_empty());
}

#[test]
fn a_forward_opens_a_flow_from_the_world() {
    let mut rig = Rig::new();
    let forward = Forward {
        protocol: slipgate_abi::Protocol::Tcp,
        host: [0, 0, 0, 0].into(),
        host_port: 8_080,
        vm: VmId::new(101),
        vm_row: VmRow::new(1),
        guest_port: 80,
        // The rig's rules begin at 10; three texts are its policy's, which has defaults only.
        rule: RuleIndex::new(13),
        is_own: false,
    };
    let texts = vec!["--forward tcp:8080:80".to_owned()];
    rig.tell(move |engine| {
        engine.set_forwards(vec![forward]);
        engine.set_forward_texts(RuleIndex::new(13), texts);
    });
    rig.kernel
        .borrow_mut()
        .forwards
        .insert((NAT, 8_080, 6), (1, 101));
    let (client, host) = ((PEER, 50_000), (NAT, 8_080));
    assert_eq!(
        rig.world(&syn(client, host, 5)),
        Handling::Engine(Handover::Forward)
    );
    let (vm, got) = rig.at_guest().pop().expect("the SYN arrives");
    assert_eq!(
        (vm, &got[16..20], &got[22..24]),
        (101, &GUEST.octets[..], &80u16.to_be_bytes()[..])
    );
    assert!(is_right(&got));
    assert_eq!(
        rig.guest(1, &syn_ack((GUEST, 80), client, 9, 6)),
        Handling::Fast
    );
    assert_eq!(
        rig.at_world().pop().unwrap()[20..22],
        8_080u16.to_be_bytes()
    );
    // A packet that the host would route to another machine is not the forward's.
    let other = [203, 0, 113, 77].into_ip();
    rig.kernel
        .borrow_mut()
        .forwards
        .insert((other, 8_080, 6), (1, 101));
    let before = rig.dropped(1, DropReason::NoFlow);
    rig.world(&syn(client, (other, 8_080), 5));
    assert_eq!(rig.dropped(1, DropReason::NoFlow), before + 1);
    assert!(rig.at_guest().is_empty());
    // In the peer's name anybody can send a SYN: the connection lives on.
    assert_eq!(
        rig.world(&syn(client, host, 777)),
        Handling::Engine(Handover::Syn)
    );
    assert_eq!(rig.at_guest().len(), 1);
    assert_eq!(rig.flows(), 1);
    rig.assert_paired();
    rig.send(|engine| engine.remove_vm(VmRow::new(1), VmId::new(101)));
    rig.pass(60 * crate::clock::MILLISECOND_NS);
    assert_eq!(rig.records()[0]["rule_text"], "--forward tcp:8080:80");
}

#[test]
fn guests_do_not_fill_the_next_hops() {
    for (has_l2, most) in [(true, 256), (false, 1)] {
        let mut rig = Rig::new();
        let mut network = network();
        // Every destination is on the link.
        network.routes.routes[0].gateway = None;
        network.links[0].has_l2 = has_l2;
        rig.follow(network);
        for i in 0..300u16 {
            let [high, low] = i.to_be_bytes();
            let to = [198, 51, 100 + high, low].into_ip();
            rig.guest(1, &udp((GUEST, 5_000), (to, 9), b"x"));
        }
        assert_eq!(rig.flows(), 300);
        let kernel = rig.kernel.borrow();
        let slots = kernel.slots_in_use().into_iter();
        let mut hops: Vec<u32> = slots
            .map(|slot| kernel.slot(slot).next_hop().load(Relaxed))
            .filter(|hop| *hop != 0)
            .collect();
        let named = hops.len();
        hops.sort_unstable();
        hops.dedup();
        assert_eq!(hops.len(), most);
        // By a link without L2 nobody is left to be resolved by packet.
        assert_eq!(named, if has_l2 { 256 } else { 300 });
    }
}

#[test]
fn rfc5382_req_2_simultaneous_open() {
    let mut rig = Rig::new();
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
    let sent = rig.at_world().pop().unwrap();
    let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
    assert_eq!(
        rig.world(&syn(SERVER, nat, 1_000)),
        Handling::Engine(Handover::Syn)
    );
    assert_eq!(rig.at_guest().len(), 1);
    rig.guest(1, &syn_ack((GUEST, 40_000), SERVER, 7, 1_001));
    assert_eq!(rig.at_world().len(), 1);
    assert_eq!(rig.flows(), 1);
}

#[test]
fn a_time_to_live_of_one_is_told_before_a_flow_is_opened() {
    let mut rig = Rig::new();
    rig.guest(1, &with_ttl(udp((GUEST, 5_000), (PEER, 33_434), b"x"), 1));
    let (_, error) = rig.at_guest().pop().unwrap();
    assert_eq!((error[20], error[21]), (11, 0));
    assert_eq!(
        (rig.flows(), rig.dropped(1, DropReason::TtlExpired)),
        (0, 1)
    );
}

#[test]
fn why_says_what_would_happen() {
    let mut rig = Rig::with(Setup {
        rules: vec![rule(Action::Deny, "198.51.100.0/24")],
        ..Setup::default()
    });
    let verdicts = [[198, 51, 100, 7], [203, 0, 113, 1], [169, 254, 169, 254]].map(|addr| {
        let to = slipgate_policy::Destination {
            addr: addr.into(),
            port: 443,
            protocol: slipgate_abi::Protocol::Tcp,
        };
        let answer = rig.tell(move |engine| engine.why(VmRow::new(1), to, None));
        (answer.admitted, answer.refusal)
    });
    assert_eq!(
        verdicts
            .each_ref()
            .map(|(admitted, refusal)| (*admitted, refusal.as_deref())),
        [
            (false, Some("rule")),
            (true, None),
            (false, Some("protected"))
        ]
    );
}

#[test]
fn what_belongs_to_no_vm_is_nobodys() {
    let mut rig = Rig::new();
    // The row was given to another VM meanwhile.
    let row = rig.kernel.borrow().vm(1).as_ptr();
    // SAFETY: a live row; one thread.
    unsafe { (*row).id = 999 };
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
    assert_eq!(rig.dropped(0, DropReason::StaleVm), 1);
    // A frame of the host's own.
    rig.kernel.borrow_mut().queue.push_back(vec![0x33; 60]);
    rig.turn();
    assert_eq!(rig.dropped(0, DropReason::BadCommand), 1);
}

/// Conversion of an address, for brevity in tests.
trait IntoIp {
    fn into_ip(self) -> slipgate_abi::Ip4;
}

impl IntoIp for [u8; 4] {
    fn into_ip(self) -> slipgate_abi::Ip4 {
        slipgate_abi::Ip4 { octets: self }
    }
}
