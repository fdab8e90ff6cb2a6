//! Transmit half: slots into which the stack writes frames.
use alloc::{vec, vec::Vec};
use core::mem::ManuallyDrop;

use super::{
    super::{
        super::{
            dma::Dma,
            ring::{Ring, Segment},
            transport::Doorbell,
        },
        feature, header,
    },
    FRAME_MOST,
};
use crate::{pci::Registers, platform::NicCounters};

/// Length of a small slot, bytes: a frame of the largest ordinary size, and its header.
const SMALL: usize = 2048;
/// Length of a large slot, bytes.
const LARGE: usize = (FRAME_MOST + header::BYTES).next_multiple_of(128);
const LARGE_SLOTS: usize = 32;

pub(super) struct Send<R> {
    pub(super) ring: ManuallyDrop<Ring>,
    doorbell: Doorbell<R>,
    memory: ManuallyDrop<Dma>,
    free_small: Vec<u32>,
    free_large: Vec<u32>,
    /// Offset of the slot of each chain in flight, by the chain's head.
    in_flight: Vec<u32>,
    large_start: u32,
    offload: bool,
    /// True if a frame could not be sent since the last `arm`.
    pub(super) blocked: bool,
    pub(super) counters: NicCounters,
}

impl<R: Registers> Send<R> {
    pub(super) fn new(ring: Ring, doorbell: Doorbell<R>, features: u64) -> Self {
        let slots = usize::from(ring.size());
        let large_start = slots * SMALL;
        Send {
            in_flight: vec![0; slots],
            ring: ManuallyDrop::new(ring),
            doorbell,
            memory: ManuallyDrop::new(Dma::new(large_start + LARGE_SLOTS * LARGE)),
            free_small: (0..slots).map(|slot| (slot * SMALL) as u32).collect(),
            free_large: (0..LARGE_SLOTS)
                .map(|slot| (large_start + slot * LARGE) as u32)
                .collect(),
            large_start: large_start as u32,
            offload: features & feature::CSUM != 0,
            blocked: false,
            counters: NicCounters::default(),
        }
    }

    /// Returns the number of sent frames that the device has not returned yet.
    pub(super) fn in_flight(&self) -> usize {
        let ring = &self.ring;
        usize::from(
            ring.used_index()
                .wrapping_sub(ring.published_index())
                .wrapping_neg(),
        )
    }

    pub(super) fn kick(&mut self) {
        if self.ring.wants_kick() {
            self.counters.kicks += 1;
            self.doorbell.ring();
        }
    }

    /// Frees the slots of frames that the device has returned.
    pub(super) fn reap(&mut self) {
        while let Some(used) = self.ring.take_used() {
            self.ring.release(used.head);
            let slot = self.in_flight[usize::from(used.head)];
            let free = if slot < self.large_start {
                &mut self.free_small
            } else {
                &mut self.free_large
            };
            free.push(slot);
        }
    }

    /// Returns whether a frame of any size can be sent.
    pub(super) fn has_room(&self) -> bool {
        !self.free_small.is_empty() && !self.free_large.is_empty() && self.ring.room() > 0
    }

    pub(super) fn ready(&mut self) -> bool {
        if self.ring.room() * 2 < usize::from(self.ring.size()) || !self.has_room() {
            self.reap();
        }
        if !self.has_room() {
            self.blocked = true;
            self.counters.tx_full += 1;
            return false;
        }
        true
    }

    pub(super) fn send<T>(
        &mut self,
        length: usize,
        segment: Option<u16>,
        fill: impl FnOnce(&mut [u8]) -> T,
    ) -> T {
        let small = length <= SMALL - header::BYTES;
        let free = if small {
            &mut self.free_small
        } else {
            &mut self.free_large
        };
        let slot = free
            .pop()
            .expect("a token is given only when there are slots");
        let start = slot as usize;
        assert!(length <= FRAME_MOST, "a frame of {length} bytes");
        // SAFETY: a free slot: the device does not access it.
        let buffer = unsafe { self.memory.bytes_mut(start, header::BYTES + length) };
        let (head, frame) = buffer.split_at_mut(header::BYTES);
        let result = fill(frame);
        let prepared = if self.offload {
            header::prepare(frame, segment)
        } else {
            [0; header::BYTES]
        };
        head.copy_from_slice(&prepared);
        let offered = self.ring.offer_one(Segment {
            address: self.memory.address(start),
            length: (header::BYTES + length) as u32,
            device_writes: false,
        });
        let head = offered.expect("a token is given only when there is a descriptor");
        self.in_flight[usize::from(head)] = slot;
        self.counters.tx_frames += 1;
        self.counters.tx_bytes += length as u64;
        self.counters.tx_segmented += u64::from(segment.is_some());
        result
    }
}
