//! Parts of the port range that are kept for each process.
//!
//! Processes do not know which ports the others use, and find out by collisions. So that no process
//! can take all ports toward a destination, the last quarter of the range is divided into as many
//! equal parts as there can be processes. While there are several processes, each leaves the parts
//! of the others alone, and uses its own part for those of its VMs that have few ports.
use slipgate_abi::maps::MAX_OWNERS;

/// Division of a range's offsets among processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Parts {
    /// First offset of the first part.
    first: usize,
    /// Offsets in each part; 0 when the range is too small.
    each: usize,
    /// Row of this process in `OWNERS`.
    own: u32,
    /// Rows of `OWNERS` in use, one bit each, this process's included; 0 while it is alone.
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

    /// Returns the number of offsets that are kept for processes.
    pub(super) fn kept(&self) -> usize {
        self.each * self.rows.count_ones() as usize
    }

    /// Returns the first offset behind the part that an offset is in; `None` when that part is not
    /// kept for a process.
    pub(super) fn behind_kept(&self, offset: usize) -> Option<usize> {
        let part = offset.checked_sub(self.first)?.checked_div(self.each)?;
        let is_kept = self.rows.checked_shr(part as u32).unwrap_or(0) & 1 == 1;
        is_kept.then(|| self.first + (part + 1) * self.each)
    }

    /// Returns the offsets that are kept for this process.
    pub(super) fn own(&self) -> std::ops::Range<usize> {
        let start = self.first + self.own as usize * self.each;
        start..start + if self.rows == 0 { 0 } else { self.each }
    }
}
