//! Counters of a balloon.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counters of a balloon: its thread increments them, any thread reads them.
        #[derive(Debug, Default)]
        pub struct BalloonCounters {
            $($(#[doc = $doc])+ pub(super) $name: AtomicU64,)+
        }

        /// [`BalloonCounters`] at one moment.
        #[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
        pub struct BalloonSnapshot {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl BalloonCounters {
            /// Returns the present figures.
            pub fn snapshot(&self) -> BalloonSnapshot {
                BalloonSnapshot { $($name: self.$name.load(Relaxed),)+ }
            }
        }
    };
}

counters! {
    /// Bytes that the guest is asked for now.
    target_bytes,
    /// Bytes that the balloon has now, as the guest says.
    actual_bytes,
    /// Pages that the guest has given, each time.
    inflated_pages,
    /// Pages that it has taken back, each time.
    deflated_pages,
    /// Bytes of free memory that it has reported.
    reported_bytes,
    /// Bytes of both that were given back to the host.
    discarded_bytes,
    /// Bytes of both that stay, because the host's pages there are larger.
    kept_bytes,
    /// Bytes that are none of the guest's memory, and pages of a list behind its longest.
    invalid_bytes,
    /// Ranges that the host did not take back.
    failed,
    /// Times that the queues were given up, until a reset: the driver's rings were invalid.
    broken_rings,
}

/// Adds to a counter.
pub(super) fn count(counter: &AtomicU64, many: u64) {
    counter.fetch_add(many, Relaxed);
}
