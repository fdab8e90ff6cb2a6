//! What a VM may say by asking: a bound for names made up to carry something out.
//!
//! Beneath a wildcard a guest can ask for any name, and the owner of the zone reads it. So of names
//! that a VM has not asked for lately (in the same way: type and flags count), only so many octets
//! beneath the wildcard go to a resolver: as [`NewNames`] has it. What is answered from the cache,
//! and what a rule names itself, costs nothing.
//!
//! "Lately" is told by two sets of hashes, of the present time and the one before; a time is over
//! after ten minutes, or when its set is full.
use std::{
    collections::HashSet,
    hash::{BuildHasher, RandomState},
};

use super::token_bucket::{SECOND_NS, TokenBucket};
use crate::{Name, NewNames, Policy};

/// What a question costs beside its name: its type and flags say something too.
const TYPE_OCTETS: u32 = 2;
/// How long a time lasts, and how many names it has at most.
const TIME_NS: u64 = 600 * SECOND_NS;
const MOST_NAMES: usize = 4_096;

/// One VM's.
#[derive(Debug)]
pub struct Asker {
    may: NewNames,
    bucket: TokenBucket,
    now: HashSet<u64>,
    before: HashSet<u64>,
    since_ns: u64,
}

impl Asker {
    /// One who has not asked yet. `now_ns`: the engine's clock.
    pub fn new(may: NewNames, now_ns: u64) -> Self {
        Self {
            may,
            bucket: full(may),
            now: HashSet::new(),
            before: HashSet::new(),
            since_ns: now_ns,
        }
    }

    /// It may say so much from now on.
    pub fn set(&mut self, may: NewNames) {
        if self.may != may {
            (self.may, self.bucket) = (may, full(may));
        }
    }

    /// Whether a question may go to a resolver, so many octets of whose name are the guest's choice.
    pub fn asks(
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

/// What one VM would be let say by new names, over questions as they were recorded.
#[derive(Debug)]
pub struct RecordedAsker {
    asker: Asker,
    hasher: RandomState,
    last_ns: u64,
}

impl RecordedAsker {
    /// One who has not asked yet.
    pub fn new(may: NewNames, now_ns: u64) -> Self {
        Self {
            asker: Asker::new(may, now_ns),
            hasher: RandomState::new(),
            last_ns: now_ns,
        }
    }

    /// Whether a question that the rules let be asked for, and no answer was kept of, may go to a
    /// resolver. `kind`: what tells it from others for the same name.
    pub fn asks(&mut self, policy: &Policy, name: Name<'_>, kind: &str, at_ns: u64) -> bool {
        // Records are in the order of the answers.
        self.last_ns = self.last_ns.max(at_ns);
        let Some(octets) = policy.octets_beneath(name) else {
            return true;
        };
        let question = [name.0, kind.as_bytes()].concat();
        self.asker
            .asks(&self.hasher, &question, octets, self.last_ns)
    }
}

fn full(may: NewNames) -> TokenBucket {
    TokenBucket::per_minute(may.octets_per_minute, may.burst_octets)
}

#[cfg(test)]
#[path = "exfil_budget_test.rs"]
mod tests;
