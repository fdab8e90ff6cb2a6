use std::{collections::HashSet, net::Ipv4Addr};

use super::*;
use crate::flow::table::Marks;

const NAT: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const REST_NS: u64 = PORT_REST_NS + 1;

fn mappings(range: RangeInclusive<u16>, vms: usize) -> Mappings {
    let mut mappings = Mappings::new();
    mappings.set_range(Some(range));
    mappings.share_among(vms);
    mappings
}

fn inside(vm: u32, port: u16) -> Inside {
    Inside {
        vm: VmId::new(vm),
        protocol: Protocol::Udp,
        guest: Ipv4Addr::new(10, 0, 2, 15).into(),
        port,
        nat: NAT,
    }
}

fn take(mappings: &mut Mappings, vm: u32, port: u16) -> Option<u16> {
    mappings.take(inside(vm, port), VmRow::new(vm as u16))
}

/// A flow of a guest's port that has the mapping.
fn flow(mappings: &Mappings, of: &Inside) -> Entry {
    let guest = FlowTuple {
        scope: of.vm.get(),
        local: of.guest,
        local_port: of.port,
        remote: Ipv4Addr::new(198, 51, 100, 7).into(),
        remote_port: 443,
        protocol: of.protocol as u8,
    };
    let port = mappings.get(of).unwrap().port;
    let row = VmRow::new(of.vm.get() as u16);
    Entry::live(guest, of.nat, port, row, 1, Marks::NONE)
}

fn free(mappings: &Mappings) -> usize {
    mappings.free(inside(1, 1).pool()).unwrap().len()
}

/// Takes ports for ports of this parity until none is given.
fn take_all(mappings: &mut Mappings, vm: u32, parity: u16) -> Vec<u16> {
    let ports = (0..).map(|number| 1_000 + 2 * number + parity);
    ports.map_while(|port| take(mappings, vm, port)).collect()
}

#[test]
fn each_port_of_the_range_is_given_once_and_of_the_same_parity_first() {
    let mut mappings = mappings(50_000..=50_099, 1);
    let taken = take_all(&mut mappings, 1, 0);
    assert_eq!(taken.len(), 100);
    assert!(taken[..50].iter().all(|port| port % 2 == 0));
    assert!(taken[50..].iter().all(|port| port % 2 == 1));
    assert_eq!(HashSet::<u16>::from_iter(taken).len(), 100);
    assert_eq!(free(&mappings), 0);
    for number in 0..100 {
        assert!(mappings.give_back(&inside(1, 1_000 + 2 * number)));
    }
    assert_eq!(free(&mappings), 100);
}

#[test]
fn a_port_that_is_bound_is_neither_given_nor_counted_as_free() {
    let mut mappings = mappings(50_000..=50_015, 2);
    mappings.set_reserved((50_000..50_008).map(|port| (Protocol::Udp, port)));
    // Four are kept for those of the two VMs that have less than two.
    assert_eq!(take_all(&mut mappings, 1, 0).len(), 4);
    let others = take_all(&mut mappings, 2, 1);
    assert_eq!(others.len(), 2);
    assert!(others.iter().all(|port| *port >= 50_008));
    // Given back while bound, it is free when it is no more.
    mappings.set_reserved((50_008..=50_015).map(|port| (Protocol::Udp, port)));
    assert_eq!(free(&mappings), 8);
    assert!(mappings.give_back(&inside(1, 1_000)));
    assert_eq!(free(&mappings), 8);
    mappings.set_reserved([]);
    assert_eq!(free(&mappings), 11);
}

#[test]
fn a_mapping_rests_once_however_often_it_is_used_again() {
    let mut mappings = mappings(50_000..=50_015, 1);
    let (own, slot) = (inside(1, 5_000), SlotIndex::new(7));
    take(&mut mappings, 1, 5_000);
    let entry = flow(&mappings, &own);
    for now_ns in 1..1_000 {
        mappings.joined(slot, &entry);
        assert_eq!(mappings.rests.len(), 0);
        mappings.left(slot, &entry, now_ns);
        assert_eq!(mappings.rests.len(), 1);
    }
    assert!(mappings.wake(REST_NS));
    assert_eq!(mappings.len(), 1, "the last rest counts");
    assert!(mappings.wake(REST_NS + 1_000));
    assert_eq!((mappings.len(), mappings.rests.len()), (0, 0));
}

fn rest(mappings: &mut Mappings, vm: u32, port: u16, now_ns: u64) -> u16 {
    let own = inside(vm, port);
    let taken = take(mappings, vm, port).unwrap();
    let entry = flow(mappings, &own);
    mappings.joined(SlotIndex::new(7), &entry);
    mappings.left(SlotIndex::new(7), &entry, now_ns);
    taken
}

#[test]
fn nothing_is_kept_of_an_address_without_mappings() {
    let mut mappings = mappings(50_000..=50_015, 1);
    rest(&mut mappings, 1, 1_000, 0);
    assert!(mappings.wake(0));
    assert_eq!(mappings.free.borrow().len(), 1);
    assert!(mappings.wake(REST_NS));
    assert!(mappings.is_empty() && mappings.free.borrow().is_empty());
    assert_eq!(free(&mappings), 16);
}

#[test]
fn a_vms_oldest_resting_port_makes_room_and_no_other_vms() {
    let mut mappings = mappings(50_000..=50_003, 1);
    rest(&mut mappings, 1, 5_000, 10);
    let oldest = rest(&mut mappings, 2, 5_000, 30);
    rest(&mut mappings, 2, 5_001, 20);
    rest(&mut mappings, 2, 5_000, 25);
    let newer = rest(&mut mappings, 1, 5_001, 40);
    assert_eq!(take(&mut mappings, 3, 5_000), None);
    assert!(!mappings.would_give((VmId::new(3), inside(3, 1).pool()), None, &[]));
    assert!(mappings.would_give((VmId::new(2), inside(2, 1).pool()), None, &[]));
    take(&mut mappings, 2, 5_002).unwrap();
    assert!(mappings.get(&inside(2, 5_001)).is_none(), "ended first");
    assert_eq!(mappings.get(&inside(2, 5_000)).unwrap().port, oldest);
    assert_eq!(mappings.get(&inside(1, 5_001)).unwrap().port, newer);
}

#[test]
fn rests_end_so_many_at_once() {
    let ports = PORTS_AT_ONCE as u16 + 100;
    let mut mappings = mappings(20_000..=60_000, 1);
    for port in 0..ports {
        rest(&mut mappings, 1, port, 0);
    }
    assert!(!mappings.wake(REST_NS));
    assert_eq!(mappings.len(), 100);
    assert!(mappings.wake(REST_NS));
    assert!(mappings.is_empty());
}

#[test]
fn one_vm_leaves_room_for_the_open_ports_of_others() {
    let mut mappings = mappings(20_000..=60_000, 2);
    let open = |mappings: &mut Mappings, vm: u32| {
        let mut opened = 0;
        while mappings.may_open(VmId::new(vm)) {
            take(mappings, vm, opened).unwrap();
            mappings.set_open(&inside(vm, opened), true);
            opened += 1;
        }
        usize::from(opened)
    };
    assert_eq!(open(&mut mappings, 1), 6_144, "a quarter is kept");
    assert_eq!(open(&mut mappings, 2), 1_024, "as many for each");
    for port in 0..6_144 {
        assert!(mappings.give_back(&inside(1, port)));
    }
    assert!(mappings.may_open(VmId::new(2)), "and come back");
    // Processes divide them.
    let mut mappings = self::mappings(20_000..=60_000, 1);
    mappings.share_with(0, 0b1110);
    assert_eq!(open(&mut mappings, 1), 2_048);
}

#[test]
fn processes_divide_the_range() {
    let rows = 0b10_1101_u64;
    let mut all = Vec::new();
    for row in (0..64).filter(|row| rows >> row & 1 == 1) {
        let mut mappings = mappings(50_000..=54_095, 1);
        mappings.share_with(row, rows & !(1 << row));
        let ports = take_all(&mut mappings, 1, 0);
        assert!((900..1_150).contains(&ports.len()), "{}", ports.len());
        all.extend(ports);
    }
    all.sort_unstable();
    assert!(all.into_iter().eq(50_000..=54_095), "each has one owner");
    // Alone again, it has all.
    let mut mappings = mappings(50_000..=54_095, 1);
    mappings.share_with(3, 0b1);
    mappings.share_with(3, 0);
    assert_eq!(free(&mappings), 4_096);
}

#[test]
fn what_may_have_changed_is_taken_in_parts_and_once() {
    let mut mappings = mappings(20_000..=60_000, 1);
    for port in 0..600 {
        take(&mut mappings, 1 + u32::from(port % 2), port).unwrap();
    }
    assert!(!mappings.has_changed());
    mappings.look_again(VmId::new(1));
    mappings.look_again(VmId::new(1));
    let mut taken = Vec::new();
    while mappings.has_changed() {
        let part = mappings.take_changed(256);
        assert!(part.len() <= 256);
        taken.extend(part);
    }
    assert_eq!(taken.len(), 300);
    assert!(taken.iter().all(|inside| inside.vm == VmId::new(1)));
}
