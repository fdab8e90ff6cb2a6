//! Datagrams of one flow that leave in one system call.
//!
//! # Theory of operation
//! A guest's datagrams come in frames of their own. Those of one flow and one length that are read
//! together leave together, as one `UDP_SEGMENT` send: the kernel makes of them the datagrams that they
//! were (udp(7)). They wait no longer than until the frames that were read with them are handled. A
//! datagram of another flow, a longer one, or one behind a shorter one begins the next burst.
use slipgate_model::FlowTuple;

use crate::packet::{Version, transport::UDP_HEADER_LEN};

/// Most datagrams of one send (the kernel's `UDP_MAX_SEGMENTS` before 6.9).
const MOST: usize = 64;
/// Longest packet of a datagram that waits for others, bytes: what a usual link carries whole.
const LONGEST_PACKET: usize = 1_500;
/// Most bytes of one send.
const MOST_BYTES: usize = 65_000;

/// Datagrams that wait for the end of the turn.
#[derive(Debug, Default)]
pub(super) struct Burst {
    /// Of whom they are.
    of: Option<(u32, FlowTuple)>,
    payload: Vec<u8>,
    each: usize,
    count: usize,
}

/// A burst that is to be sent.
#[derive(Debug)]
pub(super) struct Sent<'b> {
    pub(super) key: u32,
    pub(super) tuple: FlowTuple,
    pub(super) payload: &'b [u8],
    /// Length of each but the last; `None`: it is one datagram.
    pub(super) each: Option<u16>,
}

impl Burst {
    /// Whether a datagram of this length may wait for others at all.
    pub(super) fn is_for(version: Version, len: usize) -> bool {
        let longest = LONGEST_PACKET - version.header_len() - UDP_HEADER_LEN;
        (1..=longest).contains(&len)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.of.is_none()
    }

    /// Whether a datagram joins those that wait.
    pub(super) fn takes(&self, key: u32, len: usize) -> bool {
        let is_next = self.of.is_some_and(|(of, _)| of == key)
            && self.count < MOST
            && len <= self.each
            && self.payload.len() + len <= MOST_BYTES;
        // A shorter one was the last.
        is_next && self.payload.len() == self.each * self.count
    }

    /// Adds a datagram, which it takes, or to none.
    pub(super) fn push(&mut self, key: u32, tuple: FlowTuple, payload: &[u8]) {
        if self.of.is_none() {
            self.of = Some((key, tuple));
            self.each = payload.len();
        }
        self.payload.extend_from_slice(payload);
        self.count += 1;
    }

    /// Returns what waits, if anything does. [`Burst::clear`] follows.
    pub(super) fn waiting(&self) -> Option<Sent<'_>> {
        let (key, tuple) = self.of?;
        let each = (self.count > 1).then(|| u16::try_from(self.each).ok());
        Some(Sent {
            key,
            tuple,
            payload: &self.payload,
            each: each.flatten(),
        })
    }

    pub(super) fn clear(&mut self) {
        self.of = None;
        self.payload.clear();
        self.count = 0;
    }
}

#[cfg(test)]
#[path = "burst_test.rs"]
mod tests;
