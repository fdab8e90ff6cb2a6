use super::*;
use crate::fake::{FakeDatapath, Kernel, KernelHandle};

const SECOND_NS: u64 = 1_000_000_000;
/// Share of a VM that holds no slots and is the only one.
const ALONE: (usize, usize) = (0, 1);

/// A process with its pool of slots.
struct Process {
    tables: FakeDatapath,
    pool: SlotPool,
    used: Vec<SlotIndex>,
}

impl Process {
    fn new(kernel: &KernelHandle, owner: u32) -> Self {
        Self {
            tables: FakeDatapath::new(kernel, owner, 1),
            pool: SlotPool::default(),
            used: Vec::new(),
        }
    }

    /// Takes up to so many slots and fills them; how many there were.
    fn open(&mut self, most: usize, now_ns: u64) -> usize {
        let before = self.used.len();
        for _ in 0..most {
            let Some(slot) = self.pool.take(&mut self.tables, ALONE, now_ns) else {
                break;
            };
            let live = self.tables.slot(slot);
            live.generation().fetch_add(1, Relaxed);
            live.set_verdict(Verdict::Fast);
            self.used.push(slot);
        }
        self.used.len() - before
    }

    /// All its flows but so many end.
    fn end_all_but(&mut self, kept: usize, now_ns: u64) {
        for slot in self.used.split_off(kept) {
            self.tables.slot(slot).set_verdict(Verdict::Free);
            self.pool.release(slot, now_ns);
        }
    }

    fn give_back_all(&mut self, now_ns: u64) -> usize {
        std::iter::from_fn(|| self.pool.give_back(&mut self.tables, now_ns)).count()
    }

    fn chunks(&self) -> usize {
        self.tables.own_chunks().len()
    }
}

/// As by default: 64 chunks.
fn kernel() -> KernelHandle {
    Kernel::new(65_536)
}

#[test]
fn what_three_have_had_goes_to_a_fourth_when_their_flows_have_ended() {
    let kernel = kernel();
    let mut all: Vec<_> = (0..4).map(|owner| Process::new(&kernel, owner)).collect();
    for process in &mut all[..3] {
        process.open(16_384, 0);
    }
    for process in &mut all[..3] {
        let used = process.used.len();
        process.end_all_but(0, SECOND_NS);
        process.give_back_all(SECOND_NS);
        assert!(process.chunks() * 1_024 >= used, "they rest");
        process.give_back_all(2 * SECOND_NS);
        assert_eq!(process.chunks(), 1);
    }
    // At once: they have rested.
    assert_eq!(all[3].open(16_384, 4 * SECOND_NS), 16_384);
}

#[test]
fn a_fourth_finds_its_part_whatever_three_have() {
    let kernel = kernel();
    let mut all: Vec<_> = (0..6).map(|owner| Process::new(&kernel, owner)).collect();
    for process in &mut all[..3] {
        process.open(65_536, 0);
    }
    let chunks: Vec<usize> = all.iter().map(Process::chunks).collect();
    assert_eq!(chunks, [48, 5, 3, 0, 0, 0]);
    // Half of the quarter that is kept is for those that have none.
    let opened: Vec<usize> = all[3..].iter_mut().map(|p| p.open(65_536, 0)).collect();
    assert_eq!(opened, [1_024, 1_024, 1_024]);
    for process in &mut all[..3] {
        assert_eq!(process.open(1, 2 * SECOND_NS), 0);
    }
}

#[test]
fn a_chunk_with_a_flow_stays_and_flows_gather_in_the_first() {
    let kernel = kernel();
    let mut process = Process::new(&kernel, 7);
    process.open(4_000, 0);
    assert_eq!(process.chunks(), 6);
    // The last flow of all lives on, and some of the first chunk.
    let last = process.used.pop().unwrap();
    process.end_all_but(500, 0);
    process.give_back_all(2 * SECOND_NS);
    assert_eq!(process.chunks(), 2);
    let chunks = process.tables.own_chunks();
    assert!(chunks[1].contains(&last.get()));
    // What opens now goes where the others are, so that this one can get empty too.
    process.open(400, 2 * SECOND_NS);
    assert!(
        process
            .used
            .iter()
            .all(|slot| chunks[0].contains(&slot.get()))
    );
}

#[test]
fn a_generation_goes_on_in_another_owners_hands() {
    let kernel = Kernel::new(2_048);
    let (mut first, mut second) = (Process::new(&kernel, 1), Process::new(&kernel, 2));
    first.open(2_048, 0);
    let slot = SlotIndex::new(1_500);
    let before = first.tables.slot(slot).generation().load(Relaxed);
    first.end_all_but(0, 0);
    assert_eq!(first.give_back_all(SECOND_NS), 1);
    assert_eq!(second.open(2_048, 3 * SECOND_NS), 1_024);
    let live = second.tables.slot(slot);
    assert_eq!(live.generation().load(Relaxed), before + 1);
    assert_eq!(first.open(2_048, 3 * SECOND_NS), 1_024, "it keeps the last");
}

/// Slots that a dead process's successor or the sweep has released may have been freed just now.
#[test]
fn what_has_not_rested_rests_first() {
    let kernel = Kernel::new(1_024);
    let mut first = Process::new(&kernel, 1);
    first.open(1_024, 0);
    first.end_all_but(0, 10 * SECOND_NS);
    first
        .tables
        .release_chunk(SlotIndex::new(0), 10 * SECOND_NS);
    let mut second = Process::new(&kernel, 2);
    assert_eq!(second.open(1, 10 * SECOND_NS), 0);
    assert_eq!(second.open(1, 11 * SECOND_NS), 1);
}

#[test]
fn a_load_that_comes_and_goes_does_not_move_chunks_to_and_fro() {
    let kernel = kernel();
    let mut process = Process::new(&kernel, 1);
    process.open(10_000, 0);
    let before = process.chunks();
    let mut moved = 0;
    for second in (0..20).step_by(2) {
        process.end_all_but(8_000, second * SECOND_NS);
        moved += process.give_back_all((second + 1) * SECOND_NS);
        process.open(2_000, (second + 2) * SECOND_NS);
    }
    assert_eq!((moved, process.chunks()), (0, before));
}
