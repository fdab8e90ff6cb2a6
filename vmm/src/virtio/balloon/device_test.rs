use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    time::{Duration, Instant},
};

use proptest::prelude::*;
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::snapshot::Progress;
use crate::{
    GuestMemory,
    virtio::{
        EnabledQueue, Signals,
        balloon::{BalloonSnapshot, MAX_LIST_BYTES, PAGE_BYTES},
    },
};

const MEMORY: usize = 8 << 20;
const SIZE: u16 = 16;
/// A list of pages, and the pages that are given.
const LIST: u64 = 0x10_0000;
const FREE: u64 = 0x40_0000;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const NEXT: u16 = VRING_DESC_F_NEXT as u16;
/// Where drivers of Linux have the queue of reports, and where the specification has it.
const REPORTS: [u16; 2] = [2, 4];

#[derive(Default)]
struct Recorder {
    interrupts: AtomicU64,
    changes: AtomicU64,
    needs_reset: AtomicBool,
}

impl Signals for Recorder {
    fn queue(&self, _index: u16) {
        self.interrupts.fetch_add(1, SeqCst);
    }
    fn config(&self) {
        self.changes.fetch_add(1, SeqCst);
    }
    fn needs_reset(&self) {
        self.needs_reset.store(true, SeqCst);
    }
}

struct Rig {
    balloon: Balloon,
    memory: Arc<GuestMemory>,
    recorder: Arc<Recorder>,
    counters: Arc<BalloonCounters>,
    bells: [EventFd; 5],
    available: [u16; 5],
}

/// Buffer of a chain: address, bytes, whether the device writes it.
type Buffer = (u64, u32, bool);

/// Addresses of a queue's descriptors, available and used ring.
fn rings(queue: u16) -> [u64; 3] {
    [0, 0x1000, 0x2000].map(|part| 0x1_0000 + u64::from(queue) * 0x4000 + part)
}

fn setup() -> ThreadSetup {
    ThreadSetup::new(|kind| {
        assert_eq!(kind, ThreadKind::Balloon);
        Ok(())
    })
}

impl Rig {
    fn new(target_bytes: u64) -> Rig {
        let counters: Arc<BalloonCounters> = Arc::default();
        let config = BalloonConfig { target_bytes };
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        Rig {
            balloon: Balloon::new(config, &setup(), counters.clone()).unwrap(),
            memory: Arc::new(memory),
            recorder: Arc::default(),
            counters,
            bells: std::array::from_fn(|_| EventFd::new(EFD_NONBLOCK).unwrap()),
            available: [0; 5],
        }
    }

    fn activate(&mut self, queues: &[u16]) {
        let progress = |queue: &u16| Progress {
            queue: *queue,
            ..Progress::default()
        };
        let none = DeviceState {
            queues: queues.iter().map(progress).collect(),
            model: Model::Plain,
        };
        self.go_on(&none);
    }

    /// Activates the balloon, which goes on from there.
    fn go_on(&mut self, state: &DeviceState) {
        let queue = |progress: &Progress| {
            let [table, available, used] = rings(progress.queue).map(|at| Some(at as u32));
            let mut queue = Queue::new(SIZE).unwrap();
            queue.set_desc_table_address(table, None);
            queue.set_avail_ring_address(available, None);
            queue.set_used_ring_address(used, None);
            queue.set_next_avail(progress.next_available);
            queue.set_next_used(progress.next_used);
            queue.set_ready(true);
            EnabledQueue {
                index: progress.queue,
                queue,
                kick: self.bells[usize::from(progress.queue)].try_clone().unwrap(),
                taken: progress.taken.clone(),
            }
        };
        let activation = Activation {
            memory: self.memory.clone(),
            features: 0,
            queues: state.queues.iter().map(queue).collect(),
            signals: self.recorder.clone(),
            restored: Some(state.model.clone()),
        };
        self.balloon.activate(activation).unwrap();
    }

    /// Writes a chain from the table's start and makes it available.
    fn offer(&mut self, queue: u16, chain: &[Buffer]) {
        let [table, available, _] = rings(queue);
        for (at, (address, bytes, writable)) in chain.iter().enumerate() {
            let next = if at + 1 < chain.len() { NEXT } else { 0 };
            let flags = next | if *writable { WRITE } else { 0 };
            let raw = u128::from(*address)
                | u128::from(*bytes) << 64
                | u128::from(flags) << 96
                | (at as u128 + 1) << 112;
            let at = GuestAddress(table + 16 * at as u64);
            self.memory.write_slice(&raw.to_le_bytes(), at).unwrap();
        }
        let index = &mut self.available[usize::from(queue)];
        let slot = GuestAddress(available + 4 + 2 * u64::from(*index % SIZE));
        self.memory.write_obj(0_u16, slot).unwrap();
        *index = index.wrapping_add(1);
        let at = GuestAddress(available + 2);
        self.memory.store(*index, at, SeqCst).unwrap();
        self.bells[usize::from(queue)].write(1).unwrap();
    }

    /// As [`Rig::offer`], and waits until it is given back.
    fn ask(&mut self, queue: u16, chain: &[Buffer]) {
        self.offer(queue, chain);
        let all = self.available[usize::from(queue)];
        self.wait("an answer", |rig| rig.used(queue) == all);
    }

    fn used(&self, queue: u16) -> u16 {
        let at = GuestAddress(rings(queue)[2] + 2);
        self.memory.load(at, SeqCst).unwrap()
    }

    /// Writes numbers of pages, and returns the buffer.
    fn list(&self, pages: &[u32]) -> Buffer {
        let bytes: Vec<_> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.memory.write_slice(&bytes, GuestAddress(LIST)).unwrap();
        (LIST, bytes.len() as u32, false)
    }

    /// Fills pages from [`FREE`] on.
    fn fill(&self, pages: u64) {
        let bytes = vec![0x5a; (pages * PAGE_BYTES) as usize];
        self.memory.write_slice(&bytes, GuestAddress(FREE)).unwrap();
    }

    /// The first byte of each page from [`FREE`] on.
    fn firsts(&self, pages: u64) -> Vec<u8> {
        let first = |page: u64| {
            let at = GuestAddress(FREE + page * PAGE_BYTES);
            self.memory.read_obj(at).unwrap()
        };
        (0..pages).map(first).collect()
    }

    fn config(&self) -> [u32; 2] {
        let mut bytes = [0; 8];
        self.balloon.read_config(0, &mut bytes);
        let (wanted, actual) = bytes.split_at(4);
        [wanted, actual].map(|half| u32::from_le_bytes(half.try_into().unwrap()))
    }

    fn counted(&self) -> BalloonSnapshot {
        self.counters.snapshot()
    }

    #[track_caller]
    fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !done(self) {
            assert!(begin.elapsed() < Duration::from_secs(10), "{what}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn is_broken(&self) -> bool {
        self.recorder.needs_reset.load(SeqCst)
    }
}

const FIRST: u32 = (FREE / PAGE_BYTES) as u32;

#[test]
fn pages_are_given_and_taken_back() {
    let mut rig = Rig::new(3 * PAGE_BYTES);
    assert_eq!(rig.config(), [3, 0]);
    rig.activate(&[0, 1, 2]);
    rig.fill(5);
    // In any order, twice, and divided in the middle of a number.
    let (at, bytes, _) = rig.list(&[FIRST + 3, FIRST, FIRST + 1, FIRST + 1]);
    rig.ask(0, &[(at, 6, false), (at + 6, bytes - 6, false)]);
    assert_eq!(rig.firsts(5), [0, 0, 0x5a, 0, 0x5a]);
    rig.balloon.write_config(4, &3_u32.to_le_bytes());
    // What is not the driver's to write stays.
    rig.balloon.write_config(0, &9_u32.to_le_bytes());
    rig.balloon.write_config(7, &[0, 1, 2]);
    rig.balloon.write_config(usize::MAX, &[1, 2]);
    assert_eq!(rig.config(), [3, 3]);
    let counted = rig.counted();
    assert_eq!((counted.inflated_pages, counted.invalid_bytes), (4, 0));
    assert_eq!(counted.discarded_bytes, 3 * PAGE_BYTES);
    assert_eq!(
        (counted.target_bytes, counted.actual_bytes),
        (3 * PAGE_BYTES, 3 * PAGE_BYTES)
    );

    rig.fill(5);
    let chain = rig.list(&[FIRST, FIRST + 1]);
    rig.ask(1, &[chain]);
    assert_eq!(rig.counted().deflated_pages, 2);
    assert_eq!(rig.firsts(5), [0x5a; 5], "nothing is lost");
    assert!(rig.recorder.interrupts.load(SeqCst) >= 2);
    rig.balloon.reset();
    assert_eq!(rig.config(), [3, 0]);
    assert!(!rig.is_broken());
}

#[test]
fn free_memory_is_reported_by_either_number_of_the_queue() {
    for queue in REPORTS {
        let mut rig = Rig::new(0);
        rig.activate(&[0, 1, queue]);
        rig.fill(6);
        let bytes = 2 * PAGE_BYTES as u32;
        let far = FREE + 4 * PAGE_BYTES;
        rig.ask(
            queue,
            &[(FREE, bytes, true), (far, PAGE_BYTES as u32, true)],
        );
        assert_eq!(rig.firsts(6), [0, 0, 0x5a, 0x5a, 0, 0x5a]);
        let counted = rig.counted();
        let counts = (counted.reported_bytes, counted.discarded_bytes);
        assert_eq!(counts, (3 * PAGE_BYTES, 3 * PAGE_BYTES));
    }
}

#[test]
fn another_target_interrupts_also_when_it_came_during_a_rest() {
    let mut rig = Rig::new(0);
    rig.activate(&[0, 1, 2]);
    let target = rig.balloon.target();
    target.ask_for(7 * PAGE_BYTES);
    rig.wait("an interrupt", |rig| rig.recorder.changes.load(SeqCst) == 1);
    assert_eq!(rig.config(), [7, 0]);
    rig.balloon.write_config(4, &5_u32.to_le_bytes());
    let state = rig.balloon.suspend();
    let expected = Model::Balloon {
        target: 7,
        actual: 5,
    };
    assert_eq!(state.model, expected);
    target.ask_for(2 * PAGE_BYTES);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(rig.recorder.changes.load(SeqCst), 1, "it rests");
    rig.balloon.resume();
    rig.wait("an interrupt", |rig| rig.recorder.changes.load(SeqCst) == 2);
    assert_eq!(rig.config(), [2, 5]);
}

#[test]
fn a_balloon_that_rests_takes_nothing_and_goes_on_also_in_another_process() {
    let mut rig = Rig::new(0);
    rig.activate(&[0, 1, 2]);
    rig.fill(4);
    let chain = rig.list(&[FIRST]);
    rig.ask(0, &[chain]);
    rig.balloon.target().ask_for(4 * PAGE_BYTES);
    rig.balloon.write_config(4, &1_u32.to_le_bytes());
    let state = rig.balloon.suspend();
    let progress = &state.queues[0];
    assert_eq!((progress.next_available, progress.next_used), (1, 1));
    let chain = rig.list(&[FIRST + 1]);
    rig.offer(0, &[chain]);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(rig.firsts(4), [0, 0x5a, 0x5a, 0x5a], "it rests");

    // Another device on the same memory.
    let config = BalloonConfig::default();
    rig.balloon = Balloon::new(config, &setup(), rig.counters.clone()).unwrap();
    rig.go_on(&state);
    assert_eq!(rig.config(), [4, 1]);
    rig.wait("an answer", |rig| rig.used(0) == 2);
    assert_eq!(rig.firsts(4), [0, 0, 0x5a, 0x5a]);
    assert!(!rig.is_broken());
}

#[test]
fn pages_that_are_none_are_counted_and_a_request_is_bounded() {
    let mut rig = Rig::new(0);
    rig.activate(&[0, 1, 2]);
    rig.fill(2);
    let last = (MEMORY as u64 / PAGE_BYTES) as u32;
    let chain = rig.list(&[u32::MAX, last, FIRST, 0x8000_0000]);
    rig.ask(0, &[chain]);
    assert_eq!(rig.firsts(2), [0, 0x5a]);
    assert_eq!(rig.counted().invalid_bytes, 3 * PAGE_BYTES);
    // Longer than any list: the rest is not read, though it lies outside the memory.
    let before = rig.counted();
    let all = [(LIST, MAX_LIST_BYTES, false), (u64::MAX, 4 * 9 + 3, false)];
    rig.ask(1, &all);
    let counted = rig.counted();
    let most = u64::from(MAX_LIST_BYTES) / 4;
    assert_eq!(counted.deflated_pages - before.deflated_pages, most);
    let refused = counted.invalid_bytes - before.invalid_bytes;
    assert_eq!(refused, 9 * PAGE_BYTES);
    // A report of everything and more.
    let before = rig.counted();
    rig.ask(2, &[(FREE, u32::MAX, true)]);
    let invalid = rig.counted().invalid_bytes - before.invalid_bytes;
    assert_eq!(invalid, u64::from(u32::MAX) - (MEMORY as u64 - FREE));
    // Or the same half of the memory three times in a request.
    let before = rig.counted();
    let half = (FREE, MEMORY as u32 / 2, true);
    rig.ask(2, &[half; 3]);
    let counted = rig.counted();
    let discarded = counted.discarded_bytes - before.discarded_bytes;
    let invalid = counted.invalid_bytes - before.invalid_bytes;
    assert_eq!((discarded, invalid), (MEMORY as u64, MEMORY as u64 / 2));
    assert_eq!(
        counted.reported_bytes - before.reported_bytes,
        3 * MEMORY as u64 / 2
    );
    // The next one is another request.
    let before = rig.counted();
    rig.ask(2, &[half]);
    let discarded = rig.counted().discarded_bytes - before.discarded_bytes;
    assert_eq!(discarded, MEMORY as u64 / 2);
    assert!(!rig.is_broken());
}

#[test]
fn chains_without_sense_need_a_reset_and_then_it_serves() {
    let outside = MEMORY as u64;
    let cases: [(u16, &[Buffer]); 4] = [
        (0, &[(LIST, 4, true)]),
        (1, &[(LIST, 4, true)]),
        (0, &[(outside, 4, false)]),
        (2, &[(FREE, 4096, false)]),
    ];
    for (queue, chain) in cases {
        let mut rig = Rig::new(0);
        rig.activate(&[0, 1, 2]);
        rig.offer(queue, chain);
        rig.wait("it needs a reset", Rig::is_broken);
        assert_eq!(rig.counted().broken_rings, 1);
        rig.balloon.reset();
        for queue in [0, 1, 2] {
            let [_, available, used] = rings(queue).map(GuestAddress);
            rig.memory.write_slice(&[0; 64], available).unwrap();
            rig.memory.write_slice(&[0; 64], used).unwrap();
        }
        rig.available = [0; 5];
        rig.activate(&[0, 1, 2]);
        rig.fill(1);
        let chain = rig.list(&[FIRST]);
        rig.ask(0, &[chain]);
        assert_eq!(rig.firsts(1), [0]);
    }
    let mut rig = Rig::new(0);
    let activation = Activation {
        memory: rig.memory.clone(),
        features: 0,
        queues: Vec::new(),
        signals: rig.recorder.clone(),
        restored: None,
    };
    assert!(rig.balloon.activate(activation).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is in the rings, the device ends in a count or serves, and rests when it is told to.
    #[test]
    fn the_balloon_outlives_any_ring(
        garbage in prop::collection::vec((0..3_u16, 0..0x3000_u64, prop::collection::vec(any::<u8>(), 1..80)), 0..12),
        available in prop::collection::vec(any::<u16>(), 3),
        lists in prop::collection::vec(any::<u32>(), 0..64),
    ) {
        let mut rig = Rig::new(0);
        rig.list(&lists);
        for (queue, at, bytes) in &garbage {
            let at = GuestAddress(rings(*queue)[0] + at % (0x3000 - 80));
            rig.memory.write_slice(bytes, at).unwrap();
        }
        rig.activate(&[0, 1, 2]);
        for (queue, available) in (0..).zip(&available) {
            let at = GuestAddress(rings(queue)[1] + 2);
            rig.memory.store(*available % 40, at, SeqCst).unwrap();
            rig.bells[usize::from(queue)].write(1).unwrap();
        }
        rig.balloon.suspend();
        rig.balloon.resume();
        rig.balloon.reset();
        // It serves the next driver.
        rig.memory.write_slice(&vec![0; 0x2_0000], GuestAddress(0x1_0000)).unwrap();
        rig.available = [0; 5];
        rig.activate(&[0, 1, 2]);
        rig.fill(1);
        let chain = rig.list(&[FIRST]);
        rig.ask(0, &[chain]);
        prop_assert_eq!(rig.firsts(1), [0]);
    }
}
