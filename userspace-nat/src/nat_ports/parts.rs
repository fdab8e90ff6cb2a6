//! What of the ports is kept for each process.
//!
//! Processes do not know which ports the others use, and find out by colliding. So that one of them
//! can't have all of a destination's, the last quarter of the range is in as many equal parts as
//! there can be processes. While there are several, each leaves the others' parts alone, and its own
//! is for those of its VMs that have little.
use slipgate_abi::maps::MAX_OWNERS;

/// Parts of the offsets of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Parts {
    /// The first offset of the first part.
    first: usize,
    /// Offsets of a part; 0: the range is too small.
    each: usize,
    /// Our row.
    own: u32,
    /// A bit for each row that a process has, ours too; none while it is alone.
    rows: u64,
}

impl Parts {
    pub(super) fn new(size: usize, own: u32, others: u64) -> Self {
        let each = size / 4 / MAX_OWNERS as usize;
        let ours = 1u64.checked_shl(own).unwrap_or(0);
        Self {
            first: size - each * MAX_OWNERS as usize,
            each,
            own,
            rows: if others & !ours == 0 {
                0
            } else {
                others | ours
            },
        }
    }

    /// How many offsets are kept.
    pub(super) fn kept(&self) -> usize {
        self.each * self.rows.count_ones() as usize
    }

    /// Whether an offset is kept; what comes behind its part then.
    pub(super) fn behind_kept(&self, offset: usize) -> Option<usize> {
        let part = offset.checked_sub(self.first)?.checked_div(self.each)?;
        let is_kept = self.rows.checked_shr(part as u32).unwrap_or(0) & 1 == 1;
        is_kept.then(|| self.first + (part + 1) * self.each)
    }

    /// The offsets that are kept for us.
    pub(super) fn own(&self) -> std::ops::Range<usize> {
        let start = self.first + self.own as usize * self.each;
        start..start + if self.rows == 0 { 0 } else { self.each }
    }
}
