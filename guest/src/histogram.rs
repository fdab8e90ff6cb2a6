//! Histogram of durations, with quantiles. Recording a sample allocates nothing; histograms of
//! several CPUs can be merged.
//!
//! Buckets are log-linear: each power of two of nanoseconds is divided into [`PARTS`] equal
//! buckets, so the relative error of a quantile is less than 1/[`PARTS`].

use alloc::{boxed::Box, vec};

/// Number of buckets in each power of two.
const PARTS: u64 = 64;
const PARTS_LOG2: u32 = PARTS.ilog2();
/// Logarithm of the longest duration: 2^40 ns are 18 minutes. Longer ones count as that.
const LONGEST_LOG2: u32 = 40;
const BUCKETS: usize = (LONGEST_LOG2 - PARTS_LOG2 + 1) as usize * PARTS as usize;

/// Histogram of durations in nanoseconds.
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: Box<[u32]>,
    count: u64,
    sum_ns: u64,
    min_ns: u64,
    max_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram {
            buckets: vec![0; BUCKETS].into_boxed_slice(),
            count: 0,
            sum_ns: 0,
            min_ns: u64::MAX,
            max_ns: 0,
        }
    }
}

impl Histogram {
    /// Records one duration, in nanoseconds.
    pub fn record(&mut self, ns: u64) {
        let bucket = &mut self.buckets[bucket_of(ns)];
        *bucket = bucket.saturating_add(1);
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds the samples of another histogram.
    pub fn merge(&mut self, other: &Histogram) {
        for (ours, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *ours = ours.saturating_add(*theirs);
        }
        self.count += other.count;
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Returns the number of samples.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the shortest duration, exactly; 0 without samples.
    pub fn min_ns(&self) -> u64 {
        if self.count == 0 { 0 } else { self.min_ns }
    }

    /// Returns the longest duration, exactly; 0 without samples.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// Returns the arithmetic mean; 0 without samples.
    pub fn mean_ns(&self) -> u64 {
        self.sum_ns.checked_div(self.count).unwrap_or(0)
    }

    /// Returns the duration that `per_mille` of the samples do not exceed (500: the median). Its
    /// relative error is less than 1/64, and it lies between the shortest and the longest sample; 0
    /// without samples.
    pub fn quantile_ns(&self, per_mille: u64) -> u64 {
        let rank = (self.count * per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= rank {
                return middle_of(index).clamp(self.min_ns, self.max_ns);
            }
        }
        self.max_ns
    }
}

fn bucket_of(ns: u64) -> usize {
    let ns = ns.min((1 << LONGEST_LOG2) - 1);
    if ns < PARTS {
        return ns as usize;
    }
    // The leading one and the next PARTS_LOG2 bits.
    let power = ns.ilog2();
    let part = (ns >> (power - PARTS_LOG2)) - PARTS;
    ((power - PARTS_LOG2 + 1) as u64 * PARTS + part) as usize
}

fn middle_of(index: usize) -> u64 {
    let (power, part) = (index as u64 / PARTS, index as u64 % PARTS);
    match power.checked_sub(1) {
        None => part,
        Some(shift) => ((PARTS + part) << shift) + ((1 << shift) >> 1),
    }
}

#[cfg(test)]
#[path = "histogram_test.rs"]
mod tests;
