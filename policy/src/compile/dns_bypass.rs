//! Resolvers elsewhere: ways to ask for names that pass by the guests' own DNS, and so by the rules
//! by name. DNS over TLS (RFC 7858) and QUIC (RFC 9250) have a port of their own, 853; DNS over
//! HTTPS (RFC 8484) is known by who serves it: `public_resolvers.txt`.
use std::{
    collections::HashSet,
    net::{Ipv4Addr, SocketAddrV4},
    sync::LazyLock,
};

use slipgate_abi::Protocol;

use crate::{Destination, Name, NamePattern, Pattern, rule::names::NameMatcher};

/// The port of DNS over TLS, DTLS and QUIC.
const DNS_OVER_TLS: u16 = 853;

static KNOWN: LazyLock<Known> =
    LazyLock::new(|| Known::parse(include_str!("public_resolvers.txt")));

/// The list, compiled.
struct Known {
    addresses: HashSet<Ipv4Addr>,
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

/// What kind of resolver a destination is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Elsewhere {
    /// DNS over TLS or QUIC, by its port.
    Port,
    /// A public resolver, by its address.
    Known,
}

impl Elsewhere {
    /// In words.
    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::Port => "the port of DNS over TLS and QUIC",
            Self::Known => "a public resolver's address",
        }
    }
}

/// Whether a destination is a resolver elsewhere. Ping is none.
pub(crate) fn dns_bypass(to: Destination) -> Option<Elsewhere> {
    match to.protocol {
        Protocol::Icmp => None,
        _ if KNOWN.addresses.contains(&to.addr) => Some(Elsewhere::Known),
        _ if to.port == DNS_OVER_TLS => Some(Elsewhere::Port),
        _ => None,
    }
}

/// Whether a rule by address means resolvers elsewhere: it gives port 853 and no other, or one
/// address and ports.
pub(crate) fn means(pattern: &Pattern) -> bool {
    pattern.ports() == Some((DNS_OVER_TLS, DNS_OVER_TLS))
        || (pattern.ports().is_some() && pattern.prefix().prefix_len() == 32)
}

/// Whether a rule by name means them: it gives one name, and that is a resolver's, or port 853.
pub fn name_means(pattern: &NamePattern) -> bool {
    let only = Some((DNS_OVER_TLS, DNS_OVER_TLS));
    pattern.is_exact() && (is_resolver(pattern.name()) || pattern.ports() == only)
}

/// Whether a name (in lower case) is a public resolver's.
pub(crate) fn is_resolver(name: Name<'_>) -> bool {
    !KNOWN.names.matching(name).is_empty()
}

/// Whether a name (in lower case) is asked for to learn whether a resolver elsewhere may be used.
pub fn is_canary(name: Name<'_>) -> bool {
    !KNOWN.canaries.matching(name).is_empty()
}

/// Whether a destination is one by its address alone: others, at that port, are none.
pub(crate) fn is_by_address(to: Destination) -> bool {
    dns_bypass(to) == Some(Elsewhere::Known) && to.port != DNS_OVER_TLS
}

/// The public resolvers' addresses.
pub(crate) fn resolvers() -> impl Iterator<Item = Ipv4Addr> {
    KNOWN.addresses.iter().copied()
}

/// The narrowest rule that would open it.
pub(crate) fn opened_by(to: Destination) -> String {
    let (at, protocol) = (SocketAddrV4::new(to.addr, to.port), to.protocol.name());
    format!("{at}/{protocol}")
}

#[cfg(test)]
#[path = "dns_bypass_test.rs"]
mod tests;
