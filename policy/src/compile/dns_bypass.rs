//! DNS bypass: resolvers that a guest can reach without the guests' own DNS, and so without the
//! rules by name. DNS over TLS (RFC 7858) and QUIC (RFC 9250) have a port of their own, 853. DNS
//! over HTTPS (RFC 8484) is recognized by its server's address or name: `public_resolvers.txt`.
use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
    sync::LazyLock,
};

use slipgate_abi::Protocol;

use crate::{Destination, Name, NamePattern, Pattern, rule::names::NameMatcher};

/// Port of DNS over TLS, DTLS and QUIC.
const DNS_OVER_TLS: u16 = 853;

static KNOWN: LazyLock<Known> =
    LazyLock::new(|| Known::parse(include_str!("public_resolvers.txt")));

/// The compiled list of public resolvers.
struct Known {
    addresses: HashSet<IpAddr>,
    names: NameMatcher,
    canaries: NameMatcher,
}

impl Known {
    fn parse(text: &str) -> Self {
        let (mut addresses, mut names, mut canaries) = (HashSet::new(), Vec::new(), Vec::new());
        for line in text.lines() {
            let line = line.split_once('#').map_or(line, |(line, _)| line).trim();
            let (line, list) = match line.strip_prefix("canary ") {
                Some(name) => (name, &mut canaries),
                None => (line, &mut names),
            };
            if let Ok(address) = line.parse() {
                addresses.insert(address);
            } else if let Ok(name) = line.parse::<NamePattern>() {
                list.push(name);
            }
        }
        let compiled = |names: &[NamePattern]| NameMatcher::new((0..).zip(names));
        Self {
            addresses,
            names: compiled(&names),
            canaries: compiled(&canaries),
        }
    }
}

/// How a destination is recognized as a DNS bypass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BypassKind {
    /// DNS over TLS or QUIC, by its port.
    Port,
    /// A public resolver, by its address.
    Resolver,
}

impl BypassKind {
    /// Returns a description for a sentence.
    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::Port => "the port of DNS over TLS and QUIC",
            Self::Resolver => "a public resolver's address",
        }
    }
}

/// Returns how a destination is recognized as a DNS bypass; `None` if it is not one. Ping never is.
pub(crate) fn dns_bypass(to: Destination) -> Option<BypassKind> {
    match to.protocol {
        Protocol::Icmp | Protocol::Icmpv6 => None,
        _ if KNOWN.addresses.contains(&to.addr) => Some(BypassKind::Resolver),
        _ if to.port == DNS_OVER_TLS => Some(BypassKind::Port),
        _ => None,
    }
}

/// Whether a rule by address opens DNS bypasses: it gives port 853 alone, or one address and ports.
pub(crate) fn opens_bypass(pattern: &Pattern) -> bool {
    pattern.ports() == Some((DNS_OVER_TLS, DNS_OVER_TLS))
        || (pattern.ports().is_some() && pattern.is_one_address())
}

/// Whether a rule by name opens DNS bypasses: it gives a single name, and that is a public
/// resolver's or the port is 853 alone.
pub fn name_means(pattern: &NamePattern) -> bool {
    let only = Some((DNS_OVER_TLS, DNS_OVER_TLS));
    pattern.is_exact() && (is_resolver(pattern.name()) || pattern.ports() == only)
}

/// Whether a name (in lower case) belongs to a public resolver.
pub(crate) fn is_resolver(name: Name<'_>) -> bool {
    !KNOWN.names.matching(name).is_empty()
}

/// Whether a name (in lower case) is a canary: a browser asks for it to learn whether it may use a
/// resolver of its own.
pub fn is_canary(name: Name<'_>) -> bool {
    !KNOWN.canaries.matching(name).is_empty()
}

/// Whether a destination is a DNS bypass by its address alone, and not by port 853.
pub(crate) fn is_by_address(to: Destination) -> bool {
    dns_bypass(to) == Some(BypassKind::Resolver) && to.port != DNS_OVER_TLS
}

/// Returns the addresses of the public resolvers.
pub(crate) fn resolvers() -> impl Iterator<Item = IpAddr> {
    KNOWN.addresses.iter().copied()
}

/// Returns the narrowest pattern that would open a destination.
pub(crate) fn narrowest_pattern(to: Destination) -> String {
    let (at, protocol) = (SocketAddr::new(to.addr, to.port), to.protocol.name());
    format!("{at}/{protocol}")
}

#[cfg(test)]
#[path = "dns_bypass_test.rs"]
mod tests;
