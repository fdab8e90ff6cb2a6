//! The engine dies and another takes over; credits; a port that fails.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{DropReason, FlowRef, Ip4, Tuple, Verdict, VmId, VmRow};

use super::rig::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    fake::Faults,
    flow::adopt::Adoption,
    port::VirtioNetHdr,
};
use slipgate_policy::{Action, Rule};

fn adoption(live: usize, ending: usize, ended: usize, dangling: usize) -> Adoption {
    Adoption {
        live,
        ending,
        ended,
        dangling,
        refused: 0,
        uninspected: 0,
        reopened: 0,
    }
}

#[test]
fn live_flows_are_adopted_and_go_on() {
    let mut rig = Rig::new();
    let nats: Vec<At> = (0..5).map(|i| rig.connect(40_000 + i, 7)).collect();
    // While nobody serves, flows go on and new ones fail.
    let (mut rig, found) = rig.restart(&Setup::default());
    assert_eq!(found, adoption(5, 0, 0, 0));
    rig.assert_paired();
    for nat in &nats {
        assert_eq!(rig.world(&ack(SERVER, *nat, 0, 9_001, 8)), Handling::Fast);
    }
    // Ports and caps are known again: no tuple is given out twice.
    for i in 0..100 {
        rig.connect(50_000 + i, 7);
    }
    rig.assert_paired();
    rig.pass(3 * 3_600_000 * MILLISECOND_NS);
    rig.assert_empty();
    assert_eq!(rig.records().len(), 105);
}

#[test]
fn adopted_flows_that_the_rules_refuse_now_are_ended() {
    let mut rig = Rig::new();
    let octets = [203, 0, 113, 9];
    let denied: At = (Ip4 { octets }, 443);
    let nat = rig.connect(40_000, 7);
    rig.guest(1, &syn((GUEST, 40_001), denied, 7));
    let sent = rig.at_world().pop().unwrap();
    let denied_nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
    let pattern = "203.0.113.0/24:443/tcp".parse().unwrap();
    let (mut rig, found) = rig.restart(&Setup {
        rules: vec![Rule::Match(Action::Deny, pattern)],
        ..Setup::default()
    });
    let expected = Adoption {
        refused: 1,
        ..adoption(1, 0, 0, 0)
    };
    assert_eq!(found, expected);
    assert_ne!(
        rig.world(&ack(denied, denied_nat, 0, 9_001, 8)),
        Handling::Fast
    );
    assert_eq!(rig.world(&ack(SERVER, nat, 0, 9_001, 8)), Handling::Fast);
    rig.pass(1_000 * MILLISECOND_NS);
    rig.assert_paired();
    assert_eq!(rig.flows(), 1);
    let records = rig.records();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0]["end"], "policy");
    assert_eq!(records[0]["remote"], "203.0.113.9:443");
    assert_eq!(records[0]["tx_packets"], 1);
}

#[test]
fn what_a_predecessor_left_empty_is_given_back() {
    let setup = || Setup {
        slots: 8_192,
        max_flows: 8_192,
        ..Setup::default()
    };
    let mut rig = Rig::with(setup());
    for port in 0..4_000 {
        rig.guest(1, &udp((GUEST, 1_000 + port), SERVER, b"x"));
        rig.guest(1, &udp((GUEST, 1_000 + port), (PEER, 9), b"x"));
    }
    let chunks = |rig: &Rig| {
        let kernel = rig.kernel.borrow();
        kernel
            .chunks
            .iter()
            .filter(|c| c.owner() == Some(0))
            .count()
    };
    // Three quarters: two more are for whoever comes.
    assert_eq!(chunks(&rig), 6);
    let flows = rig.flows();
    let (mut rig, found) = rig.restart(&setup());
    assert_eq!(found.live, flows);
    rig.pass(320 * SECOND_NS);
    assert_eq!((rig.flows(), chunks(&rig)), (0, 1));
    // Also when all VMs have gone meanwhile.
    for port in 0..3_000 {
        rig.guest(1, &udp((GUEST, 1_000 + port), SERVER, b"x"));
    }
    assert!(chunks(&rig) > 3);
    for row in 1..=3 {
        let id = 100 + u32::from(row);
        rig.send(move |engine| engine.remove_vm(VmRow::new(row), VmId::new(id)));
    }
    rig.pass(20 * SECOND_NS);
    assert_eq!((rig.flows(), chunks(&rig)), (0, 1));
    assert_eq!(rig.engine.timeout_ns(), None, "it sleeps");
}

#[test]
fn ports_of_adopted_flows_are_busy() {
    let setup = || Setup {
        nat_ports: 61_000..=61_002,
        ..Setup::default()
    };
    let mut rig = Rig::with(setup());
    let nats: Vec<At> = (0..2).map(|i| rig.connect(40_000 + i, 7)).collect();
    let (mut rig, _) = rig.restart(&setup());
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let to = rig.engine.core.nat.flows.entry(slot).unwrap().destination();
    assert_eq!(rig.engine.core.nat.flows.ports.busy(&to), 2);
    let third = rig.connect(50_000, 7);
    assert!(!nats.contains(&third));
    assert_eq!(rig.engine.core.nat.flows.ports.busy(&to), 3);
}

#[test]
fn what_a_dying_engine_left_half_done_is_finished() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    rig.connect(40_001, 7);
    rig.connect(40_002, 7);
    {
        let mut kernel = rig.kernel.borrow_mut();
        // One had begun to end; one had lost its guest's tuple.
        let [a, b, c] = kernel.slots_in_use()[..] else {
            panic!("three slots")
        };
        kernel.slot(a).set_verdict(Verdict::Closing);
        kernel.slot(b).set_verdict(Verdict::Closing);
        let tuple = kernel.slot(b).guest_tuple();
        kernel.flows.remove(&tuple);
        let _ = c;
        // One was being opened: its slot is still free.
        let free = 1_000;
        let tuple = Tuple {
            local_port: 1,
            ..tuple
        };
        kernel.flows.insert(
            tuple,
            FlowRef {
                slot: free,
                generation: 1,
            },
        );
    }
    let (mut rig, found) = rig.restart(&Setup::default());
    assert_eq!(found, adoption(1, 2, 0, 1));
    rig.pass(1_000 * MILLISECOND_NS);
    rig.assert_paired();
    rig.pass(3 * 3_600_000 * MILLISECOND_NS);
    rig.assert_empty();
    assert_eq!(rig.records().len(), 3);
}

#[test]
fn a_flow_is_recorded_once_whenever_the_engine_dies() {
    for recorded in [false, true] {
        let mut rig = Rig::new();
        rig.connect(40_000, 7);
        let slot = rig.kernel.borrow().slots_in_use()[0];
        {
            let mut kernel = rig.kernel.borrow_mut();
            kernel.slot(slot).set_verdict(Verdict::Closing);
            kernel.flows.clear();
        }
        if recorded {
            let instance = rig.kernel.borrow().instance;
            let id = format!("{{\"id\":\"{instance:08x}-{slot}-1\"}}\n");
            rig.log.0.lock().unwrap().extend_from_slice(id.as_bytes());
        }
        let (rig, found) = rig.restart(&Setup::default());
        assert_eq!(found, adoption(0, 0, 1, 0));
        assert_eq!(rig.records().len(), 1);
        let counters = rig.kernel.borrow().stats(1).snapshot().0;
        assert_eq!((counters.ended, counters.ended_tx.packets), (1, 2));
        assert!(rig.kernel.borrow().slots_in_use().is_empty());
    }
}

#[test]
fn a_vm_that_did_not_come_back_loses_its_flows() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let raw = rig.kernel.borrow().slot(slot).as_ptr();
    // SAFETY: a live slot; one thread. The flow is of a VM of old.
    let old = unsafe {
        let old = (*raw).guest_tuple_of();
        (*raw).vm = 77;
        old
    };
    let reference = rig.kernel.borrow_mut().flows.remove(&old).unwrap();
    rig.kernel
        .borrow_mut()
        .flows
        .insert(Tuple { scope: 77, ..old }, reference);
    let (mut rig, found) = rig.restart(&Setup::default());
    assert_eq!(found, adoption(0, 1, 0, 0));
    rig.pass(1_000 * MILLISECOND_NS);
    assert_eq!(rig.records()[0]["end"], "vm-removed");
    assert!(rig.kernel.borrow().flows.is_empty());
}

#[test]
fn lost_frames_give_their_credits_back_and_are_counted() {
    let mut rig = Rig::new();
    rig.kernel.borrow_mut().faults = Faults {
        queue_len: 10,
        ..Faults::default()
    };
    for i in 0..64 {
        let packet = udp((GUEST, 5_000 + i), SERVER, b"x");
        rig.kernel
            .borrow_mut()
            .guest_sends(1, VirtioNetHdr::default(), &packet);
    }
    let lost = rig.kernel.borrow().lost;
    assert_eq!(lost, 54);
    assert_eq!(
        rig.guest(1, &udp((GUEST, 6_000), SERVER, b"x")),
        Handling::Dropped(DropReason::NoCredit)
    );
    rig.pass(100 * MILLISECOND_NS);
    let counters = rig.kernel.borrow().stats(1).snapshot().0;
    assert_eq!(counters.lost_after_redirect, lost);
    assert!(matches!(
        rig.guest(1, &udp((GUEST, 6_001), SERVER, b"x")),
        Handling::Engine(_)
    ));
    rig.pass(100 * MILLISECOND_NS);
    assert_eq!(
        rig.kernel
            .borrow()
            .stats(1)
            .snapshot()
            .0
            .lost_after_redirect,
        lost
    );
}

/// Of all VMs together, too: else what one VM lost would be room that nobody has any more.
#[test]
fn lost_frames_make_room_for_all_vms() {
    let mut rig = Rig::new();
    rig.kernel.borrow_mut().faults = Faults {
        queue_len: 10,
        ..Faults::default()
    };
    let all = rig.kernel.borrow().owner_row(0);
    all.common().store(64, Relaxed);
    let send = |rig: &Rig, vm: u16, from: u16| {
        for i in 0..40 {
            let packet = udp((GUEST, from + i), SERVER, b"x");
            let mut kernel = rig.kernel.borrow_mut();
            kernel.guest_sends(vm, VirtioNetHdr::default(), &packet);
        }
    };
    let no_credit = |rig: &Rig, vm| rig.dropped(vm, DropReason::NoCredit);
    send(&rig, 1, 5_000);
    send(&rig, 2, 5_000);
    assert_eq!((no_credit(&rig, 1), no_credit(&rig, 2)), (0, 16));
    rig.pass(100 * MILLISECOND_NS);
    let in_flight = || {
        let (handed_over, taken_in) = all.under_way(false);
        handed_over.load(Relaxed) - taken_in.load(Relaxed)
    };
    assert_eq!(in_flight(), 0);
    for vm in [1, 2] {
        let vm = rig.kernel.borrow().vm(vm);
        let (handed_over, taken_in) = vm.under_way(false);
        assert_eq!(handed_over.load(Relaxed), taken_in.load(Relaxed));
    }
    // Frames of a VM that is gone count too: it was in the queue when its row was given to another.
    send(&rig, 1, 6_000);
    rig.kernel.borrow().vm(1).handed_over().store(0, Relaxed);
    rig.kernel.borrow().vm(1).taken_in().store(0, Relaxed);
    assert_ne!(in_flight(), 0);
    rig.pass(200 * MILLISECOND_NS);
    assert_eq!(in_flight(), 0);
}

#[test]
fn frames_of_vms_that_take_turns_are_each_counted_as_its_own() {
    let mut rig = Rig::new();
    for i in 0..20 {
        for vm in [1, 2] {
            let packet = udp((GUEST, 7_000 + i), SERVER, b"x");
            let mut kernel = rig.kernel.borrow_mut();
            kernel.guest_sends(vm, VirtioNetHdr::default(), &packet);
        }
    }
    rig.turn();
    for vm in [1, 2] {
        let vm = rig.kernel.borrow().vm(vm);
        let (handed_over, taken_in) = vm.under_way(false);
        assert_eq!(
            (handed_over.load(Relaxed), taken_in.load(Relaxed)),
            (20, 20)
        );
    }
}

#[test]
fn what_the_port_does_not_take_is_counted() {
    let mut rig = Rig::new();
    // The frame that orders the flow to be opened, and the packet that is handled again.
    rig.kernel.borrow_mut().faults.port_refuses = 2;
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
    assert_eq!(rig.dropped(1, DropReason::PortWrite), 1);
    // The flow is there; the retransmission takes it.
    assert_eq!(
        rig.guest(1, &syn((GUEST, 40_000), SERVER, 7)),
        Handling::Fast
    );
    assert_eq!(rig.at_world().len(), 1);
}

#[test]
fn a_flood_of_one_vm_does_not_delay_another_beyond_its_turn() {
    let mut rig = Rig::new();
    for i in 0..60 {
        let packet = udp((GUEST, 5_000 + i), SERVER, b"x");
        rig.kernel
            .borrow_mut()
            .guest_sends(1, VirtioNetHdr::default(), &packet);
    }
    let packet = udp((GUEST, 5_000), (PEER, 1_234), b"x");
    rig.kernel
        .borrow_mut()
        .guest_sends(2, VirtioNetHdr::default(), &packet);
    rig.turn();
    let sent = rig.at_world();
    let place = sent
        .iter()
        .position(|p| p[22..24] == 1_234u16.to_be_bytes());
    assert_eq!(place, Some(1));
}

/// A slot's guest tuple before its VM is changed.
trait GuestTupleOf {
    fn guest_tuple_of(&self) -> Tuple;
}

impl GuestTupleOf for slipgate_abi::Slot {
    fn guest_tuple_of(&self) -> Tuple {
        Tuple {
            scope: self.vm,
            local: self.guest,
            remote: self.remote,
            local_port: self.guest_port,
            remote_port: self.remote_port,
            protocol: self.protocol as u8,
            pad: [0; 3],
        }
    }
}

#[test]
fn verdicts_other_than_fast_bring_packets_here_and_send_them_on() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    let slot = rig.kernel.borrow().slots_in_use()[0];
    rig.kernel.borrow().slot(slot).set_verdict(Verdict::Engine);
    rig.world(&ack(SERVER, nat, 0, 9_001, 8));
    rig.guest(1, &ack((GUEST, 40_000), SERVER, 0, 8, 9_001));
    assert_eq!((rig.at_guest().len(), rig.at_world().len()), (1, 1));
    let verdict = rig.kernel.borrow().slot(slot).verdict().load(Relaxed);
    assert_eq!(verdict, Verdict::Engine as u32);
}
