//! Flows that the engine carries, VMs that are frozen or limited.
use std::{net::IpAddr, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{DropReason, Handover, Rate, SlotIndex, Verdict, VmId, VmRates, tcp::Flags};

use super::rig::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    datapath::{NameMap, RememberedName},
    fake::FakeDatapath,
    flow::EndReason,
    port::VirtioNetHdr,
};

const GUEST_AT: At = (GUEST, 40_000);

fn verdict(rig: &Rig, slot: SlotIndex) -> u32 {
    rig.kernel.borrow().slot(slot).verdict().load(Relaxed)
}

fn held(rig: &mut Rig) -> (At, SlotIndex) {
    let nat = rig.connect(40_000, 7);
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let core = &mut rig.engine.core;
    assert!(core.nat.flows.hold(&mut core.nat.datapath, slot));
    (nat, slot)
}

fn release(rig: &mut Rig, slot: SlotIndex) -> bool {
    let core = &mut rig.engine.core;
    core.nat.flows.release(&mut core.nat.datapath, slot)
}

#[test]
fn a_held_flow_goes_through_the_engine_until_it_is_released() {
    let mut rig = Rig::new();
    let (nat, slot) = held(&mut rig);
    let engine = Handling::Engine(Handover::Verdict);
    assert_eq!(rig.guest(1, &ack(GUEST_AT, SERVER, 0, 2, 2)), engine);
    assert_eq!(rig.world(&ack(SERVER, nat, 0, 2, 2)), engine);
    assert_eq!((rig.at_world().len(), rig.at_guest().len()), (1, 1));
    assert_eq!(verdict(&rig, slot), Verdict::Engine as u32);
    assert!(release(&mut rig, slot));
    assert_eq!(
        rig.guest(1, &ack(GUEST_AT, SERVER, 0, 2, 2)),
        Handling::Fast
    );
    assert_eq!(rig.world(&ack(SERVER, nat, 0, 2, 2)), Handling::Fast);
    let slot = rig.kernel.borrow().slot(slot);
    assert_eq!(slot.tx_packets().load(Relaxed), 2 + 2);
    rig.assert_paired();
}

#[test]
fn a_held_flow_lives_and_is_revived_as_what_it_was() {
    let mut rig = Rig::new();
    let (nat, slot) = held(&mut rig);
    rig.kernel.borrow_mut().now_ns += 7_441 * SECOND_NS;
    rig.turn();
    assert_eq!(verdict(&rig, slot), Verdict::Closing as u32);
    rig.guest(1, &ack(GUEST_AT, SERVER, 0, 2, 2));
    assert_eq!(verdict(&rig, slot), Verdict::Engine as u32);
    // Released while it ends, it is the kernel's when it lives on.
    rig.kernel.borrow_mut().now_ns += 7_441 * SECOND_NS;
    rig.turn();
    assert!(release(&mut rig, slot));
    assert_eq!(verdict(&rig, slot), Verdict::Closing as u32);
    rig.world(&ack(SERVER, nat, 0, 2, 2));
    assert_eq!(verdict(&rig, slot), Verdict::Fast as u32);
    rig.pass(SECOND_NS);
    assert_eq!(rig.records().len(), 0);
}

#[test]
fn what_is_gone_is_neither_held_nor_released() {
    let mut rig = Rig::new();
    let (_, slot) = held(&mut rig);
    let now_ns = rig.kernel.borrow().now_ns;
    for reason in [EndReason::Cut, EndReason::Inspection] {
        let core = &mut rig.engine.core;
        core.nat
            .flows
            .begin_end(&mut core.nat.datapath, slot, reason, now_ns);
    }
    // A packet in the grace passes, and revives nothing.
    rig.guest(1, &ack(GUEST_AT, SERVER, 0, 2, 2));
    rig.pass(100 * MILLISECOND_NS);
    assert_eq!(rig.records()[0]["end"], "cut");
    assert!(!release(&mut rig, slot));
    assert_eq!(verdict(&rig, slot), Verdict::Free as u32);
    rig.assert_empty();
}

#[test]
fn a_held_flow_that_nobody_inspects_is_the_kernels_after_adoption() {
    let mut rig = Rig::new();
    let (_, slot) = held(&mut rig);
    // It was a capture's, which ended with its engine.
    let (mut rig, adoption) = rig.restart(&Setup::default());
    assert_eq!((adoption.live, adoption.refused), (1, 0));
    assert!(!rig.engine.core.nat.flows.entry(slot).unwrap().is_held());
    assert_eq!(
        rig.guest(1, &ack(GUEST_AT, SERVER, 0, 2, 2)),
        Handling::Fast
    );
}

#[test]
fn a_frozen_vm_is_silent_and_another_is_not() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.kernel.borrow().set_frozen(1, true);
    let frozen = Handling::Dropped(DropReason::Frozen);
    assert_eq!(rig.guest(1, &ack(GUEST_AT, SERVER, 0, 2, 2)), frozen);
    assert_eq!(rig.guest(1, &syn((GUEST, 40_001), SERVER, 7)), frozen);
    assert_eq!(rig.world(&ack(SERVER, nat, 0, 2, 2)), frozen);
    rig.connect_from(2, 50_000, 7);
    // What the engine still sends does not arrive either.
    let core = &mut rig.engine.core;
    let slot = rig.kernel.borrow().slots_in_use()[0];
    core.nat.flows.hold(&mut core.nat.datapath, slot);
    let l3 = ack(GUEST_AT, SERVER, 0, 2, 2);
    let vnet = VirtioNetHdr::default();
    rig.kernel
        .borrow_mut()
        .hand_over(1, Handover::Verdict, 0, vnet, &l3);
    rig.turn();
    assert_eq!(rig.at_world().len(), 0);
    release(&mut rig, slot);
    rig.kernel.borrow().set_frozen(1, false);
    assert_eq!(
        rig.guest(1, &ack(GUEST_AT, SERVER, 0, 2, 2)),
        Handling::Fast
    );
    assert_eq!(rig.world(&ack(SERVER, nat, 0, 2, 2)), Handling::Fast);
}

#[test]
fn a_rate_holds_for_what_the_engine_carries_too() {
    let mut rig = Rig::new();
    let (_, slot) = held(&mut rig);
    let tx = Rate {
        packets_per_second: 50,
        bytes_per_second: 0,
        ..Rate::default()
    };
    let rates = VmRates {
        tx,
        ..VmRates::default()
    };
    rig.kernel.borrow().set_rates(1, rates);
    let segment = ack(GUEST_AT, SERVER, 0, 2, 2);
    for _ in 0..20 {
        rig.guest(1, &segment);
    }
    assert_eq!(rig.at_world().len(), 5, "100 ms of the rate");
    release(&mut rig, slot);
    let over = Handling::Dropped(DropReason::PacketRate);
    assert_eq!(rig.guest(1, &segment), over);
    rig.kernel.borrow_mut().now_ns += 20 * MILLISECOND_NS;
    assert_eq!(rig.guest(1, &segment), Handling::Fast);
    assert_eq!(rig.guest(1, &segment), over);
    let (_, drops) = rig.kernel.borrow().stats(1).snapshot();
    assert_eq!(drops.packet_rate.packets, 15 + 2);
}

#[test]
fn an_end_is_recorded_with_how_long_connecting_took() {
    let mut rig = Rig::new();
    rig.guest(1, &syn(GUEST_AT, SERVER, 7));
    let sent = rig.at_world();
    let port = u16::from_be_bytes([sent[0][20], sent[0][21]]);
    rig.kernel.borrow_mut().now_ns += 12_345_678;
    let answer = ack(SERVER, (NAT, port), Flags::SYN, 1, 8);
    assert_eq!(rig.world(&answer), Handling::Fast);
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let connect_us = rig.kernel.borrow().slot(slot).connect_us().load(Relaxed);
    assert_eq!(connect_us, 12_345);
}

#[test]
fn names_are_remembered_for_whoever_serves_the_vm() {
    let rig = Rig::new();
    let mut datapath = FakeDatapath::new(&rig.kernel, 0, 9);
    let at = |addr: IpAddr, vm, last: u8, expires_ns| RememberedName {
        vm,
        addr,
        name: [&[1][..], &[last], &[0]].concat().into(),
        expires_ns,
    };
    let peer = IpAddr::from(PEER);
    let name = |vm, last, expires_ns| at(peer, vm, last, expires_ns);
    let id = rig.kernel.borrow().vm(1).id().load(Relaxed);
    let ours = [name(VmId::new(id), b'a', 5), name(VmId::new(id), b'b', 6)];
    for one in ours.iter().chain([&name(VmId::new(9_999), b'a', 7)]) {
        assert!(datapath.remember_name(one));
    }
    let later = name(VmId::new(id), b'a', 50);
    assert!(datapath.remember_name(&later));
    let mut found = datapath.remembered_names();
    found.sort_by_key(|name| name.expires_ns);
    assert_eq!(found, [ours[1].clone(), later.clone()]);
    rig.kernel.borrow_mut().faults.names_capacity = 3;
    assert!(
        !datapath.remember_name(&name(VmId::new(id), b'c', 1)),
        "no room"
    );
    assert!(datapath.remember_name(&later), "there already");
    rig.kernel.borrow_mut().faults.names_capacity = 0;
    // The same name at an address of IPv6 is another entry.
    let six = at(IpAddr::V6(PEER6), VmId::new(id), b'a', 60);
    assert!(datapath.remember_name(&six));
    assert!(datapath.forget_name(VmId::new(id), peer, &later.name));
    assert!(!datapath.forget_name(VmId::new(id), peer, &later.name));
    let mut found = datapath.remembered_names();
    found.sort_by_key(|name| name.expires_ns);
    assert_eq!(found, [ours[1].clone(), six]);
}
