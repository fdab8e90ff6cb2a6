use std::os::fd::OwnedFd;

use nix::{
    sys::socket::{AddressFamily, SockFlag, SockType, socketpair},
    unistd,
};
use proptest::prelude::*;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::{GuestMemory, virtio::Signals};

const SIZE: u16 = 16;
const MEMORY: usize = 0x2_0000;

pub(super) struct Nobody;

impl Signals for Nobody {
    fn queue(&self, _index: u16) {}
    fn config(&self) {}
    fn needs_reset(&self) {}
}

pub(super) fn sockets() -> (OwnedFd, OwnedFd) {
    let flags = SockFlag::SOCK_NONBLOCK;
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap()
}

/// Where a queue's descriptors are, and 0x1000 and 0x2000 behind them its two rings.
pub(super) fn ring(queue: u64) -> u64 {
    queue * 0x3000
}

/// A queue as the transport hands it over.
pub(in crate::virtio) fn enabled(index: u64, size: u16) -> EnabledQueue {
    let mut queue = Queue::new(size).unwrap();
    queue.set_desc_table_address(Some(ring(index) as u32), Some(0));
    queue.set_avail_ring_address(Some(ring(index) as u32 + 0x1000), Some(0));
    queue.set_used_ring_address(Some(ring(index) as u32 + 0x2000), Some(0));
    queue.set_ready(true);
    EnabledQueue {
        index: index as u16,
        queue,
        kick: EventFd::new(EFD_NONBLOCK).unwrap(),
        taken: Vec::new(),
    }
}

/// A queue of which every descriptor and entry is arbitrary, most of them plausible.
#[derive(Clone, Debug)]
struct Soup {
    descriptors: Vec<(u64, u32, u16, u16)>,
    entries: Vec<u16>,
    available: u16,
}

fn soup(write: u16) -> impl Strategy<Value = Soup> {
    let address = prop_oneof![
        8 => 0xa000_u64..MEMORY as u64,
        1 => any::<u64>(),
    ];
    let bytes = prop_oneof![8 => 0_u32..3_000, 1 => any::<u32>()];
    let flags = prop_oneof![6 => Just(write), 3 => Just(write | 1), 1 => 0_u16..8];
    let next = 0..SIZE + 1;
    (
        prop::collection::vec((address, bytes, flags, next), usize::from(SIZE)),
        prop::collection::vec(0..SIZE + 1, usize::from(SIZE)),
        0..SIZE + 2,
    )
        .prop_map(|(descriptors, entries, available)| Soup {
            descriptors,
            entries,
            available,
        })
}

fn lay_out(memory: &GuestMemory, queue: u64, soup: &Soup) {
    for (index, (at, bytes, flags, next)) in soup.descriptors.iter().enumerate() {
        let here = ring(queue) + 16 * index as u64;
        memory.write_obj(*at, GuestAddress(here)).unwrap();
        memory.write_obj(*bytes, GuestAddress(here + 8)).unwrap();
        memory.write_obj(*flags, GuestAddress(here + 12)).unwrap();
        memory.write_obj(*next, GuestAddress(here + 14)).unwrap();
    }
    for (index, head) in soup.entries.iter().enumerate() {
        let here = ring(queue) + 0x1004 + 2 * index as u64;
        memory.write_obj(*head, GuestAddress(here)).unwrap();
    }
    let index = GuestAddress(ring(queue) + 0x1002);
    memory.write_obj(soup.available, index).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Any contents of the rings: no panic, an end, at most as many chains given back as there
    /// were, and only frames at the peer that a TAP may be given.
    #[test]
    fn arbitrary_rings_do_no_harm(
        soups in (soup(2), soup(0), soup(0)),
        features in any::<u64>(),
        frames in prop::collection::vec(26_usize..20_000, 0..8),
        fill in any::<u8>(),
    ) {
        let (ours, peer) = sockets();
        let counters = NetCounters::new(1);
        let mut card = Stepped::new(ours, Arc::clone(&counters)).unwrap();
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        let noise: Vec<u8> = (0..MEMORY).map(|at| (at as u8).wrapping_mul(fill) & 0x85).collect();
        memory.write_slice(&noise[0xa000..], GuestAddress(0xa000)).unwrap();
        for (queue, soup) in [&soups.0, &soups.1, &soups.2].into_iter().enumerate() {
            lay_out(&memory, queue as u64, soup);
        }
        let memory = Arc::new(memory);
        let activated = card.activate(Activation {
            memory: Arc::clone(&memory),
            features: features & card.features(),
            queues: (0..3).map(|index| enabled(index, SIZE)).collect(),
            signals: Arc::new(Nobody),
            restored: None,
        });
        prop_assert_eq!(activated, Ok(()));
        for bytes in frames {
            unistd::write(&peer, &vec![fill; bytes]).unwrap();
        }
        let mut passes = 0;
        while card.pass() == Ok(true) {
            passes += 1;
            prop_assert!(passes < 100, "it ends");
        }
        while card.command() == Ok(true) {}
        for (queue, soup) in [&soups.0, &soups.1, &soups.2].into_iter().enumerate() {
            let at = GuestAddress(ring(queue as u64) + 0x2002);
            let used: u16 = memory.read_obj(at).unwrap();
            prop_assert!(used <= soup.available);
        }
        let mut frame = vec![0; 70_000];
        let mut seen = 0;
        while let Ok(length @ 1..) = unistd::read(&peer, &mut frame) {
            if length == 4 {
                // It tells of offloads.
                continue;
            }
            seen += 1;
            prop_assert!((26..=65_561).contains(&length));
            prop_assert!(frame[0] <= 1 && matches!(frame[1], 0 | 1 | 4 | 5 | 0x81 | 0x84));
        }
        prop_assert_eq!(counters.snapshot().pairs[0].tx_frames, seen);
        card.reset();
    }
}
