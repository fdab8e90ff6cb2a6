//! Upstream resolvers: parsing of addresses, and selection of the next one to ask.
use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6},
    str::FromStr,
};

use thiserror::Error;

pub use slipgate_policy::{DNS_PORT, MAX_RESOLVERS, Resolvers};

use crate::clock::SECOND_NS;

/// Most resolvers in a resolv.conf(5) file (`MAXNS`).
const MAX_RESOLV_CONF: usize = 3;
/// Time for which a resolver that did not answer in time is asked last, ns.
const REST_NS: u64 = 5 * SECOND_NS;

/// Error: the text is not a resolver's address.
#[derive(Debug, Error)]
#[error("`{given}` is not a resolver: give an address, or address:port ([address]:port for IPv6)")]
pub struct ResolverError {
    given: String,
}

/// Parses `A`, `A:P`, `[A]` or `[A]:P`; the port is 53 by default.
///
/// # Errors
/// If the text has none of these forms.
pub fn parse_resolver(text: &str) -> Result<SocketAddr, ResolverError> {
    let bare = text
        .strip_prefix('[')
        .and_then(|t| t.strip_suffix(']'))
        .unwrap_or(text);
    let address = || {
        IpAddr::from_str(bare)
            .ok()
            .map(|a| SocketAddr::new(a, DNS_PORT))
    };
    text.parse()
        .ok()
        .or_else(address)
        .filter(|a: &SocketAddr| a.port() != 0 && !a.ip().is_unspecified())
        .ok_or_else(|| ResolverError {
            given: text.to_owned(),
        })
}

/// Resolvers in the `nameserver` lines of a resolv.conf(5) file, as the C library reads them: the
/// first three, without invalid ones. A link-local address may name its link by number
/// (`fe80::1%2`).
pub fn parse_resolv_conf(text: &str) -> Vec<SocketAddr> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            (words.next()? == "nameserver")
                .then(|| words.next())
                .flatten()
        })
        .filter_map(|word| match word.split_once('%') {
            None => parse_resolver(word).ok(),
            Some((address, link)) => Some(SocketAddr::V6(SocketAddrV6::new(
                Ipv6Addr::from_str(address).ok()?,
                DNS_PORT,
                0,
                link.parse().ok()?,
            ))),
        })
        .take(MAX_RESOLV_CONF)
        .collect()
}

/// Resolvers that did not answer lately, for whatever question, and the time until which they are
/// asked last, ns.
#[derive(Clone, Debug, Default)]
pub(super) struct Silent(HashMap<SocketAddr, u64>);

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
    /// the one asked last come at the end.
    pub(super) fn next(
        &self,
        spent: &[SocketAddr],
        before: Option<SocketAddr>,
        now_ns: u64,
    ) -> Option<SocketAddr> {
        let start = before
            .and_then(|b| self.list.iter().position(|a| *a == b))
            .map_or(0, |i| i + 1);
        let rests = |address| {
            let until_ns = self.silent.0.get(&address);
            until_ns.is_some_and(|until_ns| *until_ns > now_ns)
        };
        (0..self.list.len())
            .map(|i| self.list[(start + i) % self.list.len()])
            .filter(|a| !spent.contains(a))
            .min_by_key(|&a| (Some(a) == before, rests(a)))
    }

    pub(super) fn was_silent(&mut self, address: SocketAddr, now_ns: u64) {
        let silent = &mut self.silent.0;
        silent.retain(|_, until_ns| *until_ns > now_ns);
        silent.insert(address, now_ns + REST_NS);
    }

    pub(super) fn answered(&mut self, address: SocketAddr) {
        self.silent.0.remove(&address);
    }
}

#[cfg(test)]
#[path = "resolvers_test.rs"]
mod tests;
