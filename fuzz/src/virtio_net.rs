//! virtio-net: an arbitrary driver of rings, buffers and control queue, and a socket pair in place
//! of a TAP.
//!
//! Input: `features (8) | queue size (1) | steps …`. Steps: see [`what`]. Two memory regions are
//! adjacent, with no memory after them.
use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
};

use nix::{
    sys::socket::{AddressFamily, SockFlag, SockType, socketpair},
    unistd,
};
use slipgate_vmm::{
    GuestMemory,
    virtio::{
        Activation, EnabledQueue, NeedsReset, Signals,
        net::{NetCounters, stepped::Stepped},
    },
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::tape::Tape;

/// Kinds of steps, by their first byte.
pub(crate) mod what {
    /// Write a descriptor: `queue | index | how | address (2) | bytes (2) | flags | next`. `how`:
    /// bit 0 has the address and length as they are, by eight and by four bytes; bit 1 puts it into
    /// an indirect table.
    pub(crate) const DESCRIPTOR: u8 = 0;
    /// Make a chain available: `queue | head`.
    pub(crate) const OFFER: u8 = 1;
    /// Move the available index: `queue | by (2)`.
    pub(crate) const INDEX: u8 = 2;
    /// Write memory: `eighth (2) | length (2) | bytes`.
    pub(crate) const WRITE: u8 = 3;
    /// Send a frame to the guest: `header (12) | bytes (2) | fill`.
    pub(crate) const FRAME: u8 = 4;
    /// Make some passes of the worker.
    pub(crate) const PASS: u8 = 5;
    /// Serve the control queue.
    pub(crate) const COMMAND: u8 = 6;
    /// Turn the pair on or off: `on`.
    pub(crate) const ACTIVE: u8 = 7;
    /// Set the wanted interrupts: `queue | flags (2) | used_event (2)`.
    pub(crate) const EVENT: u8 = 8;
    /// Reset and initialize the device again.
    pub(crate) const RESET: u8 = 9;
}

const MEMORY: [(GuestAddress, usize); 2] = [
    (GuestAddress(0), 0x3_0000),
    (GuestAddress(0x3_0000), 0x1_0000),
];
/// Address of the indirect tables, and by default of the buffers.
const BUFFERS: u64 = 0x1_0000;
const TABLE: u64 = 0xf000;
const QUEUES: usize = 3;

/// Performs the steps that the input describes.
pub fn virtio_net(input: &[u8]) {
    let mut tape = Tape::new(input);
    let features = u64::from_le_bytes(tape.array());
    let size = 1 << (tape.u8() % 7);
    let mut rig = Rig::new(features, size);
    rig.activate();
    while !tape.is_at_end() {
        rig.step(&mut tape);
    }
    rig.passes();
    rig.card.reset();
}

struct Nobody(AtomicBool);

impl Signals for Nobody {
    fn queue(&self, _index: u16) {}
    fn config(&self) {}
    fn needs_reset(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Rig {
    memory: Arc<GuestMemory>,
    card: Stepped,
    counters: Arc<NetCounters>,
    peer: OwnedFd,
    features: u64,
    size: u16,
    /// Numbers of chains made available and given back since the last reset, per queue.
    made: [u64; QUEUES],
    back: [u64; QUEUES],
    used: [u16; QUEUES],
    /// Number of frames that the peer received.
    seen: u64,
    /// Whether a buffer has overlapped the rings. Then the rings' contents may be received data.
    overlaps: bool,
}

impl Rig {
    fn new(features: u64, size: u16) -> Rig {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let sockets = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags);
        let (ours, peer) = sockets.expect("a pair of sockets");
        let counters = NetCounters::new(1);
        let card = Stepped::new(ours, Arc::clone(&counters)).expect("a card");
        Rig {
            memory: Arc::new(GuestMemory::from_ranges(&MEMORY).expect("memory")),
            features: features & card.features(),
            card,
            counters,
            peer,
            size,
            made: [0; QUEUES],
            back: [0; QUEUES],
            used: [0; QUEUES],
            seen: 0,
            overlaps: false,
        }
    }

    fn activate(&mut self) {
        let enabled = (0..QUEUES).map(|index| {
            let at = ring(index) as u32;
            let mut queue = Queue::new(64).expect("a queue");
            queue.set_size(self.size);
            queue.set_desc_table_address(Some(at), Some(0));
            queue.set_avail_ring_address(Some(at + 0x1000), Some(0));
            queue.set_used_ring_address(Some(at + 0x2000), Some(0));
            queue.set_ready(true);
            EnabledQueue {
                index: index as u16,
                queue,
                kick: EventFd::new(EFD_NONBLOCK).expect("an eventfd"),
                taken: Vec::new(),
            }
        });
        let activation = Activation {
            memory: Arc::clone(&self.memory),
            features: self.features,
            queues: enabled.collect(),
            signals: Arc::new(Nobody(AtomicBool::new(false))),
            restored: None,
        };
        self.card
            .activate(activation)
            .expect("the rings are within memory");
        self.overlaps = false;
        self.made = [0; QUEUES];
        self.back = [0; QUEUES];
        for queue in 0..QUEUES {
            // The device begins at zero, whatever was there.
            self.used[queue] = 0;
            self.half(ring(queue) + 0x1002).store(0, Ordering::Relaxed);
            self.half(ring(queue) + 0x2002).store(0, Ordering::Relaxed);
        }
    }

    fn step(&mut self, tape: &mut Tape<'_>) {
        match tape.u8() {
            what::DESCRIPTOR => self.descriptor(tape),
            what::OFFER => {
                let (queue, head) = (queue(tape), u16::from(tape.u8()));
                let index = self.half(ring(queue) + 0x1002).load(Ordering::Relaxed);
                let entry = u64::from(index & (self.size - 1));
                self.write(ring(queue) + 0x1004 + 2 * entry, &head.to_le_bytes());
                self.advance(queue, 1);
            }
            what::INDEX => {
                let (queue, by) = (queue(tape), tape.u16());
                self.advance(queue, by);
            }
            what::WRITE => {
                let at = u64::from(tape.u16()) * 8;
                self.write(at, tape.bytes());
                // The indices are the driver's and the device's: no writing over them by the way.
                for queue in 0..QUEUES {
                    self.half(ring(queue) + 0x2002)
                        .store(self.used[queue], Ordering::Relaxed);
                    let made = self.made[queue] as u16;
                    self.half(ring(queue) + 0x1002)
                        .store(made, Ordering::Relaxed);
                }
            }
            what::FRAME => {
                let header: [u8; 12] = tape.array();
                let mut frame = header.to_vec();
                frame.resize(12 + usize::from(tape.u16()), tape.u8());
                // A full socket takes no more.
                let _ = unistd::write(&self.peer, &frame);
            }
            what::PASS => self.passes(),
            what::COMMAND => {
                self.overlaps |= overlaps_rings(&self.memory, self.size);
                for _ in 0..8 {
                    match self.card.command() {
                        Ok(true) => {}
                        Ok(false) => break,
                        Err(NeedsReset) => break,
                    }
                }
                self.look();
            }
            what::ACTIVE => self.card.set_active(tape.u8() & 1 != 0),
            what::EVENT => {
                let queue = queue(tape);
                let (flags, event) = (tape.u16(), tape.u16());
                self.half(ring(queue) + 0x1000)
                    .store(flags, Ordering::Relaxed);
                let at = ring(queue) + 0x1004 + 2 * u64::from(self.size);
                self.half(at).store(event, Ordering::Relaxed);
            }
            what::RESET => {
                self.card.reset();
                self.activate();
            }
            _ => {}
        }
    }

    fn descriptor(&mut self, tape: &mut Tape<'_>) {
        let (queue, index, how) = (queue(tape), tape.u8(), tape.u8());
        let (address, bytes) = if how & 1 != 0 {
            (
                u64::from_le_bytes(tape.array()),
                u32::from_le_bytes(tape.array()),
            )
        } else {
            (BUFFERS + u64::from(tape.u16()), u32::from(tape.u16()))
        };
        let (flags, next) = (tape.u8(), tape.u8());
        let table = if how & 2 != 0 { TABLE } else { ring(queue) };
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..12].copy_from_slice(&bytes.to_le_bytes());
        descriptor[12] = flags;
        descriptor[14] = next;
        self.write(table + 16 * u64::from(index % 64), &descriptor);
    }

    fn passes(&mut self) {
        self.overlaps |= overlaps_rings(&self.memory, self.size);
        for _ in 0..8 {
            match self.card.pass() {
                Ok(true) => self.look(),
                Ok(false) => break,
                Err(NeedsReset) => break,
            }
        }
        self.look();
    }

    /// Checks the guarantees toward the peer and the driver.
    fn look(&mut self) {
        let mut frame = [0; 70_000];
        while let Ok(length @ 1..) = unistd::read(&self.peer, &mut frame) {
            if length == 4 {
                // It tells of offloads.
                continue;
            }
            self.seen += 1;
            sound(&frame[..length]);
        }
        let pair = &self.counters.snapshot().pairs[0];
        assert_eq!(pair.tx_frames, self.seen);
        for queue in 0..QUEUES {
            let now = self.half(ring(queue) + 0x2002).load(Ordering::Relaxed);
            if self.overlaps {
                self.used[queue] = now;
                continue;
            }
            self.back[queue] += u64::from(now.wrapping_sub(self.used[queue]));
            self.used[queue] = now;
            assert!(
                self.back[queue] <= self.made[queue],
                "given back what was not made available"
            );
        }
    }

    fn advance(&mut self, queue: usize, by: u16) {
        let index = self.half(ring(queue) + 0x1002);
        index.store(
            index.load(Ordering::Relaxed).wrapping_add(by),
            Ordering::Relaxed,
        );
        self.made[queue] += u64::from(by);
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let _ = self.memory.write(bytes, GuestAddress(at));
    }

    fn half(&self, at: u64) -> &AtomicU16 {
        let host = self
            .memory
            .get_host_address(GuestAddress(at))
            .expect("within memory");
        // SAFETY: two bytes of the first region, aligned, mapped as long as the memory is.
        unsafe { AtomicU16::from_ptr(host.cast()) }
    }
}

fn queue(tape: &mut Tape<'_>) -> usize {
    usize::from(tape.u8()) % QUEUES
}

fn ring(queue: usize) -> u64 {
    queue as u64 * 0x4000
}

/// Whether any descriptor makes the device write below the buffers, or refers to a table elsewhere.
fn overlaps_rings(memory: &GuestMemory, size: u16) -> bool {
    let tables = (0..QUEUES).map(|queue| (ring(queue), u64::from(size)));
    tables.chain([(TABLE, 64)]).any(|(table, entries)| {
        (0..entries).any(|index| {
            let mut descriptor = [0; 16];
            let at = GuestAddress(table + 16 * index);
            let read = memory.read_slice(&mut descriptor, at);
            let address = u64::from_le_bytes(descriptor[..8].try_into().expect("eight"));
            let writes = descriptor[12] & 2 != 0 && address < BUFFERS;
            let elsewhere = descriptor[12] & 4 != 0 && address != TABLE;
            read.is_ok() && (writes || elsewhere)
        })
    })
}

/// Checks that a frame may be written to a TAP.
fn sound(frame: &[u8]) {
    let (header, frame) = frame.split_at_checked(12).expect("a header");
    let half = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
    assert!((14..=65_549).contains(&frame.len()));
    assert!(header[0] <= 1 && half(10) == 0);
    assert!(matches!(header[1], 0 | 1 | 4 | 5 | 0x81 | 0x84));
    assert!(half(2) <= frame.len());
    if header[0] == 1 {
        assert!(half(6) >= 14 && half(6) + half(8) + 2 <= frame.len());
    }
    if header[1] != 0 {
        assert!(header[0] == 1 && half(4) > 0);
    }
}
