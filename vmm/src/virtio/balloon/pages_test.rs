use std::{fs::File, io, os::fd::FromRawFd as _, os::unix::fs::FileExt as _};

use slipgate_testbed::{HugePages, skipped, turns};
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::memory::{MIN_BYTES, of_file, shared};

const PAGE: u64 = 4096;

/// Memory of which each page begins with its number and one, and where the host has pages.
fn filled(memory: &GuestMemory) {
    for page in 0..MIN_BYTES / PAGE {
        let at = GuestAddress(page * PAGE);
        memory.write_obj(page + 1, at).unwrap();
    }
}

fn word(memory: &GuestMemory, page: u64) -> u64 {
    memory.read_obj(GuestAddress(page * PAGE)).unwrap()
}

/// Whether the host has a page of its own there; asks the kernel, and touches nothing.
fn is_present(memory: &GuestMemory, page: u64) -> bool {
    let region = memory.iter().next().unwrap();
    let at = region.as_ptr().wrapping_add((page * PAGE) as usize) as u64;
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, at / PAGE * 8).unwrap();
    u64::from_le_bytes(entry) >> 63 == 1
}

fn memory_file() -> File {
    // SAFETY: the name ends with a zero; the descriptor is new, and ours.
    let file = unsafe {
        let fd = libc::memfd_create(c"memory".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        File::from_raw_fd(fd)
    };
    file.set_len(MIN_BYTES).unwrap();
    file
}

#[test]
fn anonymous_pages_are_given_back_and_read_as_zeroes() {
    let memory = crate::memory::create(MIN_BYTES).unwrap();
    filled(&memory);
    let pages = Pages::of(&memory);
    let given = pages.give_back(2 * PAGE, 3 * PAGE);
    let expected = Given {
        discarded: 3 * PAGE,
        ..Given::default()
    };
    assert_eq!(given, expected);
    let there: Vec<_> = (1..6).map(|page| is_present(&memory, page)).collect();
    assert_eq!(there, [true, false, false, false, true]);
    let words: Vec<_> = (1..6).map(|page| word(&memory, page)).collect();
    assert_eq!(words, [2, 0, 0, 0, 6]);
}

#[test]
fn pages_of_a_snapshot_are_given_back_and_read_as_they_were_saved() {
    let file = memory_file();
    file.write_all_at(&77_u64.to_le_bytes(), 3 * PAGE).unwrap();
    let memory = of_file(MIN_BYTES, file.try_clone().unwrap()).unwrap();
    filled(&memory);
    let given = Pages::of(&memory).give_back(2 * PAGE, 2 * PAGE);
    assert_eq!((given.discarded, given.failed), (2 * PAGE, 0));
    let words: Vec<_> = (1..5).map(|page| word(&memory, page)).collect();
    assert_eq!(words, [2, 0, 77, 5]);
    // Nothing reached the file.
    let mut saved = [0; 8];
    file.read_exact_at(&mut saved, 4 * PAGE).unwrap();
    assert_eq!(saved, [0; 8]);
}

#[test]
fn shared_pages_are_given_back_for_all_who_have_them() {
    let file = memory_file();
    let of_another = shared(MIN_BYTES, file.try_clone().unwrap(), MIN_BYTES).unwrap();
    let memory = shared(MIN_BYTES, file.try_clone().unwrap(), MIN_BYTES).unwrap();
    filled(&memory);
    let blocks = || {
        use std::os::unix::fs::MetadataExt as _;
        file.metadata().unwrap().blocks()
    };
    let before = blocks();
    let given = Pages::of(&memory).give_back(2 * PAGE, 2 * PAGE);
    assert_eq!((given.discarded, given.failed), (2 * PAGE, 0));
    assert_eq!(before - blocks(), 2 * PAGE / 512);
    let words: Vec<_> = (1..5).map(|page| word(&of_another, page)).collect();
    assert_eq!(words, [2, 0, 0, 5]);
}

#[test]
fn what_is_no_whole_page_stays_and_what_is_none_of_the_memory_is_passed_over() {
    let memory = crate::memory::create(MIN_BYTES).unwrap();
    filled(&memory);
    let pages = Pages::of(&memory);
    let odd = pages.give_back(PAGE + 1, 2 * PAGE);
    assert_eq!((odd.discarded, odd.kept, odd.invalid), (PAGE, PAGE, 0));
    let words: Vec<_> = (1..4).map(|page| word(&memory, page)).collect();
    assert_eq!(words, [2, 0, 4]);
    let inside = pages.give_back(PAGE + 8, 16);
    assert_eq!((inside.discarded, inside.kept), (0, 16));

    let beyond = pages.give_back(MIN_BYTES - PAGE, 3 * PAGE);
    assert_eq!((beyond.discarded, beyond.invalid), (PAGE, 2 * PAGE));
    for (guest, bytes) in [
        (MIN_BYTES, PAGE),
        (u64::MAX - 10, PAGE),
        (u64::MAX, u64::MAX),
        (1 << 52, u64::from(u32::MAX)),
    ] {
        let none = pages.give_back(guest, bytes);
        let expected = Given {
            invalid: bytes,
            ..Given::default()
        };
        assert_eq!(none, expected, "{guest:#x}");
    }
    assert_eq!(pages.give_back(0, 0), Given::default());
}

#[test]
fn huge_pages_are_given_back_whole_or_not_at_all() {
    let turn = turns::alone("it sets the host's pool of huge pages");
    let Some(_more) = HugePages::more(3, &turn) else {
        // A host without any says what to do.
        if let Err(why) = crate::memory::create_huge(3 << 21) {
            assert!(why.to_string().contains("vm.nr_hugepages=3"), "{why}");
        }
        return skipped!("it needs root, and room for 3 huge pages on the host");
    };
    let memory = crate::memory::create_huge(3 << 21).unwrap();
    let large = 2 << 20;
    memory.write_obj(7_u64, GuestAddress(0)).unwrap();
    memory.write_obj(7_u64, GuestAddress(large)).unwrap();
    let pages = Pages::of(&memory);
    let given = pages.give_back(PAGE, 2 * large - PAGE);
    assert_eq!((given.discarded, given.kept), (large, large - PAGE));
    assert_eq!(memory.read_obj::<u64>(GuestAddress(0)).unwrap(), 7);
    assert_eq!(memory.read_obj::<u64>(GuestAddress(large)).unwrap(), 0);
}
