//! Shares of a quota, and of a store that VMs use together.
//!
//! # The rate of flows that the world opens
//! Retransmitted first packets are preferred at the rate at which the world may open flows to a VM.
//! A token bucket alone admits the same part of a flood and of real clients, and a client that
//! retries has no better chance than before: at four times the rate one in three has not connected
//! after 7 s. But a client retries (TCP its SYN after 1 s, then 2, then 4; others do likewise), and
//! a sender of forged sources makes each packet new, or has to send each twice. So a packet that is
//! refused for lack of a token is remembered by its hash. While there have been such refusals
//! lately, a part of the tokens is left to packets that come again: they find a token whatever else
//! arrives.
//!
//! Marks are in an unordered table. A mark occasionally replaces another, whose client then waits
//! once more. The hash key is random, so an attacker cannot choose packets that replace a given
//! mark.
use std::hash::BuildHasher;

use crate::clock::{MILLISECOND_NS, SECOND_NS};
pub use slipgate_policy::TokenBucket;

/// Returns how much of a VM's quota its forwards may use: all but a quarter, which peers can't take
/// from the guest. A quota of one is not divided.
pub const fn worlds_share(quota: u32) -> u32 {
    match quota {
        0 | 1 => quota,
        _ => quota - quota.div_ceil(4),
    }
}

/// Part of a common store that is kept so that no VM can use up the store for the others: a
/// quarter, divided into equal parts. A VM that holds a part's worth or more may only take while
/// more than the reserve is free. So a VM that holds less always finds room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reserve {
    part: usize,
    whole: usize,
}

impl Reserve {
    /// Creates the reserve of a store of `size` elements for `vms` VMs. With one VM nothing is
    /// kept.
    pub const fn new(size: usize, vms: usize) -> Self {
        let part = if vms < 2 { 0 } else { size / 4 / vms };
        Self {
            part,
            whole: part * vms,
        }
    }

    /// Returns how many elements are kept.
    pub const fn size(&self) -> usize {
        self.whole
    }

    /// Whether a VM may take one more element while `free` are free. `held` returns how many it
    /// has; it is called only when that matters.
    pub fn allows(&self, free: usize, held: impl FnOnce() -> usize) -> bool {
        free > self.whole || held() < self.part
    }
}

/// Entries in the table of marks, 256 KiB. At 6,000 refusals a second nine in ten marks outlive the
/// second until a SYN is sent again.
const PLACES: usize = 65_536;
/// Unit in which the times of marks are counted, ns.
const TICK_NS: u64 = 100 * MILLISECOND_NS;
/// Shortest time after which a packet counts as sent again, ns: no client retries sooner, and a
/// link may duplicate a packet.
const AGAIN_FROM_NS: u64 = 200 * MILLISECOND_NS;
/// Longest time after which a packet counts as sent again, ns.
const AGAIN_UNTIL_NS: u64 = 8 * SECOND_NS;
/// Time without refusals after which the table is freed, ns.
const FORGET_NS: u64 = 60 * SECOND_NS;

/// Mark of a refused packet: its hash, and when it was first refused.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    hash: u16,
    /// Time of the first refusal in ticks, which wrap after 109 minutes; 0: the entry is free.
    at: u16,
}

/// Part of a VM's rate of new flows that the world may use.
#[derive(Clone, Debug)]
pub(crate) struct WorldsRate {
    bucket: TokenBucket,
    /// Tokens that are left to packets that come again.
    kept: u32,
    marks: Vec<Mark>,
    refused_ns: Option<u64>,
    hasher: foldhash::quality::RandomState,
}

impl WorldsRate {
    /// Allows `rate` new flows a second, and as many in one burst.
    pub(crate) fn new(rate: u32) -> Self {
        Self {
            bucket: TokenBucket::new(rate, rate),
            kept: rate / 4,
            marks: Vec::new(),
            refused_ns: None,
            hasher: foldhash::quality::RandomState::default(),
        }
    }

    /// Takes a token for a first packet. Returns whether there was one. `packet` has the same hash
    /// when the packet comes again.
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

    /// Returns how long ago a packet was first refused, ns; `None` when it is not remembered.
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

/// Returns the bits of the hash that do not select the entry.
const fn short(hash: u64) -> u16 {
    (hash >> 48) as u16
}

fn ticks(now_ns: u64) -> u16 {
    ((now_ns / TICK_NS) as u16).max(1)
}

#[cfg(test)]
#[path = "quota_test.rs"]
mod tests;
