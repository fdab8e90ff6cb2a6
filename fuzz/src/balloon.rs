//! virtio-balloon: arbitrary rings, lists of pages and reports.
//!
//! Input: `features (8) | chains (1) | chains … | memory`. A chain: `queue (1) | buffers (1)`, then
//! for each buffer `how (1) | address (8) | bytes (4)`. `how`: bit 0, the device writes it; bit 1, the
//! address is anywhere and not within the memory. The rest of the input is the memory of lists.
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use slipgate_vmm::{
    GuestMemory,
    virtio::balloon::{BalloonCounters, PAGE_BYTES, stepped::serve},
};
use vm_memory::{Bytes, GuestAddress};

use crate::{
    driver::{Interrupts, descriptor, queue},
    tape::Tape,
};

/// Two regions with nothing behind them.
const MEMORY: [(GuestAddress, usize); 2] = [
    (GuestAddress(0), 0x4_0000),
    (GuestAddress(0x4_0000), 0x4_0000),
];
const MEMORY_BYTES: u64 = 0x8_0000;
/// Where the rest of the input goes.
const LISTS: u64 = 0x1_0000;
const LIST_BYTES: usize = 0x1_0000;
const QUEUES: u16 = 3;
const SIZE: u16 = 32;

fn ring(queue: u16) -> u64 {
    0x1000 + u64::from(queue) * 0x3000
}

/// Serves the chains. The balloon gives back no more than was listed and reported, and all of that is
/// accounted for.
pub fn balloon(input: &[u8]) {
    let mut tape = Tape::new(input);
    let features = u64::from_le_bytes(tape.array());
    let memory = Arc::new(GuestMemory::from_ranges(&MEMORY).expect("memory"));
    let (mut made, mut next) = ([0_u16; QUEUES as usize], [0_u16; QUEUES as usize]);
    for _ in 0..tape.u8() {
        let queue = u16::from(tape.u8()) % QUEUES;
        let buffers = u16::from(tape.u8()) % 4 + 1;
        let (made, next) = (&mut made[usize::from(queue)], &mut next[usize::from(queue)]);
        if *next + buffers > SIZE || *made == SIZE {
            continue;
        }
        let head = *next;
        for buffer in 0..buffers {
            let how = tape.u8();
            let address = u64::from_le_bytes(tape.array());
            let bytes = u32::from_le_bytes(tape.array());
            let (address, bytes) = match how & 2 {
                0 => (address % MEMORY_BYTES, bytes % (2 * LIST_BYTES as u32)),
                _ => (address, bytes),
            };
            let flags = u8::from(buffer + 1 < buffers) | (how & 1) << 1;
            let at = ring(queue) + 16 * u64::from(*next);
            write(&memory, at, &descriptor(address, bytes, flags, *next + 1));
            *next += 1;
        }
        let slot = ring(queue) + 0x1004 + 2 * u64::from(*made);
        write(&memory, slot, &head.to_le_bytes());
        *made += 1;
        write(&memory, ring(queue) + 0x1002, &made.to_le_bytes());
    }
    write(&memory, LISTS, tape.take(LIST_BYTES));
    let queues: Vec<_> = (0..QUEUES)
        .map(|index| {
            let at = ring(index);
            queue(index, SIZE, [at, at + 0x1000, at + 0x2000])
        })
        .collect();
    let (counters, signals) = (BalloonCounters::default(), Interrupts(AtomicU64::new(0)));
    // A list may have the rings given back: then they are empty, and broken if anything.
    let _ = serve(memory, features, &queues, (&counters, &signals), 256);
    let counted = counters.snapshot();
    assert_eq!(counted.failed, 0);
    let asked = counted.inflated_pages * PAGE_BYTES + counted.reported_bytes;
    let done = counted.discarded_bytes + counted.kept_bytes;
    assert!(done <= asked + MEMORY_BYTES, "{counted:?}");
    assert!(signals.0.load(Ordering::Relaxed) <= 256 * u64::from(QUEUES));
}

fn write(memory: &GuestMemory, at: u64, bytes: &[u8]) {
    memory
        .write_slice(bytes, GuestAddress(at))
        .expect("within the memory");
}
