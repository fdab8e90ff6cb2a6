//! Reads of a block each, several at once.
use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use super::{DeviceError, Disk, DiskError, HEADER_BYTES, STATUS_AT, header, judge, kind};
use crate::{
    pci::Registers,
    virtio::{dma::Dma, net::patience, ring::Segment},
};

/// Length of a read, bytes.
pub const BLOCK_BYTES: usize = 4096;
/// Largest number of reads at once.
pub const READS_MAX: u16 = 32;

/// Length of a read's header and status in memory, with what aligns the next.
const ENVELOPE_BYTES: usize = 32;
/// Sectors of a block.
const BLOCK_SECTORS: u64 = (BLOCK_BYTES / super::SECTOR_BYTES) as u64;

/// A read that the device has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadBlock {
    /// The read's place, below the number of reads at once.
    pub place: usize,
    /// Number of the block that was read.
    pub block: u64,
}

/// Reads under way. The disk does nothing else meanwhile, and nothing more when one has failed.
pub struct Reads<'a, R> {
    disk: &'a mut Disk<R>,
    /// Data of each place, then the envelopes.
    memory: ManuallyDrop<Dma>,
    places: usize,
    free: Vec<usize>,
    /// Block of each place's read.
    blocks: Vec<u64>,
    /// Place of the read whose chain has this head.
    by_head: Vec<usize>,
}

impl<R: Registers + Clone> Disk<R> {
    /// Returns reads of which `at_once` (1 to [`READS_MAX`]) may be under way.
    pub fn reads(&mut self, at_once: u16) -> Reads<'_, R> {
        let places = usize::from(at_once.clamp(1, READS_MAX));
        let heads = usize::from(self.ring.size());
        Reads {
            disk: self,
            memory: ManuallyDrop::new(Dma::new(places * (BLOCK_BYTES + ENVELOPE_BYTES))),
            places,
            free: (0..places).rev().collect(),
            blocks: alloc::vec![0; places],
            by_head: alloc::vec![0; heads],
        }
    }
}

impl<R: Registers + Clone> Reads<'_, R> {
    /// Returns whether one more read can begin.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Offers a read of a block to the device, which sees it after [`Reads::publish`]. Returns its
    /// place.
    ///
    /// # Errors
    /// So many are under way already, or the device's ring is too small for them.
    pub fn begin(&mut self, block: u64) -> Result<usize, DiskError> {
        let full = DiskError::Device(DeviceError::Missing("a queue for so many reads"));
        self.disk.check_none_lost()?;
        let place = self.free.pop().ok_or(full)?;
        let envelope = self.envelope(place);
        // SAFETY: the device does not have this place.
        unsafe {
            let memory = self.memory.bytes_mut(envelope, STATUS_AT + 1);
            memory[..STATUS_AT].copy_from_slice(&header(kind::READ, block * BLOCK_SECTORS));
            memory[STATUS_AT] = 0xFF;
        }
        let segment = |at, length, device_writes| Segment {
            address: self.memory.address(at),
            length,
            device_writes,
        };
        let segments = [
            segment(envelope, HEADER_BYTES, false),
            segment(place * BLOCK_BYTES, BLOCK_BYTES as u32, true),
            segment(envelope + STATUS_AT, 1, true),
        ];
        let head = self.disk.ring.offer(&segments).ok_or(full)?;
        self.by_head[usize::from(head)] = place;
        self.blocks[place] = block;
        Ok(place)
    }

    /// Shows the device the reads that have begun.
    pub fn publish(&mut self) {
        if self.disk.ring.wants_kick() {
            self.disk.doorbell.ring();
        }
    }

    /// Waits for the next answer.
    ///
    /// # Errors
    /// The device refuses the read, or does not answer.
    pub fn wait(&mut self) -> Result<ReadBlock, DiskError> {
        let mut patience = patience();
        let used = loop {
            if let Some(used) = self.disk.ring.take_used() {
                break used;
            }
            if !patience() {
                return Err(DeviceError::Silent("a disk's read").into());
            }
        };
        self.disk.ring.release(used.head);
        let place = self.by_head[usize::from(used.head)];
        let status_at = self.envelope(place) + STATUS_AT;
        // SAFETY: the device has returned the buffer.
        let status = unsafe { self.memory.bytes(status_at, 1) }[0];
        judge(status, used.written, BLOCK_BYTES as u32 + 1)?;
        let block = self.blocks[place];
        Ok(ReadBlock { place, block })
    }

    /// Returns the data of a read that was answered and not released.
    pub fn data(&self, place: usize) -> &[u8] {
        assert!(!self.free.contains(&place), "no read at {place}");
        // SAFETY: the device has returned the buffer.
        unsafe { self.memory.bytes(place * BLOCK_BYTES, BLOCK_BYTES) }
    }

    /// Makes the place of a read that was answered free for another.
    pub fn release(&mut self, place: usize) {
        self.free.push(place);
    }

    fn envelope(&self, place: usize) -> usize {
        self.places * BLOCK_BYTES + place * ENVELOPE_BYTES
    }
}

impl<R> Drop for Reads<'_, R> {
    fn drop(&mut self) {
        // The device may still write for a read that was not answered: its memory is lost.
        if self.free.len() == self.places {
            // SAFETY: it is not used again.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            self.disk.has_lost = true;
        }
    }
}
