//! Rates: token buckets in integer nanoseconds.
//!
//! A bucket is kept as the time at which it will be full again (the generic cell rate algorithm's
//! theoretical arrival time, ITU-T I.371): one word, no division per packet, no drift.
use crate::clock::SECOND_NS;

/// Lets through `rate` per second, with a burst of as many as `burst`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenBucket {
    interval_ns: u64,
    burst_ns: u64,
    full_at_ns: u64,
}

impl TokenBucket {
    /// A full bucket. A rate of 0 lets nothing through.
    pub fn new(rate_per_second: u32, burst: u32) -> Self {
        // Rounded down, so that a rate is never undercut by rounding.
        let interval_ns = SECOND_NS
            .checked_div(u64::from(rate_per_second))
            .unwrap_or(u64::MAX);
        Self {
            interval_ns,
            burst_ns: interval_ns.saturating_mul(u64::from(burst)),
            full_at_ns: 0,
        }
    }

    /// Takes a token, if there is one.
    pub fn take(&mut self, now_ns: u64) -> bool {
        if self.interval_ns == u64::MAX {
            return false;
        }
        let full_at_ns = self.full_at_ns.max(now_ns) + self.interval_ns;
        if full_at_ns - now_ns > self.burst_ns {
            return false;
        }
        self.full_at_ns = full_at_ns;
        true
    }

    /// Gives a token back that was taken in vain.
    pub fn give_back(&mut self) {
        if self.interval_ns != u64::MAX {
            self.full_at_ns = self.full_at_ns.saturating_sub(self.interval_ns);
        }
    }
}

#[cfg(test)]
#[path = "quota_test.rs"]
mod tests;
