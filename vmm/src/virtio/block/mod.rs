//! virtio-blk (OASIS virtio 1.2, section 5.2): a raw image or block device as the guest's disk.
//!
//! # Theory of operation
//! A disk has one queue, and one thread that lives as long as the device. The thread takes the
//! requests in order and carries each out by one preadv(2) or pwritev(2) between the guest's
//! buffers and the file, so the bytes are copied once, by the kernel. When the ring is empty, it
//! looks for the next request for a while, as long as that has paid off lately and no other thread
//! wants the core (`virtio/look.rs`). Meanwhile the driver does not notify. Then the thread asks for
//! notifications and sleeps.
//!
//! A request is a chain of buffers that the device reads (16 bytes of header, then the data of a
//! write), followed by buffers that it writes (the data of a read, then one byte of status). The
//! bytes may be divided among the buffers in any way. A request that can't be carried out, because
//! it lies outside the disk, has an impossible length, or the file fails, ends with an error in
//! its status, and the next one is served. An invalid ring, or a chain without room for the status,
//! ends in DEVICE_NEEDS_RESET.
//!
//! A write is stable when a later FLUSH has succeeded. The driver that does not negotiate FLUSH
//! can't ask for that, so each of its writes is stable before it is answered.
//!
//! A disk may have a rate limit ([`rate`](super::rate)). Each request is one operation, and the bytes
//! are those of its data, carried out or not. Beyond the limit requests wait in the ring, the thread
//! sleeps until the limit opens, and none is refused.
//!
//! A reset waits for the request under way, whose length is bounded by [`MAX_REQUEST_BYTES`];
//! requests behind it are not begun.
mod counters;
mod device;
mod file;
mod request;
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

const QUEUE_SIZE: u16 = 128;

/// Configuration of a disk.
#[derive(Debug)]
pub struct DiskConfig {
    /// Raw image or block device, opened for reading, and for writing unless `read_only`.
    pub file: File,
    /// Whether the guest's writes are refused.
    pub read_only: bool,
    /// Most that the guest's requests transfer, and most requests. What is more waits in the ring.
    pub rate: RateConfig,
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
