//! A guest's stream, put together from its segments by sequence number.
//!
//! **The first copy of a byte is the only one.** What a later segment says of a byte that is there
//! is not looked at, so nobody sees another copy than the one that was inspected.
//!
//! What is kept begins at the first byte that the server has not acknowledged and is bounded, also
//! in the number of gaps. A segment beyond the bounds is not kept; its sender sends it again.

/// Most bytes kept of a stream.
pub const MAX_LEN: usize = 32_768;
/// Most gaps.
const MAX_GAPS: usize = 64;
/// The buffer grows by so much, bytes.
pub(super) const GROWTH: usize = 4_096;

/// A stream in pieces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reassembly {
    /// Sequence number of the first byte kept.
    begin: u32,
    bytes: Vec<u8>,
    /// How many bytes from the first are there without a gap.
    whole: usize,
    /// What is there behind the first gap: from, to; ascending, neither touching nor empty.
    islands: Vec<(usize, usize)>,
    /// Where the stream ends, if that is known.
    end: Option<usize>,
}

impl Reassembly {
    /// A stream whose first byte has this sequence number.
    pub fn new(begin: u32) -> Self {
        Self {
            begin,
            bytes: Vec::new(),
            whole: 0,
            islands: Vec::new(),
            end: None,
        }
    }

    /// Sequence number of the first byte kept.
    pub fn begin(&self) -> u32 {
        self.begin
    }

    /// The bytes kept, up to the first gap.
    pub fn whole(&self) -> &[u8] {
        &self.bytes[..self.whole]
    }

    /// Whether the stream ends right behind [`Reassembly::whole`].
    pub fn is_ended(&self) -> bool {
        self.end == Some(self.whole)
    }

    /// Whether something is there behind a gap.
    pub fn has_islands(&self) -> bool {
        !self.islands.is_empty()
    }

    /// Whether what is there from a place on is what a segment has there.
    pub fn has(&self, sequence: u32, segment: &[u8]) -> bool {
        let from = sequence.wrapping_sub(self.begin) as usize;
        let end = from.checked_add(segment.len());
        segment.is_empty() || end.and_then(|end| self.bytes.get(from..end)) == Some(segment)
    }

    /// Memory held, bytes.
    pub fn held(&self) -> usize {
        self.bytes.capacity()
    }

    /// Memory held if a segment were taken, bytes.
    pub fn held_with(&self, sequence: u32, len: usize) -> usize {
        match self.place(sequence, len) {
            Some((from, _, len)) if len > 0 => self
                .bytes
                .capacity()
                .max((from + len).next_multiple_of(GROWTH)),
            _ => self.bytes.capacity(),
        }
    }

    /// Takes a segment; `fin`: it ends the stream. `false` when something of it is not kept.
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

    /// Lets go of the first bytes: the server has them.
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

    /// Forgets what is there behind [`Reassembly::whole`].
    pub fn forget_islands(&mut self) {
        self.islands.clear();
        self.bytes.truncate(self.whole);
        self.end = self.end.filter(|end| *end == self.whole);
    }

    /// Where a segment goes: from which place, without how many of its first bytes, how many.
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

    /// Notes that a range is there.
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
