//! Pattern of a rule by address: `CIDR[:PORT[-PORT]][/tcp|udp|icmp]`.
//!
//! `/` precedes both a prefix length and a protocol; the character after it tells which one it is.
use std::{fmt, net::Ipv4Addr, str::FromStr};

use ipnet::Ipv4Net;
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
    prefix: Ipv4Net,
    scope: Scope,
}

impl Pattern {
    /// Returns the prefix that contains all matching addresses.
    pub fn prefix(&self) -> Ipv4Net {
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
    /// The text looks like an IPv6 address.
    #[error(
        "{0:?} looks like an IPv6 address; only IPv4 is served yet, as in 203.0.113.0/24:443/tcp"
    )]
    Ipv6(String),
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
    /// The prefix length is not a number from 0 to 32.
    #[error("Prefix length {given:?} in {pattern:?} is not one: 0 to 32 would do")]
    PrefixLength {
        /// The prefix length as given.
        given: String,
        /// The whole pattern as given.
        pattern: String,
    },
    /// Bits of the address outside of the prefix are set.
    #[error("{pattern:?} names a host inside a network: {network} is the network, {host} the host")]
    HostBits {
        /// The whole pattern as given.
        pattern: String,
        /// The network, with the host bits cleared.
        network: Ipv4Net,
        /// The address without the prefix length.
        host: Ipv4Addr,
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
        let port = if host.contains(':') { "" } else { port };
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
        if text.starts_with('[') || text.matches(':').count() > 1 {
            return Err(PatternError::Ipv6(text.to_owned()));
        }
        let pattern = || text.to_owned();
        let (addr_text, rest) = split_at(text, |c| c == '/' || c == ':');
        let addr: Ipv4Addr = addr_text.parse().map_err(|_| PatternError::Address {
            given: addr_text.to_owned(),
            pattern: pattern(),
        })?;

        let is_length = |after: &&str| after.starts_with(|c: char| c.is_ascii_digit());
        let (prefix_len, rest) = match rest.strip_prefix('/').filter(is_length) {
            Some(after) => {
                let (given, rest) = split_at(after, |c| c == '/' || c == ':');
                let length = given.parse().ok().filter(|length| *length <= 32);
                let length = length.ok_or_else(|| PatternError::PrefixLength {
                    given: given.to_owned(),
                    pattern: pattern(),
                })?;
                (length, rest)
            }
            None => (32, rest),
        };
        let prefix = Ipv4Net::new_assert(addr, prefix_len);
        if prefix.trunc() != prefix {
            return Err(PatternError::HostBits {
                pattern: pattern(),
                network: prefix.trunc(),
                host: addr,
            });
        }

        let scope = Scope::parse(rest, text)?;
        Ok(Self { prefix, scope })
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix.prefix_len() {
            32 => write!(f, "{}", self.prefix.addr())?,
            _ => write!(f, "{}", self.prefix)?,
        }
        write!(f, "{}", self.scope)
    }
}

#[cfg(test)]
#[path = "pattern_test.rs"]
mod tests;
