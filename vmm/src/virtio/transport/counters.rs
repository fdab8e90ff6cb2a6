//! What the transport counts: most of it never happens with an honest driver.
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::pci::Vectors;

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counters of one device's transport; relaxed atomics, counted up from any thread.
        pub struct TransportCounters {
            $($(#[doc = $doc])+ pub $name: AtomicU64,)+
            /// Routes that the hypervisor refused: MSI messages that no interrupt can be.
            pub routes_refused: Arc<AtomicU64>,
            vectors: Arc<Vectors>,
        }

        /// [`TransportCounters`] at one moment.
        #[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
        pub struct TransportSnapshot {
            $($(#[doc = $doc])+ pub $name: u64,)+
            /// Routes that the hypervisor refused: MSI messages that no interrupt can be.
            pub routes_refused: u64,
            /// Interrupts sent, per MSI-X vector.
            pub interrupts: Vec<u64>,
        }

        impl TransportCounters {
            pub(super) fn new(vectors: Arc<Vectors>, routes_refused: Arc<AtomicU64>) -> Self {
                Self { $($name: AtomicU64::new(0),)+ routes_refused, vectors }
            }

            /// The figures now.
            pub fn snapshot(&self) -> TransportSnapshot {
                let count = u16::try_from(self.vectors.count()).unwrap_or(u16::MAX);
                TransportSnapshot {
                    $($name: self.$name.load(Relaxed),)+
                    routes_refused: self.routes_refused.load(Relaxed),
                    interrupts: (0..count).map(|vector| self.vectors.sent(vector)).collect(),
                }
            }
        }
    };
}

counters! {
    /// Times the driver brought the device up.
    activations,
    /// Times the driver, or a function level reset, stopped it.
    resets,
    /// Feature sets that were refused: not offered, without VERSION_1, or not a whole.
    features_refused,
    /// Writes of a status that skips a step; the steps skipped to were not taken.
    status_refused,
    /// Writes to the registers that have no meaning there or then; ignored.
    writes_ignored,
    /// Queues that could not be what the driver said: size, alignment, addresses.
    bad_queues,
    /// Activations that the device, or the host, refused.
    activations_failed,
    /// Times that the device went to DEVICE_NEEDS_RESET, whatever the cause.
    needs_reset,
    /// Notifications that left the kernel because no ioeventfd caught them.
    notify_exits,
    /// ioeventfds that could not be had; those queues' notifications exit.
    doorbells_failed,
}

/// One more.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}
