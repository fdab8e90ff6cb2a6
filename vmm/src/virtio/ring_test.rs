use std::{sync::Arc, time::Instant};

use proptest::prelude::*;
use virtio_queue::QueueOwnedT;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::*;
use crate::GuestMemory;

const SIZE: u16 = 8;
const EVENT_IDX: u64 = 1 << 29;
const TABLE: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;

fn memory() -> Arc<GuestMemory> {
    Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap())
}

fn queue(size: u16) -> Queue {
    let mut queue = Queue::new(size).unwrap();
    queue.set_desc_table_address(Some(TABLE as u32), Some(0));
    queue.set_avail_ring_address(Some(AVAILABLE as u32), Some(0));
    queue.set_used_ring_address(Some(USED as u32), Some(0));
    queue.set_ready(true);
    queue
}

/// Returns a ring whose indices start at `index`.
fn at(memory: &Arc<GuestMemory>, features: u64, index: u16) -> (Ring, Translation) {
    let translation = Translation::new(Arc::clone(memory));
    let mut queue = queue(SIZE);
    queue.set_next_avail(index);
    queue.set_next_used(index);
    put(memory, AVAILABLE + 2, index);
    (
        Ring::new(&queue, features, &translation).unwrap(),
        translation,
    )
}

fn put(memory: &GuestMemory, at: u64, value: u16) {
    memory.write_obj(value, GuestAddress(at)).unwrap();
}

fn get(memory: &GuestMemory, at: u64) -> u16 {
    memory.read_obj(GuestAddress(at)).unwrap()
}

#[test]
fn chains_that_were_taken_before_a_snapshot_come_first() {
    let memory = memory();
    let translation = Translation::new(Arc::clone(&memory));
    let mut rings = queue(SIZE);
    rings.set_next_avail(2);
    rings.set_next_used(1);
    for (entry, head) in [(0, 4), (1, 5), (2, 6)] {
        put(&memory, AVAILABLE + 4 + 2 * entry, head);
    }
    put(&memory, AVAILABLE + 2, 3);
    let kick = vmm_sys_util::eventfd::EventFd::new(0).unwrap();
    let enabled = EnabledQueue {
        index: 7,
        queue: rings,
        kick,
        taken: vec![5],
    };
    let mut ring = Ring::of(&enabled, 0, &translation).unwrap();
    assert_eq!(ring.waiting(), Ok(2));
    // What nobody has taken again is part of the next snapshot.
    let progress = ring.progress(7, [9]);
    assert_eq!(progress.taken, [9, 5]);
    assert_eq!(
        [ring.next(), ring.next(), ring.next()],
        [Ok(Some(5)), Ok(Some(6)), Ok(None)]
    );
    ring.push_used(5, 0);
    ring.publish();
    let progress = ring.progress(7, [6]);
    assert_eq!(
        (progress.queue, progress.next_available, progress.next_used),
        (7, 3, 2)
    );
    assert_eq!(progress.taken, [6]);
}

#[test]
fn the_index_is_published_once_for_a_batch() {
    let memory = memory();
    let (mut ring, _translation) = at(&memory, 0, 0);
    assert_eq!(ring.publish(), Published::Nothing);
    for head in 0..5 {
        ring.push_used(head, u32::from(head) * 10);
        assert_eq!(get(&memory, USED + 2), 0);
    }
    assert_eq!(ring.publish(), Published::Interrupt);
    assert_eq!(get(&memory, USED + 2), 5);
    let last: [u32; 2] = memory.read_obj(GuestAddress(USED + 4 + 8 * 4)).unwrap();
    assert_eq!(last, [4, 40]);
    put(&memory, AVAILABLE, 1);
    ring.push_used(0, 0);
    assert_eq!(ring.publish(), Published::Quiet);
    assert_eq!(ring.publish(), Published::Nothing);
}

#[test]
fn notifications_are_turned_off_and_on_by_flags() {
    let memory = memory();
    let (mut ring, _translation) = at(&memory, 0, 0);
    ring.quiet();
    assert_eq!(get(&memory, USED), 1);
    assert_eq!(ring.listen(), Ok(false));
    assert_eq!(get(&memory, USED), 0);
    put(&memory, AVAILABLE + 2, 1);
    assert_eq!(ring.listen(), Ok(true));
}

#[test]
fn notifications_are_asked_for_by_event() {
    let memory = memory();
    let (mut ring, _translation) = at(&memory, EVENT_IDX, 0xfffe);
    ring.quiet();
    assert_eq!(get(&memory, USED), 0);
    put(&memory, AVAILABLE + 2, 1);
    for _ in 0..3 {
        ring.next().unwrap().unwrap();
    }
    assert_eq!(ring.next(), Ok(None));
    assert_eq!(ring.listen(), Ok(false));
    assert_eq!(get(&memory, USED + 4 + 8 * u64::from(SIZE)), 1);
}

proptest! {
    /// Compares with the specification's `vring_need_event`: an interrupt when the used index
    /// passes the event, wherever the indices wrap.
    #[test]
    fn an_interrupt_when_the_event_is_passed(
        begin in any::<u16>(),
        event in any::<u16>(),
        near in -10_i16..10,
        use_near in any::<bool>(),
        count in 1..SIZE,
    ) {
        let memory = memory();
        let event = if use_near { begin.wrapping_add_signed(near) } else { event };
        let (mut ring, _translation) = at(&memory, EVENT_IDX, begin);
        put(&memory, AVAILABLE + 4 + 2 * u64::from(SIZE), event);
        for head in 0..count {
            ring.push_used(head, 0);
        }
        let passed = (0..count).any(|step| begin.wrapping_add(step) == event);
        let expected = if passed { Published::Interrupt } else { Published::Quiet };
        prop_assert_eq!(ring.publish(), expected);
    }
}

/// Measures the time to take and give back a chain of one buffer, and that of the virtio-queue
/// crate.
#[test]
#[ignore = "a measurement"]
fn beside_virtio_queue() {
    const ENTRIES: u16 = 256;
    const ROUNDS: u32 = 40_000;
    const BATCH: u16 = 64;
    let memory = memory();
    for index in 0..ENTRIES {
        let here = TABLE + 16 * u64::from(index);
        memory.write_obj(0x1_0000_u64, GuestAddress(here)).unwrap();
        memory.write_obj(1_514_u32, GuestAddress(here + 8)).unwrap();
        put(&memory, AVAILABLE + 4 + 2 * u64::from(index), index);
    }
    let per_chain =
        |begin: Instant| begin.elapsed().as_nanos() as f64 / f64::from(ROUNDS) / f64::from(BATCH);
    for _ in 0..3 {
        let translation = Translation::new(Arc::clone(&memory));
        let mut ring = Ring::new(&queue(ENTRIES), EVENT_IDX, &translation).unwrap();
        let mut pieces = Vec::with_capacity(usize::from(BATCH));
        let mut index: u16 = 0;
        let begin = Instant::now();
        for _ in 0..ROUNDS {
            index = index.wrapping_add(BATCH);
            put(&memory, AVAILABLE + 2, index);
            pieces.clear();
            while let Some(head) = ring.next().unwrap() {
                let list = &mut pieces;
                ring.walk(head, &translation, |buffer| {
                    translation.append(buffer.guest, buffer.bytes, list)
                })
                .unwrap();
                ring.push_used(head, 0);
            }
            std::hint::black_box(&pieces);
            ring.publish();
        }
        let ours = per_chain(begin);

        let mut theirs = queue(ENTRIES);
        theirs.set_event_idx(true);
        let mut index: u16 = 0;
        let begin = Instant::now();
        for _ in 0..ROUNDS {
            index = index.wrapping_add(BATCH);
            put(&memory, AVAILABLE + 2, index);
            pieces.clear();
            while let Some(chain) = theirs.iter(&*memory).unwrap().next() {
                let head = chain.head_index();
                for descriptor in chain {
                    let bytes = descriptor.len() as usize;
                    let slice = memory.get_slice(descriptor.addr(), bytes).unwrap();
                    pieces.push(libc::iovec {
                        iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                        iov_len: slice.len(),
                    });
                }
                theirs.add_used(&*memory, head, 0).unwrap();
            }
            std::hint::black_box(&pieces);
            theirs.needs_notification(&*memory).unwrap();
        }
        println!(
            "ns per chain: ours {ours:.1}, virtio-queue {:.1}",
            per_chain(begin)
        );
    }
}
