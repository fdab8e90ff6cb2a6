//! Token buckets in integer nanoseconds.
//!
//! The state of a bucket is the time at which it will be full again (the theoretical arrival time
//! of the generic cell rate algorithm, ITU-T I.371): one word, no division per packet, no drift.

pub(super) const SECOND_NS: u64 = 1_000_000_000;

/// A token bucket with a rate and a burst.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenBucket {
    interval_ns: u64,
    burst_ns: u64,
    full_at_ns: u64,
}

impl TokenBucket {
    /// Creates a full bucket of `rate_per_second`. A rate of 0 lets nothing through.
    pub fn new(rate_per_second: u32, burst: u32) -> Self {
        Self::over(SECOND_NS, rate_per_second, burst)
    }

    /// Creates a full bucket of `rate` per minute.
    pub fn per_minute(rate: u32, burst: u32) -> Self {
        Self::over(60 * SECOND_NS, rate, burst)
    }

    fn over(time_ns: u64, rate: u32, burst: u32) -> Self {
        // Rounded down, so that a rate is never undercut by rounding.
        let interval_ns = time_ns.checked_div(u64::from(rate)).unwrap_or(u64::MAX);
        Self {
            interval_ns,
            burst_ns: interval_ns.saturating_mul(u64::from(burst)),
            full_at_ns: 0,
        }
    }

    /// Takes a token. Returns false if there is none.
    pub fn take(&mut self, now_ns: u64) -> bool {
        self.take_many(1, now_ns)
    }

    /// Reports whether a token is available now, without taking it.
    pub fn has(&self, now_ns: u64) -> bool {
        let mut copy = *self;
        copy.take(now_ns)
    }

    /// Takes a token if at least `left` tokens remain after it. Returns false otherwise.
    pub fn take_leaving(&mut self, left: u32, now_ns: u64) -> bool {
        let kept_ns = self.interval_ns.saturating_mul(u64::from(left));
        let mut less = Self {
            burst_ns: self.burst_ns.saturating_sub(kept_ns),
            ..*self
        };
        let taken = less.take(now_ns);
        self.full_at_ns = less.full_at_ns;
        taken
    }

    /// Takes `tokens` tokens. Returns false, and takes none, if there are fewer.
    pub fn take_many(&mut self, tokens: u32, now_ns: u64) -> bool {
        if self.interval_ns == u64::MAX {
            return false;
        }
        let taken_ns = self.interval_ns.saturating_mul(u64::from(tokens));
        let full_at_ns = self.full_at_ns.max(now_ns).saturating_add(taken_ns);
        if full_at_ns - now_ns > self.burst_ns {
            return false;
        }
        self.full_at_ns = full_at_ns;
        true
    }
}

#[cfg(test)]
#[path = "token_bucket_test.rs"]
mod tests;
