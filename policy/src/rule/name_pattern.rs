//! What a rule by name matches: `NAME[:PORT[-PORT]][/tcp|udp|icmp]`, `NAME` being `example.com` or
//! `*.example.com`.
use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use slipgate_abi::Protocol;
use thiserror::Error;

use super::{
    name::{MAX_LEN, Name},
    pattern::PatternError,
    scope::{Scope, split_at},
};

/// Names, ports, protocols. [`Display`](fmt::Display) writes the shortest form, in lower case.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NamePattern {
    /// Wire form, in lower case.
    name: Box<[u8]>,
    /// All names beneath it, and not the name itself.
    beneath: bool,
    scope: Scope,
}

/// A name that can't be understood.
#[derive(Error, Clone, PartialEq, Eq, Debug)]
pub enum NameError {
    /// Characters that are not ASCII.
    #[error(
        "{0:?} has characters that DNS has not: write the name as it is asked for, each such label \
         in its `xn--` form"
    )]
    NotAscii(String),
    /// A star that is not the first label.
    #[error(
        "{0:?} has a `*` elsewhere than in front of a name: write *.example.com for all names \
         beneath example.com; for every name there is --default"
    )]
    Star(String),
    /// A label that is none.
    #[error(
        "{label:?} in {name:?} is no label of a name: 1 to 63 letters, digits, `-` and `_`, with no \
         `-` at either end"
    )]
    Label {
        /// What stands for the label.
        label: String,
        /// The name as given.
        name: String,
    },
    /// The last label has digits only, as no name of the world has.
    #[error("{0:?} is neither a name, for its last label is a number, nor an address")]
    Number(String),
    /// Too long.
    #[error("{0:?} is too long: a name has at most 253 characters")]
    Long(String),
    /// The ports or the protocol.
    #[error(transparent)]
    Scope(#[from] PatternError),
}

impl NamePattern {
    /// Whether `text` means a name rather than an address: its host part has a letter, a `*` or
    /// something that no address has.
    pub fn is_meant_by(text: &str) -> bool {
        let text = text.trim();
        let (host, _) = split_at(text, |c| c == '/' || c == ':');
        let address = |c: char| c.is_ascii_digit() || c == '.';
        !host.is_empty() && !text.starts_with('[') && !is_ipv6(text) && !host.chars().all(address)
    }

    /// The name, or the one that all names meant are beneath, in lower case.
    pub(crate) fn name(&self) -> Name<'_> {
        Name(&self.name)
    }

    /// Whether that name alone is meant.
    pub(crate) fn is_exact(&self) -> bool {
        !self.beneath
    }

    /// First and last port, or `None` for any.
    pub(crate) fn ports(&self) -> Option<(u16, u16)> {
        self.scope.ports
    }

    /// Ports and protocols.
    pub(crate) fn scope(&self) -> Scope {
        self.scope
    }

    /// Whether every port and protocol matches.
    pub fn is_whole(&self) -> bool {
        self.scope.is_whole()
    }

    /// Whether a port and protocol match.
    pub fn covers(&self, port: u16, protocol: Protocol) -> bool {
        self.scope.matches(port, protocol)
    }
}

fn is_ipv6(text: &str) -> bool {
    text.matches(':').count() > 1
}

impl FromStr for NamePattern {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let text = text.trim();
        PatternError::of_url(text)?;
        let (given, rest) = split_at(text, |c| c == '/' || c == ':');
        let (beneath, host) = match given.strip_prefix("*.") {
            Some(host) => (true, host),
            None => (false, given),
        };
        if host.contains('*') {
            return Err(NameError::Star(given.to_owned()));
        }
        Ok(Self {
            name: wire(host)?,
            beneath,
            scope: Scope::parse(rest, text)?,
        })
    }
}

/// A name as people write it in wire form (RFC 1035 section 3.1), in lower case. IDNA is not
/// guessed: what a guest asks for is in ASCII, and so is a rule.
pub fn wire(text: &str) -> Result<Box<[u8]>, NameError> {
    let name = || text.to_owned();
    if !text.is_ascii() {
        return Err(NameError::NotAscii(name()));
    }
    if text.contains('*') {
        return Err(NameError::Star(name()));
    }
    let mut wire = Vec::with_capacity(text.len() + 2);
    for label in text.strip_suffix('.').unwrap_or(text).split('.') {
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        let fits = (1..=63).contains(&label.len())
            && label.bytes().all(plain)
            && !label.starts_with('-')
            && !label.ends_with('-');
        if !fits {
            return Err(NameError::Label {
                label: label.to_owned(),
                name: name(),
            });
        }
        wire.push(label.len() as u8);
        wire.extend(label.bytes().map(|b| b.to_ascii_lowercase()));
    }
    let last = text.strip_suffix('.').unwrap_or(text).rsplit('.').next();
    if last.is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit())) {
        return Err(NameError::Number(name()));
    }
    wire.push(0);
    if wire.len() > MAX_LEN {
        return Err(NameError::Long(name()));
    }
    Ok(wire.into())
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let star = if self.beneath { "*." } else { "" };
        let name = Name(&self.name).without_dot();
        write!(f, "{star}{name}{}", self.scope)
    }
}

#[cfg(test)]
#[path = "name_pattern_test.rs"]
mod tests;
