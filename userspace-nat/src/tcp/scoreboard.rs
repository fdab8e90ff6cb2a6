//! What the guest has received of our data behind a gap, by its selective acknowledgements (RFC 6675).
//!
//! It is only a list of what need not be sent again at present. The data itself stays in the socket's
//! queue until it is acknowledged cumulatively, so a guest that reneges (RFC 2018 section 8) gets it
//! again after the retransmission timer, which forgets the list. A block at or before the first number
//! that is not acknowledged reports a duplicate (RFC 2883) and is ignored.
use super::{before, earlier, later, options::SackBlocks};

/// Most ranges that are kept for one connection. What further blocks report is sent again.
const MOST_RANGES: usize = 64;
/// Ranges above a number that mean that it is lost (DupThresh of RFC 6675), one more than the segments'
/// worth of bytes that mean the same.
const DUPLICATES: usize = 3;

/// Ranges of sequence numbers that the guest has, in order, apart from each other.
#[derive(Clone, Debug, Default)]
pub(super) struct Scoreboard(Vec<(u32, u32)>);

impl Scoreboard {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn clear(&mut self) {
        // Its memory too: most connections never lose anything.
        self.0 = Vec::new();
    }

    /// Notes a segment's blocks, which are of what lies between the first number that is not
    /// acknowledged and what was sent last.
    pub(super) fn note(&mut self, blocks: &SackBlocks, unacknowledged: u32, sent: u32) {
        for (first, end) in blocks.iter() {
            let is_valid =
                before(first, end) && before(unacknowledged, first) && !before(sent, end);
            if is_valid {
                self.add(first, end);
            }
        }
    }

    fn add(&mut self, first: u32, end: u32) {
        let from = self.0.partition_point(|(_, last)| before(*last, first));
        let to = self.0.partition_point(|(start, _)| !before(end, *start));
        if from == to {
            if self.0.len() < MOST_RANGES {
                self.0.insert(from, (first, end));
            }
            return;
        }
        // Those that it overlaps or touches become one.
        let (lowest, highest) = (self.0[from].0, self.0[to - 1].1);
        let joined = (earlier(lowest, first), later(highest, end));
        self.0.splice(from..to, [joined]);
    }

    /// All before this is acknowledged. A range that it does not include although they meet is none.
    pub(super) fn acknowledged(&mut self, to: u32) {
        self.0.retain(|(start, _)| before(to, *start));
        if self.0.is_empty() {
            self.clear();
        }
    }

    /// Returns the first number from `at` on that the guest does not have, as far as it is known.
    pub(super) fn skip(&self, at: u32) -> u32 {
        let nth = self.0.partition_point(|(_, end)| !before(at, *end));
        match self.0.get(nth) {
            Some((start, end)) if !before(at, *start) => *end,
            _ => at,
        }
    }

    /// Returns where the next range behind `at` begins.
    pub(super) fn next_range(&self, at: u32) -> Option<u32> {
        let nth = self.0.partition_point(|(start, _)| !before(at, *start));
        self.0.get(nth).map(|(start, _)| *start)
    }

    /// Returns the number behind the last that the guest has.
    pub(super) fn highest(&self) -> Option<u32> {
        self.0.last().map(|(_, end)| *end)
    }

    /// Returns the number before which all that the guest does not have is lost: the guest has three
    /// ranges behind it, or more than two segments (IsLost of RFC 6675 section 4).
    pub(super) fn lost_before(&self, mss: u32) -> Option<u32> {
        let (mut ranges, mut bytes) = (0, 0_u32);
        for (start, end) in self.0.iter().rev() {
            ranges += 1;
            bytes = bytes.saturating_add(end.wrapping_sub(*start));
            if ranges >= DUPLICATES || bytes > mss.saturating_mul(DUPLICATES as u32 - 1) {
                return Some(*start);
            }
        }
        None
    }
}

#[cfg(test)]
#[path = "scoreboard_test.rs"]
mod tests;
