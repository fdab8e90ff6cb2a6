//! Resolvers of the host, as resolv.conf(5) lists them.
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::DNS_PORT;

/// Most resolvers in a resolv.conf(5) file (`MAXNS`).
const MAX_RESOLV_CONF: usize = 3;

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
            None => parse_resolver(word),
            Some((address, link)) => Some(SocketAddr::V6(SocketAddrV6::new(
                address.parse::<Ipv6Addr>().ok()?,
                DNS_PORT,
                0,
                link.parse().ok()?,
            ))),
        })
        .take(MAX_RESOLV_CONF)
        .collect()
}

/// Parses `A`, `A:P`, `[A]` or `[A]:P`; the port is 53 by default.
fn parse_resolver(text: &str) -> Option<SocketAddr> {
    let bare = text
        .strip_prefix('[')
        .and_then(|t| t.strip_suffix(']'))
        .unwrap_or(text);
    let address = || bare.parse::<IpAddr>().map(|a| SocketAddr::new(a, DNS_PORT));
    let resolver: SocketAddr = text.parse().or_else(|_| address()).ok()?;
    (resolver.port() != 0 && !resolver.ip().is_unspecified()).then_some(resolver)
}

#[cfg(test)]
#[path = "resolv_conf_test.rs"]
mod tests;
