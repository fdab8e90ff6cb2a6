//! Reads and writes of a block each, and flushes, several at once.
use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use super::{DeviceError, Disk, DiskError, HEADER_BYTES, STATUS_AT, header, judge, kind};
use crate::{
    pci::Registers,
    virtio::{dma::Dma, net::patience, ring::Segment},
};

/// Length of a block, bytes.
pub const BLOCK_BYTES: usize = 4096;
/// Largest number of reads and writes at once. A flush may be under way beside them.
pub const BLOCKS_MAX: u16 = 32;

/// Length of a request's header and status in memory, with what aligns the next.
const ENVELOPE_BYTES: usize = 32;
/// Sectors of a block.
const BLOCK_SECTORS: u64 = (BLOCK_BYTES / super::SECTOR_BYTES) as u64;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Reads this block.
    Read(u64),
    /// Writes this block.
    Write(u64),
    /// Makes the writes stable that were answered before it began.
    Flush,
}

/// A request that the device has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The request's place, below the number of places.
    pub place: usize,
    /// What it was for.
    pub work: Work,
}

/// Requests under way. The disk does nothing else meanwhile, and nothing more when one has failed.
pub struct Blocks<'a, R: Registers + Clone> {
    disk: &'a mut Disk<R>,
    /// Data of each place, then the envelopes.
    memory: ManuallyDrop<Dma>,
    places: usize,
    free: Vec<usize>,
    /// What each place's last request does.
    works: Vec<Work>,
    /// Place of the request whose chain has this head.
    by_head: Vec<usize>,
}

impl<R: Registers + Clone> Disk<R> {
    /// Returns requests of which `places` (1 to [`BLOCKS_MAX`] and one more) may be under way.
    pub fn blocks(&mut self, places: u16) -> Blocks<'_, R> {
        let places = usize::from(places.clamp(1, BLOCKS_MAX + 1));
        let heads = usize::from(self.ring.size());
        Blocks {
            disk: self,
            memory: ManuallyDrop::new(Dma::new(places * (BLOCK_BYTES + ENVELOPE_BYTES))),
            places,
            free: (0..places).rev().collect(),
            works: alloc::vec![Work::Flush; places],
            by_head: alloc::vec![0; heads],
        }
    }
}

impl<R: Registers + Clone> Blocks<'_, R> {
    /// Returns how many more requests can begin.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Offers a read of a block to the device, which sees it after [`Blocks::publish`]. Returns its
    /// place.
    ///
    /// # Errors
    /// So many are under way already, or the device's ring is too small for them.
    pub fn read(&mut self, block: u64) -> Result<usize, DiskError> {
        self.begin(Work::Read(block), |_| {})
    }

    /// As [`Blocks::read`], but writes what `fill` puts into the block, all of it zeroes or of an
    /// earlier request before.
    ///
    /// # Errors
    /// As of [`Blocks::read`].
    pub fn write(&mut self, block: u64, fill: impl FnOnce(&mut [u8])) -> Result<usize, DiskError> {
        self.begin(Work::Write(block), fill)
    }

    /// As [`Blocks::read`], but makes the writes stable that were answered.
    ///
    /// # Errors
    /// As of [`Blocks::read`]; or the device offers no flushes, so there is nothing to flush.
    pub fn flush(&mut self) -> Result<usize, DiskError> {
        match self.disk.has_flushes() {
            true => self.begin(Work::Flush, |_| {}),
            false => Err(DiskError::Unsupported),
        }
    }

    fn begin(&mut self, work: Work, fill: impl FnOnce(&mut [u8])) -> Result<usize, DiskError> {
        let full = DiskError::Device(DeviceError::Missing("a queue for so many requests"));
        self.disk.check_none_lost()?;
        let place = self.free.pop().ok_or(full)?;
        let (kind, sector, device_writes) = match work {
            Work::Read(block) => (kind::READ, block * BLOCK_SECTORS, true),
            Work::Write(block) => (kind::WRITE, block * BLOCK_SECTORS, false),
            Work::Flush => (kind::FLUSH, 0, false),
        };
        let envelope = self.envelope(place);
        // SAFETY: the device does not have this place.
        unsafe {
            fill(self.memory.bytes_mut(place * BLOCK_BYTES, BLOCK_BYTES));
            let memory = self.memory.bytes_mut(envelope, STATUS_AT + 1);
            memory[..STATUS_AT].copy_from_slice(&header(kind, sector));
            memory[STATUS_AT] = 0xFF;
        }
        let segment = |at, length, device_writes| Segment {
            address: self.memory.address(at),
            length,
            device_writes,
        };
        let head = segment(envelope, HEADER_BYTES, false);
        let status = segment(envelope + STATUS_AT, 1, true);
        let data = segment(place * BLOCK_BYTES, BLOCK_BYTES as u32, device_writes);
        let head = match work {
            Work::Flush => self.disk.ring.offer(&[head, status]),
            _ => self.disk.ring.offer(&[head, data, status]),
        };
        let head = head.ok_or(full)?;
        self.by_head[usize::from(head)] = place;
        self.works[place] = work;
        Ok(place)
    }

    /// Shows the device the requests that have begun.
    pub fn publish(&mut self) {
        if self.disk.ring.wants_kick() {
            self.disk.doorbell.ring();
        }
    }

    /// Waits for the next answer.
    ///
    /// # Errors
    /// The device refuses the request, or does not answer.
    pub fn wait(&mut self) -> Result<Done, DiskError> {
        let mut patience = patience();
        let used = loop {
            if let Some(used) = self.disk.ring.take_used() {
                break used;
            }
            if !patience() {
                return Err(DeviceError::Silent("a disk's request").into());
            }
        };
        self.disk.ring.release(used.head);
        let place = self.by_head[usize::from(used.head)];
        let status_at = self.envelope(place) + STATUS_AT;
        // SAFETY: the device has returned the buffer.
        let status = unsafe { self.memory.bytes(status_at, 1) }[0];
        let work = self.works[place];
        let due = match work {
            Work::Read(_) => BLOCK_BYTES as u32 + 1,
            Work::Write(_) | Work::Flush => 1,
        };
        judge(status, used.written, due)?;
        Ok(Done { place, work })
    }

    /// Returns the data of a read that was answered and not released.
    pub fn data(&self, place: usize) -> &[u8] {
        assert!(!self.free.contains(&place), "no read at {place}");
        // SAFETY: the device has returned the buffer.
        unsafe { self.memory.bytes(place * BLOCK_BYTES, BLOCK_BYTES) }
    }

    /// Makes the place of a request that was answered free for another.
    pub fn release(&mut self, place: usize) {
        self.free.push(place);
    }

    /// Returns what is under way, or answered and not released.
    pub fn under_way(&self) -> impl Iterator<Item = Work> {
        let places = self.works.iter().enumerate();
        let taken = places.filter(|(place, _)| !self.free.contains(place));
        taken.map(|(_, work)| *work)
    }

    fn envelope(&self, place: usize) -> usize {
        self.places * BLOCK_BYTES + place * ENVELOPE_BYTES
    }
}

impl<R: Registers + Clone> Drop for Blocks<'_, R> {
    fn drop(&mut self) {
        // The device may still use the memory of a request that was not answered: it is lost.
        if self.free.len() == self.places {
            // SAFETY: it is not used again.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            self.disk.has_lost = true;
        }
    }
}
