//! Counters of the vsock device.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counters of the vsock device: its thread increments them, any thread reads them.
        #[derive(Debug, Default)]
        pub struct VsockCounters {
            $($(#[doc = $doc])+ pub(super) $name: AtomicU64,)+
        }

        /// [`VsockCounters`] at one moment.
        #[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
        pub struct VsockSnapshot {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl VsockCounters {
            /// Returns the present figures.
            pub fn snapshot(&self) -> VsockSnapshot {
                VsockSnapshot { $($name: self.$name.load(Relaxed),)+ }
            }
        }
    };
}

counters! {
    /// Connections that a program of the host asked for and the guest accepted.
    opened_by_host,
    /// Connections that the guest asked for and for which a program of the host was there.
    opened_by_guest,
    /// Bytes of the guest's packets that went into sockets of the host.
    to_host_bytes,
    /// Bytes of these that a socket did not take at once, and that were held for it.
    held_bytes,
    /// Bytes from sockets of the host that went to the guest.
    to_guest_bytes,
    /// Connections of the host that were closed before they were asked for in the guest: no line
    /// of the form `CONNECT PORT`, or one connection too many.
    refused_host,
    /// Connections that the guest asked for and that were refused by RST: no program of the host
    /// listens for that port.
    refused_requests,
    /// The same, because of too many connections, or too many requests without an answer.
    refused_requests_full,
    /// The same, because the process that connects did not answer in time, or is gone.
    refused_requests_silent,
    /// Packets of the guest that were refused by RST: no such connection, not a stream, or another
    /// destination than the host. Requests for connections are not among them.
    refused_guest,
    /// Connections that ended by RST because the guest broke the rules of the stream, such as more
    /// data than its credit.
    violations,
    /// Packets of the guest that were dropped: no whole header, a length beyond the packet's end,
    /// or another source than the guest.
    dropped,
    /// Times that the queues were given up, until a reset: the driver's rings were invalid.
    broken_rings,
}

/// Adds to a counter.
pub(super) fn count(counter: &AtomicU64, many: u64) {
    counter.fetch_add(many, Relaxed);
}
