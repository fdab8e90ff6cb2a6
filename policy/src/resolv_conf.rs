//! Resolvers of the host, as resolv.conf(5) lists them.
use std::net::{IpAddr, SocketAddr};

use crate::DNS_PORT;

/// Most resolvers in a resolv.conf(5) file (`MAXNS`).
const MAX_RESOLV_CONF: usize = 3;

/// Resolvers in the `nameserver` lines of a resolv.conf(5) file, as the C library reads them: the
/// first three that can be asked. A link-local address (`fe80::1%eth0`) can't: it is of one link, and
/// the questions leave by the link that routes name.
pub fn parse_resolv_conf(text: &str) -> Vec<SocketAddr> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            (words.next()? == "nameserver")
                .then(|| words.next())
                .flatten()
        })
        .filter_map(parse_resolver)
        .filter(|resolver| !is_of_a_link(*resolver))
        .take(MAX_RESOLV_CONF)
        .collect()
}

/// Whether a resolver's address is of one link, which it does not name: `fe80::/10`.
pub(crate) fn is_of_a_link(resolver: SocketAddr) -> bool {
    match resolver {
        SocketAddr::V6(v6) => v6.ip().is_unicast_link_local(),
        SocketAddr::V4(_) => false,
    }
}

/// Parses `A`, `A:P`, `[A]` or `[A]:P`; the port is 53 by default. An IPv4 address in IPv6 form is of
/// IPv4.
pub(crate) fn parse_resolver(text: &str) -> Option<SocketAddr> {
    let bare = text
        .strip_prefix('[')
        .and_then(|t| t.strip_suffix(']'))
        .unwrap_or(text);
    let address = || bare.parse::<IpAddr>().map(|a| SocketAddr::new(a, DNS_PORT));
    let given: SocketAddr = text.parse().or_else(|_| address()).ok()?;
    let ip = given.ip().to_canonical();
    let names_a_link = text.contains('%');
    let is_one = given.port() != 0 && !ip.is_unspecified() && !ip.is_multicast();
    (is_one && !names_a_link).then(|| SocketAddr::new(ip, given.port()))
}

#[cfg(test)]
#[path = "resolv_conf_test.rs"]
mod tests;
