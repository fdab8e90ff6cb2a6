use slipgate_abi::{DropReason, count::drop_packet, vm6::Vm6Flags};

use super::*;
use crate::{
    Owner,
    testing::{in_netns, maps_only, vm_spec},
};

#[test]
fn ids_are_never_given_out_again_and_rows_are() {
    in_netns("ids_are_never_given_out_again_and_rows_are", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
        let first = open(maps, &owner, &vm_spec("a")).unwrap();
        let row = VmRow::new(1);
        assert_eq!((first.id, first.row), (VmId::new(1), row));
        assert_eq!(name_of(maps, row).unwrap(), "a");
        // SAFETY: a mapped row.
        unsafe { drop_packet(maps.drops(row).unwrap(), DropReason::Spoofed, 3, 180) };
        maps.vm(row).unwrap().handed_over().store(5, Release);
        maps.vm(row).unwrap().world_taken_in().store(5, Release);
        close(maps, first.row).unwrap();
        assert_eq!(maps.taps.entries().unwrap(), []);

        // Rows are taken in turn: the first one is used again after the last.
        let rows = maps.vm_rows().len() as u32;
        maps.next_vm_id().store(rows + 1, Release);
        let second = open(maps, &owner, &vm_spec("b")).unwrap();
        assert_eq!((second.id, second.row), (VmId::new(rows + 1), row));
        let read = crate::ReadOnlyMaps::open_pinned(&datapath.paths().pin_dir).unwrap();
        assert_eq!(read.drops(row).unwrap().spoofed.packets, 0);
        let vm = read.vm(row).unwrap();
        assert_eq!((vm.handed_over, vm.world_taken_in, vm.id), (0, 0, rows + 1));
        assert_eq!(crate::ReadOnlyMaps::name(&vm), "b");
        assert_eq!(read.vms().map(|(row, _)| row).collect::<Vec<_>>(), [row]);
    });
}

#[test]
fn a_retired_vms_name_is_free_and_its_row_is_not() {
    in_netns("a_retired_vms_name_is_free_and_its_row_is_not", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
        let first = open(maps, &owner, &vm_spec("a")).unwrap();
        retire(maps, first.row);
        let second = open(maps, &owner, &vm_spec("a")).unwrap();
        assert!(!second.adopted && second.id != first.id && second.row != first.row);
        assert_eq!(id_of(maps, first.row), Some(first.id));
        assert_eq!(name_of(maps, first.row).unwrap(), "(gone 1)");
    });
}

#[test]
fn an_adopted_row_keeps_its_counts_and_takes_the_spec() {
    in_netns("an_adopted_row_keeps_its_counts_and_takes_the_spec", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
        let first = open(maps, &owner, &vm_spec("a")).unwrap();
        maps.vm(first.row).unwrap().handed_over().store(5, Release);
        let spec = VmSpec {
            guest_mac: Some([2, 0, 0, 0, 0, 9]),
            tap_ifindex: Some(IfIndex::new(4_242)),
            mtu: 9_000,
            ..vm_spec("a")
        };
        assert!(open(maps, &owner, &spec).unwrap().adopted);
        let vm = maps.vm(first.row).unwrap();
        assert_eq!(vm.handed_over().load(Acquire), 5);
        assert_eq!(vm.flags().load(Acquire), VmFlags::CHECK_MAC);
        // SAFETY: a word of a mapped row.
        let mtu = unsafe { (&raw const (*vm.as_ptr()).mtu).read_volatile() };
        assert_eq!(mtu, 9_000);
        let entry = TapEntry::new(first.id, first.row);
        assert_eq!(maps.taps.entries().unwrap(), [(4_242, entry)]);
    });
}

#[test]
fn ipv6_of_a_row_begins_changes_and_ends_with_the_spec() {
    in_netns(
        "ipv6_of_a_row_begins_changes_and_ends_with_the_spec",
        || {
            let datapath = maps_only();
            let maps = datapath.maps();
            let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
            let with = |prefix: Option<&str>| VmSpec {
                ipv6: prefix.map(|prefix| Ipv6Spec {
                    prefix: format!("{prefix}::").parse().unwrap(),
                    gateway: format!("{prefix}::1").parse().unwrap(),
                    gateway_local: "fe80::1".parse().unwrap(),
                }),
                ..vm_spec("a")
            };
            let own: Ipv6Addr = "fd00::15".parse().unwrap();
            let first = open(maps, &owner, &with(Some("fd00"))).unwrap();
            let row = maps.vm6(first.row).unwrap();
            let is_on = || row.flags().load(Acquire) == Vm6Flags::ON;
            let is_bound = || row.place_of(own.into()).is_some();
            assert!(is_on() && !is_bound());
            assert_eq!(Ipv6Addr::from(row.gateway()).to_string(), "fd00::1");
            row.bind(1, own.into(), 5);
            // A start with the same network keeps what the guest uses; another network does not.
            assert!(open(maps, &owner, &with(Some("fd00"))).unwrap().adopted);
            assert!(is_on() && is_bound());
            open(maps, &owner, &with(Some("fd01"))).unwrap();
            assert!(is_on() && !is_bound());
            open(maps, &owner, &with(None)).unwrap();
            assert!(!is_on());
            // Nothing of it is left for the row's next VM.
            set_ipv6(maps, first.row, with(Some("fd00")).ipv6);
            row.bind(1, own.into(), 5);
            close(maps, first.row).unwrap();
            let others = (0..slipgate_abi::maps::DEFAULT_VMS).map(|n| VmSpec {
                tap_ifindex: None,
                name: format!("b{n}"),
                ..vm_spec("b")
            });
            for spec in others {
                let vm = open(maps, &owner, &spec).unwrap();
                assert!(maps.vm6(vm.row).unwrap().copy() == slipgate_abi::Vm6::OFF);
            }
        },
    );
}

#[test]
fn names_that_do_not_fit_are_refused() {
    in_netns("names_that_do_not_fit_are_refused", || {
        let datapath = maps_only();
        let owner = Owner::take(datapath.maps(), datapath.paths(), &[]).unwrap();
        for name in ["", "a\0b", &"x".repeat(65)] {
            let error = open(datapath.maps(), &owner, &vm_spec(name)).unwrap_err();
            assert!(matches!(error, Error::VmName { .. }), "{error}");
        }
        open(datapath.maps(), &owner, &vm_spec(&"x".repeat(64))).unwrap();
    });
}

#[test]
fn a_tap_is_one_vms() {
    in_netns("a_tap_is_one_vms", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
        let first = open(maps, &owner, &vm_spec("a")).unwrap();
        let tap = vm_spec("a").tap_ifindex;
        let other = VmSpec {
            tap_ifindex: tap,
            ..vm_spec("b")
        };
        // As if another process served it: init lives for sure.
        let pid = |pid: u32| {
            let element = maps.owner(owner.row()).unwrap();
            // SAFETY: a word of a mapped element.
            unsafe { (&raw mut (*element).pid).write_volatile(pid) };
        };
        pid(1);
        let error = open(maps, &owner, &other).unwrap_err();
        assert!(
            matches!(&error, Error::TapInUse { other, pid: 1, .. } if other == "a"),
            "{error}"
        );
        let tap_of = |row| maps.vm(row).unwrap().tap_ifindex().load(Acquire);
        assert_eq!(Some(IfIndex::new(tap_of(first.row))), tap);

        // No process has this number: the row is a dead one's, and the index is new.
        pid(u32::MAX);
        let second = open(maps, &owner, &other).unwrap();
        assert_eq!(tap_of(first.row), 0);
        assert_eq!(Some(IfIndex::new(tap_of(second.row))), tap);
    });
}

/// The row would otherwise be taken for good: nobody closes a VM that was refused.
#[test]
fn a_vm_whose_tap_can_not_be_known_takes_no_row() {
    in_netns("a_vm_whose_tap_can_not_be_known_takes_no_row", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
        let mut index = 1_000;
        loop {
            let entry = TapEntry::new(VmId::new(7), VmRow::new(1));
            match maps.taps.insert(&index, &entry, Insert::New) {
                Ok(()) => index += 1,
                Err(InsertError::Full) => break,
                Err(error) => panic!("{error:?}"),
            }
        }
        let error = open(maps, &owner, &vm_spec("a")).unwrap_err();
        assert!(matches!(error, Error::Full { what: "TAP", .. }), "{error}");
        assert_eq!(rows_of(maps, owner.row()).count(), 0);
    });
}

#[test]
fn a_vm_may_wait_for_its_tap() {
    in_netns("a_vm_may_wait_for_its_tap", || {
        let datapath = maps_only();
        let maps = datapath.maps();
        let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
        let spec = VmSpec {
            tap_ifindex: None,
            ..vm_spec("a")
        };
        let open_vm = open(maps, &owner, &spec).unwrap();
        assert!(maps.taps.entries().unwrap().is_empty());
        set_tap(maps, open_vm.row, IfIndex::new(77)).unwrap();
        let entry = TapEntry::new(open_vm.id, open_vm.row);
        assert_eq!(maps.taps.entries().unwrap(), [(77, entry)]);
        // A successor that finds no TAP of that name keeps no entry of the one before.
        assert!(open(maps, &owner, &spec).unwrap().adopted);
        assert!(maps.taps.entries().unwrap().is_empty());
    });
}
