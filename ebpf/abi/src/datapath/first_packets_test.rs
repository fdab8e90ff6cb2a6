extern crate std;

use core::sync::atomic::Ordering::{Acquire, Release};
use std::{boxed::Box, thread, vec::Vec};

use super::*;
use crate::{FirstPacket, maps::Owner};

/// CPUs on which programs run.
const CPUS: usize = 4;
/// Packets of each.
const PACKETS: u64 = 20_000;

/// A ring in memory, of the first row of `OWNERS`.
#[derive(Clone, Copy)]
struct Ring {
    owner: OwnerRef,
    places: [FirstPacketRef; RING_LEN as usize],
}

impl Ring {
    /// Leaks its memory, so that threads may have it.
    fn new() -> Self {
        let place = || {
            let place = Box::leak(Box::new(core::mem::MaybeUninit::<FirstPacket>::zeroed()));
            // SAFETY: integers and bytes, which live as long as the process.
            unsafe { FirstPacketRef::new(place.as_mut_ptr()) }
        };
        let owner = Box::leak(Box::new(Owner::default()));
        Self {
            // SAFETY: as above.
            owner: unsafe { OwnerRef::new(owner) },
            places: core::array::from_fn(|_| place()),
        }
    }

    fn place(&self, number: u64) -> FirstPacketRef {
        self.places[place(0, number) as usize]
    }

    /// Puts a packet with this word into the ring, as [`queue`] does. Returns whether it had room.
    fn put(&self, word: u64) -> bool {
        let Some(number) = claim(self.owner) else {
            return false;
        };
        let place = self.place(number);
        let packet = place.as_ptr();
        // SAFETY: the place is this thread's until it is published.
        unsafe {
            (*packet).len = 8;
            (*packet).at_ns = number;
            let frame = (&raw mut (*packet).frame).cast::<[u8; 8]>();
            frame.write(word.to_ne_bytes());
        }
        place.number().swap(number.wrapping_add(1), SeqCst);
        true
    }
}

/// Each number is claimed once, so no packet is lost or doubled, and those of one CPU keep their order.
#[test]
fn programs_on_several_cpus_fill_one_ring() {
    let ring = Ring::new();
    let mut read: Vec<Vec<u64>> = (0..CPUS).map(|_| Vec::new()).collect();
    thread::scope(|scope| {
        for cpu in 0..CPUS as u64 {
            scope.spawn(move || {
                for nth in 0..PACKETS {
                    while !ring.put(cpu << 32 | nth) {
                        thread::yield_now();
                    }
                }
            });
        }
        for number in 0..CPUS as u64 * PACKETS {
            let mut word = [0; 8];
            let at_ns = loop {
                match ring.place(number).read(number, &mut word) {
                    Some((_, at_ns)) => break at_ns,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(at_ns, number);
            ring.owner.ring_head().store(number + 1, Release);
            let word = u64::from_ne_bytes(word);
            read[(word >> 32) as usize].push(word & 0xffff_ffff);
        }
    });
    for of_cpu in read {
        assert!(of_cpu.into_iter().eq(0..PACKETS));
    }
    let tail = ring.owner.ring_tail().load(Acquire);
    assert_eq!(tail, CPUS as u64 * PACKETS);
}

#[test]
fn a_full_ring_gives_no_number() {
    let ring = Ring::new();
    for word in 0..u64::from(RING_LEN) {
        assert!(ring.put(word));
    }
    assert!(!ring.put(0));
    ring.owner.ring_head().store(1, Release);
    assert!(ring.put(0));
    assert!(!ring.put(0));
}
