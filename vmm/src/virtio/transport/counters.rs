//! Counters of the transport. Most of them stay 0 with a correct driver.
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::pci::Vectors;

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counters of one device's transport: relaxed atomics that any thread increments.
        pub struct TransportCounters {
            $($(#[doc = $doc])+ pub $name: AtomicU64,)+
            /// MSI-X routes that the hypervisor refused, because the message is no valid interrupt, and
            /// vectors that it did not connect or disconnect.
            pub routes_refused: Arc<AtomicU64>,
            vectors: Arc<Vectors>,
        }

        /// [`TransportCounters`] at one moment.
        #[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
        pub struct TransportSnapshot {
            $($(#[doc = $doc])+ pub $name: u64,)+
            /// MSI-X routes that the hypervisor refused, because the message is no valid interrupt, and
            /// vectors that it did not connect or disconnect.
            pub routes_refused: u64,
            /// Interrupts sent, per MSI-X vector.
            pub interrupts: Vec<u64>,
        }

        impl TransportCounters {
            pub(super) fn new(vectors: Arc<Vectors>, routes_refused: Arc<AtomicU64>) -> Self {
                Self { $($name: AtomicU64::new(0),)+ routes_refused, vectors }
            }

            /// Returns the present figures.
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
    /// Times that the driver activated the device.
    activations,
    /// Resets of the device, by the driver or by a function level reset.
    resets,
    /// Feature sets that were refused: not offered, without VERSION_1, or inconsistent.
    features_refused,
    /// Writes of a status that skips a step. The steps behind the gap were not taken.
    status_refused,
    /// Register writes that are invalid or came at the wrong time; they were ignored.
    writes_ignored,
    /// Enabled queues with an invalid size, alignment or address.
    bad_queues,
    /// Activations that the device, or the host, refused.
    activations_failed,
    /// Times that the device went to DEVICE_NEEDS_RESET, whatever the cause.
    needs_reset,
    /// Notifications that caused an exit because no ioeventfd handled them.
    notify_exits,
    /// ioeventfds that could not be created. Notifications of those queues cause exits.
    doorbells_failed,
}

/// Adds one to a counter.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}
