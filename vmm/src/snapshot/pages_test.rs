use std::{cell::Cell, os::unix::fs::MetadataExt as _};

use nix::sys::memfd::{MFdFlags, memfd_create};
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::memory;

const MIB: u64 = 1 << 20;

#[test]
fn memory_is_read_back_and_zeroes_take_no_room() {
    let ram = memory::create(16 * MIB).unwrap();
    let written: &[(u64, &[u8])] = &[
        (5, b"first page"),
        (PAGE_SIZE - 1, b"across pages"),
        (4 * MIB - 2, b"across pieces"),
        (9 * MIB, b"alone"),
        (16 * MIB - 1, b"!"),
    ];
    for (at, bytes) in written {
        ram.write_slice(bytes, GuestAddress(*at)).unwrap();
    }
    let file = tempfile::tempfile().unwrap();
    write_memory(&ram, &file, &|| Ok(())).unwrap();
    let data = file.metadata().unwrap();
    assert_eq!(data.len(), 16 * MIB);
    assert!(data.blocks() * 512 <= 16 * PAGE_SIZE, "{}", data.blocks());

    let restored = memory::of_file(16 * MIB, file.try_clone().unwrap()).unwrap();
    let (mut before, mut after) = (vec![0; 16 << 20], vec![0; 16 << 20]);
    ram.read_slice(&mut before, GuestAddress(0)).unwrap();
    restored.read_slice(&mut after, GuestAddress(0)).unwrap();
    assert!(before == after);

    // What a clone writes is its own.
    restored.write_slice(b"clone", GuestAddress(5)).unwrap();
    let other = memory::of_file(16 * MIB, file).unwrap();
    let mut there = [0; 10];
    other.read_slice(&mut there, GuestAddress(5)).unwrap();
    assert_eq!(&there, b"first page");
}

#[test]
fn a_snapshot_of_shared_memory_touches_no_page_that_the_guest_has_not() {
    let shared = File::from(memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).unwrap());
    // Something of another kind follows the memory.
    shared.set_len(64 * MIB + PAGE_SIZE).unwrap();
    let copy = shared.try_clone().unwrap();
    let ram = memory::shared(64 * MIB, copy, 64 * MIB + PAGE_SIZE).unwrap();
    ram.write_slice(b"alone", GuestAddress(9 * MIB)).unwrap();
    let touched = || shared.metadata().unwrap().blocks();
    let before = touched();
    let file = tempfile::tempfile().unwrap();
    write_memory(&ram, &file, &|| Ok(())).unwrap();
    assert_eq!(touched(), before);
    assert_eq!(file.metadata().unwrap().len(), 64 * MIB);
    let mut there = [0; 5];
    file.read_exact_at(&mut there, 9 * MIB).unwrap();
    assert_eq!(&there, b"alone");
}

#[test]
fn memory_with_zeroes_at_its_end_has_its_size() {
    let ram = memory::create(4 * MIB).unwrap();
    let file = tempfile::tempfile().unwrap();
    write_memory(&ram, &file, &|| Ok(())).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 4 * MIB);
}

#[test]
fn a_stop_is_heard_each_few_mebibytes() {
    let ram = memory::create(64 * MIB).unwrap();
    let file = tempfile::tempfile().unwrap();
    let asked = Cell::new(0);
    let goes_on = || {
        asked.set(asked.get() + 1);
        match asked.get() {
            3 => Err(SnapshotError::Ended),
            _ => Ok(()),
        }
    };
    let ended = write_memory(&ram, &file, &goes_on);
    assert!(matches!(ended, Err(SnapshotError::Ended)), "{ended:?}");
    assert_eq!(asked.get(), 3);
}

#[test]
fn a_file_of_another_size_is_no_memory() {
    let file = tempfile::tempfile().unwrap();
    for bytes in [0, 4 * MIB - 1, 4 * MIB + PAGE_SIZE] {
        file.set_len(bytes).unwrap();
        let refused = memory::of_file(4 * MIB, file.try_clone().unwrap()).unwrap_err();
        assert!(refused.to_string().contains("it is not whole"), "{refused}");
    }
}
