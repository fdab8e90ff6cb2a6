//! What a VM may say by asking: a bound for names made up to carry something out.
//!
//! Beneath a wildcard a guest can ask for any name, and the owner of the zone reads it. So of names
//! that a VM has not asked for lately (in the same way: type and flags count), only so many octets beneath the wildcard go to a resolver:
//! [`OCTETS_PER_MINUTE`], and [`BURST_OCTETS`] at once after a quiet time. What is answered from the
//! cache, and what a rule names itself, costs nothing.
//!
//! "Lately" is told by two sets of hashes, of the present time and the one before; a time is over
//! after ten minutes, or when its set is full.
use std::{
    collections::HashSet,
    hash::{BuildHasher, RandomState},
};

use crate::{clock::SECOND_NS, quota::TokenBucket};

/// Octets of new names beneath wildcards in a minute: some 250 names of common length, each with
/// two types.
pub const OCTETS_PER_MINUTE: u32 = 8 * 1_024;
/// At once.
pub const BURST_OCTETS: u32 = 32 * 1_024;
/// What a question costs beside its name: its type and flags say something too.
const TYPE_OCTETS: u32 = 2;
/// How long a time lasts, and how many names it has at most.
const TIME_NS: u64 = 600 * SECOND_NS;
const MOST_NAMES: usize = 4_096;

/// One VM's.
#[derive(Debug)]
pub(super) struct Asker {
    bucket: TokenBucket,
    now: HashSet<u64>,
    before: HashSet<u64>,
    since_ns: u64,
}

impl Asker {
    pub(super) fn new(now_ns: u64) -> Self {
        Self {
            bucket: TokenBucket::new(OCTETS_PER_MINUTE / 60, BURST_OCTETS),
            now: HashSet::new(),
            before: HashSet::new(),
            since_ns: now_ns,
        }
    }

    /// Whether a question may go to a resolver, so many octets of whose name are the guest's choice.
    pub(super) fn asks(
        &mut self,
        hasher: &RandomState,
        question: &[u8],
        octets: usize,
        now_ns: u64,
    ) -> bool {
        if now_ns.saturating_sub(self.since_ns) >= TIME_NS || self.now.len() == MOST_NAMES {
            self.before = std::mem::take(&mut self.now);
            self.since_ns = now_ns;
        }
        let hash = hasher.hash_one(question);
        let known = self.now.contains(&hash) || self.before.contains(&hash);
        let octets = u32::try_from(octets).unwrap_or(u32::MAX);
        if !known
            && !self
                .bucket
                .take_many(octets.saturating_add(TYPE_OCTETS), now_ns)
        {
            return false;
        }
        self.now.insert(hash);
        true
    }
}

#[cfg(test)]
#[path = "asking_test.rs"]
mod tests;
