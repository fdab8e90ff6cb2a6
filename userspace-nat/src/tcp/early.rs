//! Segments of a guest that came before those that precede them.
//!
//! A TAP keeps the order and seldom loses, so as a rule there are none. They are kept for what is lost
//! all the same: a guest that must send a whole window again for each loss, because nothing behind it
//! was kept, takes its time over it. A guest that takes selective acknowledgements is told of each that
//! is kept ([`Connection::hold`]), and nothing that it was told of is forgotten. Their bytes are bounded
//! for each connection and each VM, with what each segment takes besides its payload; what is beyond
//! that the guest sends again. A GSO frame is kept as it came, as one.
//!
//! What a full socket does not take of the segment that is next is kept here too, until it has room.
use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use slipgate_abi::tcp::Flags;
use slipgate_model::GuestTcpCounts;

use super::{Connection, Segment, before};
use crate::payload::Payload;

/// Most bytes that one connection keeps: sixteen of the longest frames, or a thousand small segments.
const MOST_BYTES: usize = 1 << 20;
/// What counts for a segment besides its payload: its place in the list and its allocation.
const OVERHEAD: usize = 64;
const _: () = assert!(size_of::<Early>() + 16 <= OVERHEAD);
/// Bytes that count for a segment at least, so that inserting one in the list stays cheap.
const LEAST_BYTES: usize = 1 << 10;
/// Most bytes of a VM's.
const BYTES_PER_VM: usize = 4 << 20;

/// Room for a VM's segments that came early, and what is counted of the VM's segments.
#[derive(Clone, Debug)]
pub(crate) struct EarlyRoom(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Bytes of the room, and those of it that are left.
    all: usize,
    left: AtomicUsize,
    not_kept: AtomicU64,
    urgent: AtomicU64,
}

impl Default for EarlyRoom {
    fn default() -> Self {
        Self::of(BYTES_PER_VM)
    }
}

impl EarlyRoom {
    fn of(all: usize) -> Self {
        Self(Arc::new(Shared {
            all,
            left: AtomicUsize::new(all),
            not_kept: AtomicU64::new(0),
            urgent: AtomicU64::new(0),
        }))
    }

    /// No room at all.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self::of(0)
    }

    fn take(&self, bytes: usize) -> bool {
        let left = |left: usize| left.checked_sub(bytes);
        self.0.left.fetch_update(Relaxed, Relaxed, left).is_ok()
    }

    fn give(&self, bytes: usize) {
        self.0.left.fetch_add(bytes, Relaxed);
    }

    /// Counts a segment with urgent data.
    pub(super) fn note_urgent(&self) {
        self.0.urgent.fetch_add(1, Relaxed);
    }

    /// Returns what is kept at present, and the counts.
    pub(crate) fn counts(&self) -> GuestTcpCounts {
        let left = self.0.left.load(Relaxed);
        GuestTcpCounts {
            kept_bytes: self.0.all.saturating_sub(left) as u64,
            not_kept: self.0.not_kept.load(Relaxed),
            urgent: self.0.urgent.load(Relaxed),
        }
    }

    /// Returns the bytes that are left.
    #[cfg(test)]
    pub(crate) fn left(&self) -> usize {
        self.0.left.load(Relaxed)
    }
}

/// A segment that waits for its turn.
#[derive(Debug)]
pub(super) struct Early {
    sequence: u32,
    is_last: bool,
    pub(super) payload: Box<[u8]>,
    room: EarlyRoom,
}

impl Early {
    /// The segment without its acknowledgement and options, which were taken when it came.
    pub(super) fn segment(&self) -> Segment {
        Segment {
            sequence: self.sequence,
            flags: Flags::ACK | if self.is_last { Flags::FIN } else { 0 },
            payload_len: self.payload.len() as u32,
            ..Segment::default()
        }
    }

    fn end(&self) -> u32 {
        self.sequence.wrapping_add(self.payload.len() as u32)
    }

    fn cost(&self) -> usize {
        cost(self.payload.len())
    }
}

/// Bytes that count for a segment with so much payload.
const fn cost(payload_len: usize) -> usize {
    let cost = payload_len + OVERHEAD;
    if cost < LEAST_BYTES {
        LEAST_BYTES
    } else {
        cost
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        self.room.give(self.cost());
    }
}

/// The early segments of a connection.
#[derive(Debug, Default)]
pub(super) struct EarlySegments {
    /// By their sequence numbers, each of which is there once.
    segments: VecDeque<Early>,
    /// Bytes that count for them.
    bytes: usize,
}

impl EarlySegments {
    /// Keeps a segment that is behind what is next, if it is within the window and there is room.
    pub(super) fn keep(
        &mut self,
        connection: &mut Connection,
        segment: &Segment,
        payload: &Payload<'_>,
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
            && payload.len() == segment.payload_len as usize
            && connection.is_receiving()
            && before(next, segment.sequence)
            && end <= connection.window_left()
            && !connection.is_outdated(segment);
        if is_early && self.insert(segment, payload, room) {
            let end = segment.sequence.wrapping_add(segment.payload_len);
            connection.hold(segment.sequence, end);
        }
    }

    /// Inserts a segment. Returns whether all of its bytes are here now.
    pub(super) fn insert(
        &mut self,
        segment: &Segment,
        payload: &Payload<'_>,
        room: &EarlyRoom,
    ) -> bool {
        let (sequence, is_last) = (segment.sequence, segment.has(Flags::FIN));
        let end = sequence.wrapping_add(segment.payload_len);
        let at = self
            .segments
            .partition_point(|early| before(early.sequence, sequence));
        let is_whole = |early: &Early| !before(early.end(), end) && (early.is_last || !is_last);
        let preceding = at.checked_sub(1).and_then(|at| self.segments.get(at));
        let same = self
            .segments
            .get(at)
            .filter(|early| early.sequence == sequence);
        if preceding.is_some_and(is_whole) || same.is_some_and(is_whole) {
            return true;
        }
        let (same_len, freed) = same.map_or((0, 0), |same| (same.payload.len(), same.cost()));
        let bytes = self.bytes - freed + cost(payload.len());
        // A shorter one that ends the stream is not worth its bytes: the guest was told of the longer.
        if same_len > payload.len() {
            return false;
        }
        if bytes > MOST_BYTES || !room.take(cost(payload.len())) {
            room.0.not_kept.fetch_add(1, Relaxed);
            return false;
        }
        let Some(payload) = payload.to_box() else {
            room.give(cost(payload.len()));
            return false;
        };
        let early = Early {
            sequence,
            is_last,
            payload,
            room: room.clone(),
        };
        match same_len {
            0 => self.segments.insert(at, early),
            _ => self.segments[at] = early,
        }
        self.bytes = bytes;
        true
    }

    /// Whether a segment's turn has come.
    pub(super) fn is_due(&self, connection: &Connection) -> bool {
        let next = connection.next_from_guest();
        let front = self.segments.front();
        front.is_some_and(|early| !before(next, early.sequence))
    }

    /// Returns a segment whose turn has come.
    pub(super) fn next(&mut self, connection: &Connection) -> Option<Early> {
        if self.segments.is_empty() {
            return None;
        }
        if !connection.is_receiving() {
            *self = Self::default();
            return None;
        }
        if !self.is_due(connection) {
            return None;
        }
        let early = self.segments.pop_front()?;
        self.bytes -= early.cost();
        if self.segments.is_empty() {
            // Its memory too: most connections never lose anything again.
            self.segments = VecDeque::new();
        }
        Some(early)
    }

    /// Takes back the segment that was given out last: the socket took only a part of it.
    pub(super) fn put_back(&mut self, early: Early) {
        self.bytes += early.cost();
        self.segments.push_front(early);
    }
}

#[cfg(test)]
#[path = "early_test.rs"]
mod tests;
