//! What the event loop lends to a service.
use crate::{poll::Poller, port::Outbox};

/// What the loop lends to a service for the time of a call.
#[derive(Debug)]
pub struct Context<'a> {
    /// `CLOCK_MONOTONIC`, ns.
    pub now_ns: u64,
    /// Frames to be sent.
    pub out: &'a mut Outbox,
    /// Where descriptors are waited on.
    pub poller: &'a Poller,
}
