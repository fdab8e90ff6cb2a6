//! A link that loses, duplicates, delays and reorders, the same way for the same seed.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    time::{Duration, Instant},
};

/// Impairments of a link. Probabilities are parts in 10,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Impairment {
    /// Seed of the pseudo-random sequence.
    pub seed: u64,
    /// Probability that a frame is lost.
    pub lose_per_10k: u32,
    /// Frames that arrive twice.
    pub duplicate_per_10k: u32,
    /// Frames held back by `reorder_delay`, so that later ones overtake them.
    pub reorder_per_10k: u32,
    /// Time for which a reordered frame is held back.
    pub reorder_delay: Duration,
    /// One-way delay of every frame.
    pub delay: Duration,
}

impl Impairment {
    /// 1 % lost, 0.5 % twice, 1 % out of order, no delay: a bad link on which TCP still moves.
    pub fn rough(seed: u64) -> Self {
        Impairment {
            seed,
            lose_per_10k: 100,
            duplicate_per_10k: 50,
            reorder_per_10k: 100,
            reorder_delay: Duration::from_millis(1),
            delay: Duration::ZERO,
        }
    }

    /// Loses, duplicates and reorders nothing.
    pub fn none(seed: u64) -> Self {
        Impairment {
            lose_per_10k: 0,
            duplicate_per_10k: 0,
            reorder_per_10k: 0,
            ..Self::rough(seed)
        }
    }
}

/// Numbers of frames that a link has impaired so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImpairmentCounts {
    /// Number of lost frames.
    pub lost: u64,
    /// Frames that arrived twice.
    pub duplicated: u64,
    /// Number of frames held back.
    pub reordered: u64,
}

/// One direction of an impaired link: frames go in with the time, and come out when due.
pub(crate) struct ImpairedLink {
    how: Impairment,
    random: SplitMix64,
    pub(crate) counts: ImpairmentCounts,
    waiting: BinaryHeap<Reverse<(Instant, u64, Vec<u8>)>>,
    order: u64,
}

impl ImpairedLink {
    pub(crate) fn new(how: Impairment, direction: u64) -> Self {
        let random = SplitMix64(how.seed ^ direction.wrapping_mul(0x5851_f42d_4c95_7f2d));
        ImpairedLink {
            how,
            random,
            counts: Default::default(),
            waiting: BinaryHeap::new(),
            order: 0,
        }
    }

    /// Takes a frame that arrived at `now`.
    pub(crate) fn push(&mut self, now: Instant, frame: &[u8]) {
        // Always four draws, so that one frame's fate does not shift the next one's.
        let [lose, twice, late, _] = std::array::from_fn(|_| (self.random.next() % 10_000) as u32);
        if lose < self.how.lose_per_10k {
            self.counts.lost += 1;
            return;
        }
        let mut due = now + self.how.delay;
        if late < self.how.reorder_per_10k {
            self.counts.reordered += 1;
            due += self.how.reorder_delay;
        }
        let copies = if twice < self.how.duplicate_per_10k {
            2
        } else {
            1
        };
        self.counts.duplicated += copies - 1;
        for _ in 0..copies {
            self.order += 1;
            self.waiting
                .push(Reverse((due, self.order, frame.to_vec())));
        }
    }

    /// Returns the next frame that is due at `now`.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<Vec<u8>> {
        let Reverse((due, ..)) = self.waiting.peek()?;
        (*due <= now).then(|| self.waiting.pop().map(|Reverse((.., frame))| frame))?
    }

    /// Returns the time at which the next frame is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.waiting.peek().map(|Reverse((due, ..))| *due)
    }
}

/// Vigna's SplitMix64: small, seedable, the same everywhere.
#[derive(Clone, Debug)]
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// The next 64 bits.
    #[allow(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
#[path = "impairment_test.rs"]
mod tests;
