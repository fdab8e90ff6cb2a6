use std::{fs, process::Command};

use slipgate_abi::{FlowRef, IfIndex, Protocol, Slot, SlotIndex, SlotRef, Tuple, Verdict};

use super::*;
use crate::{
    Hook, Program,
    maps::Insert,
    testing::{attached_at, datapath, in_netns, make_tap, maps_only, vm_spec},
    vm,
};

#[path = "owner/sweep6_test.rs"]
mod sweep6;

#[test]
fn a_living_owner_keeps_its_row() {
    in_netns("a_living_owner_keeps_its_row", || {
        let datapath = maps_only();
        let take = |names: &[&str]| Owner::take(datapath.maps(), datapath.paths(), names);
        let first = take(&["a"]).unwrap();
        vm::open(datapath.maps(), &first, &vm_spec("a")).unwrap();
        let second = take(&["b"]).unwrap();
        assert_ne!(first.row(), second.row());
        let rows = 1 << first.row() | 1 << second.row();
        assert_eq!(datapath.maps().owners(), rows);
        assert!(!first.adopted() && !second.adopted());
        let error = take(&["b", "a"]).unwrap_err();
        let Error::VmInUse { name, pid } = error else {
            panic!("{error}");
        };
        assert_eq!((name.as_str(), pid), ("a", std::process::id()));
    });
}

#[test]
fn a_dead_owners_row_is_adopted_by_who_serves_its_vms() {
    in_netns("a_dead_owners_row_is_adopted_by_who_serves_its_vms", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let take = |names: &[&str]| Owner::take(maps, datapath.paths(), names).unwrap();
        let first = take(&["a"]);
        let (row, epoch) = (first.row(), first.epoch());
        let before = vm::open(maps, &first, &vm_spec("a")).unwrap();
        let chunk = maps.claim_chunk(row, 0).unwrap().0;
        drop(first);

        // A process that serves another VM leaves it alone.
        let other = take(&["b"]);
        assert_ne!(other.row(), row);

        let second = take(&["a", "c"]);
        assert_eq!((second.row(), second.epoch()), (row, epoch + 1));
        assert!(second.adopted());
        assert_eq!(maps.chunks_of(row), vec![chunk]);
        let after = vm::open(maps, &second, &vm_spec("a")).unwrap();
        assert!(after.adopted && !before.adopted);
        assert_eq!((after.id, after.row), (before.id, before.row));
        let new = vm::open(maps, &second, &vm_spec("c")).unwrap();
        assert!(new.id > before.id && new.row != before.row);
    });
}

#[test]
fn several_dead_owners_rows_become_one() {
    in_netns("several_dead_owners_rows_become_one", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let take = |names: &[&str]| Owner::take(maps, datapath.paths(), names).unwrap();
        let (first, second) = (take(&["a"]), take(&["b"]));
        vm::open(maps, &first, &vm_spec("a")).unwrap();
        vm::open(maps, &second, &vm_spec("b")).unwrap();
        maps.claim_chunk(first.row(), 0).unwrap();
        maps.claim_chunk(second.row(), 0).unwrap();
        let hop = maps
            .claim_next_hop(second.row(), IfIndex::new(1), [10, 0, 0, 1], 0)
            .unwrap();
        let rows = [first.row(), second.row()];
        drop((first, second));

        let third = take(&["b", "a"]);
        assert_eq!(third.row(), rows[0]);
        assert_eq!(maps.chunks_of(rows[0]).len(), 2);
        assert!(maps.chunks_of(rows[1]).is_empty());
        assert_eq!(vm::rows_of(maps, rows[0]).count(), 2);
        assert_eq!(maps.next_hops_of(rows[0]).collect::<Vec<_>>(), [hop]);
    });
}

/// Its engine was killed with the ring open, and its VMs went to another row.
#[test]
fn a_row_without_vms_begins_with_an_empty_shut_ring() {
    in_netns("a_row_without_vms_begins_with_an_empty_shut_ring", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let take = |names: &[&str]| Owner::take(maps, datapath.paths(), names).unwrap();
        let leave = |row: u32| {
            let ring = maps.owner_ref(row).unwrap();
            ring.ring_open().store(1, Release);
            ring.ring_tail().store(700, Release);
            ring.ring_head().store(600, Release);
            ring.port_handed().store(9, Release);
            ring.port_taken().store(7, Release);
        };
        let state = |row: u32| {
            let ring = maps.owner_ref(row).unwrap();
            let numbers = [
                ring.ring_tail(),
                ring.ring_head(),
                ring.port_handed(),
                ring.port_taken(),
            ];
            let numbers = numbers.map(|number| number.load(Acquire));
            (ring.ring_open().load(Acquire), numbers)
        };
        let (first, second) = (take(&["a"]), take(&["b"]));
        vm::open(maps, &first, &vm_spec("a")).unwrap();
        vm::open(maps, &second, &vm_spec("b")).unwrap();
        let rows = [first.row(), second.row()];
        drop((first, second));
        rows.into_iter().for_each(leave);
        let both = take(&["a", "b"]);
        assert_eq!(both.row(), rows[0]);
        // What waits for a successor is its.
        assert_eq!(state(rows[0]), (1, [700, 600, 9, 7]));
        // A row that is merged is locked until its owner goes.
        let vms: Vec<_> = vm_rows::rows_of(maps, rows[0]).collect();
        vms.into_iter()
            .for_each(|row| maps.vm(row).unwrap().id().store(0, Release));
        drop(both);
        let (next, another) = (take(&["c"]), take(&["d"]));
        assert_eq!([next.row(), another.row()], rows);
        for row in rows {
            assert_eq!(state(row), (0, [700, 700, 9, 9]));
        }
    });
}

/// The lock is freed when the process dies, whatever it did.
#[test]
fn killing_the_owner_frees_its_row() {
    in_netns("killing_the_owner_frees_its_row", || {
        let datapath = maps_only();
        let path = lock_path(datapath.paths(), 0);
        fs::write(&path, "").unwrap();
        let mut holder = Command::new("flock")
            .arg("--no-fork")
            .arg(&path)
            .args(["sleep", "100"])
            .spawn()
            .unwrap();
        let alive = || is_alive(datapath.paths(), 0).unwrap();
        while !alive() {
            std::thread::yield_now();
        }
        let owner = Owner::take(datapath.maps(), datapath.paths(), &[]).unwrap();
        assert_eq!(owner.row(), 1);
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert!(!alive());
    });
}

/// Fills a slot for a flow of VM 1.
fn slot_of(maps: &SharedMaps, index: u32) -> SlotRef {
    maps.slot(SlotIndex::new(index)).unwrap()
}

fn fill(slot: SlotRef, generation: u32, port: u16, verdict: Verdict) {
    // SAFETY: a mapped slot that no other thread uses.
    unsafe {
        slot.as_ptr().write(Slot {
            generation,
            verdict,
            tcp: 0,
            next_hop: 0,
            tx_packets: 0,
            tx_bytes: 0,
            rx_packets: 0,
            rx_bytes: 0,
            tx_last_ns: 0,
            rx_last_ns: 0,
            vm: 1,
            vm_row: 1,
            guest: [10, 0, 2, 15].into_ip4(),
            remote: [1, 1, 1, 1].into_ip4(),
            nat: [192, 0, 2, 1].into_ip4(),
            guest_port: port,
            remote_port: 443,
            nat_port: port,
            protocol: Protocol::Tcp,
            flags: 0,
            isn: 0,
            created_ns: 0,
            rule: 0,
            uplink_ifindex: 0,
            owner: 0,
            epoch: 0,
            fin_end_tx: 0,
            fin_end_rx: 0,
            connect_us: 0,
        });
    }
}

trait IntoIp4 {
    fn into_ip4(self) -> slipgate_abi::Ip4;
}

impl IntoIp4 for [u8; 4] {
    fn into_ip4(self) -> slipgate_abi::Ip4 {
        slipgate_abi::Ip4 { octets: self }
    }
}

#[test]
fn the_sweep_removes_half_pairs_of_the_dead_only() {
    in_netns("the_sweep_removes_half_pairs_of_the_dead_only", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let take = |names: &[&str]| Owner::take(maps, datapath.paths(), names).unwrap();
        let insert = |tuple: Tuple, slot, generation| {
            let flow = FlowRef { slot, generation };
            maps.flows.insert(&tuple, &flow, Insert::New).unwrap();
            tuple
        };
        let pair = |index: u32, port, verdict| {
            let slot = slot_of(maps, index);
            fill(slot, 5, port, verdict);
            [
                insert(slot.guest_tuple(), index, 5),
                insert(slot.world_tuple(), index, 5),
            ]
        };
        let (dead, living) = (take(&["a"]), take(&["b"]));
        vm::open(maps, &dead, &vm_spec("a")).unwrap();
        let (dead_chunk, living_chunk) = (
            maps.claim_chunk(dead.row(), 0).unwrap().0,
            maps.claim_chunk(living.row(), 0).unwrap().0,
        );
        drop(dead);

        let mut kept = pair(dead_chunk.start, 1, Verdict::Fast).to_vec();
        kept.extend(pair(dead_chunk.start + 1, 2, Verdict::Closing));
        // An admission of the living owner, before its verdict.
        kept.extend(pair(living_chunk.start, 3, Verdict::Free));
        // The same of the dead one.
        let mut gone = pair(dead_chunk.start + 2, 4, Verdict::Free).to_vec();
        // A slot that has another flow by now.
        let used_again = slot_of(maps, dead_chunk.start).world_tuple();
        gone.push(insert(
            Tuple {
                local_port: 5,
                ..used_again
            },
            dead_chunk.start,
            5,
        ));
        gone.push(insert(
            Tuple {
                local_port: 6,
                ..used_again
            },
            dead_chunk.start + 1,
            4,
        ));
        // A slot that isn't one.
        gone.push(insert(
            Tuple {
                local_port: 7,
                ..used_again
            },
            u32::MAX,
            1,
        ));

        let other = take(&["c"]);
        let sweep_for = |owner: &Owner| sweep(maps, datapath.paths(), [owner], PATIENCE).unwrap();
        {
            let adopter = take(&["a"]);
            assert_eq!(sweep_for(&adopter), Swept::default(), "its engine does it");
        }
        assert_eq!(sweep_for(&other).tuples, gone.len());
        for tuple in kept {
            assert!(maps.flows.get(&tuple).unwrap().is_some(), "{tuple:?}");
        }
        for tuple in gone {
            assert!(maps.flows.get(&tuple).unwrap().is_none(), "{tuple:?}");
        }
        assert_eq!(sweep_for(&other), Swept::default());
    });
}

#[test]
fn the_sweep_frees_what_the_dead_left_empty() {
    in_netns("the_sweep_frees_what_the_dead_left_empty", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let take = |names: &[&str]| Owner::take(maps, datapath.paths(), names).unwrap();
        let dead = take(&[]);
        let full = maps.claim_chunk(dead.row(), 0).unwrap().0;
        maps.claim_chunk(dead.row(), 0).unwrap();
        fill(slot_of(maps, full.start + 9), 1, 1, Verdict::Fast);
        let stale = slipgate_abi::TapEntry { vm: 77, vm_row: 3 };
        maps.taps.insert(&99, &stale, Insert::New).unwrap();
        let row = dead.row();
        drop(dead);
        let owner = take(&["b"]);
        assert_ne!(owner.row(), row);
        let swept = sweep(maps, datapath.paths(), [&owner], PATIENCE).unwrap();
        assert_eq!((swept.chunks, swept.entries), (1, 1));
        assert_eq!(maps.chunks_of(row), [full]);
    });
}

#[test]
fn who_waits_for_the_last_owner_begins_anew() {
    in_netns("who_waits_for_the_last_owner_begins_anew", || {
        let last = maps_only();
        let lock = last.lock().unwrap();
        let waits = std::thread::spawn(|| datapath().joined());
        // It is as likely to come before the lock's end as after: both must do.
        std::thread::sleep(std::time::Duration::from_millis(200));
        last.detach_all().unwrap();
        last.unpin_all().unwrap();
        drop(lock);
        assert!(!waits.join().unwrap());
        assert!(last.paths().pin_dir.join("FLOWS").exists());
        assert!(last.paths().run_dir.join("lock").exists());
    });
}

/// A reused index is another device, whatever the pin says.
#[test]
fn only_engine_ports_are_removed_with_their_program() {
    in_netns("only_engine_ports_are_removed_with_their_program", || {
        let datapath = datapath();
        let other = make_tap("t0");
        datapath
            .attach(Program::EnginePort, other, Hook::Clsact)
            .unwrap();
        let owner = Owner::take(datapath.maps(), datapath.paths(), &[]).unwrap();
        assert!(datapath.remove_if_last(vec![owner]).unwrap());
        crate::device::Device::named("t0").unwrap();
        assert_eq!(attached_at("t0", Program::EnginePort), 0);
    });
}

#[test]
fn the_last_owner_removes_everything() {
    in_netns("the_last_owner_removes_everything", || {
        let (first, second) = (datapath(), datapath());
        let tap = make_tap("t0");
        crate::serve::serve_tap(&first, tap, Hook::Tcx).unwrap();
        first
            .attach(Program::UplinkIngress, IfIndex::new(1), Hook::Tcx)
            .unwrap();
        let take = |names: &[&str]| Owner::take(first.maps(), first.paths(), names).unwrap();
        let (a, b) = (take(&["a"]), take(&["b"]));
        for owner in [&a, &b] {
            let port = crate::tap::EnginePort::open(owner.row(), &mut Vec::new()).unwrap();
            port.serve(&first, Hook::Tcx).unwrap();
        }
        let port = |row: u32| crate::device::Device::named(&format!("sgport{row}"));
        let (row_a, row_b) = (a.row(), b.row());
        let vm = vm::open(first.maps(), &b, &vm_spec("b")).unwrap();
        first.maps().claim_chunk(a.row(), 0).unwrap();
        let paths = first.paths().clone();
        assert_eq!(attached_at("t0", Program::GuestEgress), 1);
        assert_eq!(attached_at("lo", Program::UplinkIngress), 1);

        assert!(!second.remove_if_last(vec![a]).unwrap(), "b lives");
        assert!(paths.pin_dir.join("FLOWS").exists());
        assert!(port(row_a).is_err() && port(row_b).is_ok());
        vm::close(first.maps(), vm.row).unwrap();
        assert!(first.remove_if_last(vec![b]).unwrap());
        assert!(!paths.pin_dir.exists() && !paths.run_dir.exists());
        assert!(port(row_b).is_err());
        let device = crate::device::Device::named("t0").unwrap();
        assert_eq!(device.flags().unwrap() & libc::IFF_UP, 0, "the TAP is shut");
        assert_eq!(attached_at("t0", Program::GuestEgress), 0);
        assert_eq!(attached_at("lo", Program::UplinkIngress), 0);
    });
}

/// A process with two engines leaves two rows: two engines go on with one each, whatever their
/// order, and one with both.
#[test]
fn each_engine_goes_on_with_the_row_of_one_before() {
    in_netns("each_engine_goes_on_with_the_row_of_one_before", || {
        let datapath = maps_only();
        let (maps, paths) = (datapath.maps(), datapath.paths());
        let take = |engines| Owner::take_several(maps, paths, &["a", "b"], engines).unwrap();
        let rows = |owners: &[Owner]| owners.iter().map(Owner::row).collect::<Vec<_>>();
        let first = take(2);
        let held = rows(&first);
        vm::open(maps, &first[0], &vm_spec("a")).unwrap();
        vm::open(maps, &first[1], &vm_spec("b")).unwrap();
        let chunk = maps.claim_chunk(held[1], 0).unwrap().0;
        let port = crate::tap::EnginePort::open(held[1], &mut Vec::new()).unwrap();
        first[1].set_port(maps, port.ifindex);
        drop((port.fd, first));

        let more = take(3);
        assert_eq!(rows(&more)[..2], held);
        assert!(more[0].adopted() && more[1].adopted() && !more[2].adopted());
        assert_eq!(maps.chunks_of(held[1]), std::slice::from_ref(&chunk));
        drop(more);

        let one = take(1);
        assert_eq!(one[0].rows(), held);
        assert_eq!(vm::rows_of(maps, held[0]).count(), 2);
        assert_eq!(maps.chunks_of(held[0]), [chunk]);
        // A start that fails leaves what a predecessor left.
        let swept = sweep(maps, paths, &one, PATIENCE).unwrap();
        assert_eq!(swept.ports, 0);
        crate::device::Device::named(&port.name).unwrap();
        one[0].remove_merged_ports().unwrap();
        assert!(crate::device::Device::named(&port.name).is_err());
        for row in vm::rows_of(maps, held[0]).collect::<Vec<_>>() {
            vm::close(maps, row).unwrap();
        }
        assert!(datapath.remove_if_last(one).unwrap(), "both rows are ours");
    });
}
