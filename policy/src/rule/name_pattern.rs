//! Pattern of a rule by name: `NAME[:PORT[-PORT]][/tcp|udp|icmp]`, where `NAME` is `example.com` or
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

/// Set of names, ports and protocols. [`Display`](fmt::Display) writes the shortest form, in lower
/// case.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NamePattern {
    /// Name in wire form, in lower case.
    name: Box<[u8]>,
    /// Whether the pattern matches all names beneath `name`, but not `name` itself.
    beneath: bool,
    scope: Scope,
}

/// Error of a name or a pattern by name that cannot be parsed.
#[derive(Error, Clone, PartialEq, Eq, Debug)]
pub enum NameError {
    /// The name has characters outside ASCII.
    #[error(
        "{0:?} has characters that DNS names do not have: write the name as it is asked for, each such label \
         in its `xn--` form"
    )]
    NotAscii(String),
    /// A `*` stands elsewhere than as the first label.
    #[error(
        "{0:?} has a `*` elsewhere than in front of a name: write *.example.com for all names \
         beneath example.com; for every name there is --default"
    )]
    Star(String),
    /// A part of the name is not a valid label.
    #[error(
        "{label:?} in {name:?} is no label of a name: 1 to 63 letters, digits, `-` and `_`, with no \
         `-` at either end"
    )]
    Label {
        /// The label as given.
        label: String,
        /// The name as given.
        name: String,
    },
    /// The last label consists of digits only, as that of no name in public DNS does.
    #[error("{0:?} is neither a name, for its last label is a number, nor an address")]
    Number(String),
    /// The name is longer than 253 characters.
    #[error("{0:?} is too long: a name has at most 253 characters")]
    Long(String),
    /// The ports or the protocol cannot be parsed.
    #[error(transparent)]
    Scope(#[from] PatternError),
}

impl NamePattern {
    /// Whether `text` is a pattern by name rather than by address: its host part has a letter, a
    /// `*` or another character that no address has.
    pub fn is_meant_by(text: &str) -> bool {
        let text = text.trim();
        let (host, _) = split_at(text, |c| c == '/' || c == ':');
        let address = |c: char| c.is_ascii_digit() || c == '.';
        !host.is_empty() && !text.starts_with('[') && !is_ipv6(text) && !host.chars().all(address)
    }

    /// Returns the name, or the parent of the names that a wildcard matches, in lower case.
    pub(crate) fn name(&self) -> Name<'_> {
        Name(&self.name)
    }

    /// Whether the pattern matches one name only.
    pub(crate) fn is_exact(&self) -> bool {
        !self.beneath
    }

    /// Returns the first and the last port, or `None` if every port matches.
    pub(crate) fn ports(&self) -> Option<(u16, u16)> {
        self.scope.ports
    }

    /// Returns the ports and protocols.
    pub(crate) fn scope(&self) -> Scope {
        self.scope
    }

    /// Whether every port and protocol matches.
    pub fn is_whole(&self) -> bool {
        self.scope.is_whole()
    }

    /// Whether the port and protocol match.
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

/// Converts a name from presentation form to wire form (RFC 1035 section 3.1), in lower case. IDNA
/// is not applied: a guest asks for names in ASCII, and rules are written in ASCII too.
///
/// # Errors
/// The text is not a valid name: its characters, its labels or its length.
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
