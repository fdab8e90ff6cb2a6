//! Upstream resolvers: selection of the next one to ask.
use std::{collections::HashMap, net::SocketAddr};

pub use slipgate_policy::{DNS_PORT, MAX_RESOLVERS, Resolvers};

use slipgate_abi::IfIndex;

use crate::clock::SECOND_NS;

/// Time for which a resolver that did not answer in time is asked last, ns.
const REST_NS: u64 = 5 * SECOND_NS;

/// A resolver, and the link by which it is asked: by another one it may answer. `None`: as the host's
/// own questions leave.
pub(super) type AskedBy = (SocketAddr, Option<IfIndex>);

/// Resolvers that did not answer lately, for whatever question, and the time until which they are
/// asked last, ns.
#[derive(Clone, Debug, Default)]
pub(super) struct Silent(HashMap<AskedBy, u64>);

/// Resolvers that a question may go to.
#[derive(Debug)]
pub(super) struct Candidates<'r> {
    list: &'r [SocketAddr],
    silent: &'r mut Silent,
}

impl<'r> Candidates<'r> {
    /// Candidates from the first entries of this list.
    pub(super) fn new(list: &'r [SocketAddr], silent: &'r mut Silent) -> Self {
        let list = &list[..list.len().min(MAX_RESOLVERS)];
        Self { list, silent }
    }

    /// Whether this resolver is a candidate.
    pub(super) fn has(&self, address: SocketAddr) -> bool {
        self.list.contains(&address)
    }

    /// The next resolver to ask: the first that is not `spent`. Those that were silent lately and
    /// the one asked last come at the end. `link_to`: the link by which one is asked.
    pub(super) fn next(
        &self,
        spent: &[SocketAddr],
        before: Option<SocketAddr>,
        link_to: impl Fn(SocketAddr) -> Option<IfIndex>,
        now_ns: u64,
    ) -> Option<SocketAddr> {
        let start = before
            .and_then(|b| self.list.iter().position(|a| *a == b))
            .map_or(0, |i| i + 1);
        let rests = |address| {
            let until_ns = self.silent.0.get(&(address, link_to(address)));
            until_ns.is_some_and(|until_ns| *until_ns > now_ns)
        };
        (0..self.list.len())
            .map(|i| self.list[(start + i) % self.list.len()])
            .filter(|a| !spent.contains(a))
            .min_by_key(|&a| (Some(a) == before, rests(a)))
    }

    pub(super) fn was_silent(&mut self, asked: AskedBy, now_ns: u64) {
        let silent = &mut self.silent.0;
        silent.retain(|_, until_ns| *until_ns > now_ns);
        silent.insert(asked, now_ns + REST_NS);
    }

    pub(super) fn answered(&mut self, asked: AskedBy) {
        self.silent.0.remove(&asked);
    }
}

#[cfg(test)]
#[path = "resolvers_test.rs"]
mod tests;
