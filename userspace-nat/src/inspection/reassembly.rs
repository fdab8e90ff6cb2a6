//! Reassembly of a guest's stream from its segments, by sequence number.
//!
//! **Only the first copy of a byte counts.** Later copies of a byte that is stored are ignored, so
//! no receiver gets a copy other than the inspected one.
//!
//! The stored part begins at the first byte that the server has not acknowledged. Its length and
//! the number of gaps are bounded. A segment beyond the bounds is not stored; its sender
//! retransmits it.

/// Most bytes stored of a stream.
pub const MAX_LEN: usize = 32_768;
/// Most gaps in a stream.
const MAX_GAPS: usize = 64;
/// Step by which the buffer grows, bytes.
pub(super) const GROWTH: usize = 4_096;

/// Stored part of a stream, possibly with gaps.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reassembly {
    /// Sequence number of the first stored byte.
    begin: u32,
    bytes: Vec<u8>,
    /// Number of bytes before the first gap.
    whole: usize,
    /// Stored ranges after the first gap, from and to, in order; they neither touch nor are empty.
    islands: Vec<(usize, usize)>,
    /// Offset at which the stream ends, if known.
    end: Option<usize>,
}

impl Reassembly {
    /// A stream whose first byte has this sequence number.
    pub fn new(begin: u32) -> Self {
        Self {
            begin,
            ..Self::default()
        }
    }

    /// Sequence number of the first stored byte.
    pub fn begin(&self) -> u32 {
        self.begin
    }

    /// Stored bytes before the first gap.
    pub fn whole(&self) -> &[u8] {
        &self.bytes[..self.whole]
    }

    /// Whether the stream ends directly after [`Reassembly::whole`].
    pub fn is_ended(&self) -> bool {
        self.end == Some(self.whole)
    }

    /// Whether bytes are stored after a gap.
    pub fn has_out_of_order(&self) -> bool {
        !self.islands.is_empty()
    }

    /// Whether the stored bytes from this sequence number on equal a segment's.
    pub fn has(&self, sequence: u32, segment: &[u8]) -> bool {
        let from = sequence.wrapping_sub(self.begin) as usize;
        let end = from.checked_add(segment.len());
        segment.is_empty() || end.and_then(|end| self.bytes.get(from..end)) == Some(segment)
    }

    /// Memory in use, bytes.
    pub fn held(&self) -> usize {
        self.bytes.capacity()
    }

    /// Memory in use if a segment were inserted, bytes.
    pub fn held_with(&self, sequence: u32, len: usize) -> usize {
        match self.place(sequence, len) {
            Some((from, _, len)) if len > 0 => self
                .bytes
                .capacity()
                .max((from + len).next_multiple_of(GROWTH)),
            _ => self.bytes.capacity(),
        }
    }

    /// Inserts a segment. `fin` says that it ends the stream. Returns `false` if a part of it is
    /// not stored.
    pub fn insert(&mut self, sequence: u32, segment: &[u8], fin: bool) -> bool {
        let Some((from, skip, len)) = self.place(sequence, segment.len()) else {
            // All of it is there, or out of reach. An end that was told before may come again.
            let to = sequence
                .wrapping_add(segment.len() as u32)
                .wrapping_sub(self.begin);
            return to as i32 <= 0;
        };
        let kept = self.keep(from, &segment[skip..skip + len]);
        let all = kept && skip + len == segment.len();
        if fin && all {
            self.set_end(from + len);
        }
        all
    }

    /// Removes the first `len` bytes, which the server has acknowledged.
    pub fn release(&mut self, len: usize) {
        let len = len.min(self.whole);
        if len == 0 {
            return;
        }
        self.begin = self.begin.wrapping_add(len as u32);
        self.bytes.drain(..len);
        self.whole -= len;
        for (from, to) in &mut self.islands {
            *from -= len;
            *to -= len;
        }
        self.end = self.end.map(|end| end - len);
        if self.bytes.is_empty() {
            self.bytes = Vec::new();
        }
    }

    /// Removes the bytes after [`Reassembly::whole`].
    pub fn forget_out_of_order(&mut self) {
        self.islands.clear();
        self.bytes.truncate(self.whole);
        self.end = self.end.filter(|end| *end == self.whole);
    }

    /// Place of a segment: its offset, the number of its first bytes to skip, and the number to
    /// store. `None` if nothing of it is stored.
    fn place(&self, sequence: u32, len: usize) -> Option<(usize, usize, usize)> {
        let from = sequence.wrapping_sub(self.begin) as i32;
        let skip = usize::try_from(from.checked_neg()?).unwrap_or(0);
        let from = usize::try_from(from).unwrap_or(0);
        let most = self.end.unwrap_or(MAX_LEN).min(MAX_LEN);
        if skip > len || from > most {
            return None;
        }
        Some((from, skip, (len - skip).min(most - from)))
    }

    fn set_end(&mut self, end: usize) {
        // What was said before of where it ends, or of bytes behind it, came first.
        let last = self.islands.last().map_or(self.whole, |island| island.1);
        if self.end.is_none() && last <= end {
            self.end = Some(end);
        }
    }

    fn keep(&mut self, from: usize, piece: &[u8]) -> bool {
        let to = from + piece.len();
        // Nothing at all, however far ahead, takes no room.
        if piece.is_empty() || to <= self.whole {
            return true;
        }
        if from > self.whole && self.islands.len() >= MAX_GAPS {
            return false;
        }
        if self.bytes.len() < to {
            let more = to.next_multiple_of(GROWTH) - self.bytes.len();
            self.bytes.reserve_exact(more);
            self.bytes.resize(to, 0);
        }
        // Fills the gaps only.
        let mut at = from.max(self.whole);
        let mut write = |at: usize, to: usize| {
            if at < to {
                self.bytes[at..to].copy_from_slice(&piece[at - from..to - from]);
            }
        };
        for &(island, end) in &self.islands {
            write(at, island.min(to));
            at = at.max(end);
        }
        write(at, to);
        self.join(from.max(self.whole), to);
        true
    }

    /// Records that a range is stored.
    fn join(&mut self, mut from: usize, mut to: usize) {
        if from == to {
            return;
        }
        self.islands.retain(|&(island, end)| {
            let apart = end < from || island > to;
            if !apart {
                from = from.min(island);
                to = to.max(end);
            }
            apart
        });
        if from <= self.whole {
            self.whole = self.whole.max(to);
        } else {
            let at = self.islands.partition_point(|(island, _)| *island < from);
            self.islands.insert(at, (from, to));
        }
    }
}

#[cfg(test)]
#[path = "reassembly_test.rs"]
mod tests;
