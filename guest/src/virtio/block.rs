//! Driver of a disk (virtio 1.2, 5.2), polled, on one CPU: one request at a time, or several
//! ([`Blocks`]).
mod blocks;

use alloc::vec::Vec;

use super::{
    DeviceError,
    dma::Dma,
    ring::{Ring, Segment, feature::EVENT_IDX},
    transport::{Doorbell, NO_VECTOR, ResetFirst, Transport},
};
use crate::pci::Registers;

pub use blocks::{BLOCK_BYTES, BLOCKS_MAX, Blocks, Done, Work};

/// PCI vendor and device id of a virtio disk.
pub const DISK: (u16, u16) = (0x1AF4, 0x1042);
/// Ids of a disk that also offers the legacy interface.
pub const DISK_TRANSITIONAL: (u16, u16) = (0x1AF4, 0x1001);
/// Unit of addresses and lengths, bytes.
pub const SECTOR_BYTES: usize = 512;
/// Longest data of a request, bytes.
pub const REQUEST_BYTES: usize = 64 << 10;

/// Feature bits of a disk.
mod feature {
    /// The disk can't be written.
    pub(super) const RO: u64 = 1 << 5;
    /// Writes are stable after a flush.
    pub(super) const FLUSH: u64 = 1 << 9;
    /// Ranges may be discarded.
    pub(super) const DISCARD: u64 = 1 << 13;
    /// Ranges may be made zeroes.
    pub(super) const WRITE_ZEROES: u64 = 1 << 14;
}

/// Size of the queue: [`BLOCKS_MAX`] requests of three descriptors each, and a flush.
const QUEUE_SIZE: u16 = 128;

/// Types of virtio-blk requests.
mod kind {
    pub(super) const READ: u32 = 0;
    pub(super) const WRITE: u32 = 1;
    pub(super) const FLUSH: u32 = 4;
    pub(super) const DISCARD: u32 = 11;
    pub(super) const WRITE_ZEROES: u32 = 13;
}

/// Place of the header, of the status and of the data in the disk's memory.
const HEADER_AT: usize = 0;
const STATUS_AT: usize = 16;
const DATA_AT: usize = 4096;
const HEADER_BYTES: u32 = 16;

/// Reason why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The device reports an error.
    #[error("the disk answered with an I/O error")]
    Io,
    /// The device does not know the request.
    #[error("the disk does not support the request")]
    Unsupported,
    /// The device answered otherwise, or wrote another number of bytes.
    #[error("the disk answered nonsense: status {status}, {written} bytes")]
    Nonsense {
        /// Status of the request.
        status: u8,
        /// Number of bytes that the device says it wrote.
        written: u32,
    },
    /// The device did not answer.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A disk whose queue is set up. It is reset when this is dropped.
pub struct Disk<R: Registers + Clone> {
    _device: ResetFirst<R>,
    ring: Ring,
    doorbell: Doorbell<R>,
    memory: Dma,
    features: u64,
    sectors: u64,
    /// Whether the device may still have chains of requests that were given up.
    has_lost: bool,
}

impl<R: Registers + Clone> Disk<R> {
    /// Resets and initialises a disk.
    ///
    /// # Errors
    /// The device lacks what is needed, or behaves wrongly.
    pub fn bring_up(transport: Transport<R>) -> Result<Self, DeviceError> {
        let features = transport.negotiate(
            feature::RO | feature::FLUSH | feature::DISCARD | feature::WRITE_ZEROES | EVENT_IDX,
        )?;
        let sectors = transport.device_config(|device| {
            u64::from(device.read32(0)) | u64::from(device.read32(4)) << 32
        });
        let (mut ring, doorbell) = transport.make_queue(0, QUEUE_SIZE, NO_VECTOR, features)?;
        ring.disarm();
        transport.start();
        Ok(Disk {
            _device: ResetFirst(transport),
            ring,
            doorbell,
            memory: Dma::new(DATA_AT + REQUEST_BYTES),
            features,
            sectors,
            has_lost: false,
        })
    }

    /// Returns the disk's size, in sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Returns whether the disk can't be written.
    pub fn is_read_only(&self) -> bool {
        self.features & feature::RO != 0
    }

    /// Reads `bytes` (up to [`REQUEST_BYTES`], whole sectors) from a sector on.
    ///
    /// # Errors
    /// The device refuses or does not answer.
    pub fn read(&mut self, sector: u64, bytes: usize) -> Result<Vec<u8>, DiskError> {
        self.request(kind::READ, sector, bytes)?;
        // SAFETY: the device has returned the buffer.
        Ok(unsafe { self.memory.bytes(DATA_AT, bytes) }.to_vec())
    }

    /// Writes whole sectors, up to [`REQUEST_BYTES`], from a sector on.
    ///
    /// # Errors
    /// The device refuses or does not answer.
    pub fn write(&mut self, sector: u64, data: &[u8]) -> Result<(), DiskError> {
        // SAFETY: the device has no buffer now.
        unsafe { self.memory.bytes_mut(DATA_AT, data.len()) }.copy_from_slice(data);
        self.request(kind::WRITE, sector, data.len())
    }

    /// Returns whether writes are stable after a flush, and not when they are answered.
    pub fn has_flushes(&self) -> bool {
        self.features & feature::FLUSH != 0
    }

    /// Makes all earlier writes stable. Without the feature they are when they are answered.
    ///
    /// # Errors
    /// The device refuses or does not answer.
    pub fn flush(&mut self) -> Result<(), DiskError> {
        match self.has_flushes() {
            true => self.request(kind::FLUSH, 0, 0),
            false => Ok(()),
        }
    }

    /// Discards sectors from the disk's start: what they hold need not be kept.
    ///
    /// # Errors
    /// The device does not offer it, refuses, or does not answer.
    pub fn discard(&mut self, sectors: u32) -> Result<(), DiskError> {
        self.range(kind::DISCARD, feature::DISCARD, sectors)
    }

    /// Makes sectors from the disk's start zeroes.
    ///
    /// # Errors
    /// The device does not offer it, refuses, or does not answer.
    pub fn write_zeroes(&mut self, sectors: u32) -> Result<(), DiskError> {
        self.range(kind::WRITE_ZEROES, feature::WRITE_ZEROES, sectors)
    }

    fn range(&mut self, kind: u32, feature: u64, sectors: u32) -> Result<(), DiskError> {
        if self.features & feature == 0 {
            return Err(DiskError::Unsupported);
        }
        // From sector 0 on, without flags.
        let range = u128::from(sectors) << 64;
        // SAFETY: the device has no buffer now.
        unsafe { self.memory.bytes_mut(DATA_AT, 16) }.copy_from_slice(&range.to_le_bytes());
        self.request(kind, 0, 16)
    }

    /// Checks that all requests at once were answered: the next used element would be that of another.
    fn check_none_lost(&self) -> Result<(), DeviceError> {
        match self.has_lost {
            true => Err(DeviceError::Silent("a disk whose requests were given up")),
            false => Ok(()),
        }
    }

    fn request(&mut self, kind: u32, sector: u64, bytes: usize) -> Result<(), DiskError> {
        self.check_none_lost()?;
        let reads = kind == kind::READ;
        // SAFETY: the device has no buffer now.
        unsafe {
            let memory = self.memory.bytes_mut(HEADER_AT, STATUS_AT + 1);
            memory[..STATUS_AT].copy_from_slice(&header(kind, sector));
            memory[STATUS_AT] = 0xFF;
        }
        let segment = |at, length, device_writes| Segment {
            address: self.memory.address(at),
            length,
            device_writes,
        };
        let mut segments = Vec::with_capacity(3);
        segments.push(segment(HEADER_AT, HEADER_BYTES, false));
        if bytes > 0 {
            segments.push(segment(DATA_AT, bytes as u32, reads));
        }
        segments.push(segment(STATUS_AT, 1, true));
        let silent = DeviceError::Silent("a disk's request");
        self.ring.offer(&segments).ok_or(silent)?;
        if self.ring.wants_kick() {
            self.doorbell.ring();
        }
        let mut patience = super::net::patience();
        let used = loop {
            if let Some(used) = self.ring.take_used() {
                break used;
            }
            if !patience() {
                return Err(silent.into());
            }
        };
        self.ring.release(used.head);
        // SAFETY: the device has returned the buffer.
        let status = unsafe { self.memory.bytes(STATUS_AT, 1) }[0];
        let due = if reads { bytes as u32 + 1 } else { 1 };
        judge(status, used.written, due)
    }
}

fn header(kind: u32, sector: u64) -> [u8; HEADER_BYTES as usize] {
    let mut header = [0; HEADER_BYTES as usize];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    header
}

/// Judges the answer to a request, into which the device wrote so many bytes where `due` are right.
fn judge(status: u8, written: u32, due: u32) -> Result<(), DiskError> {
    match status {
        0 if written == due => Ok(()),
        1 => Err(DiskError::Io),
        2 => Err(DiskError::Unsupported),
        _ => Err(DiskError::Nonsense { status, written }),
    }
}
