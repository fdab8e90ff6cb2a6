//! virtio-blk: an arbitrary driver of rings, requests and buffers, and a file in memory. All that the
//! disk does is compared with a model that is made of arrays.
//!
//! Input: `features (8) | knobs (1) | steps …`. Knobs: bits 0 and 1, the cache mode; bit 2, the disk
//! is read-only; bit 3, it has two queues; bits 4 and 5, what the file asks transfers to be aligned to. Steps: see [`what`]. Two memory regions are adjacent, with
//! no memory after them.
mod model;

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use nix::{
    fcntl::{FallocateFlags, fallocate},
    sys::memfd::{MFdFlags, memfd_create},
};
use slipgate_vmm::{
    GuestMemory,
    virtio::{
        Activation,
        block::{Cache, DiskConfig, DiskCounters, SECTOR_BYTES, stepped::Stepped},
        rate::RateConfig,
    },
};
use vm_memory::{Bytes, GuestAddress};

use crate::{
    driver::{
        Interrupts, descriptor, queue,
        rings::{available, descriptors, used},
    },
    tape::Tape,
};
use model::Model;

/// Kinds of steps, by their first byte.
pub(crate) mod what {
    /// Write a chain and offer it: `queue | shape | buffers …`. `shape`: the lower three bits are the
    /// number of buffers less one; bit 7, they are in an indirect table. A buffer: `how | address (2)
    /// | bytes (2)`, the address in eights, and what the bits of `how` say, in this order. Bit 0: the
    /// device writes it. Bit 1: eight bytes of address and four of length are in place of the former.
    /// Bit 2: a header for it follows, `type | sector (8)`. Bit 3: a range follows, `sector (8) |
    /// sectors (4) | flags`, to be written behind the header, if there is one. Bit 4: `flags | next`
    /// of the descriptor follow.
    pub(crate) const CHAIN: u8 = 0;
    /// Offer any chain: `queue | head | by`, where `by` is how far the index goes.
    pub(crate) const OFFER: u8 = 1;
    /// Write memory: `eighth (2) | length (2) | bytes`.
    pub(crate) const WRITE: u8 = 2;
    /// Serve one request: `queue`.
    pub(crate) const TURN: u8 = 3;
    /// Begin a request and pause: `queue`.
    pub(crate) const PAUSE: u8 = 4;
    /// Serve until there is nothing to do.
    pub(crate) const ALL: u8 = 5;
    /// Reset and initialize the device again.
    pub(crate) const RESET: u8 = 6;
}

/// Length of the first region.
const REGION_BYTES: u64 = 0x1_8000;
const MEMORY_BYTES: u64 = 0x2_0000;
const DISK_BYTES: u64 = 32 * SECTOR_BYTES;
/// Number of entries of each queue.
const SIZE: u16 = 32;
/// Where the indirect tables are, each of which has eight descriptors.
const TABLES: u64 = 0x2000;
const TABLE_BYTES: u64 = 8 * 16;
/// Most requests that are served at a time: one that reads into the rings may offer the next.
const TURNS: usize = 1_000;

/// Performs the steps that the input describes. The disk does what the model does, and nothing else:
/// in the file, in all of the memory, and by its counters.
pub fn disk(input: &[u8]) {
    let mut tape = Tape::new(input);
    let features = u64::from_le_bytes(tape.array());
    let mut rig = Rig::new(features, tape.u8());
    rig.activate();
    while !tape.is_at_end() {
        rig.step(&mut tape);
    }
    rig.all();
    rig.compare();
}

struct Rig {
    memory: Arc<GuestMemory>,
    file: File,
    disk: Stepped,
    counters: Arc<DiskCounters>,
    interrupts: Arc<Interrupts>,
    model: Model,
    features: u64,
    queues: u16,
    /// Number of descriptors written, per queue, and of tables.
    next: [u16; 2],
    tables: u64,
    /// Requests that were answered before the last reset.
    answered: u64,
}

impl Rig {
    fn new(features: u64, knobs: u8) -> Rig {
        let cache = [
            Cache::WriteBack,
            Cache::WriteThrough,
            Cache::Unsafe,
            Cache::None,
        ][usize::from(knobs & 3)];
        let alignment = [None, Some([4, 512]), Some([4096, 512]), Some([512, 4096])];
        let alignment = alignment[usize::from(knobs >> 4 & 3)];
        let (read_only, queues) = (knobs & 4 != 0, 1 + u16::from(knobs >> 3 & 1));
        let content: Vec<u8> = (0..DISK_BYTES)
            .map(|at| (at / 251) as u8 ^ at as u8)
            .collect();
        // Also the file of a disk that is read-only could be written.
        let file = File::from(memfd_create(c"disk", MFdFlags::MFD_CLOEXEC).expect("a file"));
        file.write_all_at(&content, 0).expect("room for the file");
        let counters = Arc::new(DiskCounters::default());
        let config = DiskConfig {
            file: file.try_clone().expect("a descriptor"),
            read_only,
            // A file in memory is not opened otherwise.
            cache: match (cache, alignment) {
                (Cache::None, None) => Cache::WriteBack,
                _ => cache,
            },
            queues,
            rate: RateConfig::default(),
        };
        let disk = match alignment {
            None => Stepped::new(config, counters.clone()),
            Some(alignment) => Stepped::aligned(config, counters.clone(), alignment),
        };
        let disk = disk.expect("the file is a disk");
        let ranges = [
            (GuestAddress(0), REGION_BYTES as usize),
            (
                GuestAddress(REGION_BYTES),
                (MEMORY_BYTES - REGION_BYTES) as usize,
            ),
        ];
        Rig {
            memory: Arc::new(GuestMemory::from_ranges(&ranges).expect("memory")),
            model: Model::new(content, (read_only, cache, alignment), makes_zeroes()),
            features: features & disk.features(),
            file,
            disk,
            counters,
            interrupts: Arc::new(Interrupts(AtomicU64::new(0))),
            queues,
            next: [0; 2],
            tables: 0,
            answered: 0,
        }
    }

    /// The driver begins, with empty rings.
    fn activate(&mut self) {
        let enabled = (0..self.queues).map(|index| {
            queue(
                index,
                SIZE,
                [descriptors(index), available(index), used(index)],
            )
        });
        let activation = Activation {
            memory: self.memory.clone(),
            features: self.features,
            queues: enabled.collect(),
            signals: self.interrupts.clone(),
            restored: None,
        };
        for queue in 0..self.queues {
            self.write(available(queue) + 2, &[0; 2]);
            self.write(used(queue) + 2, &[0; 2]);
        }
        self.answered += self.model.answered();
        let begun = self.disk.activate(activation);
        begun.expect("the rings are within memory");
        self.model.activate(self.features, self.queues);
        self.next = [0; 2];
    }

    fn step(&mut self, tape: &mut Tape<'_>) {
        match tape.u8() {
            what::CHAIN => self.chain(tape),
            what::OFFER => {
                let queue = self.queue(tape);
                let (head, by) = (tape.u8().into(), tape.u8().into());
                self.offer(queue, head, by);
            }
            what::WRITE => {
                let at = u64::from(tape.u16()) * 8;
                self.write(at, tape.bytes());
            }
            what::TURN => {
                let queue = self.queue(tape);
                self.turn(queue, false);
            }
            what::PAUSE => {
                let queue = self.queue(tape);
                self.turn(queue, true);
            }
            what::ALL => self.all(),
            what::RESET => {
                self.compare();
                self.disk.reset();
                self.activate();
            }
            _ => {}
        }
    }

    fn queue(&self, tape: &mut Tape<'_>) -> u16 {
        u16::from(tape.u8()) % self.queues
    }

    fn chain(&mut self, tape: &mut Tape<'_>) {
        let (queue, shape) = (self.queue(tape), tape.u8());
        let (buffers, is_indirect) = (u16::from(shape & 7) + 1, shape & 0x80 != 0);
        let of_queue = usize::from(queue);
        let head = self.next[of_queue];
        let table = TABLES + self.tables % 64 * TABLE_BYTES;
        for buffer in 0..buffers {
            let (at, next) = match is_indirect {
                true => (table + 16 * u64::from(buffer), buffer + 1),
                false => {
                    let place = self.next[of_queue];
                    self.next[of_queue] = (place + 1) % SIZE;
                    (
                        descriptors(queue) + 16 * u64::from(place),
                        self.next[of_queue],
                    )
                }
            };
            self.descriptor(at, next, buffer + 1 < buffers, tape);
        }
        if is_indirect {
            self.tables += 1;
            self.next[of_queue] = (head + 1) % SIZE;
            let at = descriptors(queue) + 16 * u64::from(head);
            let bytes = u32::from(buffers) * 16;
            self.write(at, &descriptor(table, bytes, 4, 0));
        }
        self.offer(queue, head, 1);
    }

    fn descriptor(&mut self, at: u64, next: u16, goes_on: bool, tape: &mut Tape<'_>) {
        let how = tape.u8();
        let (address, bytes) = match how & 2 {
            0 => (u64::from(tape.u16()) * 8 % MEMORY_BYTES, tape.u16().into()),
            _ => (
                u64::from_le_bytes(tape.array()),
                u32::from_le_bytes(tape.array()),
            ),
        };
        let mut content = Vec::new();
        if how & 4 != 0 {
            content.extend([tape.u8(), 0, 0, 0, 0, 0, 0, 0]);
            content.extend(tape.array::<8>());
        }
        if how & 8 != 0 {
            content.extend(tape.array::<12>());
            content.extend([tape.u8(), 0, 0, 0]);
        }
        self.write(address, &content);
        let (flags, next) = match how & 16 {
            0 => (u8::from(goes_on) | (how & 1) << 1, next),
            _ => (tape.u8(), tape.u8().into()),
        };
        self.write(at, &descriptor(address, bytes, flags, next));
    }

    /// Puts a chain into the available ring, and moves its index on.
    fn offer(&mut self, queue: u16, head: u16, by: u16) {
        let mut index = [0; 2];
        let at = available(queue) + 2;
        let read = self.memory.read_slice(&mut index, GuestAddress(at));
        read.expect("the ring is within memory");
        let index = u16::from_le_bytes(index);
        let entry = u64::from(index % SIZE);
        self.write(available(queue) + 4 + 2 * entry, &head.to_le_bytes());
        self.write(at, &index.wrapping_add(by).to_le_bytes());
    }

    /// Writes memory as the driver, unless it lies outside.
    fn write(&mut self, at: u64, bytes: &[u8]) {
        let end = at.checked_add(bytes.len() as u64);
        if end.is_some_and(|end| end <= MEMORY_BYTES) {
            let written = self.memory.write_slice(bytes, GuestAddress(at));
            written.expect("within the memory");
            self.model.put(at, bytes);
        }
    }

    /// Serves one request. Returns whether there was one.
    fn turn(&mut self, queue: u16, pauses: bool) -> bool {
        let served = match pauses {
            true => self.disk.pause(queue),
            false => self.disk.turn(queue),
        };
        let expected = self.model.turn(queue, pauses);
        assert_eq!(served.ok(), expected.ok());
        assert_eq!(self.disk.under_way(), 0);
        served == Ok(true)
    }

    fn all(&mut self) {
        for queue in 0..self.queues {
            for _ in 0..TURNS {
                if !self.turn(queue, false) {
                    break;
                }
            }
        }
    }

    /// Compares all that there is with the model.
    fn compare(&self) {
        let mut file = vec![0; DISK_BYTES as usize];
        let read = self.file.read_exact_at(&mut file, 0);
        read.expect("the file is as long as it was");
        assert_eq!(self.file.metadata().expect("a file").len(), DISK_BYTES);
        same("file", &file, &self.model.disk);
        let mut memory = vec![0; MEMORY_BYTES as usize];
        let read = self.memory.read_slice(&mut memory, GuestAddress(0));
        read.expect("the memory is there");
        same("memory", &memory, &self.model.memory);
        let counted = self.counters.snapshot();
        assert_eq!(counted, self.model.counted);
        let interrupts = self.interrupts.0.load(Ordering::Relaxed);
        assert!(interrupts <= self.answered + self.model.answered());
    }
}

fn same(what: &str, is: &[u8], expected: &[u8]) {
    if is != expected {
        let at = is
            .iter()
            .zip(expected)
            .position(|(is, wanted)| is != wanted);
        panic!("the {what} is another from byte {at:#x?} on");
    }
}

/// Returns whether this kernel's files in memory make zeroes by FALLOC_FL_ZERO_RANGE.
fn makes_zeroes() -> bool {
    static MAKES: OnceLock<bool> = OnceLock::new();
    *MAKES.get_or_init(|| {
        let file = memfd_create(c"zeroes", MFdFlags::MFD_CLOEXEC).expect("a file");
        let flags = FallocateFlags::FALLOC_FL_ZERO_RANGE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(file, flags, 0, SECTOR_BYTES as i64).is_ok()
    })
}
