//! Datagrams of one flow that leave in one system call.
//!
//! # Theory of operation
//! A guest's datagrams come in frames of their own. Those of one flow and one length that are read
//! together leave together, as one `UDP_SEGMENT` send: the kernel makes of them the datagrams that they
//! were (udp(7)). They wait no longer than until the frames that were read with them are handled. A
//! datagram of another flow, a longer one, one behind a shorter one, or one that may leave in fragments
//! behind one that may not, begins the next burst.
use slipgate_model::FlowTuple;

use super::path_mtu::IfTooLong;
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
    of: Option<(u32, FlowTuple, IfTooLong)>,
    payload: Vec<u8>,
    each: usize,
    count: usize,
}

/// Payloads of one flow that leave together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load<'p> {
    pub(super) key: u32,
    pub(super) tuple: FlowTuple,
    pub(super) payload: &'p [u8],
    /// Length of each datagram but the last; `None`: it is one.
    pub(super) each: Option<u16>,
    pub(super) if_too_long: IfTooLong,
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
    pub(super) fn takes(&self, key: u32, len: usize, if_too_long: IfTooLong) -> bool {
        let is_next = self
            .of
            .is_some_and(|(of, _, how)| of == key && how == if_too_long)
            && self.count < MOST
            && len <= self.each
            && self.payload.len() + len <= MOST_BYTES;
        // A shorter one was the last.
        is_next && self.payload.len() == self.each * self.count
    }

    /// Adds a datagram, which it takes, or to none.
    pub(super) fn push(
        &mut self,
        key: u32,
        tuple: FlowTuple,
        payload: &[u8],
        if_too_long: IfTooLong,
    ) {
        if self.of.is_none() {
            self.of = Some((key, tuple, if_too_long));
            self.each = payload.len();
        }
        self.payload.extend_from_slice(payload);
        self.count += 1;
    }

    /// Returns what waits, if anything does. [`Burst::clear`] follows.
    pub(super) fn waiting(&self) -> Option<Load<'_>> {
        let (key, tuple, if_too_long) = self.of?;
        let each = (self.count > 1).then(|| u16::try_from(self.each).ok());
        Some(Load {
            key,
            tuple,
            payload: &self.payload,
            each: each.flatten(),
            if_too_long,
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
