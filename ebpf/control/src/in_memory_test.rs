use std::{net::Ipv4Addr, path::Path};

use slipgate_abi::{FlowRef, IfIndex, Ip4, SlotIndex, Tuple, Verdict};

use super::*;
use crate::{
    maps::{Insert, InsertError, ReadOnlyMaps},
    vm::{self, VmSpec},
};

const SLOTS: u32 = 4_096;

fn open(dir: &Path) -> (InMemory, Owner) {
    let paths = Paths {
        pin_dir: dir.to_owned(),
        run_dir: dir.to_owned(),
    };
    InMemory::open(paths, Sizes::of_slots(SLOTS)).unwrap()
}

fn open_vm(memory: &InMemory, owner: &Owner, name: &str) -> vm::OpenVm {
    let spec = VmSpec {
        name: name.to_owned(),
        guest: Ipv4Addr::new(10, 0, 2, 15),
        gateway: Ipv4Addr::new(10, 0, 2, 2),
        prefix_len: 24,
        ipv6: None,
        guest_mac: None,
        gateway_mac: [2, 0, 0, 0, 0, 1],
        mtu: 1_500,
        credits: 64,
        policy: 0,
        tap_ifindex: Some(IfIndex::new(7)),
        port_ifindex: IfIndex::new(8),
    };
    vm::open(&memory.maps, owner, &spec).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let maps = ReadOnlyMaps::open_pinned(dir).unwrap();
    assert!(maps.are_of_userspace());
    maps.vms().map(|(_, vm)| ReadOnlyMaps::name(&vm)).collect()
}

#[test]
fn processes_share_the_files_and_the_last_removes_them() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("maps");
    let (a, owner_a) = open(&dir);
    let (b, owner_b) = open(&dir);
    assert_ne!(owner_a.row(), owner_b.row());
    assert_eq!(a.maps.instance(), b.maps.instance());
    assert_eq!(a.maps.slots(), SLOTS);
    let (vm_a, vm_b) = (open_vm(&a, &owner_a, "a"), open_vm(&b, &owner_b, "b"));
    assert_ne!((vm_a.id, vm_a.row), (vm_b.id, vm_b.row));
    assert_eq!(names(&dir), ["a", "b"]);
    vm::close(&a.maps, vm_a.row).unwrap();
    a.close(owner_a).unwrap();
    assert_eq!(names(&dir), ["b"]);
    vm::close(&b.maps, vm_b.row).unwrap();
    b.close(owner_b).unwrap();
    assert!(!dir.exists());
}

#[test]
fn what_a_killed_process_left_is_nobodys() {
    let dir = tempfile::tempdir().unwrap();
    let (_living, _owner) = open(dir.path());
    let (killed, its_owner) = open(dir.path());
    let row = its_owner.row();
    open_vm(&killed, &its_owner, "killed");
    let (chunk, _) = killed.maps.claim_chunk(row, 0).unwrap();
    let slot = killed.maps.slot(SlotIndex::new(chunk.start)).unwrap();
    slot.set_verdict(Verdict::Fast);
    // Its lock is free, and nothing was taken back.
    drop((killed, its_owner));
    assert_eq!(names(dir.path()), ["killed"]);
    let (next, _next_owner) = open(dir.path());
    assert!(names(dir.path()).is_empty());
    assert!(next.maps.chunks_of(row).is_empty());
    let slot = next.maps.slot(SlotIndex::new(chunk.start)).unwrap();
    assert_eq!(
        slot.verdict().load(std::sync::atomic::Ordering::Acquire),
        Verdict::Free as u32
    );
}

#[test]
fn files_of_another_length_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_memory, _owner) = open(dir.path());
    let file = std::fs::File::options()
        .write(true)
        .open(dir.path().join("VMS"));
    file.unwrap().set_len(4_096).unwrap();
    let error = ReadOnlyMaps::open_pinned(dir.path())
        .unwrap_err()
        .to_string();
    assert!(error.contains("VMS"), "{error}");
}

#[test]
fn a_table_in_memory_keeps_the_kernels_rules() {
    let dir = tempfile::tempdir().unwrap();
    let (memory, _owner) = open(dir.path());
    let flows = &memory.maps.flows;
    let tuple = |port| Tuple {
        scope: 1,
        local: Ip4 {
            octets: [10, 0, 2, 15],
        },
        remote: Ip4 {
            octets: [192, 0, 2, 1],
        },
        local_port: port,
        remote_port: 80,
        protocol: 6,
        pad: [0; 3],
    };
    let flow = FlowRef::new(SlotIndex::new(5), 1);
    flows.insert(&tuple(1), &flow, Insert::New).unwrap();
    let again = flows.insert(&tuple(1), &flow, Insert::New);
    assert!(matches!(again, Err(InsertError::Exists)));
    let missing = flows.insert(&tuple(2), &flow, Insert::Existing);
    assert!(matches!(missing, Err(InsertError::Missing)));
    assert_eq!(flows.get(&tuple(1)).unwrap(), Some(flow));
    assert!(flows.remove(&tuple(1)).unwrap() && !flows.remove(&tuple(1)).unwrap());
    let most = 2 * SLOTS as u16;
    for port in 0..most {
        flows.insert(&tuple(port), &flow, Insert::New).unwrap();
    }
    let full = flows.insert(&tuple(most), &flow, Insert::New);
    assert!(matches!(full, Err(InsertError::Full)));
    assert_eq!(flows.entries().unwrap().len(), most.into());
}
