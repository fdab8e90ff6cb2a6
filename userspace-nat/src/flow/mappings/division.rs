//! Division of the range among the processes that there are.
//!
//! A port is of one process, or two guests could have the same one: with filtering by address and
//! port there is no entry in `FORWARDS` that would tell. Each port is of the process whose row gets
//! the highest score with it (rendezvous hashing). So all agree without a word, and when a process
//! comes or goes only its own ports change hands. A mapping keeps its port until it ends.

/// The processes among which ports are divided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Division {
    /// Row of this process in `OWNERS`.
    own: u32,
    /// Rows of `OWNERS` in use, one bit each, this process's included; 0 while it is alone.
    rows: u64,
}

impl Division {
    /// One process has all ports.
    pub(super) const ALONE: Self = Self { own: 0, rows: 0 };

    /// `others`: rows of other processes, one bit each.
    pub(super) fn new(own: u32, others: u64) -> Self {
        let ours = 1u64.checked_shl(own).unwrap_or(0);
        match others & !ours {
            0 => Self::ALONE,
            others => Self {
                own,
                rows: others | ours,
            },
        }
    }

    /// Returns the number of processes.
    pub(super) fn processes(&self) -> usize {
        (self.rows.count_ones() as usize).max(1)
    }

    /// Whether this process may give a port to a guest.
    pub(super) fn is_own(&self, port: u16) -> bool {
        let rows = (0..u64::BITS).filter(|row| self.rows >> row & 1 == 1);
        let best = rows.max_by_key(|row| score(port, *row));
        best.is_none_or(|row| row == self.own)
    }
}

/// The finalizer of `SplitMix64`: all processes must compute the same.
const fn score(port: u16, row: u32) -> u64 {
    let mut x = ((row as u64) << 16 | port as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
