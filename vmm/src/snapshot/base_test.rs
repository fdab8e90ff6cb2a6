use std::os::unix::fs::MetadataExt as _;

use proptest::prelude::*;
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::{
    GuestMemory,
    layout::{HIGH_RAM_START, LOW_RAM_LIMIT},
    memory,
    snapshot::{encode, file::tests::state, write_differences, write_memory},
};

const BYTES: u64 = 8 << 20;

/// A snapshot's files, which are written once and opened again and again.
struct Saved {
    state: File,
    memory: File,
    id: SnapshotId,
}

impl Saved {
    fn of(memory: File, pm_timer_ns: u64, base: Option<BaseState>) -> Self {
        let mut machine = state();
        machine.memory_bytes = BYTES;
        // What tells it from others.
        machine.pm_timer_ns = pm_timer_ns;
        machine.base = base;
        let bytes = encode(&machine).unwrap();
        let state = tempfile::tempfile().unwrap();
        state.write_all_at(&bytes, 0).unwrap();
        let id = super::super::file::id_of(&bytes);
        Self { state, memory, id }
    }

    fn whole(ram: &GuestMemory, number: u64) -> Self {
        let file = tempfile::tempfile().unwrap();
        write_memory(ram, &file, &|| Ok(())).unwrap();
        Self::of(file, number, None)
    }

    /// Makes a snapshot of the differences from these, the nearest first.
    fn differing(ram: &GuestMemory, number: u64, from: &[&Saved]) -> Self {
        let (layers, id) = Layers::to_differ_from(files(from), BYTES).unwrap();
        let file = tempfile::tempfile().unwrap();
        let runs = write_differences(ram, &layers, &file, &|| Ok(())).unwrap();
        Self::of(file, number, Some(BaseState { id, runs }))
    }

    fn base(&self) -> Option<BaseState> {
        read_base(&self.state).unwrap().0.base
    }
}

fn files(saved: &[&Saved]) -> Vec<SavedFiles> {
    let open = |saved: &&Saved| SavedFiles {
        state: saved.state.try_clone().unwrap(),
        memory: saved.memory.try_clone().unwrap(),
    };
    saved.iter().map(open).collect()
}

/// The memory of the first, which has the others below it.
fn restored(chain: &[&Saved]) -> Result<GuestMemory, SnapshotError> {
    let (own, bases) = chain.split_first().unwrap();
    let memory = own.memory.try_clone().unwrap();
    let layers = Layers::of(memory, BYTES, own.base(), files(bases))?;
    Ok(memory::of_layers(BYTES, layers).unwrap())
}

fn content(ram: &GuestMemory) -> Vec<u8> {
    let mut bytes = vec![0; BYTES as usize];
    ram.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    bytes
}

fn write(ram: &GuestMemory, at: u64, bytes: &[u8]) {
    ram.write_slice(bytes, GuestAddress(at)).unwrap();
}

#[test]
fn differences_on_their_base_are_the_whole_memory() {
    let ram = memory::create(BYTES).unwrap();
    for page in (0..BYTES).step_by(3 * PAGE_SIZE as usize) {
        write(&ram, page, &page.to_le_bytes());
        write(&ram, page + 9, b"base");
    }
    let lowest = Saved::whole(&ram, 1);
    // New, changed, and zeroes in the place of something.
    write(&ram, PAGE_SIZE, b"new");
    write(&ram, BYTES - 1, b"!");
    write(&ram, 3 * PAGE_SIZE, &[0; 64]);
    let middle = Saved::differing(&ram, 2, &[&lowest]);
    let three = [(1, 1), (3, 1), (BYTES / PAGE_SIZE - 1, 1)];
    assert_eq!(middle.base().unwrap().runs, Runs(three.to_vec()));
    assert!(content(&restored(&[&middle, &lowest]).unwrap()) == content(&ram));

    // One on the other, with a page that is as in the lowest again.
    write(&ram, PAGE_SIZE, &[0; 3]);
    write(&ram, 4 << 20, b"top");
    let top = Saved::differing(&ram, 3, &[&middle, &lowest]);
    let chain = [&top, &middle, &lowest];
    let again = restored(&chain).unwrap();
    assert!(content(&again) == content(&ram));
    let data = top.memory.metadata().unwrap();
    assert_eq!(data.len(), BYTES);
    assert!(data.blocks() * 512 <= 4 * PAGE_SIZE, "{}", data.blocks());

    // What a clone writes is its own, on pages of either file.
    for at in [PAGE_SIZE, 6 * PAGE_SIZE] {
        write(&again, at, b"clone");
    }
    assert!(content(&restored(&chain).unwrap()) == content(&ram));
}

#[test]
fn a_missing_base_and_another_one_are_refused_by_their_ids() {
    let ram = memory::create(BYTES).unwrap();
    let (lowest, other) = (Saved::whole(&ram, 1), Saved::whole(&ram, 2));
    write(&ram, 0, b"x");
    let top = Saved::differing(&ram, 3, &[&lowest]);
    let why = restored(&[&top]).unwrap_err().to_string();
    assert!(why.contains(&lowest.id.to_string()), "{why}");
    let why = restored(&[&top, &other]).unwrap_err().to_string();
    let names_both = [lowest.id, other.id].map(|id| why.contains(&id.to_string()));
    assert_eq!(names_both, [true; 2], "{why}");
    assert!(matches!(
        restored(&[&top, &lowest, &other]),
        Err(SnapshotError::NotABase)
    ));
    let many = [&top; MAX_BASES + 2];
    assert!(matches!(restored(&many), Err(SnapshotError::TooManyBases)));
    let refused = Layers::to_differ_from(files(&[&other]), BYTES / 2).err();
    assert!(matches!(refused, Some(SnapshotError::Mismatch(_))));
    // A base whose state is damaged, or whose memory was cut.
    let (layers, _) = Layers::to_differ_from(files(&[&lowest]), BYTES).unwrap();
    for bytes in [BYTES - PAGE_SIZE, BYTES + 1] {
        lowest.memory.set_len(bytes).unwrap();
        // Found before the guest is paused.
        let why = Layers::to_differ_from(files(&[&lowest]), BYTES).unwrap_err();
        assert!(why.to_string().contains("it is not whole"), "{why}");
    }
    lowest.memory.set_len(BYTES - PAGE_SIZE).unwrap();
    let file = tempfile::tempfile().unwrap();
    let refused = write_differences(&ram, &layers, &file, &|| Ok(())).err();
    assert!(matches!(refused, Some(SnapshotError::File { .. })));
    lowest.state.write_all_at(b"?", 100).unwrap();
    let refused = restored(&[&top, &lowest]).err();
    assert!(matches!(refused, Some(SnapshotError::Damaged(_))));
}

#[test]
fn pages_that_are_none_of_the_memorys_are_refused() {
    let pages = BYTES / PAGE_SIZE;
    for runs in [
        vec![(pages, 1)],
        vec![(0, pages + 1)],
        vec![(u64::MAX, 1)],
        vec![(1, u64::MAX)],
        vec![(0, 0)],
        vec![(5, 2), (6, 1)],
        vec![(5, 1), (4, 1)],
        vec![(0, 1); MAX_RUNS + 1],
    ] {
        assert!(Runs(runs.clone()).check(BYTES).is_err(), "{runs:?}");
    }
    Runs(vec![(0, 1), (1, pages - 1)]).check(BYTES).unwrap();
}

#[test]
fn differences_lie_on_both_sides_of_the_hole() {
    // Sparse: nothing of it is touched but what is written here.
    let bytes = LOW_RAM_LIMIT + (8 << 20);
    let file = |text: &[u8], at: u64| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        file.write_all_at(text, at).unwrap();
        file
    };
    let lowest = file(b"lowest", bytes - PAGE_SIZE);
    let above = file(b"above the lowest", LOW_RAM_LIMIT - 5);
    // One run reaches from the end of the low RAM into the high one; the page after it is the lowest's.
    let runs = Runs(vec![(LOW_RAM_LIMIT / PAGE_SIZE - 1, 2)]);
    runs.check(bytes).unwrap();
    above
        .write_all_at(b"none", LOW_RAM_LIMIT + PAGE_SIZE)
        .unwrap();
    let above = vec![(above, runs)];
    let ram = memory::of_layers(bytes, Layers { lowest, above }).unwrap();
    let read = |at: u64, length: usize| {
        let mut there = vec![0; length];
        ram.read_slice(&mut there, GuestAddress(at)).unwrap();
        there
    };
    assert_eq!(read(LOW_RAM_LIMIT - 5, 5), b"above");
    assert_eq!(read(HIGH_RAM_START, 11), b" the lowest");
    assert_eq!(read(HIGH_RAM_START + PAGE_SIZE, 4), [0; 4]);
    assert_eq!(read(HIGH_RAM_START + (8 << 20) - PAGE_SIZE, 6), b"lowest");
}

#[test]
fn holes_of_a_base_are_read_without_taking_the_hosts_memory() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES).unwrap();
    let data = [(2, b"first"), (3, b"joins"), (900, b"later")];
    for (page, text) in data {
        file.write_all_at(text, page * PAGE_SIZE).unwrap();
    }
    let layers = Layers {
        lowest: file.try_clone().unwrap(),
        above: Vec::new(),
    };
    let mut expected = vec![0; BYTES as usize];
    for (page, text) in data {
        let at = (page * PAGE_SIZE) as usize;
        expected[at..at + text.len()].copy_from_slice(text);
    }
    // Pieces that begin and end in data and in holes, within a page, and at the end of the file.
    let mut read = vec![0xff; BYTES as usize];
    for (at, end) in [(0, 8194), (8194, 4 << 20), (4 << 20, BYTES)] {
        layers
            .read(&mut read[at as usize..end as usize], at)
            .unwrap();
    }
    assert!(read == expected);
    let behind = layers.read(&mut [0; 2], BYTES - 1);
    assert!(matches!(behind, Err(SnapshotError::File { .. })));
    // A file system may have more than the pages of the data, ahead of reads, but not all.
    let cached = cached_pages(&file);
    assert!(cached < BYTES / PAGE_SIZE / 2, "{cached} pages are cached");
}

/// Number of a file's pages in the host's cache.
fn cached_pages(file: &File) -> u64 {
    let mut is_cached = vec![0u8; (BYTES / PAGE_SIZE) as usize];
    // SAFETY: a new mapping of an open file, which nobody reads; `is_cached` has a byte for each page.
    unsafe {
        let (length, fd) = (BYTES as usize, file.as_raw_fd());
        let map = libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ,
            libc::MAP_SHARED,
            fd,
            0,
        );
        assert_ne!(map, libc::MAP_FAILED);
        assert_eq!(libc::mincore(map, length, is_cached.as_mut_ptr()), 0);
        libc::munmap(map, length);
    }
    is_cached.iter().filter(|page| **page & 1 == 1).count() as u64
}

#[test]
fn a_stop_is_heard_while_memory_is_compared() {
    let ram = memory::create(BYTES).unwrap();
    let lowest = Saved::whole(&ram, 1);
    let (layers, _) = Layers::to_differ_from(files(&[&lowest]), BYTES).unwrap();
    let file = tempfile::tempfile().unwrap();
    let ended = write_differences(&ram, &layers, &file, &|| Err(SnapshotError::Ended));
    assert!(matches!(ended, Err(SnapshotError::Ended)));
}

proptest! {
    #[test]
    fn runs_have_all_pages_and_are_few(
        gaps in prop::collection::vec(0u64..40, 0..20_000),
    ) {
        let pages: Vec<u64> = gaps
            .iter()
            .scan(0, |at, gap| {
                *at += gap + 1;
                Some(*at)
            })
            .collect();
        let mut runs = Runs::default();
        for page in &pages {
            runs.add(*page);
            prop_assert!(runs.0.len() <= 2 * MAX_RUNS);
        }
        runs.join();
        let end = pages.last().map_or(0, |last| last + 1);
        runs.check(end * PAGE_SIZE).unwrap();
        let mut at = 0;
        for page in pages {
            while runs.0[at].0 + runs.0[at].1 <= page {
                at += 1;
            }
            prop_assert!(runs.0[at].0 <= page);
        }
    }

    #[test]
    fn the_parts_within_a_range_are_those_of_all_runs(
        gaps in prop::collection::vec((1u64..4, 1u64..4), 0..20),
        at in 0u64..100,
        length in 1u64..100,
    ) {
        let mut end = 0;
        let mut runs = Runs::default();
        for (gap, count) in gaps {
            runs.0.push((end + gap, count));
            end += gap + count;
        }
        // Amid pages, too.
        let (from, until) = (at * PAGE_SIZE / 2, (at + length) * PAGE_SIZE / 2);
        let parts = runs.bytes().map(|(start, bytes)| (start.max(from), (start + bytes).min(until)));
        let parts: Vec<_> = parts.filter(|(from, until)| from < until).collect();
        prop_assert_eq!(runs.within(from, until).collect::<Vec<_>>(), parts);
    }
}
