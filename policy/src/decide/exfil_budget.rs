//! Limit on data that a VM can convey by DNS questions: a bound for names made up to carry
//! something out.
//!
//! Beneath a wildcard a guest can ask for any name, and the owner of the zone reads it. So of the
//! names that a VM has not asked for recently (a question with another type or other flags is a new
//! one), a limited number of octets beneath the wildcard is sent to a resolver ([`NewNames`]).
//!
//! Which of the questions that were asked before is asked again, and in which order, says something
//! too, wherever the answer may not be cached (TTL 0). Such a question conveys no more bits than it
//! takes to number the questions asked before. So it costs these, of a second bucket with the same
//! limit, 64 octets at least: a guest that asks for the same few names often is not held up, and new names take nothing
//! from known ones nor the other way round. Where no other names may be asked for, those that rules
//! give themselves cost the same, and their type when it is new.
//!
//! Questions that are answered from the cache cost nothing.
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
/// Least rate per minute, and least burst, of the bucket for known questions: a policy that lets a guest
/// invent no names is no reason to refuse it those that rules give. That is 32 first questions.
const LEAST_OCTETS: u32 = 64;
/// Maximum number of questions remembered per period.
const MOST_NAMES: usize = 4_096;

/// Part of a name that the guest which asks for it chose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Chosen {
    /// The name is one of those that rules give themselves.
    Listed,
    /// This many octets are beneath a wildcard.
    Beneath(usize),
}

/// Limit that a question exceeds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exceeded {
    /// Limit of the octets of new names.
    NewNames,
    /// Limit of what the choice among known questions conveys.
    Repeated,
}

impl Exceeded {
    /// Returns what there is too much of, in words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::NewNames => "new names beneath wildcards",
            Self::Repeated => "questions asked before",
        }
    }

    /// Returns the rate in force, octets per minute, where a policy has this limit.
    pub fn octets_per_minute(self, limit: NewNames) -> u32 {
        match self {
            Self::NewNames => limit.octets_per_minute,
            Self::Repeated => limit.octets_per_minute.max(LEAST_OCTETS),
        }
    }
}

/// State of one VM: its buckets, and its recent questions.
#[derive(Debug)]
pub struct Asker {
    limit: NewNames,
    /// Octets of new names.
    new_names: TokenBucket,
    /// Bits by the choice among known questions.
    repeated: TokenBucket,
    current: HashSet<u64>,
    previous: HashSet<u64>,
    since_ns: u64,
}

impl Asker {
    /// Creates the state of a VM that has not asked yet. `now_ns`: the engine's clock.
    pub fn new(limit: NewNames, now_ns: u64) -> Self {
        let (new_names, repeated) = full(limit);
        Self {
            limit,
            new_names,
            repeated,
            current: HashSet::new(),
            previous: HashSet::new(),
            since_ns: now_ns,
        }
    }

    /// Changes the limit. A changed limit begins with full buckets.
    pub fn set(&mut self, limit: NewNames) {
        if self.limit != limit {
            self.limit = limit;
            (self.new_names, self.repeated) = full(limit);
        }
    }

    /// Decides whether a question may be sent to a resolver. `chosen`: the part of its name that
    /// the guest chose.
    ///
    /// # Errors
    /// The limit that it exceeds.
    pub fn asks(
        &mut self,
        hasher: &RandomState,
        question: &[u8],
        chosen: Chosen,
        now_ns: u64,
    ) -> Result<(), Exceeded> {
        if now_ns.saturating_sub(self.since_ns) >= PERIOD_NS || self.current.len() == MOST_NAMES {
            self.previous = std::mem::take(&mut self.current);
            self.since_ns = now_ns;
        }
        let hash = hasher.hash_one(question);
        let is_known = self.current.contains(&hash) || self.previous.contains(&hash);
        let bits = self.bits();
        let (bucket, cost, exceeded) = match chosen {
            _ if is_known => (&mut self.repeated, bits, Exceeded::Repeated),
            Chosen::Listed => (&mut self.repeated, 8 * TYPE_OCTETS, Exceeded::Repeated),
            Chosen::Beneath(octets) => {
                let octets = u32::try_from(octets).unwrap_or(u32::MAX);
                let cost = octets.saturating_add(TYPE_OCTETS);
                (&mut self.new_names, cost, Exceeded::NewNames)
            }
        };
        if !bucket.take_many(cost, now_ns) {
            return Err(exceeded);
        }
        self.previous.remove(&hash);
        self.current.insert(hash);
        Ok(())
    }

    /// Returns the bits that it takes to number the known questions. A single one has its time to tell
    /// something by.
    fn bits(&self) -> u32 {
        let known = self.current.len() + self.previous.len();
        (usize::BITS - known.saturating_sub(1).leading_zeros()).max(1)
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
    ///
    /// # Errors
    /// The limit that it exceeds.
    pub fn asks(
        &mut self,
        policy: &Policy,
        name: Name<'_>,
        kind: &str,
        at_ns: u64,
    ) -> Result<(), Exceeded> {
        // Records are in the order of the answers.
        self.last_ns = self.last_ns.max(at_ns);
        let Some(chosen) = policy.chosen(name) else {
            return Ok(());
        };
        let question = [name.0, kind.as_bytes()].concat();
        self.asker
            .asks(&self.hasher, &question, chosen, self.last_ns)
    }
}

/// Full buckets: of octets of new names, and of bits.
fn full(limit: NewNames) -> (TokenBucket, TokenBucket) {
    let (rate, burst) = (limit.octets_per_minute, limit.burst_octets);
    let bits = |octets: u32| octets.max(LEAST_OCTETS).saturating_mul(8);
    (
        TokenBucket::per_minute(rate, burst),
        TokenBucket::per_minute(bits(rate), bits(burst)),
    )
}

#[cfg(test)]
#[path = "exfil_budget_test.rs"]
mod tests;
