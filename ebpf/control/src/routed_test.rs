use std::{
    net::Ipv4Addr,
    sync::{Barrier, atomic::Ordering::Release},
};

use slipgate_abi::IfIndex;
use tempfile::TempDir;

use super::*;
use crate::{
    InMemory, Owner, Sizes,
    owner::{self, PATIENCE},
    vm::{self, Ipv6Spec, VmSpec},
};

/// Maps that several processes share.
struct Rig {
    memory: InMemory,
    _first: Owner,
    _dir: TempDir,
}

/// A process with a row.
struct Process<'a> {
    memory: &'a InMemory,
    owner: Owner,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths {
            pin_dir: dir.path().join("maps"),
            run_dir: dir.path().join("maps"),
        };
        let (memory, first) = InMemory::open(paths, Sizes::of_slots(4_096)).unwrap();
        Self {
            memory,
            _first: first,
            _dir: dir,
        }
    }

    fn maps(&self) -> &SharedMaps {
        &self.memory.maps
    }

    /// A process that is to serve these VMs.
    fn process(&self, names: &[&str]) -> Process<'_> {
        let memory = &self.memory;
        let owner = Owner::take(&memory.maps, memory.paths(), names).unwrap();
        Process { memory, owner }
    }

    fn holder(&self, routed: Routed) -> Option<VmId> {
        let entry = self.maps().forwards6.get(&routed.key()).unwrap();
        entry.map(|entry| entry.id())
    }
}

impl Process<'_> {
    /// Adds a VM, as a broker does.
    fn add(&self, name: &str, routed: Routed) -> Result<OpenVm> {
        self.add_within(name, routed, PATIENCE)
    }

    fn add_within(&self, name: &str, routed: Routed, patience: Duration) -> Result<OpenVm> {
        let (maps, paths) = (&self.memory.maps, self.memory.paths());
        let (prefix, gateway) = match routed {
            Routed::Prefix(first) => (first, Ipv6Addr::from_bits(first.to_bits() | 1)),
            Routed::Address(address) => (address, ip("fd73:6c69:7067::1")),
        };
        let spec = VmSpec {
            name: name.to_owned(),
            guest: Ipv4Addr::new(10, 0, 2, 15),
            gateway: Ipv4Addr::new(10, 0, 2, 2),
            prefix_len: 24,
            ipv6: Some(Ipv6Spec {
                prefix,
                gateway,
                gateway_local: ip("fe80::1"),
            }),
            guest_mac: None,
            gateway_mac: [2, 0, 0, 0, 0, 1],
            mtu: 1_500,
            credits: 64,
            policy: 0,
            tap_ifindex: None,
            port_ifindex: IfIndex::new(8),
        };
        let open = vm::open(maps, &self.owner, &spec).unwrap();
        let taken = take(maps, paths, routed, &open, self.owner.rows(), patience);
        if taken.is_err() && !open.adopted {
            vm::close(maps, open.row).unwrap();
        }
        taken.map(|()| open)
    }

    fn remove(&self, open: &OpenVm, routed: Routed) {
        leave(&self.memory.maps, routed, open.id).unwrap();
        vm::close(&self.memory.maps, open.row).unwrap();
    }
}

fn ip(text: &str) -> Ipv6Addr {
    text.parse().unwrap()
}

fn prefix() -> Routed {
    Routed::Prefix(ip("2001:db8:42::"))
}

fn address() -> Routed {
    Routed::Address(ip("2001:db8:42::9"))
}

/// Each pair of which the second is in the way of the first.
fn overlaps() -> [(Routed, Routed); 4] {
    [
        (prefix(), prefix()),
        (prefix(), address()),
        (address(), prefix()),
        (address(), address()),
    ]
}

#[test]
fn what_overlaps_is_refused_in_either_order_until_it_is_left() {
    let rig = Rig::new();
    let (one, other) = (rig.process(&[]), rig.process(&[]));
    for (wanted, there) in overlaps() {
        let has = one.add("a", there).unwrap();
        let error = other.add("b", wanted).unwrap_err();
        assert!(matches!(error, Error::RoutedInUse { .. }), "{error}");
        let text = error.to_string();
        for said in [wanted.to_string(), there.to_string()] {
            assert!(text.contains(&said), "{text}");
        }
        assert!(text.contains("a, a VM of another process"), "{text}");
        assert_eq!(rig.holder(there), Some(has.id));
        assert!(wanted == there || rig.holder(wanted).is_none());
        one.remove(&has, there);
        let after = other.add("b", wanted).unwrap();
        assert_eq!(rig.holder(wanted), Some(after.id));
        other.remove(&after, wanted);
    }
}

#[test]
fn what_is_beside_it_is_another_vms() {
    let rig = Rig::new();
    let (one, other) = (rig.process(&[]), rig.process(&[]));
    one.add("a", address()).unwrap();
    one.add("b", Routed::Prefix(ip("2001:db8:43::"))).unwrap();
    other
        .add("c", Routed::Address(ip("2001:db8:42::a")))
        .unwrap();
    other.add("d", Routed::Prefix(ip("2001:db8:41::"))).unwrap();
    // One that was a single address of the prefix, in a row that has none any more.
    let gone = one.add("e", Routed::Address(ip("2001:db8:44::9"))).unwrap();
    vm::set_ipv6(rig.maps(), gone.row, None);
    other.add("f", Routed::Prefix(ip("2001:db8:44::"))).unwrap();
}

/// A process has its own checks, which know what is gone.
#[test]
fn what_this_process_has_in_its_rows_is_not_in_the_way() {
    let rig = Rig::new();
    let one = rig.process(&[]);
    for (at, (wanted, there)) in overlaps().into_iter().enumerate() {
        one.add(&format!("a{at}"), there).unwrap();
        let after = one.add(&format!("b{at}"), wanted).unwrap();
        assert_eq!(rig.holder(wanted), Some(after.id));
    }
}

#[test]
fn of_two_that_come_at_once_one_has_it_and_the_other_after_it() {
    let rig = Rig::new();
    let processes = [rig.process(&[]), rig.process(&[])];
    for round in 0..400 {
        let (first, second) = overlaps()[round % 4];
        let wanted = [first, second];
        let barrier = Barrier::new(2);
        let added = std::thread::scope(|scope| {
            let threads = [0, 1].map(|at| {
                let (barrier, processes) = (&barrier, &processes);
                scope.spawn(move || {
                    barrier.wait();
                    processes[at].add(["a", "b"][at], wanted[at])
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        let winner = match &added {
            [Ok(_), Err(_)] => 0,
            [Err(_), Ok(_)] => 1,
            _ => panic!("round {round}: {added:?}"),
        };
        let loser = 1 - winner;
        let refused = added[loser].as_ref().unwrap_err();
        assert!(matches!(refused, Error::RoutedInUse { .. }), "{refused}");
        let open = added[winner].as_ref().unwrap();
        processes[winner].remove(open, wanted[winner]);
        let open = processes[loser].add("c", wanted[loser]).unwrap();
        processes[loser].remove(&open, wanted[loser]);
    }
}

#[test]
fn a_dead_process_keeps_nothing_from_the_living() {
    for (wanted, there) in overlaps() {
        let rig = Rig::new();
        let dead = rig.process(&["a"]);
        let had = dead.add("a", there).unwrap();
        // It dies between its claim and its first packet, or later. Its row and entry stay.
        drop(dead);
        let living = rig.process(&["b"]);
        let open = living.add("b", wanted).unwrap();
        assert!(!open.adopted && open.row != had.row);
        assert_eq!(rig.holder(wanted), Some(open.id));
        if wanted == prefix() && there == address() {
            // The programs would find it before the prefix.
            assert_eq!(rig.holder(there), None);
        }
        // Its successor has to do without.
        let successor = rig.process(&["a"]);
        assert!(successor.owner.adopted());
        let error = successor.add("a", there).unwrap_err();
        assert!(matches!(error, Error::RoutedInUse { .. }), "{error}");
        living.remove(&open, wanted);
        let again = successor.add("a", there).unwrap();
        assert_eq!((again.id, rig.holder(there)), (had.id, Some(had.id)));
    }
}

#[test]
fn a_dead_process_among_the_living_changes_nothing() {
    let rig = Rig::new();
    let (dead, one, other) = (rig.process(&[]), rig.process(&[]), rig.process(&[]));
    let had = dead.add("a", address()).unwrap();
    let beside = Routed::Address(ip("2001:db8:42::a"));
    let has = one.add("b", beside).unwrap();
    drop(dead);
    let error = other.add("c", prefix()).unwrap_err().to_string();
    assert!(error.contains(&format!("overlaps {beside}")), "{error}");
    assert_eq!(rig.holder(address()), Some(had.id));
    assert_eq!(rig.holder(beside), Some(has.id));
    assert_eq!(rig.holder(prefix()), None);
}

/// The id in the entry is not the one of its row any more.
#[test]
fn what_a_closed_vm_left_is_nobodys() {
    let rig = Rig::new();
    let (one, other) = (rig.process(&[]), rig.process(&[]));
    for (wanted, there) in overlaps() {
        let closed = one.add("a", there).unwrap();
        let row = rig.maps().vm(closed.row).unwrap();
        row.id().store(0, Release);
        let open = other.add("b", wanted).unwrap();
        assert_eq!(rig.holder(wanted), Some(open.id));
        other.remove(&open, wanted);
        rig.maps().forwards6.remove(&there.key()).unwrap();
    }
}

#[test]
fn the_wait_for_a_lock_has_an_end_and_leaves_all_as_it_was() {
    let rig = Rig::new();
    let (maps, paths) = (rig.maps(), rig.memory.paths());
    let (one, other) = (rig.process(&[]), rig.process(&[]));
    let has = one.add("a", prefix()).unwrap();
    let held = FileLock::of_routed(&paths.run_dir, PATIENCE).unwrap();
    let free = Routed::Prefix(ip("2001:db8:43::"));
    let refused = other.add_within("b", free, Duration::ZERO);
    assert!(refused.unwrap_err().is_locked());
    assert_eq!(rig.holder(free), None);
    // Nor are entries removed meanwhile that may be another's by now.
    let swept = owner::sweep(maps, paths, [&one.owner], Duration::ZERO);
    assert!(swept.unwrap_err().is_locked());
    let closed = [has.id].into_iter().collect();
    let removed = vm::remove_entries(maps, paths, &closed, Duration::ZERO);
    assert!(removed.unwrap_err().is_locked());
    assert_eq!(rig.holder(prefix()), Some(has.id));
    drop(held);
    vm::remove_entries(maps, paths, &closed, Duration::ZERO).unwrap();
    assert_eq!(rig.holder(prefix()), None);

    // Only who is in the way of another takes the directory's lock, which starts hold for seconds.
    one.add("a", prefix()).unwrap();
    let _starting = FileLock::wait(&paths.run_dir.join("lock"), PATIENCE).unwrap();
    other.add_within("b", free, Duration::ZERO).unwrap();
    let refused = other.add_within("c", address(), Duration::ZERO);
    assert!(refused.unwrap_err().is_locked());
}
