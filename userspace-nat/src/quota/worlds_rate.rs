//! The rate at which the world may open flows to a VM: who asks again goes first.
//!
//! # Theory of operation
//! A token bucket alone lets in of a flood and of real clients the same part, and a client that asks
//! again has no better chance than before: at four times the rate one in three has not connected after
//! 7 s. But a client asks again (TCP its SYN after 1 s, then 2, then 4; others do likewise), and who
//! forges sources makes each packet anew, or has to make each of them twice. So what is refused for
//! want of a token is remembered by its mark, and as long as that is lately so a part of the tokens is
//! left to those that come again: these find one whatever else comes.
//!
//! Marks are in a table without order; one takes another's place now and then, which costs its client
//! another wait. Its key is random, so nobody can aim at it.
use std::hash::BuildHasher;

use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    quota::TokenBucket,
};

/// Places of marks, 256 KiB: at 6,000 refusals a second nine in ten marks outlive the second until a SYN
/// comes again.
const PLACES: usize = 65_536;
/// What times are counted in.
const TICK_NS: u64 = 100 * MILLISECOND_NS;
/// Nobody asks again sooner; a link may double a packet.
const AGAIN_FROM_NS: u64 = 200 * MILLISECOND_NS;
/// Or later.
const AGAIN_UNTIL_NS: u64 = 8 * SECOND_NS;
/// When nobody was refused for so long the table is given back.
const FORGET_NS: u64 = 60 * SECOND_NS;

/// What one who asks again is known by: the refused packet's hash, and when it was refused first.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    hash: u16,
    /// In ticks, which wrap after 109 minutes; 0: nobody's.
    at: u16,
}

/// What of a VM's rate of new flows the world may use.
#[derive(Clone, Debug)]
pub(crate) struct WorldsRate {
    bucket: TokenBucket,
    /// Left to those who ask again.
    kept: u32,
    marks: Vec<Mark>,
    refused_ns: Option<u64>,
    hasher: foldhash::quality::RandomState,
}

impl WorldsRate {
    /// So many a second, and as many at once.
    pub(crate) fn new(rate: u32) -> Self {
        Self {
            bucket: TokenBucket::new(rate, rate),
            kept: rate / 4,
            marks: Vec::new(),
            refused_ns: None,
            hasher: foldhash::quality::RandomState::default(),
        }
    }

    /// Takes a token for a first packet, if there is one; `packet` is the same when it comes again.
    pub(crate) fn take(&mut self, packet: impl std::hash::Hash, now_ns: u64) -> bool {
        let refused_ago_ns = self.refused_ns.map(|at_ns| now_ns.saturating_sub(at_ns));
        if refused_ago_ns.is_none_or(|ago_ns| ago_ns > FORGET_NS) {
            self.marks = Vec::new();
            self.refused_ns = None;
        }
        let lately = refused_ago_ns.is_some_and(|ago_ns| ago_ns <= AGAIN_UNTIL_NS);
        if !lately && self.bucket.take(now_ns) {
            return true;
        }
        let hash = self.hasher.hash_one(packet);
        let first_ns = self.refused_before(hash, now_ns);
        let again = first_ns.is_some_and(|ago_ns| ago_ns >= AGAIN_FROM_NS);
        let taken = match again {
            true => self.bucket.take(now_ns),
            false => self.bucket.take_leaving(self.kept, now_ns),
        };
        if !taken {
            self.refused_ns = Some(now_ns);
            if first_ns.is_none() {
                self.remember(hash, now_ns);
            }
        }
        taken
    }

    /// How long ago a packet was refused first, ns, if it is remembered.
    fn refused_before(&self, hash: u64, now_ns: u64) -> Option<u64> {
        let mark = self.marks.get(place(hash))?;
        let ago_ns = u64::from(ticks(now_ns).wrapping_sub(mark.at)) * TICK_NS;
        let known = mark.at != 0 && mark.hash == short(hash) && ago_ns <= AGAIN_UNTIL_NS;
        known.then_some(ago_ns)
    }

    fn remember(&mut self, hash: u64, now_ns: u64) {
        if self.marks.is_empty() {
            self.marks = vec![Mark::default(); PLACES];
        }
        self.marks[place(hash)] = Mark {
            hash: short(hash),
            at: ticks(now_ns),
        };
    }
}

const fn place(hash: u64) -> usize {
    hash as usize % PLACES
}

/// The bits that the place does not tell.
const fn short(hash: u64) -> u16 {
    (hash >> 48) as u16
}

fn ticks(now_ns: u64) -> u16 {
    ((now_ns / TICK_NS) as u16).max(1)
}

#[cfg(test)]
#[path = "worlds_rate_test.rs"]
mod tests;
