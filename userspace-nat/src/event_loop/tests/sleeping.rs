//! VMs that sleep, and wake.
use slipgate_abi::{DropReason, Handover, VmRow};
use slipgate_model::{Knock, SleepChange};

use super::{
    changes::tcp_of,
    forwards::{HTTP, with_forwards},
    rig::*,
};
use crate::clock::SECOND_NS;

const GUEST_AT: At = (GUEST, 40_000);
const ROW: VmRow = VmRow::new(1);

fn sleep(rig: &mut Rig) {
    rig.tell(|engine| engine.sleep(ROW));
}

fn wake(rig: &mut Rig) -> bool {
    rig.tell(|engine| engine.wake(ROW))
}

fn sequences_at_guest(rig: &mut Rig) -> Vec<u32> {
    let all = rig.at_guest();
    all.iter().map(|(_, l3)| tcp_of(l3).sequence).collect()
}

#[test]
fn what_came_for_a_vm_that_slept_is_delivered_in_order() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    let held = Handling::Engine(Handover::Asleep);
    for sequence in [10, 20, 30] {
        assert_eq!(rig.world(&ack(SERVER, nat, 0, sequence, 8)), held);
    }
    assert!(rig.at_guest().is_empty());
    // What its guest still sends goes on.
    assert_eq!(
        rig.guest(1, &ack(GUEST_AT, SERVER, 0, 8, 2)),
        Handling::Fast
    );
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [10, 20, 30]);
    assert_eq!(
        rig.world(&ack(SERVER, nat, 0, 40, 8)),
        Handling::Fast,
        "later ones go by the kernel's path"
    );
}

#[test]
fn an_opening_segment_is_admitted_when_the_vm_wakes() {
    let mut rig = with_forwards(Setup::default());
    sleep(&mut rig);
    rig.world(&syn(SERVER, HTTP, 5_000));
    assert_eq!((rig.flows(), rig.at_guest().len()), (0, 0));
    assert!(rig.at_world().is_empty(), "nothing answers for the guest");
    assert!(wake(&mut rig));
    assert_eq!(
        (rig.flows(), sequences_at_guest(&mut rig)),
        (1, vec![5_000])
    );
}

#[test]
fn a_repeated_segment_is_held_once_and_the_rest_is_bounded() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    for _ in 0..3 {
        rig.world(&ack(SERVER, nat, 0, 10, 8));
    }
    assert_eq!(rig.dropped(1, DropReason::Held), 2);
    let most = slipgate_policy::Sleep::default().packets;
    for sequence in 0..most {
        rig.world(&ack(SERVER, nat, 0, 1_000 + sequence, 8));
    }
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig).len(), most as usize);
}

#[test]
fn what_is_held_longer_than_the_policys_patience_is_dropped() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    rig.world(&ack(SERVER, nat, 0, 10, 8));
    rig.pass(40 * SECOND_NS);
    rig.world(&ack(SERVER, nat, 0, 20, 8));
    rig.pass(30 * SECOND_NS);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [20]);
}

#[test]
fn who_knocks_is_told_once_a_second() {
    let mut rig = with_forwards(Setup::default());
    sleep(&mut rig);
    rig.world(&syn(SERVER, HTTP, 5_000));
    rig.world(&syn(SERVER, HTTP, 5_001));
    rig.pass(SECOND_NS);
    rig.world(&syn(SERVER, HTTP, 5_002));
    assert!(wake(&mut rig));
    rig.turn();
    let changes: Vec<_> = rig.broker.sleep_changes.iter().map(|(_, c)| *c).collect();
    let [
        SleepChange::Asleep,
        SleepChange::Knock(first),
        SleepChange::Knock(_),
        SleepChange::Awake,
    ] = changes[..]
    else {
        panic!("{changes:?}");
    };
    let address = |(ip, port): At| std::net::SocketAddr::new(ip.into(), port);
    let (protocol, from, to) = (6, address(SERVER), address(HTTP));
    assert_eq!(first, Knock { protocol, from, to });
}

#[test]
fn flows_of_a_vm_that_sleeps_do_not_idle_out() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    rig.pass(3 * 3_600 * SECOND_NS);
    assert!(wake(&mut rig));
    rig.pass(3_600 * SECOND_NS);
    assert_eq!(rig.world(&ack(SERVER, nat, 0, 2, 8)), Handling::Fast);
    assert_eq!(rig.flows(), 1);
}

#[test]
fn a_successor_holds_what_comes_for_a_vm_that_was_put_to_sleep_before() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    sleep(&mut rig);
    let (mut rig, _) = rig.restart(&Setup::default());
    rig.at_guest();
    rig.world(&ack(SERVER, nat, 0, 10, 8));
    assert!(rig.at_guest().is_empty());
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [10]);
}

#[test]
fn a_vm_whose_tap_is_away_sleeps_on() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    let tap = |rig: &Rig, ifindex| {
        let vm = rig.kernel.borrow().vm(1);
        vm.tap_ifindex()
            .swap(ifindex, std::sync::atomic::Ordering::Relaxed)
    };
    let there = tap(&rig, 0);
    rig.world(&ack(SERVER, nat, 0, 10, 8));
    assert!(!wake(&mut rig));
    tap(&rig, there);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [10]);
}

#[test]
fn what_is_held_for_a_vm_that_is_removed_is_counted() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    sleep(&mut rig);
    rig.world(&ack(SERVER, nat, 0, 10, 8));
    let id = rig.engine.core.vms.id_of(ROW).unwrap();
    rig.tell(move |engine| engine.remove_vm(ROW, id));
    assert_eq!(rig.dropped(0, DropReason::StaleVm), 1);
}
