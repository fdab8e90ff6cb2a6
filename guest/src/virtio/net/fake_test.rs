//! A network card for tests: PCI configuration space, registers, and rings in this process's own
//! memory. Its device side runs when it is notified.
use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use super::super::{ring::feature::EVENT_IDX, transport::status};
use crate::pci::{ConfigSpace, Function, Registers};

pub(crate) const CARD: Function = Function {
    device: 2,
    function: 0,
};
const BAR: u64 = 0x8000_0000;
const NOTIFY: usize = 0x1000;
const DEVICE: usize = 0x2000;
const TABLE: usize = 0x3000;
const PENDING: usize = 0x4000;

/// Properties of the card, and a record of the accesses to it.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) offered: u64,
    pub(crate) accepted: u64,
    /// Features that the card refuses, although it offers them.
    pub(crate) refuses: u64,
    pub(crate) status: u8,
    pub(crate) pairs: u16,
    pub(crate) vectors: u16,
    pub(crate) queues: Vec<Queue>,
    pub(crate) table: Vec<u32>,
    pub(crate) commands: Vec<Vec<u8>>,
    /// Sent frames with their headers, and the queue of each.
    pub(crate) sent: Vec<(usize, Vec<u8>)>,
    /// True if the card interrupts for each returned buffer, wanted or not.
    pub(crate) always_interrupts: bool,
    /// True if sent frames stay in flight.
    pub(crate) stalled: bool,
    pub(crate) notified: Vec<usize>,
    config: Vec<u32>,
    select: [u32; 3],
    config_vector: u16,
}

#[derive(Clone, Default)]
pub(crate) struct Queue {
    pub(crate) size: u16,
    pub(crate) vector: u16,
    pub(crate) enabled: bool,
    addresses: [u64; 3],
    seen: u16,
    used: u16,
}

thread_local! {
    static INTERRUPTS: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of interrupts of this thread's cards by vectors of queues.
pub(crate) fn interrupts() -> u64 {
    INTERRUPTS.get()
}

/// Address, length and flags of a descriptor.
type Descriptor = (u64, u32, u16);

fn at<T>(address: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

fn load<T: Copy>(address: u64) -> T {
    // SAFETY: in a ring or a buffer that the driver has offered, and that a test keeps alive.
    unsafe { at::<T>(address).read_unaligned() }
}

fn store<T>(address: u64, value: T) {
    // SAFETY: as above.
    unsafe { at::<T>(address).write_unaligned(value) }
}

impl Queue {
    /// Takes the next chain. Returns its head, and address, length and flags of each descriptor.
    fn next(&mut self) -> Option<(u16, Vec<Descriptor>)> {
        let [descriptors, available, _] = self.addresses;
        if load::<u16>(available + 2) == self.seen {
            return None;
        }
        let head: u16 = load(available + 4 + 2 * u64::from(self.seen % self.size));
        self.seen = self.seen.wrapping_add(1);
        let (mut table, mut index, mut chain) = (descriptors, head, Vec::new());
        loop {
            let entry = table + 16 * u64::from(index);
            let (address, length, flags): (u64, u32, u16) =
                (load(entry), load(entry + 8), load(entry + 12));
            if flags & 4 != 0 {
                (table, index) = (address, 0);
                continue;
            }
            chain.push((address, length, flags));
            if flags & 1 == 0 {
                return Some((head, chain));
            }
            index = load(entry + 14);
        }
    }

    fn give_back(&mut self, head: u16, written: u32) {
        let entry = self.addresses[2] + 4 + 8 * u64::from(self.used % self.size);
        store(entry, u32::from(head));
        store(entry + 4, written);
        self.used = self.used.wrapping_add(1);
        store(self.addresses[2] + 2, self.used);
    }

    /// Returns whether the driver wants an interrupt for the buffer that was returned last.
    fn wants_interrupt(&self, event_idx: bool) -> bool {
        let available = self.addresses[1];
        match event_idx {
            true => {
                let event: u16 = load(available + 4 + 2 * u64::from(self.size));
                event == self.used.wrapping_sub(1)
            }
            false => load::<u16>(available) == 0,
        }
    }
}

#[derive(Clone)]
pub(crate) struct Card(pub(crate) Rc<RefCell<State>>);

impl Card {
    pub(crate) fn new(offered: u64, pairs: u16, vectors: u16) -> Self {
        let card = Card(Rc::new(RefCell::new(State {
            offered,
            pairs,
            vectors,
            ..State::default()
        })));
        let mut state = card.0.borrow_mut();
        state.table = vec![1; usize::from(vectors) * 4];
        state.config = vec![0; 64];
        let capability = |next: u32, kind: u32| 0x0010_0009 | next << 8 | kind << 24;
        for (offset, value) in [
            (0x00, 0x1041_1AF4),
            (0x04, 1 << 20),
            (0x10, BAR as u32),
            (0x34, 0x40),
            (0x40, capability(0x50, 1)),
            (0x4C, 0x38),
            (0x50, capability(0x70, 2)),
            (0x58, NOTIFY as u32),
            (0x5C, 0x100),
            (0x60, 4),
            (0x70, capability(0x80, 4)),
            (0x78, DEVICE as u32),
            (0x7C, 0x40),
            (0x80, 0x0011 | (u32::from(vectors) - 1) << 16),
            (0x84, TABLE as u32),
            (0x88, PENDING as u32),
        ] {
            state.config[offset / 4] = value;
        }
        drop(state);
        card
    }

    /// Returns the registers at an address.
    pub(crate) fn map(&self, address: u64, _: usize) -> Window {
        Window {
            card: self.clone(),
            start: (address - BAR) as usize,
        }
    }

    /// Puts a frame into receive buffers of queue pair `pair`, with `flags` in its header.
    pub(crate) fn deliver(&self, pair: usize, flags: u8, frame: &[u8]) {
        let mut state = self.0.borrow_mut();
        let mergeable = state.accepted & super::feature::MRG_RXBUF != 0;
        let queue = &mut state.queues[pair * 2];
        let mut header = [0; 12];
        header[0] = flags;
        let mut rest = [&header[..], frame].concat();
        let (mut pieces, mut first) = (Vec::new(), None);
        while !rest.is_empty() {
            let (head, chain) = queue.next().expect("a receive buffer");
            let [(address, length, 2)] = chain[..] else {
                panic!("a receive buffer of {chain:?}")
            };
            let piece: Vec<u8> = rest.drain(..rest.len().min(length as usize)).collect();
            for (at, byte) in (address..).zip(&piece) {
                store(at, *byte);
            }
            first.get_or_insert(address);
            pieces.push((head, piece.len() as u32));
        }
        assert!(mergeable || pieces.len() == 1);
        store(first.unwrap() + 10, pieces.len() as u16);
        for (head, written) in pieces {
            queue.give_back(head, written);
        }
    }

    /// Returns the lengths of the receive buffers that are offered on queue pair `pair`.
    pub(crate) fn offered_buffers(&self, pair: usize) -> Vec<u32> {
        let mut queue = self.0.borrow().queues[pair * 2].clone();
        let offered = std::iter::from_fn(|| queue.next());
        offered
            .map(|(_, chain)| chain.iter().map(|(_, length, _)| length).sum())
            .collect()
    }

    /// Returns a receive buffer as if `written` bytes were in it.
    pub(crate) fn deliver_rubbish(&self, pair: usize, written: u32) {
        let queue = &mut self.0.borrow_mut().queues[pair * 2];
        let (head, _) = queue.next().expect("a receive buffer");
        queue.give_back(head, written);
    }

    /// Completes the frames in flight.
    pub(crate) fn resume(&self) {
        let mut state = self.0.borrow_mut();
        state.stalled = false;
        (0..state.queues.len()).for_each(|queue| state.serve(queue));
    }
}

impl State {
    fn serve(&mut self, index: usize) {
        if self.status & status::DRIVER_OK == 0 || !self.queues[index].enabled {
            return;
        }
        let control = usize::from(self.pairs) * 2;
        if index != control && (index.is_multiple_of(2) || self.stalled) {
            return;
        }
        while let Some((head, chain)) = self.queues[index].next() {
            let read: Vec<u8> = chain
                .iter()
                .filter(|(.., flags)| flags & 2 == 0)
                .flat_map(|&(address, length, _)| {
                    (0..u64::from(length)).map(move |at| load::<u8>(address + at))
                })
                .collect();
            let mut written = 0;
            if index == control {
                let (answer, 1, 2..) = chain[chain.len() - 1] else {
                    panic!("no room for an answer")
                };
                store(answer, u8::from(read[0] > 5));
                written = 1;
                self.commands.push(read);
            } else {
                self.sent.push((index, read));
            }
            let queue = &mut self.queues[index];
            queue.give_back(head, written);
            let is_wanted = queue.wants_interrupt(self.accepted & EVENT_IDX != 0);
            if queue.vector != 0xFFFF && (is_wanted || self.always_interrupts) {
                INTERRUPTS.set(INTERRUPTS.get() + 1);
            }
        }
        // With EVENT_IDX, asks for a notification of the next chain.
        let queue = &self.queues[index];
        store(
            queue.addresses[2] + 4 + 8 * u64::from(queue.size),
            queue.seen,
        );
    }

    fn write_common(&mut self, offset: usize, value: u32) {
        let selected = self.select[2] as usize;
        match offset {
            0x00 => self.select[0] = value,
            0x08 => self.select[1] = value,
            0x0C => {
                let shift = 32 * self.select[1];
                self.accepted = self.accepted & !(0xFFFF_FFFF << shift) | u64::from(value) << shift;
            }
            0x10 => self.config_vector = self.vector(value),
            0x14 if value == 0 => {
                self.status = 0;
                self.accepted = 0;
                self.queues = vec![
                    Queue {
                        size: 256,
                        ..Queue::default()
                    };
                    usize::from(self.pairs) * 2 + 1
                ];
            }
            0x14 => {
                self.status = value as u8;
                if self.accepted & self.refuses != 0 || self.accepted & !self.offered != 0 {
                    self.status &= !status::FEATURES_OK;
                }
            }
            0x16 => self.select[2] = value,
            0x18 => self.queues[selected].size = value as u16,
            0x1A => self.queues[selected].vector = self.vector(value),
            0x1C => self.queues[selected].enabled = value == 1,
            0x20..0x38 => {
                let address = &mut self.queues[selected].addresses[(offset - 0x20) / 8];
                let shift = if offset.is_multiple_of(8) { 0 } else { 32 };
                *address = *address & !(0xFFFF_FFFF << shift) | u64::from(value) << shift;
            }
            _ => panic!("a write to common configuration {offset:#x}"),
        }
    }

    fn vector(&self, value: u32) -> u16 {
        if value < self.vectors.into() {
            value as u16
        } else {
            0xFFFF
        }
    }

    fn read_common(&self, offset: usize) -> u32 {
        let selected = self.select[2] as usize;
        match offset {
            0x04 => (self.offered >> (32 * self.select[0])) as u32,
            0x10 => self.config_vector.into(),
            0x12 => self.queues.len() as u32,
            0x14 => self.status.into(),
            0x15 => 0,
            0x18 => self
                .queues
                .get(selected)
                .map_or(0, |queue| queue.size.into()),
            0x1A => self.queues[selected].vector.into(),
            0x1E => self.select[2],
            _ => panic!("a read of common configuration {offset:#x}"),
        }
    }
}

impl ConfigSpace for Card {
    fn read(&self, function: Function, offset: u16) -> u32 {
        assert_eq!((function, offset % 4), (CARD, 0));
        self.0.borrow().config[usize::from(offset / 4)]
    }

    fn write(&self, _: Function, offset: u16, value: u32) {
        let register = &mut self.0.borrow_mut().config[usize::from(offset / 4)];
        // The status half is cleared by ones.
        let keep = if offset == 4 {
            *register & 0xFFFF_0000 & !value
        } else {
            value & 0xFFFF_0000
        };
        *register = keep | value & 0xFFFF;
    }
}

/// Mapped registers of the card.
#[derive(Clone)]
pub(crate) struct Window {
    card: Card,
    start: usize,
}

impl Window {
    fn read(&self, offset: usize) -> u32 {
        let state = self.card.0.borrow();
        match self.start + offset {
            at @ 0..NOTIFY => state.read_common(at),
            at @ DEVICE..TABLE => {
                // MAC, status, pairs, MTU.
                let pairs = state.pairs.to_le_bytes();
                let config = [
                    2, 0, 0, 0xAA, 0xBB, 0xCC, 1, 0, pairs[0], pairs[1], 0x78, 0x05,
                ];
                u32::from(config[at - DEVICE])
                    | u32::from(*config.get(at - DEVICE + 1).unwrap_or(&0)) << 8
            }
            at @ TABLE..PENDING => state.table[(at - TABLE) / 4],
            at => panic!("a read of {at:#x}"),
        }
    }

    fn write(&self, offset: usize, value: u32) {
        let mut state = self.card.0.borrow_mut();
        match self.start + offset {
            at @ 0..NOTIFY => state.write_common(at, value),
            at @ NOTIFY..DEVICE => {
                let queue = value as usize;
                assert_eq!(at - NOTIFY, queue * 4, "not where that queue is notified");
                state.notified.push(queue);
                state.serve(queue);
            }
            at @ TABLE..PENDING => state.table[(at - TABLE) / 4] = value,
            at => panic!("a write to {at:#x}"),
        }
    }
}

impl Registers for Window {
    fn read8(&self, offset: usize) -> u8 {
        self.read(offset) as u8
    }
    fn read16(&self, offset: usize) -> u16 {
        self.read(offset) as u16
    }
    fn read32(&self, offset: usize) -> u32 {
        self.read(offset)
    }
    fn write8(&self, offset: usize, value: u8) {
        self.write(offset, value.into());
    }
    fn write16(&self, offset: usize, value: u16) {
        self.write(offset, value.into());
    }
    fn write32(&self, offset: usize, value: u32) {
        self.write(offset, value);
    }
}
