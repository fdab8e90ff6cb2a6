use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{Handover, Verdict, VmId, VmRow, tcp::Flags};
use slipgate_model::OnExit;
use slipgate_policy::{Action, Settings, Timers};

use super::{reload::policy, rig::*};
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    event_loop::EngineError,
};

const MINUTE_NS: u64 = 60 * SECOND_NS;

#[test]
fn rfc5382_req_5_an_established_connection_lives_two_hours_four_minutes() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    rig.pass(124 * MINUTE_NS - 10 * SECOND_NS);
    assert_eq!(rig.flows(), 1);
    rig.pass(20 * SECOND_NS);
    rig.assert_empty();
    assert_eq!(rig.records()[0]["end"], "idle");
    assert_eq!(rig.records()[0]["tcp"], "established");
}

#[test]
fn rfc5382_req_5_a_half_open_connection_lives_four_minutes() {
    let mut rig = Rig::new();
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
    rig.pass(4 * MINUTE_NS - 2 * SECOND_NS);
    assert_eq!(rig.flows(), 1);
    rig.pass(5 * SECOND_NS);
    rig.assert_empty();
}

#[test]
fn rfc7857_section_2_2_a_reset_connection_lives_four_minutes_unless_revived() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let [silent, by_guest, by_server] = [40_001, 40_002, 40_003];
    let nats = [silent, by_guest, by_server].map(|port| rig.connect(port, 7));
    for nat in nats {
        rig.world(&ack(SERVER, nat, Flags::RST, 9_001, 8));
    }
    rig.pass(3 * MINUTE_NS);
    // The reset was not of the connection's: both ends go on, one of them first.
    let next = ack((GUEST, by_guest), SERVER, Flags::ACK, 8, 9_001);
    assert_eq!(rig.guest(1, &next), Handling::Fast);
    rig.world(&ack(SERVER, nats[2], Flags::ACK, 9_001, 8));
    rig.pass(MINUTE_NS - 2 * SECOND_NS);
    assert_eq!(rig.flows(), 4);
    rig.pass(5 * SECOND_NS);
    assert_eq!(rig.flows(), 3, "nothing came of the silent one");
    let of_silent = &rig.records()[0];
    assert_eq!(
        (&of_silent["end"], &of_silent["tcp"]),
        (&"reset".into(), &"reset".into())
    );
    assert_eq!(of_silent["guest"], format!("10.0.2.15:{silent}"));
    // The revived are what they were, and live as long.
    rig.pass(119 * MINUTE_NS);
    assert_eq!(rig.flows(), 3);
    rig.pass(5 * MINUTE_NS);
    rig.assert_empty();
    for record in &rig.records()[1..] {
        assert_eq!(
            (&record["end"], &record["tcp"]),
            (&"idle".into(), &"established".into())
        );
    }
}

#[test]
fn rfc4787_req_5_udp_lives_five_minutes() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    rig.pass(299 * SECOND_NS);
    assert_eq!(rig.flows(), 1);
    // RFC 4787 REQ-6: outbound refreshes.
    assert_eq!(
        rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x")),
        Handling::Fast
    );
    rig.pass(299 * SECOND_NS);
    assert_eq!(rig.flows(), 1);
    rig.pass(3 * SECOND_NS);
    rig.assert_empty();
}

/// RFC 7857 sections 2.1 and 11.
#[test]
fn timers_are_those_of_the_vms_policy_that_is_in_force() {
    let timers = Timers {
        tcp_opening_s: 400,
        udp_s: 900,
        icmp_s: 120,
        ..Timers::default()
    };
    let open = |timers| {
        policy(Action::Allow, &[]).with(Settings {
            timers,
            ..Settings::default()
        })
    };
    let both = || vec![open(timers), open(Timers::default())];
    let mut rig = Rig::new();
    rig.reload(both(), 0, [0, 1, 1]);
    for row in [1, 2] {
        rig.guest(row, &udp((GUEST, 5_000), SERVER, b"x"));
        rig.guest(row, &syn((GUEST, 40_000), SERVER, 7));
        rig.guest(row, &echo(GUEST, PEER, true, 9, b""));
    }
    let of = |rig: &Rig, row| rig.engine.core.nat.flows.slots_of(VmRow::new(row)).len();
    let left = |rig: &mut Rig, seconds| {
        rig.pass(seconds * SECOND_NS);
        (of(rig, 1), of(rig, 2))
    };
    assert_eq!(left(&mut rig, 62), (3, 2), "pings: 120 s, 60 s");
    assert_eq!(left(&mut rig, 60), (2, 2));
    assert_eq!(left(&mut rig, 120), (2, 1), "SYNs: 400 s, 240 s");
    assert_eq!(left(&mut rig, 60), (2, 0), "UDP: 900 s, 300 s");
    assert_eq!(left(&mut rig, 100), (1, 0));
    // With the other policy's timers its time is over.
    rig.reload(both(), 0, [1, 1, 1]);
    assert_eq!(left(&mut rig, 2), (0, 0));
    rig.assert_empty();
}

#[test]
fn rfc5508_req_2_a_ping_lives_sixty_seconds() {
    let mut rig = Rig::new();
    rig.guest(1, &echo(GUEST, PEER, true, 1, b""));
    rig.pass(59 * SECOND_NS);
    assert_eq!(rig.flows(), 1);
    rig.pass(3 * SECOND_NS);
    rig.assert_empty();
}

#[test]
fn a_record_says_it_all() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.close(40_000, nat, false);
    rig.pass(5 * MINUTE_NS);
    let record = &rig.records()[0];
    assert_eq!(record["vm"], "vm1");
    assert_eq!(record["proto"], "tcp");
    assert_eq!(record["guest"], "10.0.2.15:40000");
    assert_eq!(record["remote"], "198.51.100.7:443");
    assert_eq!(record["nat"], format!("192.0.2.1:{}", nat.1));
    assert_eq!(record["rule"], 10);
    assert_eq!(record["rule_text"], "--default allow");
    assert_eq!(record["end"], "closed");
    assert_eq!(record["tcp"], "closed");
    assert_eq!(record["direction"], "outbound");
    // SYN with options, ACK, FIN; SYN-ACK with options, FIN, ACK.
    assert_eq!(
        (record["tx_packets"].as_u64(), record["tx_bytes"].as_u64()),
        (Some(3), Some(124))
    );
    assert_eq!(
        (record["rx_packets"].as_u64(), record["rx_bytes"].as_u64()),
        (Some(3), Some(124))
    );
    let counters = rig.kernel.borrow().stats(1).snapshot().0;
    assert_eq!(
        (counters.ended_tx.packets, counters.ended_rx.bytes),
        (3, 124)
    );
    assert_eq!((counters.admitted, counters.ended), (1, 1));
    rig.assert_empty();
}

#[test]
fn a_packet_in_the_grace_revives_an_idle_flow() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let verdict = |rig: &Rig| rig.kernel.borrow().slot(slot).verdict().load(Relaxed);
    rig.kernel.borrow_mut().now_ns += 301 * SECOND_NS;
    rig.turn();
    assert_eq!(verdict(&rig), Verdict::Closing as u32);
    rig.kernel.borrow_mut().now_ns += MILLISECOND_NS;
    assert_eq!(
        rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x")),
        Handling::Engine(Handover::Verdict)
    );
    assert_eq!(verdict(&rig), Verdict::Fast as u32);
    assert_eq!(rig.at_world().len(), 2);
    rig.pass(SECOND_NS);
    assert_eq!((rig.flows(), rig.records().len()), (1, 0));
    rig.assert_paired();
}

#[test]
fn traffic_that_a_running_program_let_through_revives_too() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    let slot = rig.kernel.borrow().slots_in_use()[0];
    rig.kernel.borrow_mut().now_ns += 301 * SECOND_NS;
    rig.turn();
    // A program that read the verdict before it changed counts now.
    let now = rig.kernel.borrow().now_ns;
    rig.kernel
        .borrow()
        .slot(slot)
        .rx_last_ns()
        .store(now, Relaxed);
    rig.pass(SECOND_NS);
    assert_eq!((rig.flows(), rig.records().len()), (1, 0));
}

#[test]
fn a_closed_connection_s_last_packets_pass_and_revive_nothing() {
    let mut rig = Rig::with(Setup {
        nat_ports: 61_000..=61_001,
        ..Setup::default()
    });
    let nat = rig.connect(40_000, 7);
    let other = rig.connect(40_001, 7);
    rig.close(40_000, nat, true);
    // Two of two ports are busy: the closed flow is ended by the next scan.
    rig.kernel.borrow_mut().now_ns += 300 * MILLISECOND_NS;
    rig.turn();
    let way = rig.world(&ack(SERVER, nat, Flags::FIN, 2, 3));
    assert_eq!(way, Handling::Engine(Handover::Verdict));
    assert_eq!(rig.at_guest().len(), 1, "a retransmitted FIN arrives");
    rig.pass(100 * MILLISECOND_NS);
    assert_eq!((rig.flows(), rig.records().len()), (1, 1));
    assert_eq!(rig.records()[0]["rx_packets"], 3, "it was counted");
    assert_eq!(rig.world(&ack(SERVER, other, 0, 9_001, 8)), Handling::Fast);
}

#[test]
fn short_slots_are_reclaimed_from_closed_flows_ahead_of_need() {
    let mut rig = Rig::with(Setup {
        slots: 1_024,
        max_flows: 100_000,
        ..Setup::default()
    });
    // All but what is kept for the other two VMs.
    for i in 0..1_024 - 255 {
        let nat = rig.connect(10_000 + i, 7);
        rig.close(10_000 + i, nat, true);
    }
    rig.guest(1, &udp((GUEST, 1), SERVER, b"x"));
    assert_eq!(rig.refused(1, slipgate_abi::Refusal::TableFull), 1);
    rig.pass(2 * SECOND_NS);
    assert!(
        rig.flows() <= 1_024 - 255 - 128,
        "an eighth was freed: {}",
        rig.flows()
    );
    rig.connect(60_000, 7);
}

#[test]
fn a_slot_rests_a_second() {
    let mut rig = Rig::with(Setup {
        slots: 1_024,
        max_flows: 100_000,
        ..Setup::default()
    });
    // One alone may have the whole table.
    rig.tell(|engine| engine.remove_vm(VmRow::new(2), VmId::new(102)));
    rig.tell(|engine| engine.remove_vm(VmRow::new(3), VmId::new(103)));
    for i in 0..1_024 {
        rig.guest(1, &udp((GUEST, 1_000 + i), SERVER, b"x"));
    }
    assert_eq!(rig.flows(), 1_024);
    rig.send(|engine| engine.remove_vm(VmRow::new(1), VmId::new(101)));
    rig.send(|engine| engine.set_vm(spec(2, &Setup::default())));
    rig.pass(60 * MILLISECOND_NS);
    rig.assert_empty();
    rig.guest(2, &udp((GUEST, 1), SERVER, b"x"));
    assert_eq!(rig.refused(2, slipgate_abi::Refusal::TableFull), 1);
    rig.pass(SECOND_NS + MILLISECOND_NS);
    rig.guest(2, &udp((GUEST, 1), SERVER, b"x"));
    assert_eq!(rig.flows(), 1);
}

#[test]
fn a_vm_that_goes_takes_its_flows_along_and_no_others() {
    let mut rig = Rig::new();
    rig.connect_from(1, 40_000, 7);
    rig.connect_from(2, 40_000, 7);
    rig.send(|engine| engine.remove_vm(VmRow::new(1), VmId::new(101)));
    rig.pass(60 * MILLISECOND_NS);
    assert_eq!(rig.flows(), 1);
    let record = &rig.records()[0];
    assert_eq!(
        (&record["vm"], &record["end"]),
        (&"vm1".into(), &"vm-removed".into())
    );
    rig.assert_paired();
}

#[test]
fn what_a_running_program_still_counts_is_in_the_record() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let slot = rig.kernel.borrow().slots_in_use()[0];
    rig.send(|engine| engine.remove_vm(VmRow::new(1), VmId::new(101)));
    rig.turn();
    rig.kernel.borrow_mut().now_ns += 40 * MILLISECOND_NS;
    rig.turn();
    rig.kernel
        .borrow()
        .slot(slot)
        .rx_bytes()
        .fetch_add(1_000, Relaxed);
    rig.pass(20 * MILLISECOND_NS);
    // The SYN-ACK, and what came late.
    assert_eq!(rig.records()[0]["rx_bytes"], 44 + 1_000);
}

#[test]
fn an_address_that_goes_takes_its_flows_along() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let mut network = network();
    network.routes.addresses[0].addr = "192.0.2.99/24".parse().unwrap();
    rig.follow(network);
    rig.pass(SECOND_NS);
    rig.assert_empty();
    assert_eq!(rig.records()[0]["end"], "address-gone");
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 8));
    assert_eq!(rig.at_world()[0][12..16], [192, 0, 2, 99]);
}

#[test]
fn detaching_ends_and_records_everything() {
    let mut rig = Rig::new();
    for i in 0..10 {
        rig.connect(40_000 + i, 7);
    }
    rig.send(|engine| engine.stop(OnExit::Detach));
    assert_eq!(rig.run().unwrap(), OnExit::Detach);
    rig.assert_empty();
    assert_eq!(rig.records().len(), 10);
}

#[test]
fn keeping_leaves_everything() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    rig.send(|engine| engine.stop(OnExit::Keep));
    assert_eq!(rig.run().unwrap(), OnExit::Keep);
    assert_eq!((rig.flows(), rig.records().len()), (1, 0));
    rig.assert_paired();
}

#[test]
fn the_broker_s_end_is_the_engine_s_and_flows_go_on() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    rig.broker.gone = true;
    assert!(matches!(rig.run(), Err(EngineError::Control(_))));
    rig.assert_paired();
    assert_eq!(rig.records().len(), 0);
}

#[test]
fn a_sync_is_answered_when_what_was_before_it_is_recorded() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let ends = rig.tell(|engine| {
        engine.remove_vm(VmRow::new(1), VmId::new(101));
        engine.after_ends()
    });
    assert_eq!(rig.ended(), []);
    rig.pass(60 * MILLISECOND_NS);
    assert_eq!(rig.ended(), [ends]);
    let status = rig.engine.status();
    assert_eq!((status.flows, status.records_written), (0, 1));
}

#[test]
fn a_scan_of_many_flows_takes_several_turns_and_finds_all_that_are_idle() {
    let mut rig = Rig::crowded(|_| PEER);
    // The pass that is under way, or due, is over.
    rig.pass(SECOND_NS);
    rig.kernel.borrow_mut().now_ns += 301 * SECOND_NS;
    let looked = |rig: &Rig| rig.kernel.borrow().slots_looked_at.get();
    let mut turns = 0;
    while turns == 0 || rig.engine.core.nat.flows.is_scanning() {
        let before = looked(&rig);
        rig.turn();
        turns += 1;
        let most = looked(&rig) - before;
        // Each is looked at a few times.
        assert!(most <= 8 * 2_048, "{most} in turn {turns}");
    }
    assert!(turns >= u64::from(CROWD) / 2_048, "{turns}");
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 0);
}

#[test]
fn an_idle_engine_sleeps() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    rig.pass(10 * SECOND_NS);
    let timeout_ns = rig.engine.timeout_ns().unwrap();
    assert!(timeout_ns >= SECOND_NS / 2, "{timeout_ns}");
}

#[test]
fn a_deletion_that_fails_among_many_ends_leaves_the_books_right() {
    const FLOWS: u16 = 40;
    let mut rig = Rig::new();
    for port in 0..FLOWS {
        rig.guest(1, &udp((GUEST, 5_000 + port), SERVER, b"x"));
    }
    rig.at_world();
    rig.kernel.borrow_mut().faults.remove_fails = 1;
    rig.pass(310 * SECOND_NS);
    // All have ended and are recorded; of the first, the entry that was not deleted is left.
    assert_eq!(rig.flows(), 0);
    assert_eq!(rig.records().len(), usize::from(FLOWS));
    assert_eq!(rig.kernel.borrow().slots_in_use(), []);
    assert_eq!(rig.kernel.borrow().flows.len(), 1);
    // It is a miss, and in nobody's way.
    for port in 0..FLOWS {
        let again = udp((GUEST, 5_000 + port), SERVER, b"x");
        assert_eq!(rig.guest(1, &again), Handling::Engine(Handover::Miss));
    }
    assert_eq!(rig.at_world().len(), usize::from(FLOWS));
    rig.assert_paired();
}

#[test]
fn of_flows_that_end_together_one_with_a_late_packet_lives_on() {
    let mut rig = Rig::new();
    for port in [5_000, 5_001, 5_002] {
        rig.guest(1, &udp((GUEST, port), SERVER, b"x"));
    }
    rig.at_world();
    let slot = rig.kernel.borrow().slots_in_use()[1];
    rig.pass(300 * SECOND_NS - MILLISECOND_NS);
    {
        let core = &mut rig.engine.core;
        for slot in core.nat.flows.all() {
            let now_ns = rig.kernel.borrow().now_ns;
            let (flows, datapath) = (&mut core.nat.flows, &mut core.nat.datapath);
            flows.begin_end(datapath, slot, crate::flow::EndReason::Idle, now_ns);
        }
        // A program that was processing a packet when the verdict changed.
        let kernel = rig.kernel.borrow();
        let live = kernel.slot(slot);
        live.tx_last_ns()
            .store(kernel.now_ns, std::sync::atomic::Ordering::Relaxed);
    }
    rig.pass(SECOND_NS);
    assert_eq!(rig.kernel.borrow().slots_in_use(), [slot]);
    assert_eq!(rig.records().len(), 2);
    rig.assert_paired();
}
