//! Segments of a guest that came before those that precede them.
//!
//! A TAP keeps the order and seldom loses, so as a rule there are none. They are kept for what is lost
//! all the same: a guest that must send a whole window again for each loss, because nothing behind it
//! was kept, takes its time over it. Their bytes are bounded for each VM; what is beyond that the
//! guest sends again.
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use slipgate_abi::tcp::Flags;

use super::{Connection, Segment, before};

/// Most segments that one connection keeps, and most of their bytes.
const MOST_SEGMENTS: usize = 64;
const MOST_BYTES: usize = 128 << 10;
/// Most bytes of a VM's.
const BYTES_PER_VM: usize = 4 << 20;

/// Room for a VM's segments that came early.
#[derive(Clone, Debug)]
pub(crate) struct EarlyRoom(Arc<AtomicUsize>);

impl Default for EarlyRoom {
    fn default() -> Self {
        Self(Arc::new(AtomicUsize::new(BYTES_PER_VM)))
    }
}

impl EarlyRoom {
    fn take(&self, bytes: usize) -> bool {
        let left = |left: usize| left.checked_sub(bytes);
        let order = Ordering::Relaxed;
        self.0.fetch_update(order, order, left).is_ok()
    }

    /// Returns the bytes that are left.
    #[cfg(test)]
    pub(crate) fn left(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// A segment that waits for its turn.
#[derive(Debug)]
pub(super) struct Early {
    pub(super) segment: Segment,
    pub(super) payload: Box<[u8]>,
    room: EarlyRoom,
}

impl Drop for Early {
    fn drop(&mut self) {
        self.room.0.fetch_add(self.payload.len(), Ordering::Relaxed);
    }
}

/// The early segments of a connection.
#[derive(Debug, Default)]
pub(super) struct EarlySegments(Vec<Early>);

impl EarlySegments {
    /// Keeps a segment that is behind what is next, if it is within the window and there is room.
    pub(super) fn keep(
        &mut self,
        connection: &Connection,
        segment: &Segment,
        payload: &[u8],
        room: &EarlyRoom,
    ) {
        let next = connection.next_from_guest();
        let is_data =
            segment.has(Flags::ACK) && !segment.has(Flags::SYN) && !segment.has(Flags::RST);
        let end = segment
            .sequence
            .wrapping_sub(next)
            .saturating_add(segment.payload_len);
        let is_early = is_data
            && !payload.is_empty()
            && connection.is_receiving()
            && before(next, segment.sequence)
            && end <= connection.window_left();
        let held: usize = self.0.iter().map(|early| early.payload.len()).sum();
        let is_known = || {
            self.0
                .iter()
                .any(|early| early.segment.sequence == segment.sequence)
        };
        if is_early
            && self.0.len() < MOST_SEGMENTS
            && held + payload.len() <= MOST_BYTES
            && !is_known()
            && room.take(payload.len())
        {
            self.0.push(Early {
                segment: *segment,
                payload: payload.into(),
                room: room.clone(),
            });
        }
    }

    /// Returns a segment whose turn has come.
    pub(super) fn next(&mut self, connection: &Connection) -> Option<Early> {
        if self.0.is_empty() {
            return None;
        }
        if !connection.is_receiving() {
            self.0.clear();
            return None;
        }
        let next = connection.next_from_guest();
        let is_due = |early: &Early| !before(next, early.segment.sequence);
        let at = self.0.iter().position(is_due)?;
        Some(self.0.swap_remove(at))
    }
}

#[cfg(test)]
#[path = "early_test.rs"]
mod tests;
