//! A start over maps that an engine was free to write, and wrote.

use std::{collections::BTreeSet, sync::atomic::Ordering::Release};

use slipgate_abi::{
    FlowRef, IfIndex, Tuple, VmRow,
    maps::{MAX_NEXT_HOPS, MAX_OWNERS},
};

use super::*;
use crate::{
    maps::Insert,
    netlink::{NetworkWatch, NextHops},
    testing::{in_netns, maps_only, vm_spec},
    vm,
};

/// A pseudo-random sequence (Marsaglia's xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // Small numbers, too: those that are rows and indexes.
        match self.0 >> 62 {
            0 => (self.0 >> 20) as u32 % 8,
            1 => u32::MAX,
            _ => (self.0 >> 20) as u32,
        }
    }

    /// Fills an element of a mapped array.
    fn fill<T>(&mut self, element: *mut T) {
        let words = element.cast::<u32>();
        for at in 0..size_of::<T>() / 4 {
            // SAFETY: within an element, whose words have no invalid values.
            unsafe { words.add(at).write_volatile(self.next()) };
        }
    }
}

#[test]
fn a_start_over_nonsense_serves_or_says_why_not() {
    in_netns("nonsense", || {
        let datapath = maps_only();
        let (maps, paths) = (datapath.maps(), datapath.paths());
        let watch = NetworkWatch::open().unwrap();
        let mut started = 0;
        for seed in 1..=30u64 {
            let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let vms = [VmRow::NOBODY].into_iter().chain(VmRow::all());
            vms.for_each(|row| random.fill(maps.vm(row).unwrap().as_ptr()));
            (0..MAX_OWNERS).for_each(|row| random.fill(maps.owner(row).unwrap()));
            (1..MAX_NEXT_HOPS).for_each(|at| random.fill(maps.next_hop(at).unwrap().as_ptr()));
            maps.slot_indexes()
                .for_each(|at| random.fill(maps.slot(at).unwrap().as_ptr()));
            (0..maps.chunks()).for_each(|at| {
                maps.chunk(at).unwrap().store(random.next(), Release);
            });
            for _ in 0..50 {
                let mut tuple = std::mem::MaybeUninit::<Tuple>::zeroed();
                random.fill(tuple.as_mut_ptr());
                let mut flow = std::mem::MaybeUninit::<FlowRef>::zeroed();
                random.fill(flow.as_mut_ptr());
                // SAFETY: integers only.
                let (tuple, flow) = unsafe { (tuple.assume_init(), flow.assume_init()) };
                let _ = maps.flows.insert(&tuple, &flow, Insert::Any);
            }
            // What an engine knows it may name.
            crate::vm_rows::set_owner(maps, VmRow::new(1), 0);
            let name = vm::name_of(maps, VmRow::new(1)).unwrap();
            let Ok(owner) = Owner::take(maps, paths, &[&name, "a"]) else {
                continue;
            };
            started += 1;
            owner
                .note_taps(paths, BTreeSet::from([IfIndex::new(7)]))
                .unwrap();
            sweep(maps, paths, [&owner], PATIENCE).unwrap();
            for row in vm::rows_of(maps, owner.row()).collect::<Vec<_>>() {
                vm::retire(maps, row);
                vm::close(maps, row).unwrap();
            }
            let _ = vm::open(maps, &owner, &vm_spec("a"));
            let mut hops = NextHops::new(vec![owner.row()]).unwrap();
            assert_eq!(
                hops.refresh(maps, watch.network(), &[IfIndex::new(1)].into())
                    .unwrap(),
                0
            );
            assert_eq!(
                owner.noted_taps(paths).unwrap(),
                BTreeSet::from([IfIndex::new(7)])
            );
        }
        assert!(started > 0, "it was refused each time");
    });
}

#[test]
fn who_lives_is_a_locks_word_whatever_a_row_says() {
    in_netns("who_lives", || {
        let datapath = maps_only();
        let (maps, paths) = (datapath.maps(), datapath.paths());
        let owner = Owner::take(maps, paths, &[]).unwrap();
        vm::open(maps, &owner, &vm_spec("a")).unwrap();
        let row = owner.row();
        // The row names a process that has ended.
        word(maps, row, Field::Pid).store(u32::MAX, Release);
        let refused = Owner::take(maps, paths, &["a"]).unwrap_err();
        assert!(matches!(refused, Error::VmInUse { .. }), "{refused}");
        drop(owner);
        // The row names a process that lives.
        word(maps, row, Field::Pid).store(1, Release);
        let next = Owner::take(maps, paths, &["a"]).unwrap();
        assert!(next.adopted() && next.row() == row);
    });
}
