//! Pattern of a rule by address: `CIDR[:PORT[-PORT]][/tcp|udp|icmp]`.
//!
//! `/` precedes both a prefix length and a protocol; the character after it tells which one it is.
//! An IPv6 CIDR with a port stands in brackets (RFC 3986 section 3.2.2): `[2001:db8::/32]:443`.
//! A pattern matches one family: `0.0.0.0/0` is all of IPv4, `::/0` all of IPv6.
use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
    str::FromStr,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use slipgate_abi::Protocol;
use thiserror::Error;

use super::{
    Destination,
    name_pattern::NamePattern,
    scope::{Scope, split_at},
};

/// Set of destinations: a prefix, ports and protocols. [`Display`](fmt::Display) writes the
/// shortest form.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pattern {
    prefix: IpNet,
    scope: Scope,
}

impl Pattern {
    /// Returns the prefix that contains all matching addresses.
    pub fn prefix(&self) -> IpNet {
        self.prefix
    }

    /// Returns the first and the last port, or `None` if every port matches.
    pub fn ports(&self) -> Option<(u16, u16)> {
        self.scope.ports
    }

    /// Returns the ports and protocols.
    pub(crate) fn scope(&self) -> Scope {
        self.scope
    }

    /// Whether flows of `protocol` can match.
    pub fn covers(&self, protocol: Protocol) -> bool {
        self.scope.covers(protocol)
    }

    /// Whether the prefix is a single address.
    pub fn is_one_address(&self) -> bool {
        self.prefix.prefix_len() == self.prefix.max_prefix_len()
    }

    /// Whether every port and protocol matches.
    pub fn is_whole(&self) -> bool {
        self.scope.is_whole()
    }

    /// Whether the destination `to` matches.
    pub fn matches(&self, to: Destination) -> bool {
        self.prefix.contains(&to.addr) && self.scope.matches(to.port, to.protocol)
    }
}

/// Error of a pattern that cannot be parsed.
#[derive(Error, Clone, PartialEq, Eq, Debug)]
pub enum PatternError {
    /// The text is empty.
    #[error(
        "nothing is given: write an address, as in 10.0.0.0/8, 1.2.3.4:443/tcp or 0.0.0.0/0:25"
    )]
    Empty,
    /// The text is a URL.
    #[error("{given:?} is a URL, and rules know neither schemes nor paths: write {instead:?}")]
    Url {
        /// The text as given.
        given: String,
        /// Pattern that the user probably means.
        instead: String,
    },
    /// A bracket is not closed, or closed without being opened.
    #[error("{0:?} has a bracket without its other half: write [2001:db8::1]:443/tcp")]
    Bracket(String),
    /// An IPv6 address may be followed by a port.
    #[error(
        "{0:?} is not an IPv6 prefix: write 2001:db8::/32, and with a port [2001:db8::/32]:443/tcp"
    )]
    Ipv6(String),
    /// The address is an IPv4 address in IPv6 form.
    #[error("{given:?} is an IPv4 address in IPv6 form, which no packet has: write {instead}")]
    Mapped {
        /// The whole pattern as given.
        given: String,
        /// The IPv4 address, to write in its stead.
        instead: IpAddr,
    },
    /// The host part is not an IPv4 address.
    #[error(
        "{given:?} in {pattern:?} is not an IPv4 address: write four numbers up to 255, as in 10.0.0.0/8"
    )]
    Address {
        /// The host part as given.
        given: String,
        /// The whole pattern as given.
        pattern: String,
    },
    /// The prefix length is no number, or longer than an address.
    #[error("Prefix length {given:?} in {pattern:?} is not one: 0 to {longest} would do")]
    PrefixLength {
        /// The prefix length as given.
        given: String,
        /// The whole pattern as given.
        pattern: String,
        /// Bits of an address.
        longest: u8,
    },
    /// Bits of the address outside of the prefix are set.
    #[error("{pattern:?} names a host inside a network: {network} is the network, {host} the host")]
    HostBits {
        /// The whole pattern as given.
        pattern: String,
        /// The network, with the host bits cleared.
        network: IpNet,
        /// The address without the prefix length.
        host: IpAddr,
    },
    /// The port is neither a port nor a range of ports.
    #[error("Port {given:?} in {pattern:?} is neither 1 to 65535 nor a range such as 8000-8010")]
    Port {
        /// The ports as given.
        given: String,
        /// The whole pattern as given.
        pattern: String,
    },
    /// The protocol is unknown.
    #[error(
        "Protocol {given:?} in {pattern:?} is unknown: tcp, udp or icmp would do, or none for all"
    )]
    Protocol {
        /// The protocol as given.
        given: String,
        /// The whole pattern as given.
        pattern: String,
    },
    /// ICMP is given with a port.
    #[error("ICMP has no ports, but {0:?} gives one: leave the port or the protocol out")]
    IcmpPort(String),
}

impl PatternError {
    /// Checks that the text is not a URL.
    ///
    /// # Errors
    /// The text contains `://`; the error suggests a pattern with the URL's host and port.
    pub(crate) fn of_url(text: &str) -> Result<(), Self> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Ok(());
        };
        let (authority, _) = split_at(rest, |c| matches!(c, '/' | '?' | '#'));
        let host = authority
            .rsplit_once('@')
            .map_or(authority, |(_, host)| host);
        let port = match scheme.to_ascii_lowercase().as_str() {
            "https" | "wss" => ":443",
            "http" | "ws" => ":80",
            _ => "",
        };
        let is_port_given = host.rsplit(']').next().unwrap_or(host).contains(':');
        let port = if is_port_given { "" } else { port };
        let instead = format!("{host}{port}/tcp");
        let is_one = instead.parse::<Pattern>().is_ok() || instead.parse::<NamePattern>().is_ok();
        Err(Self::Url {
            given: text.to_owned(),
            instead: if is_one {
                instead
            } else {
                "example.com:443/tcp".to_owned()
            },
        })
    }
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(PatternError::Empty);
        }
        PatternError::of_url(text)?;
        let (cidr, rest) = match text.strip_prefix('[') {
            Some(inside) => inside
                .split_once(']')
                .ok_or_else(|| PatternError::Bracket(text.to_owned()))?,
            None => (text, ""),
        };
        let is_v6 = cidr.matches(':').count() > 1 || cidr.len() < text.len();
        let (prefix, after) = parse_prefix(cidr, is_v6, text)?;
        // Brackets hold the whole prefix, and ports or a protocol follow them.
        let rest = match (after, rest) {
            (after, "") if cidr.len() == text.len() || after.is_empty() => after,
            ("", rest) if rest.starts_with([':', '/']) && !is_length_at(rest) => rest,
            _ => return Err(PatternError::Ipv6(text.to_owned())),
        };
        let scope = Scope::parse(rest, text)?;
        Ok(Self { prefix, scope })
    }
}

/// Whether a prefix length follows, rather than a protocol.
fn is_length_at(rest: &str) -> bool {
    let after = rest.strip_prefix('/').unwrap_or_default();
    after.starts_with(|c: char| c.is_ascii_digit())
}

/// Parses the prefix that `cidr`, a part of `text`, begins with, and returns what follows it.
fn parse_prefix<'t>(
    cidr: &'t str,
    is_v6: bool,
    text: &str,
) -> Result<(IpNet, &'t str), PatternError> {
    let pattern = || text.to_owned();
    let (addr_text, rest) = split_at(cidr, |c| c == '/' || (c == ':' && !is_v6));
    let addr: IpAddr = match is_v6 {
        true => addr_text
            .parse::<Ipv6Addr>()
            .map_err(|_| PatternError::Ipv6(pattern()))?
            .into(),
        false => IpAddr::V4(addr_text.parse().map_err(|_| PatternError::Address {
            given: addr_text.to_owned(),
            pattern: pattern(),
        })?),
    };
    if addr.is_ipv6() && addr.to_canonical().is_ipv4() {
        return Err(PatternError::Mapped {
            given: pattern(),
            instead: addr.to_canonical(),
        });
    }
    let longest = IpNet::from(addr).prefix_len();
    let (prefix_len, rest) = match rest.strip_prefix('/') {
        Some(after) if is_length_at(rest) => {
            let (given, rest) = split_at(after, |c| c == '/' || c == ':');
            let length = given.parse().ok().filter(|length| *length <= longest);
            let length = length.ok_or_else(|| PatternError::PrefixLength {
                given: given.to_owned(),
                pattern: pattern(),
                longest,
            })?;
            (length, rest)
        }
        _ => (longest, rest),
    };
    let prefix = IpNet::new_assert(addr, prefix_len);
    if prefix.trunc() != prefix {
        return Err(PatternError::HostBits {
            pattern: pattern(),
            network: prefix.trunc(),
            host: addr,
        });
    }
    Ok((prefix, rest))
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, close) = match self.prefix {
            IpNet::V6(_) if self.scope.ports.is_some() => ("[", "]"),
            _ => ("", ""),
        };
        f.write_str(open)?;
        match self.is_one_address() {
            true => write!(f, "{}", self.prefix.addr())?,
            false => write!(f, "{}", self.prefix)?,
        }
        write!(f, "{close}{}", self.scope)
    }
}

#[cfg(test)]
#[path = "pattern_test.rs"]
mod tests;
