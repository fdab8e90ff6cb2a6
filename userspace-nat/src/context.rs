//! The access that the event loop gives a service during a call.
use crate::{poll::Poller, port::Outbox};

/// Time, outbox and epoll set, lent by the event loop to a service for one call.
#[derive(Debug)]
pub struct Context<'a> {
    /// Present time, `CLOCK_MONOTONIC` ns.
    pub now_ns: u64,
    /// Queue for the frames that the service sends.
    pub out: &'a mut Outbox,
    /// Epoll set for the descriptors of the service.
    pub poller: &'a Poller,
}
