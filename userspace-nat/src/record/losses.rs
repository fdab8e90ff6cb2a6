//! When to say that lines were lost: at once, and then in sum, every ten minutes at most. A disk
//! stays full for long, and whoever reads these messages need not be quick.
use crate::clock::SECOND_NS;

/// Between two messages, ns.
const QUIET_NS: u64 = 600 * SECOND_NS;

/// Lines that were lost and not told of.
#[derive(Debug, Default)]
pub struct Losses {
    untold: u64,
    quiet_until_ns: u64,
}

impl Losses {
    /// So many more.
    pub fn add(&mut self, lines: u64) {
        self.untold += lines;
    }

    /// Whether there is something to say, now or later.
    pub fn is_empty(&self) -> bool {
        self.untold == 0
    }

    /// How many are to be told of now.
    pub fn due(&mut self, now_ns: u64) -> Option<u64> {
        if self.untold == 0 || now_ns < self.quiet_until_ns {
            return None;
        }
        self.quiet_until_ns = now_ns + QUIET_NS;
        Some(std::mem::take(&mut self.untold))
    }

    /// How many are left to be told of, at the end.
    pub fn rest(&mut self) -> Option<u64> {
        (self.untold > 0).then(|| std::mem::take(&mut self.untold))
    }
}

#[cfg(test)]
#[path = "losses_test.rs"]
mod tests;
