//! Rate limit of messages about lost lines: one at once, then a sum every ten minutes at most. A
//! disk stays full for long, and the reader of these messages need not be quick.
use crate::clock::SECOND_NS;

/// Shortest time between two messages, ns.
const QUIET_NS: u64 = 600 * SECOND_NS;

/// Lost lines that were not reported yet.
#[derive(Debug, Default)]
pub struct Losses {
    unreported: u64,
    quiet_until_ns: u64,
}

impl Losses {
    /// Adds `lines` lost lines.
    pub fn add(&mut self, lines: u64) {
        self.unreported += lines;
    }

    /// Whether no loss is left to be reported, now or later.
    pub fn is_empty(&self) -> bool {
        self.unreported == 0
    }

    /// Returns the number of lost lines to report now; `None` if no report is due.
    pub fn due(&mut self, now_ns: u64) -> Option<u64> {
        if self.unreported == 0 || now_ns < self.quiet_until_ns {
            return None;
        }
        self.quiet_until_ns = now_ns + QUIET_NS;
        Some(std::mem::take(&mut self.unreported))
    }

    /// Returns the number of lost lines left to be reported at the end; `None` when there are none.
    pub fn rest(&mut self) -> Option<u64> {
        (self.unreported > 0).then(|| std::mem::take(&mut self.unreported))
    }
}

#[cfg(test)]
#[path = "losses_test.rs"]
mod tests;
