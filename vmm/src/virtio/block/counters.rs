//! Counters of a disk.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counters of one disk: its threads increment them, any thread reads them.
        #[derive(Debug, Default)]
        pub struct DiskCounters {
            $($(#[doc = $doc])+ pub(super) $name: AtomicU64,)+
        }

        /// [`DiskCounters`] at one moment.
        #[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
        pub struct DiskSnapshot {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl DiskCounters {
            /// Returns the present figures.
            pub fn snapshot(&self) -> DiskSnapshot {
                DiskSnapshot { $($name: self.$name.load(Relaxed),)+ }
            }
        }
    };
}

counters! {
    /// Read requests that succeeded.
    reads,
    /// Bytes that they read.
    read_bytes,
    /// Write requests that succeeded.
    writes,
    /// Bytes that they wrote.
    written_bytes,
    /// Times that something was made stable: all earlier writes by a flush, or one write or zeroes
    /// before the answer, for a driver that did not negotiate flushes.
    flushes,
    /// Bytes whose place was given back because the driver discarded them.
    discarded_bytes,
    /// Discards that the file system or the device behind the disk does not support. They changed
    /// nothing.
    discards_ignored,
    /// Bytes that were made zeroes by requests for that.
    zeroed_bytes,
    /// Times that requests were left in the ring because the disk's limit was reached.
    throttled,
    /// Requests whose memory was not aligned for transfers past the page cache. They were copied.
    unaligned,
    /// Requests of a type that the disk does not know.
    unsupported,
    /// Requests that were refused: outside the disk, of an impossible length, or a write of a
    /// disk that is read-only.
    invalid,
    /// Requests for which the file could not be read, written or flushed.
    failed,
    /// Times that the queue was given up, until a reset: the driver's rings were invalid.
    broken_rings,
    /// Queues of the disk whose operations go by io_uring. The host refused it to the others, which
    /// carry out one operation after the other.
    uring_queues,
}

/// Adds to a counter.
pub(super) fn count(counter: &AtomicU64, many: u64) {
    counter.fetch_add(many, Relaxed);
}
