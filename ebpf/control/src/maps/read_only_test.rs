use slipgate_abi::SlotRef;

use super::*;
use crate::{InMemory, Owner, Paths, SharedMaps};

const CHUNKS: u32 = 4;
const SECOND: u64 = 1_000_000_000;

/// Maps in files, to write and to read.
struct Rig {
    dir: tempfile::TempDir,
    memory: InMemory,
    owner: Owner,
    read: ReadOnlyMaps,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (memory, owner) = open(dir.path());
        let read = ReadOnlyMaps::open_pinned(dir.path()).unwrap();
        Self {
            dir,
            memory,
            owner,
            read,
        }
    }

    fn read(&self) -> Vec<u32> {
        self.read.flows().map(|(index, _)| index.get()).collect()
    }

    /// Claims a chunk for an owner, and returns the number of its first slot and of its last.
    fn claim(&self, row: u32, now_ns: u64) -> [u32; 2] {
        let (chunk, _) = self.memory.maps.claim_chunk(row, now_ns).unwrap();
        [chunk.start, chunk.end - 1]
    }
}

fn open(dir: &Path) -> (InMemory, Owner) {
    let paths = Paths {
        pin_dir: dir.to_owned(),
        run_dir: dir.to_owned(),
    };
    InMemory::open(paths, Sizes::of_slots(CHUNKS * SLOTS_PER_CHUNK)).unwrap()
}

fn slot(maps: &SharedMaps, index: u32) -> SlotRef {
    maps.slot(SlotIndex::new(index)).unwrap()
}

/// Puts a flow into a slot.
fn begin(maps: &SharedMaps, index: u32) {
    let slot = slot(maps, index);
    // SAFETY: a field of a mapped slot that nothing else uses meanwhile.
    unsafe { (&raw mut (*slot.as_ptr()).protocol).write(Protocol::Udp) };
    slot.set_verdict(Verdict::Fast);
}

#[test]
fn chunks_that_no_process_has_are_not_read() {
    let rig = Rig::new();
    let maps = &rig.memory.maps;
    // Flows that can't be there, to show that nobody looks.
    for chunk in 0..CHUNKS {
        begin(maps, chunk * SLOTS_PER_CHUNK);
    }
    assert!(rig.read().is_empty(), "nobody ever had one");
    let [first, _] = rig.claim(rig.owner.row(), 0);
    assert_eq!(rig.read(), [first]);
    // One that was given back is marked with the time.
    assert!(maps.release_chunk(rig.owner.row(), SlotIndex::new(first), 5 * SECOND));
    assert_ne!(maps.chunk(0).unwrap().load(Acquire), 0);
    assert!(rig.read().is_empty(), "it was given back");
}

#[test]
fn all_flows_of_all_owners_are_read() {
    let rig = Rig::new();
    let maps = &rig.memory.maps;
    let (killed, its_owner) = open(rig.dir.path());
    // The chunk of one that was killed has its row until another takes it over; the last row is one that a
    // chunk can have, though no process takes it.
    let mut slots: Vec<u32> = [rig.owner.row(), its_owner.row(), 126]
        .into_iter()
        .flat_map(|row| rig.claim(row, 0))
        .collect();
    drop((killed, its_owner));
    slots.iter().for_each(|index| begin(maps, *index));
    assert_eq!(rig.read(), slots);
    // The last chunk there is; and a chunk that had another owner before.
    let first = SlotIndex::new(slots[0]);
    assert!(maps.release_chunk(rig.owner.row(), first, 5 * SECOND));
    assert_eq!(rig.read(), slots[2..]);
    for row in [7, 8] {
        slots.extend(rig.claim(row, 10 * SECOND));
    }
    slots.sort_unstable();
    slots.dedup();
    slots.iter().for_each(|index| begin(maps, *index));
    assert_eq!(slots.len() as u32, 2 * CHUNKS);
    assert_eq!(rig.read(), slots);
}

#[test]
fn the_flows_of_a_range_of_slots_are_read() {
    let rig = Rig::new();
    let maps = &rig.memory.maps;
    let [first, last] = rig.claim(rig.owner.row(), 0);
    let [next, _] = rig.claim(rig.owner.row(), 0);
    assert_eq!(next, last + 1);
    for index in [first, first + 5, last, next] {
        begin(maps, index);
    }
    let read = |range: Range<u32>| {
        let flows = rig.read.flows_in(range);
        flows.map(|(index, _)| index.get()).collect::<Vec<_>>()
    };
    let all = [first, first + 5, last, next];
    assert_eq!(read(0..u32::MAX), all);
    for from in [first, first + 1, last, next, next + 1] {
        for to in [first, first + 5, last, next, next + 7] {
            let within = all.into_iter().filter(|at| (from..to).contains(at));
            assert_eq!(read(from..to), within.collect::<Vec<_>>(), "{from}..{to}");
        }
    }
}

#[test]
fn flows_that_come_and_go_meanwhile_are_read_as_they_are_then() {
    let rig = Rig::new();
    let maps = &rig.memory.maps;
    let [first, last] = rig.claim(rig.owner.row(), 0);
    for index in [first, first + 5, last] {
        begin(maps, index);
    }
    let mut flows = rig.read.flows().map(|(index, _)| index.get());
    assert_eq!(flows.next(), Some(first));
    // One that was seen ends, so does one that was not; others begin before and after, in a new chunk too.
    slot(maps, first).set_verdict(Verdict::Free);
    slot(maps, first + 5).set_verdict(Verdict::Free);
    begin(maps, first + 7);
    let [next, _] = rig.claim(rig.owner.row(), 0);
    assert!(next > last);
    begin(maps, next);
    assert_eq!(flows.collect::<Vec<_>>(), [first + 7, last, next]);
}
