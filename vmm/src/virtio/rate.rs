//! Limits of a device's rate: token buckets for bytes and for operations.
//!
//! # Theory of operation
//! A [`Bucket`] holds at most `size` tokens and is filled from empty to full in `refill`, evenly, so
//! its rate is `size / refill` and `size` is what may pass at once. `one_time_burst` more tokens are
//! there at the beginning; they are used first and never come back. These are the settings of
//! Firecracker's rate limiter.
//!
//! A bucket is *open* while it has a token. What passes an open bucket is charged in full, even where
//! that is more than the bucket has: the rest is a debt, which is paid before the bucket opens again.
//! So an operation of any length passes in the end, none has to be divided, and the length of a frame
//! need not be known before it is read. In any time `t` at most `size + one_time_burst + rate * t`
//! pass, and what passed the open bucket last: one operation of a disk; of a network card one from
//! each queue pair to the TAP, and from the TAP one batch of reads for each pair, because the lengths
//! of its frames are known afterwards.
//!
//! A [`Limiter`] has a bucket for each of the two measures that is limited, and is open while both
//! are. The functions have no clock: the time comes from the caller, who sleeps until
//! [`Limiter::closed_until`] and never polls.
use std::time::{Duration, Instant};

/// Settings of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketConfig {
    /// Tokens that the bucket holds, 1 at least.
    pub size: u64,
    /// Tokens that are there once, at the beginning, besides.
    pub one_time_burst: u64,
    /// Time in which an empty bucket becomes full.
    pub refill: Duration,
}

/// Limits of one direction of a device; `None` does not limit that measure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateConfig {
    /// Bucket that limits bytes; `None` does not limit them.
    pub bytes: Option<BucketConfig>,
    /// Limit of operations: requests of a disk, packets of a network card.
    pub operations: Option<BucketConfig>,
}

/// Token bucket of one measure, bytes or operations.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// Full, in shares: a token has as many as the refill has nanoseconds, so that each nanosecond
    /// brings a whole number of them, `size`.
    full: i128,
    /// Shares that each nanosecond brings.
    size: i128,
    /// Shares in a token.
    token: i128,
    /// Tokens of the one-time burst that are left.
    burst: u64,
    /// Present shares, as of `at`; below zero is a debt.
    balance: i128,
    at: Instant,
}

impl Bucket {
    /// Returns a full bucket.
    pub fn new(config: BucketConfig, now: Instant) -> Bucket {
        let token = i128::try_from(config.refill.as_nanos())
            .unwrap_or(i128::MAX)
            .max(1);
        let token = token.min(i128::from(u64::MAX));
        let size = i128::from(config.size.max(1)).min(i128::from(i64::MAX));
        Bucket {
            full: size * token,
            size,
            token,
            burst: config.one_time_burst,
            balance: size * token,
            at: now,
        }
    }

    /// Adds what the time since the last call has brought. A time before that brings nothing.
    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_nanos();
        let passed = i128::try_from(passed).unwrap_or(i128::MAX);
        let brought = passed.saturating_mul(self.size);
        self.balance = self.balance.saturating_add(brought).min(self.full);
        self.at = self.at.max(now);
    }

    /// Returns when the bucket will be open; `None`: it is.
    pub fn closed_until(&mut self, now: Instant) -> Option<Instant> {
        self.refill(now);
        if self.burst > 0 || self.balance >= self.token {
            return None;
        }
        let lacks = self.token.saturating_sub(self.balance);
        let nanos = lacks.saturating_add(self.size - 1) / self.size;
        let wait = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        // A time that can't be told is asked for again after an hour.
        let later = || self.at + Duration::from_secs(3600);
        Some(self.at.checked_add(wait).unwrap_or_else(later))
    }

    /// Returns the number of tokens in it: 0 with a debt.
    pub fn tokens(&mut self, now: Instant) -> u64 {
        self.refill(now);
        let whole = u64::try_from(self.balance.max(0) / self.token).unwrap_or(u64::MAX);
        whole.saturating_add(self.burst)
    }

    /// Takes tokens away, more than there are if need be.
    pub fn charge(&mut self, tokens: u64) {
        let of_burst = tokens.min(self.burst);
        self.burst -= of_burst;
        let rest = i128::from(tokens - of_burst).saturating_mul(self.token);
        self.balance = self.balance.saturating_sub(rest);
    }
}

/// Limiter of one direction of a device.
#[derive(Clone, Debug)]
pub struct Limiter {
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
}

impl Limiter {
    /// Returns a limiter with full buckets; `None` if nothing is limited.
    pub fn new(config: RateConfig, now: Instant) -> Option<Limiter> {
        let bucket = |config: Option<BucketConfig>| config.map(|it| Bucket::new(it, now));
        let (bytes, operations) = (bucket(config.bytes), bucket(config.operations));
        (bytes.is_some() || operations.is_some()).then_some(Limiter { bytes, operations })
    }

    /// Returns when operations pass again; `None`: they do.
    pub fn closed_until(&mut self, now: Instant) -> Option<Instant> {
        let buckets = [&mut self.bytes, &mut self.operations]
            .into_iter()
            .flatten();
        buckets.filter_map(|bucket| bucket.closed_until(now)).max()
    }

    /// Returns how many operations of `bytes` each pass before the limiter closes: at least one.
    ///
    /// # Errors
    /// It is closed until then.
    pub fn room(&mut self, bytes: u64, now: Instant) -> Result<u64, Instant> {
        if let Some(until) = self.closed_until(now) {
            return Err(until);
        }
        let in_bytes = self.bytes.as_mut().map(|it| it.tokens(now) / bytes.max(1));
        let operations = self.operations.as_mut().map(|it| it.tokens(now));
        let least = [in_bytes, operations].into_iter().flatten().min();
        Ok(least.unwrap_or(u64::MAX).max(1))
    }

    /// Takes the tokens of an operation that has passed.
    pub fn charge(&mut self, bytes: u64, operations: u64) {
        if let Some(bucket) = &mut self.bytes {
            bucket.charge(bytes);
        }
        if let Some(bucket) = &mut self.operations {
            bucket.charge(operations);
        }
    }
}

#[cfg(test)]
#[path = "rate_test.rs"]
mod tests;
