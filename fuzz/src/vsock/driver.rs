//! The guest's driver: its memory, rings and buffers. Each queue has slots, a buffer and two
//! descriptors each.
use std::sync::{Arc, atomic::Ordering};

use slipgate_vmm::{GuestMemory, virtio::EnabledQueue};
use vm_memory::{Bytes, GuestAddress};

use crate::driver::{
    queue,
    rings::{available, descriptors, used},
};

pub(super) const RX: u16 = 0;
pub(super) const TX: u16 = 1;
pub(super) const EVENTS: u16 = 2;

/// Length of a slot's buffer.
pub(super) const SLOT_BYTES: u32 = 0x800;
/// Number of slots of each queue.
const SLOTS: u16 = 32;
/// Number of entries of each queue.
const SIZE: u16 = 64;
/// Two regions that touch, within a buffer of the RX queue.
const MEMORY: [(GuestAddress, usize); 2] = [
    (GuestAddress(0), 0x2_0000),
    (GuestAddress(0x2_0000), 0x8000),
];
const MEMORY_BYTES: u64 = 0x2_8000;
/// Where the slots of each queue begin.
const BUFFERS: [u64; 3] = [0x1_4200, 0x4000, 0x3000];

pub(super) struct Driver {
    pub(super) memory: Arc<GuestMemory>,
    /// Slots that are not in use, and the lengths of those that are.
    free: [Vec<u16>; 3],
    lengths: [[u32; SLOTS as usize]; 3],
    made: [u16; 3],
    used: [u16; 3],
}

impl Driver {
    pub(super) fn new() -> Driver {
        Driver {
            memory: Arc::new(GuestMemory::from_ranges(&MEMORY).expect("memory")),
            free: Default::default(),
            lengths: Default::default(),
            made: [0; 3],
            used: [0; 3],
        }
    }

    /// Begins with empty rings. Returns the queues.
    pub(super) fn begin(&mut self, has_events: bool) -> Vec<EnabledQueue> {
        self.made = [0; 3];
        self.used = [0; 3];
        let queues = 2 + u16::from(has_events);
        (0..queues)
            .map(|index| {
                self.free[usize::from(index)] = (0..SLOTS).rev().collect();
                self.set_half(available(index) + 2, 0);
                self.set_half(used(index) + 2, 0);
                queue(
                    index,
                    SIZE,
                    [descriptors(index), available(index), used(index)],
                )
            })
            .collect()
    }

    /// Offers a buffer with this content for the device to read, in two pieces if `split` is within.
    /// Returns false if there is no slot.
    pub(super) fn send(&mut self, content: &[u8], split: u32) -> bool {
        let Some(slot) = self.free[usize::from(TX)].pop() else {
            return false;
        };
        self.write(buffer(TX, slot), content);
        self.offer_slot(TX, slot, content.len() as u32, split);
        true
    }

    /// Offers a buffer for the device to write. Returns false if there is no slot.
    pub(super) fn lend(&mut self, queue: u16, bytes: u32, split: u32) -> bool {
        let Some(slot) = self.free[usize::from(queue)].pop() else {
            return false;
        };
        self.offer_slot(queue, slot, bytes, split);
        true
    }

    fn offer_slot(&mut self, queue: u16, slot: u16, bytes: u32, split: u32) {
        let (head, at) = (2 * slot, buffer(queue, slot));
        let writable = u8::from(queue != TX) << 1;
        if (1..bytes).contains(&split) {
            self.descriptor(queue, head, (at, split, writable | 1, head + 1));
            let rest = (at + u64::from(split), bytes - split, writable, 0);
            self.descriptor(queue, head + 1, rest);
        } else {
            self.descriptor(queue, head, (at, bytes, writable, 0));
        }
        self.lengths[usize::from(queue)][usize::from(slot)] = bytes;
        self.offer(queue, head, 1);
    }

    /// Writes a descriptor: `address, bytes, flags, next`.
    pub(super) fn descriptor(&self, queue: u16, index: u16, fields: (u64, u32, u8, u16)) {
        let (address, bytes, flags, next) = fields;
        let descriptor = crate::driver::descriptor(address, bytes, flags, next);
        let at = descriptors(queue) + 16 * u64::from(index % SIZE);
        self.write(at, &descriptor);
    }

    /// Puts a chain into the available ring, and moves its index on.
    pub(super) fn offer(&mut self, queue: u16, head: u16, by: u16) {
        let made = &mut self.made[usize::from(queue)];
        let entry = u64::from(*made % SIZE);
        *made = made.wrapping_add(by);
        let made = *made;
        self.set_half(available(queue) + 4 + 2 * entry, head);
        self.set_half(available(queue) + 2, made);
    }

    /// Takes back what the device has given back. Returns the contents of the buffers, as far as they
    /// were written.
    pub(super) fn take_back(&mut self, queue: u16) -> Vec<Vec<u8>> {
        let of_queue = usize::from(queue);
        let now = self.half(used(queue) + 2);
        let mut all = Vec::new();
        while self.used[of_queue] != now {
            let entry = u64::from(self.used[of_queue] % SIZE);
            let mut element = [0; 8];
            self.read(used(queue) + 4 + 8 * entry, &mut element);
            let [a, b, _, _, bytes @ ..] = element;
            let (head, bytes) = (u16::from_le_bytes([a, b]), u32::from_le_bytes(bytes));
            let slot = head / 2;
            assert!(head.is_multiple_of(2) && slot < SLOTS, "a head of no chain");
            assert!(
                !self.free[of_queue].contains(&slot),
                "a chain that is not the device's"
            );
            assert!(bytes <= self.lengths[of_queue][usize::from(slot)]);
            assert!(queue != TX || bytes == 0);
            let mut content = vec![0; bytes as usize];
            self.read(buffer(queue, slot), &mut content);
            all.push(content);
            self.free[of_queue].push(slot);
            self.used[of_queue] = self.used[of_queue].wrapping_add(1);
        }
        all
    }

    /// Returns whether there is a slot for a packet.
    pub(super) fn can_send(&self) -> bool {
        !self.free[usize::from(TX)].is_empty()
    }

    /// Has all slots free, whatever became of them.
    pub(super) fn forget(&mut self) {
        self.free
            .iter_mut()
            .for_each(|free| *free = (0..SLOTS).collect());
    }

    /// Writes memory, unless it lies outside.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        if at + bytes.len() as u64 <= MEMORY_BYTES {
            let written = self.memory.write_slice(bytes, GuestAddress(at));
            written.expect("within the memory");
        }
    }

    fn read(&self, at: u64, into: &mut [u8]) {
        let read = self.memory.read_slice(into, GuestAddress(at));
        read.expect("within the memory");
    }

    fn half(&self, at: u64) -> u16 {
        let loaded = self.memory.load(GuestAddress(at), Ordering::Acquire);
        loaded.expect("within the memory")
    }

    fn set_half(&self, at: u64, value: u16) {
        let stored = self
            .memory
            .store(value, GuestAddress(at), Ordering::Release);
        stored.expect("within the memory");
    }
}

fn buffer(queue: u16, slot: u16) -> u64 {
    BUFFERS[usize::from(queue)] + u64::from(slot) * u64::from(SLOT_BYTES)
}
