//! What the adoption of a predecessor's flows needs beside the flows.

/// State of an adoption beside the flows that are left.
#[derive(Debug, Default)]
pub(crate) struct Adopting {
    /// Time of the start, ns: what DNS had opened then counts.
    pub(crate) began_ns: u64,
    /// Guests' connections that may still be probed.
    pub(crate) probes: usize,
}
