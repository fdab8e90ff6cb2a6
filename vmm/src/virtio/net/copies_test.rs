//! Compares the address at which the kernel writes each byte of a frame with the address at which
//! the driver finds it, and the address at which the driver writes each byte with the address from
//! which the kernel reads it. Equal addresses show that no copy was made in between.
use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex, MutexGuard},
};

use libc::iovec;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::{
    tests::{Nobody, enabled, ring, sockets},
    *,
};
use crate::{
    GuestMemory,
    virtio::net::{
        frame_io::{Direction, Transfer},
        tap::HEADER_BYTES,
    },
};

const MEMORY: u64 = 0x20_0000;
const QUEUE_SIZE: u16 = 128;
/// Address of the driver's empty buffers.
const BUFFERS: u64 = 0x8_0000;
const BUFFER_BYTES: u32 = 2_048;
/// Address of the frames that the driver sends.
const SENDS_FROM: u64 = 0x10_0000;
const WRITABLE: u16 = 2;
const MORE: u16 = 1;

/// Stand-in for the kernel: gives frames, takes frames, and records the addresses.
#[derive(Clone, Default)]
struct Kernel(Arc<Mutex<Noted>>);

#[derive(Default)]
struct Noted {
    to_guest: VecDeque<Vec<u8>>,
    /// Address of each byte, for each frame that was read.
    put_at: Vec<Vec<usize>>,
    /// Address of each byte, for each frame that was written.
    taken_from: Vec<Vec<usize>>,
}

impl Kernel {
    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().unwrap()
    }
}

impl FrameIo for Kernel {
    fn begin(&mut self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn transfer(&mut self, transfers: &mut [Transfer]) -> io::Result<u64> {
        let mut noted = self.noted();
        for transfer in transfers {
            // SAFETY: as the caller promises.
            let pieces: &[iovec] =
                unsafe { std::slice::from_raw_parts(transfer.pieces, transfer.count as usize) };
            let addresses = pieces.iter().flat_map(|piece| {
                let first = piece.iov_base as usize;
                first..first + piece.iov_len
            });
            transfer.result = match transfer.direction {
                Direction::Write => {
                    let all: Vec<usize> = addresses.collect();
                    let bytes = all.len();
                    noted.taken_from.push(all);
                    bytes as i32
                }
                Direction::Read => match noted.to_guest.pop_front() {
                    None => -libc::EAGAIN,
                    Some(frame) => {
                        let at: Vec<usize> = addresses.take(frame.len()).collect();
                        assert_eq!(at.len(), frame.len(), "a frame was cut short");
                        for (address, byte) in at.iter().zip(&frame) {
                            // SAFETY: the caller keeps the pieces mapped and writable.
                            unsafe { (*address as *mut u8).write(*byte) };
                        }
                        noted.put_at.push(at);
                        frame.len() as i32
                    }
                },
            };
        }
        Ok(1)
    }
}

struct Rig {
    card: Stepped,
    counters: Arc<NetCounters>,
    kernel: Kernel,
    memory: Arc<GuestMemory>,
    /// Number of buffers that the driver has taken off the receive queue.
    seen: u16,
}

impl Rig {
    fn new() -> Rig {
        let (ours, _) = sockets();
        let counters = NetCounters::new(1);
        let mut card = Stepped::new(ours, Arc::clone(&counters)).unwrap();
        let kernel = Kernel::default();
        card.worker.io = Box::new(kernel.clone());
        let range = (GuestAddress(0), MEMORY as usize);
        let memory = Arc::new(GuestMemory::from_ranges(&[range]).unwrap());
        let activation = Activation {
            memory: Arc::clone(&memory),
            features: card.features() & (1 << VIRTIO_NET_F_MRG_RXBUF | 1 << 32),
            queues: (0..3).map(|index| enabled(index, QUEUE_SIZE)).collect(),
            signals: Arc::new(Nobody),
            restored: None,
        };
        card.activate(activation).unwrap();
        let mut rig = Rig {
            card,
            counters,
            kernel,
            memory,
            seen: 0,
        };
        for index in 0..QUEUE_SIZE {
            let at = BUFFERS + u64::from(index) * u64::from(BUFFER_BYTES);
            rig.describe(0, index, at, BUFFER_BYTES, WRITABLE);
            rig.offer(0, index, index);
        }
        rig
    }

    fn put<T: vm_memory::ByteValued>(&self, at: u64, value: T) {
        self.memory.write_obj(value, GuestAddress(at)).unwrap();
    }

    fn get<T: vm_memory::ByteValued>(&self, at: u64) -> T {
        self.memory.read_obj(GuestAddress(at)).unwrap()
    }

    fn describe(&self, queue: u64, index: u16, at: u64, bytes: u32, flags: u16) {
        let here = ring(queue) + 16 * u64::from(index);
        self.put(here, at);
        self.put(here + 8, bytes);
        self.put(here + 12, flags);
        self.put(here + 14, index + 1);
    }

    /// Offers chain `head` as the `nth` of the queue.
    fn offer(&mut self, queue: u64, nth: u16, head: u16) {
        self.put(ring(queue) + 0x1004 + 2 * u64::from(nth), head);
        self.put(ring(queue) + 0x1002, nth + 1);
    }

    fn work(&mut self) {
        while self.card.pass() == Ok(true) {}
    }

    /// Returns the address in this process of a guest's byte.
    fn host(&self, guest: u64) -> usize {
        self.memory.get_host_address(GuestAddress(guest)).unwrap() as usize
    }

    fn is_guests(&self, address: usize) -> bool {
        (self.host(0)..self.host(0) + MEMORY as usize).contains(&address)
    }

    /// Passes a frame to the card. Returns the addresses at which the kernel wrote each byte, and
    /// those at which the driver finds it.
    fn receive(&mut self, frame: &[u8]) -> (Vec<usize>, Vec<usize>) {
        self.kernel.noted().to_guest.push_back(frame.to_vec());
        self.work();
        let mut found_at = Vec::new();
        let used: u16 = self.get(ring(0) + 0x2002);
        while self.seen < used {
            let entry = ring(0) + 0x2004 + 8 * u64::from(self.seen);
            let (head, bytes): (u32, u32) = (self.get(entry), self.get(entry + 4));
            let at = self.host(BUFFERS + u64::from(head) * u64::from(BUFFER_BYTES));
            found_at.extend(at..at + bytes as usize);
            self.seen += 1;
        }
        let put_at = self.kernel.noted().put_at.pop().unwrap();
        let found = found_at.iter().map(|address| {
            // SAFETY: an address in the guest's memory, which is mapped.
            unsafe { (*address as *const u8).read() }
        });
        let found: Vec<u8> = found.collect();
        assert_eq!(found[HEADER_BYTES..], frame[HEADER_BYTES..]);
        (put_at, found_at)
    }
}

/// Returns a frame of `bytes` behind its header.
fn frame(bytes: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..HEADER_BYTES + bytes).map(|at| (at * 7) as u8).collect();
    frame[..HEADER_BYTES].fill(0);
    frame
}

#[test]
fn what_is_received_is_read_where_the_kernel_put_it() {
    let mut rig = Rig::new();
    for bytes in [60, 1_500, 1_514, 64] {
        let (put_at, found_at) = rig.receive(&frame(bytes));
        assert_eq!(put_at, found_at, "{bytes}");
    }
    // Much longer than those before it: its end, and no more, is copied once.
    let (put_at, found_at) = rig.receive(&frame(9_000));
    let whole = put_at.iter().take_while(|at| rig.is_guests(**at)).count();
    assert_eq!(put_at[..whole], found_at[..whole]);
    assert!(!put_at[whole..].iter().any(|at| rig.is_guests(*at)));
    let pair = rig.counters.snapshot().pairs[0].clone();
    let moved = (put_at.len() - whole) as u64;
    assert_eq!((pair.rx_spilled_frames, pair.rx_spilled_bytes), (1, moved));
    assert!(moved > 0);
    // A frame as long as the last is not copied, nor one over many buffers.
    for bytes in [9_000, 8_000, 1_500] {
        let (put_at, found_at) = rig.receive(&frame(bytes));
        assert_eq!(put_at, found_at, "{bytes}");
    }
    assert_eq!(rig.counters.snapshot().pairs[0].rx_spilled_frames, 1);
}

#[test]
fn what_is_sent_is_taken_by_the_kernel_from_where_the_guest_put_it() {
    let mut rig = Rig::new();
    // Header and frame in one buffer; the header in one and the frame in two; a cut within the
    // header.
    let cuts: [&[u32]; 3] = [&[12 + 1_500], &[12, 1_000, 60_000], &[5, 100, 3_000]];
    let mut index = 0;
    for (nth, cut) in (0_u16..).zip(cuts) {
        let mut at = SENDS_FROM;
        let mut addresses = Vec::new();
        let head = index;
        for (piece, bytes) in cut.iter().enumerate() {
            let flags = if piece + 1 < cut.len() { MORE } else { 0 };
            rig.describe(1, index, at, *bytes, flags);
            let first = rig.host(at);
            addresses.extend(first..first + *bytes as usize);
            // Not adjacent: otherwise a copy of all at once could pass.
            at += u64::from(*bytes) + 777;
            index += 1;
        }
        rig.offer(1, nth, head);
        rig.work();
        let taken = rig.kernel.noted().taken_from.pop().unwrap();
        assert_eq!(taken.len(), addresses.len());
        // Only the header is a copy: it was checked, and the guest can't change it any more.
        let (header, bytes) = taken.split_at(HEADER_BYTES);
        assert!(!header.iter().any(|at| rig.is_guests(*at)), "{cut:?}");
        assert_eq!(bytes, &addresses[HEADER_BYTES..], "{cut:?}");
    }
    assert_eq!(rig.counters.snapshot().pairs[0].tx_frames, 3);
}
