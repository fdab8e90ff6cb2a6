//! virtio-blk (OASIS virtio 1.2, section 5.2): a raw image or block device as the guest's disk.
//!
//! # Theory of operation
//! A disk has a queue for each vCPU, up to [`MAX_QUEUES`], and each queue a thread, which lives as
//! long as the device. The thread takes requests in order and begins operations between the guest's
//! buffers and the file (`file_io`): by io_uring, a batch by one system call, or by preadv(2) and
//! pwritev(2) one after the other where the host does not allow io_uring. The bytes are copied once,
//! by the kernel. Requests are answered as their operations end, in any order. When there is nothing
//! to do, the thread looks for the next request or result for a while, as long as that has paid off
//! lately and no other thread wants the core (`virtio/look.rs`). Meanwhile the driver does not notify.
//! Then the thread asks for notifications and sleeps.
//!
//! A request is a chain of buffers that the device reads (16 bytes of header, then the data of a
//! write), followed by buffers that it writes (the data of a read, then one byte of status). The
//! bytes may be divided among the buffers in any way. A request that can't be carried out, because
//! it lies outside the disk, has an impossible length, or the file fails, ends with an error in
//! its status, and the next one is served. An invalid ring, or a chain without room for the status,
//! ends in DEVICE_NEEDS_RESET.
//!
//! A write is stable when a later FLUSH has succeeded. The driver that does not negotiate FLUSH
//! can't ask for that, so each of its writes is stable before it is answered. [`Cache`] is the
//! operator's choice.
//!
//! With [`Cache::None`] the operations pass the host's page cache by ([`direct`]). The disk is announced
//! with the blocks that the kernel takes then, and a request that is not of whole ones is refused.
//! Buffers of the guest that are not aligned are copied, a part at a time, by way of aligned ones, of
//! which a queue has a few. While all of these are used no request is taken.
//!
//! A discarded range gives its place back (FALLOC_FL_PUNCH_HOLE), and reads as zeroes afterwards where
//! the file supports that. Zeroes are made by FALLOC_FL_ZERO_RANGE, or by punching where the driver
//! lets the place be given back, or by writing them where the file system knows neither.
//!
//! A disk may have a rate limit ([`rate`](super::rate)). Each request is one operation, and the bytes
//! are those of its data, carried out or not, and those that are to be zeroes. Beyond the limit requests wait in the ring, the thread
//! sleeps until the limit opens, and none is refused.
//!
//! A reset and a pause wait for the operations under way, which are no more than the queues have
//! entries and no longer than [`MAX_REQUEST_BYTES`] each, or [`MAX_RANGE_BYTES`] for ranges that the
//! file system clears. Requests behind them are not begun. After a pause, requests of which a part was
//! carried out are begun anew.
mod counters;
mod device;
mod direct;
mod file;
mod file_io;
mod request;
#[cfg(any(test, feature = "fake"))]
pub mod stepped;
mod worker;

pub use counters::{DiskCounters, DiskSnapshot};
pub use device::Disk;

use std::{fs::File, io};

use super::rate::RateConfig;

/// Unit of a disk's size and of requests' addresses and lengths, bytes.
pub const SECTOR_BYTES: u64 = 512;
/// Longest buffer of a request that a driver may use, bytes.
pub const MAX_SEGMENT_BYTES: u32 = 1 << 18;
/// Number of data buffers of a request that a driver may use: the queue's size without the header
/// and the status.
pub const MAX_SEGMENTS: u32 = QUEUE_SIZE as u32 - 2;
/// Longest data of a request that is carried out, bytes.
pub const MAX_REQUEST_BYTES: u64 = MAX_SEGMENTS as u64 * MAX_SEGMENT_BYTES as u64;

/// Most queues of a disk.
pub const MAX_QUEUES: u16 = 8;
/// Longest range of a discard or of zeroes, bytes.
pub const MAX_RANGE_BYTES: u64 = 64 << 20;

const QUEUE_SIZE: u16 = 128;

/// When a guest's writes become stable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// With the guest's next flush. The host's page cache has them until then.
    #[default]
    WriteBack,
    /// Before each is answered. The guest is told that there is nothing to flush.
    WriteThrough,
    /// When the host likes: flushes are answered at once. A crash of the host loses what it has not
    /// written.
    Unsafe,
    /// As [`Cache::WriteBack`], but reads and writes pass the host's page cache by (O_DIRECT): the
    /// medium's own cache has writes until the flush. The disk may have longer blocks then.
    None,
}

/// Configuration of a disk.
#[derive(Debug)]
pub struct DiskConfig {
    /// Raw image or block device, opened for reading, and for writing unless `read_only`; with
    /// [`Cache::None`] by O_DIRECT.
    pub file: File,
    /// Whether the guest's writes are refused.
    pub read_only: bool,
    /// When the guest's writes become stable.
    pub cache: Cache,
    /// Number of queues, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Most that the guest's requests transfer, and most requests. What is more waits in the ring.
    pub rate: RateConfig,
}

#[cfg(test)]
impl DiskConfig {
    /// A disk that may be written, of one queue, without limits.
    fn plain(file: File) -> DiskConfig {
        DiskConfig {
            file,
            read_only: false,
            cache: Cache::WriteBack,
            queues: 1,
            rate: RateConfig::default(),
        }
    }
}

/// Reason why a disk could not be created.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The descriptor is of another kind.
    #[error("it is neither a regular file nor a block device: give a raw image or a device")]
    Kind,
    /// The file has no sector, or a part of one at its end.
    #[error("its size is {0} bytes: a disk has a multiple of {SECTOR_BYTES}, and at least one")]
    Size(u64),
    /// It is to be used past the page cache, and was not opened so.
    #[error("it is to be used past the host's page cache, and was opened without O_DIRECT")]
    Cached,
    /// The kernel transfers nothing of it past the page cache.
    #[error(
        "its file system has no direct transfers, past the host's page cache: give one on another, \
         or another cache mode"
    )]
    NoDirect,
    /// The kernel transfers it past the page cache only in an alignment that guests don't know.
    #[error(
        "direct transfers, past the host's page cache, take blocks of {block} bytes and memory \
         aligned to {memory}, and 4096 is the most that is supported: give another cache mode"
    )]
    Alignment {
        /// Alignment of memory, bytes.
        memory: u32,
        /// Length of a block, bytes.
        block: u32,
    },
    /// The file has a part of a block at its end.
    #[error(
        "its size is {bytes} bytes, and direct transfers, past the host's page cache, take blocks of \
         {block}: make it a multiple of that, or give another cache mode"
    )]
    Blocks {
        /// Size of the file.
        bytes: u64,
        /// Length of a block.
        block: u64,
    },
    /// The number of queues.
    #[error("it is to have {0} queues: a disk has 1 to {MAX_QUEUES}")]
    Queues(u16),
    /// The host refused a call.
    #[error("could not {what}")]
    Host {
        /// Operation that was tried.
        what: &'static str,
        /// Error from the host.
        source: io::Error,
    },
}

fn tried(what: &'static str) -> impl FnOnce(io::Error) -> DiskError {
    move |source| DiskError::Host { what, source }
}
