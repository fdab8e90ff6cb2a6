//! Limit on data that a VM can convey by DNS questions: a bound for names made up to carry
//! something out.
//!
//! Beneath a wildcard a guest can ask for any name, and the owner of the zone reads it. So of the
//! names that a VM has not asked for recently (a question with another type or other flags is a new
//! one), a limited number of octets beneath the wildcard is sent to a resolver ([`NewNames`]).
//! Questions that are answered from the cache, and names that a rule gives itself, cost nothing.
//!
//! Two sets of hashes hold the recent questions: those of the current period and of the one before.
//! A period ends after ten minutes, or when its set is full.
use std::{
    collections::HashSet,
    hash::{BuildHasher, RandomState},
};

use super::token_bucket::{SECOND_NS, TokenBucket};
use crate::{Name, NewNames, Policy};

/// Cost of a question beside its name, octets: its type and flags carry information too.
const TYPE_OCTETS: u32 = 2;
/// Length of a period, ns.
const PERIOD_NS: u64 = 600 * SECOND_NS;
/// Maximum number of questions remembered per period.
const MOST_NAMES: usize = 4_096;

/// State of one VM: its bucket of octets, and its recent questions.
#[derive(Debug)]
pub struct Asker {
    limit: NewNames,
    bucket: TokenBucket,
    current: HashSet<u64>,
    previous: HashSet<u64>,
    since_ns: u64,
}

impl Asker {
    /// Creates the state of a VM that has not asked yet. `now_ns`: the engine's clock.
    pub fn new(limit: NewNames, now_ns: u64) -> Self {
        Self {
            limit,
            bucket: full(limit),
            current: HashSet::new(),
            previous: HashSet::new(),
            since_ns: now_ns,
        }
    }

    /// Changes the limit. A changed limit begins with a full bucket.
    pub fn set(&mut self, limit: NewNames) {
        if self.limit != limit {
            (self.limit, self.bucket) = (limit, full(limit));
        }
    }

    /// Decides whether a question may be sent to a resolver. `octets`: the part of its name that
    /// the guest chose.
    pub fn asks(
        &mut self,
        hasher: &RandomState,
        question: &[u8],
        octets: usize,
        now_ns: u64,
    ) -> bool {
        if now_ns.saturating_sub(self.since_ns) >= PERIOD_NS || self.current.len() == MOST_NAMES {
            self.previous = std::mem::take(&mut self.current);
            self.since_ns = now_ns;
        }
        let hash = hasher.hash_one(question);
        let known = self.current.contains(&hash) || self.previous.contains(&hash);
        let octets = u32::try_from(octets).unwrap_or(u32::MAX);
        if !known
            && !self
                .bucket
                .take_many(octets.saturating_add(TYPE_OCTETS), now_ns)
        {
            return false;
        }
        self.current.insert(hash);
        true
    }
}

/// The same limit, applied to recorded questions of one VM.
#[derive(Debug)]
pub struct RecordedAsker {
    asker: Asker,
    hasher: RandomState,
    last_ns: u64,
}

impl RecordedAsker {
    /// Creates the state of a VM that has not asked yet. `now_ns`: time of its first record.
    pub fn new(limit: NewNames, now_ns: u64) -> Self {
        Self {
            asker: Asker::new(limit, now_ns),
            hasher: RandomState::new(),
            last_ns: now_ns,
        }
    }

    /// Decides whether a question may be sent to a resolver. It must be one that the rules allow
    /// and the cache did not answer. `kind` distinguishes questions for the same name.
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

fn full(limit: NewNames) -> TokenBucket {
    TokenBucket::per_minute(limit.octets_per_minute, limit.burst_octets)
}

#[cfg(test)]
#[path = "exfil_budget_test.rs"]
mod tests;
