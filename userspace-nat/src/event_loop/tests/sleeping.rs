//! VMs that sleep, and wake.
mod bounds;
mod upkeep;

use slipgate_abi::{DropReason, Handover, VmRow, tcp::Flags};
use slipgate_model::{Knock, RouteEntry, RouteKind, SleepChange, Subject};

use super::{
    changes::tcp_of,
    forwards::{HTTP, with_forwards},
    rig::*,
};
use crate::{clock::SECOND_NS, port::VirtioNetHdr};

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
fn a_former_generations_peer_is_reset_while_the_vm_sleeps() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    let other = rig.connect(40_001, 7);
    sleep(&mut rig);
    rig.at_world();
    rig.tell(|engine| engine.end_generation(ROW));
    assert_eq!(rig.at_world().len(), 2, "the peers are asked");
    for nat in [nat, other] {
        rig.world(&ack(SERVER, nat, 0, 9_501, 508));
        let reset = tcp_of(&rig.at_world().pop().unwrap());
        assert_eq!((reset.flags, reset.sequence), (Flags::RST, 508));
    }
    rig.at_guest();
    assert!(wake(&mut rig));
    assert!(rig.at_guest().is_empty(), "no answer of theirs was held");
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

/// What was told of sleep, without the beginning.
fn told(rig: &Rig) -> Vec<SleepChange> {
    let told = rig.broker.sleep_changes.iter().map(|(_, change)| *change);
    told.filter(|change| *change != SleepChange::Asleep)
        .collect()
}

#[test]
fn nobody_knocks_where_routes_change_or_flows_are_cut() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    rig.connect(40_001, 7);
    sleep(&mut rig);
    rig.at_guest();
    let mut away = network();
    away.routes.routes.push(RouteEntry {
        prefix: std::net::IpAddr::from(PEER).into(),
        kind: RouteKind::Blackhole,
        ..away.routes.routes[0]
    });
    rig.follow(away);
    rig.pass(SECOND_NS);
    assert_eq!(rig.at_guest().len(), 2, "the guest is made to send");
    rig.follow(network());
    rig.pass(20 * SECOND_NS);
    assert_eq!((rig.flows(), told(&rig)), (0, vec![]));
    assert!(wake(&mut rig));
    rig.connect(40_002, 7);
    sleep(&mut rig);
    rig.at_guest();
    rig.tell(|engine| engine.cut(Subject::Vm { row: ROW }));
    assert_eq!(rig.at_guest().len(), 1);
    assert_eq!(told(&rig), [SleepChange::Awake]);
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

/// What comes while the held packets are on their way is behind them.
#[test]
fn what_comes_while_the_vm_wakes_is_delivered_behind_what_was_held() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    rig.world(&ack(SERVER, nat, 0, 10, 8));
    let later = ack(SERVER, nat, 0, 20, 8);
    let kernel = rig.kernel.clone();
    // The engine has read its port in this turn when it is told to wake the VM.
    rig.send(move |_| {
        let way = kernel
            .borrow_mut()
            .world_sends(VirtioNetHdr::default(), &later);
        assert_eq!(way, Handling::Engine(Handover::Asleep));
    });
    let latest = ack(SERVER, nat, 0, 30, 8);
    let kernel = rig.kernel.clone();
    rig.send(|engine| assert!(engine.wake(ROW)));
    // And this one comes when it has woken, before the next turn.
    rig.send(move |_| {
        let way = kernel
            .borrow_mut()
            .world_sends(VirtioNetHdr::default(), &latest);
        assert_eq!(way, Handling::Fast);
    });
    rig.turn();
    rig.turn();
    assert_eq!(sequences_at_guest(&mut rig), [10, 20, 30]);
}
