use slipgate_abi::{SlotIndex, VmRow, maps::SLOTS_PER_CHUNK};
use slipgate_model::FlowTuple;

use super::*;
use crate::{
    flow::table::{Entry, Marks},
    nat_ports::PortPool,
};

const CHUNKS: u32 = 4;

fn flows_in(slots: &[u32]) -> Flows {
    let mut flows = Flows::new(CHUNKS * SLOTS_PER_CHUNK, 16, PortPool::new(61_000..=61_999));
    for slot in slots {
        add(&mut flows, *slot);
    }
    flows
}

fn add(flows: &mut Flows, slot: u32) {
    let guest = FlowTuple {
        scope: 101,
        local: [10, 0, 2, 15].into(),
        remote: [198, 51, 100, 7].into(),
        local_port: slot as u16,
        remote_port: 443,
        protocol: 6,
    };
    let entry = Entry::live(
        guest,
        guest.local,
        slot as u16,
        VmRow::new(1),
        1,
        Marks::NONE,
    );
    flows.table.insert(SlotIndex::new(slot), entry);
}

fn walk_on(walk: &mut SlotWalk, flows: &Flows, mut steps: u32) -> (Vec<u32>, u32) {
    let mut found = Vec::new();
    while let Some(slot) = walk.next(flows, &mut steps) {
        found.push(slot.get());
    }
    (found, steps)
}

#[test]
fn a_walk_passes_every_slot_in_use_once() {
    let in_use = [
        0,
        7,
        SLOTS_PER_CHUNK - 1,
        2 * SLOTS_PER_CHUNK,
        CHUNKS * SLOTS_PER_CHUNK - 1,
    ];
    let flows = flows_in(&in_use);
    let mut walk = SlotWalk::default();
    assert!(!walk.is_under_way());
    assert!(walk_on(&mut walk, &flows, u32::MAX).0.is_empty());
    walk.start(&flows);
    assert!(walk.is_under_way());
    assert_eq!(walk_on(&mut walk, &flows, u32::MAX).0, in_use);
    assert!(!walk.is_under_way());
}

#[test]
fn a_turns_steps_bound_it_and_the_next_turn_goes_on() {
    let flows = flows_in(&[3, 5, 11]);
    let mut walk = SlotWalk::default();
    walk.start(&flows);
    assert_eq!(walk_on(&mut walk, &flows, 6), (vec![3, 5], 0));
    assert_eq!(walk_on(&mut walk, &flows, 5), (vec![], 0));
    assert_eq!(walk_on(&mut walk, &flows, 1), (vec![11], 0));
    assert!(walk.is_under_way());
}

#[test]
fn a_chunk_that_is_not_in_use_costs_one_step() {
    let last = 3 * SLOTS_PER_CHUNK;
    let flows = flows_in(&[last]);
    let mut walk = SlotWalk::default();
    walk.start(&flows);
    assert_eq!(walk_on(&mut walk, &flows, 4), (vec![last], 0));
}

#[test]
fn a_walk_that_is_started_again_passes_what_it_had_passed() {
    let mut flows = flows_in(&[1, 2, 3_000]);
    let mut walk = SlotWalk::default();
    walk.start(&flows);
    assert_eq!(walk_on(&mut walk, &flows, 2).0, [1]);
    walk.start(&flows);
    add(&mut flows, 0);
    assert_eq!(walk_on(&mut walk, &flows, u32::MAX).0, [2, 3_000, 0, 1]);
    assert!(!walk.is_under_way());
}
