//! virtio-balloon (OASIS virtio 1.2, section 5.5): memory that the guest gives back to the host.
//!
//! # Theory of operation
//! The host asks the guest for a number of pages: the balloon's target, in the configuration space,
//! whose change is an interrupt. The driver takes pages from its own allocator and lists them on the
//! inflate queue; their memory is given back to the host. It lists those that it takes back on the
//! deflate queue; the host gives memory again when they are touched. How many it has given it writes
//! to the configuration space. It may take pages back when it would otherwise run out of memory
//! (DEFLATE_ON_OOM), whatever the target says.
//!
//! Free pages that nobody asked for are reported (REPORTING): the driver gives the device buffers
//! that *are* the free memory, and uses none of it until it has them back.
//!
//! Of either kind the content is lost. How memory is given back depends on what it is
//! ([`Pages`]): pages that are anonymous, or that a machine of a snapshot has written, are
//! dropped (MADV_DONTNEED); a file of memory that another process has too gets a hole
//! (MADV_REMOVE). What was dropped reads as zeroes, or, in a machine of a snapshot, as it was when
//! that was made. Pages of a host that has larger ones there are given back whole or not at all.
//!
//! One thread serves the device; it lives as long as the device. Everything that the driver says is a
//! number: a page outside the guest's memory is counted and passed over, a list is read up to
//! [`MAX_LIST_BYTES`], and a report up to the size of the guest's memory. An invalid ring ends in
//! DEVICE_NEEDS_RESET. What a guest can't do is have the host take a page that it did not list: an
//! operation works on the guest's memory alone, and a guest that lists pages in use harms itself.
//!
//! The queue of reports is the fifth by the specification, and the third by drivers that count only
//! the queues that there are (Linux, and QEMU with it). The device offers neither statistics nor
//! hints of free pages, whose queues would be between, so any queue behind the first two is taken
//! for it.
mod counters;
mod device;
mod pages;
mod requests;
#[cfg(any(test, feature = "fake"))]
pub mod stepped;
mod target;
mod worker;

pub use counters::{BalloonCounters, BalloonSnapshot};
pub use device::Balloon;
pub(crate) use target::Target;

use std::io;

use pages::Pages;

/// Bytes of a page of the balloon, whatever pages guest and host have.
pub const PAGE_BYTES: u64 = 4096;
/// Longest list of pages of one request that is read, bytes: four for each page.
pub const MAX_LIST_BYTES: u32 = 64 << 10;

/// Queues: pages that the guest gives, and that it takes back.
const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;
/// The queue of reports is this one or one behind it.
const REPORTS: u16 = 2;
const QUEUE_SIZE: u16 = 128;

/// Configuration of a balloon.
#[derive(Clone, Copy, Debug, Default)]
pub struct BalloonConfig {
    /// Bytes that the guest is asked for at the beginning, whole pages.
    pub target_bytes: u64,
}

/// Reason why a balloon could not be created.
#[derive(Debug, thiserror::Error)]
pub enum BalloonError {
    /// More is asked for than there is.
    #[error("{wanted} bytes are asked for, and the guest's memory has {memory}: give less")]
    Target {
        /// Bytes that were asked for.
        wanted: u64,
        /// Size of the memory, bytes.
        memory: u64,
    },
    /// The host refused a call.
    #[error("could not {what}")]
    Host {
        /// Operation that was tried.
        what: &'static str,
        /// Error from the host.
        source: io::Error,
    },
}
