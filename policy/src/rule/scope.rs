//! Ports and protocols that a rule matches, beside its host: `[:PORT[-PORT]][/tcp|udp|icmp]`.
use std::fmt;

use serde::{Deserialize, Serialize};
use slipgate_abi::Protocol;

use super::pattern::PatternError;

/// Ports and protocols. Without a port every port matches, without a protocol every protocol; a
/// port leaves out ICMP, which has none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Scope {
    /// First and last port; `None`: any port.
    pub(crate) ports: Option<(u16, u16)>,
    #[serde(with = "protocol_number")]
    pub(crate) protocol: Option<Protocol>,
}

impl Scope {
    /// Parses `rest`, the part of `text` after the host. Errors quote `text` whole.
    pub(crate) fn parse(rest: &str, text: &str) -> Result<Self, PatternError> {
        let pattern = || text.to_owned();
        let (ports, rest) = match rest.strip_prefix(':') {
            Some(after) => {
                let (given, rest) = split_at(after, |c| c == '/');
                let ports = parse_ports(given).ok_or_else(|| PatternError::Port {
                    given: given.to_owned(),
                    pattern: pattern(),
                })?;
                (Some(ports), rest)
            }
            None => (None, rest),
        };
        let protocol = match rest.strip_prefix('/') {
            Some(given) => Some(parse_protocol(given).ok_or_else(|| PatternError::Protocol {
                given: given.to_owned(),
                pattern: pattern(),
            })?),
            None => None,
        };
        if protocol == Some(Protocol::Icmp) && ports.is_some() {
            return Err(PatternError::IcmpPort(pattern()));
        }
        Ok(Self { ports, protocol })
    }

    /// Whether flows of `protocol` can match.
    pub(crate) fn covers(&self, protocol: Protocol) -> bool {
        match self.protocol {
            Some(only) => only == protocol,
            None => self.ports.is_none() || protocol != Protocol::Icmp,
        }
    }

    /// Whether this scope matches everything that `other` matches.
    pub(crate) fn contains(&self, other: Self) -> bool {
        let ports = match (self.ports, other.ports) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some((first, last)), Some((from, to))) => first <= from && to <= last,
        };
        let mut all = Protocol::all().into_iter();
        ports && all.all(|p| !other.covers(p) || self.covers(p))
    }

    /// Whether some port and protocol matches both scopes.
    pub(crate) fn overlaps(&self, other: Self) -> bool {
        let ports = match (self.ports, other.ports) {
            (None, _) | (_, None) => true,
            (Some((first, last)), Some((from, to))) => first <= to && from <= last,
        };
        let mut all = Protocol::all().into_iter();
        ports && all.any(|p| self.covers(p) && other.covers(p))
    }

    /// Whether every port and protocol matches.
    pub(crate) fn is_whole(&self) -> bool {
        self.ports.is_none() && self.protocol.is_none()
    }

    /// Whether a port and protocol match.
    pub(crate) fn matches(&self, port: u16, protocol: Protocol) -> bool {
        self.covers(protocol)
            && self
                .ports
                .is_none_or(|(first, last)| (first..=last).contains(&port))
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ports {
            Some((first, last)) if first == last => write!(f, ":{first}")?,
            Some((first, last)) => write!(f, ":{first}-{last}")?,
            None => {}
        }
        match self.protocol {
            Some(protocol) => write!(f, "/{}", protocol.name()),
            None => Ok(()),
        }
    }
}

/// Splits the text before the first separator; the second part begins with it.
pub(crate) fn split_at(text: &str, separator: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(separator).unwrap_or(text.len()))
}

pub(crate) fn parse_ports(text: &str) -> Option<(u16, u16)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (parse_port(first)?, parse_port(last)?);
    (first <= last).then_some((first, last))
}

fn parse_port(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|port| digits && *port != 0)
}

fn parse_protocol(text: &str) -> Option<Protocol> {
    Protocol::by_name(&text.to_ascii_lowercase())
}

/// Serialization of a protocol as its IP protocol number; 0: any.
mod protocol_number {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};
    use slipgate_abi::Protocol;

    pub(super) fn serialize<S: Serializer>(
        protocol: &Option<Protocol>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(protocol.map_or(0, |protocol| protocol as u8))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Protocol>, D::Error> {
        match u8::deserialize(deserializer)? {
            0 => Ok(None),
            number => match Protocol::from_ip(number) {
                None => Err(D::Error::custom(format_args!("no protocol {number}"))),
                known => Ok(known),
            },
        }
    }
}
