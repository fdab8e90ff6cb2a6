//! Ports of the gateway that lead to the host's loopback.
//!
//! An entry admits by itself: neither the default nor the safe defaults apply to it. A rule by
//! address that denies has precedence, wherever it stands, unless a rule that allows comes first. A
//! rule that inspects refuses too, because nothing on this way is inspected.
use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    str::FromStr,
};

use serde::{Deserialize, Serialize};
use slipgate_abi::Protocol;

use super::{Destination, scope, settings::DNS_PORT};

/// Port of the DHCP server, which is never led to the host; DNS has its own port too.
const DHCP_PORT: u16 = 67;
/// Maximum number of entries of a policy, so that a linear search stays cheap.
pub const MOST_LOOPBACK_ENTRIES: usize = 256;

/// One entry of the list of the host's loopback ports:
/// `[ADDR:]PORT[-PORT][:PORT[-PORT]][/tcp|udp]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LoopbackPorts {
    /// Address that the guest connects to; `None`: the gateway's.
    pub address: Option<Ipv4Addr>,
    /// First and last port that the guest connects to.
    pub ports: (u16, u16),
    /// Port of the host that the first port leads to; the others follow in order.
    pub host_first: u16,
    /// Whether TCP connections are led.
    pub tcp: bool,
    /// Whether UDP datagrams are led.
    pub udp: bool,
    /// Whether the entry was given by a flag rather than by a policy file.
    pub typed: bool,
}

/// Error of an entry that cannot be parsed or added.
#[derive(thiserror::Error, Clone, PartialEq, Eq, Debug)]
pub enum LoopbackError {
    /// The text is neither a port nor a range of ports.
    #[error("{0:?} is no port or range of ports")]
    Ports(String),
    /// The protocol is neither TCP nor UDP.
    #[error("{0:?} is neither tcp nor udp")]
    Protocol(String),
    /// The text before the first colon is not an IPv4 address.
    #[error("{0:?} is no IPv4 address")]
    Address(String),
    /// The two ranges have different lengths.
    #[error("{0} ports lead to {1} ports of the host")]
    Lengths(usize, usize),
    /// The gateway itself serves the port.
    #[error("port {0} is slipgate's own: its {1} answers there")]
    Ours(u16, &'static str),
    /// Another entry has the port.
    #[error("port {0} leads to port {1} of the host already")]
    Twice(u16, u16),
    /// The policy has too many entries.
    #[error("more than {MOST_LOOPBACK_ENTRIES} entries")]
    TooMany,
}

impl LoopbackPorts {
    /// Returns the port of the host that a destination leads to, or `None` if the entry does not
    /// match.
    pub fn leads(&self, to: Destination, gateway: IpAddr) -> Option<u16> {
        let (first, last) = self.ports;
        let listed = to.addr == self.address.map_or(gateway, IpAddr::V4)
            && (first..=last).contains(&to.port)
            && match to.protocol {
                Protocol::Tcp => self.tcp,
                Protocol::Udp => self.udp,
                Protocol::Icmp | Protocol::Icmpv6 => false,
            };
        listed.then(|| self.host_first + (to.port - first))
    }

    /// Returns the entry's text as it would be given: `8080:80/tcp`.
    pub fn spec(&self) -> String {
        let range = |(first, last): (u16, u16)| match first == last {
            true => format!("{first}"),
            false => format!("{first}-{last}"),
        };
        let address = self.address.map(|address| format!("{address}:"));
        let mut text = address.unwrap_or_default() + &range(self.ports);
        if self.host_first != self.ports.0 {
            let last = self.host_first + (self.ports.1 - self.ports.0);
            text += &format!(":{}", range((self.host_first, last)));
        }
        text + match (self.tcp, self.udp) {
            (true, false) => "/tcp",
            (false, true) => "/udp",
            _ => "",
        }
    }

    /// Returns a port that both entries match, and the host's port that `other` leads it to.
    fn clashes(&self, other: &Self) -> Option<(u16, u16)> {
        let first = self.ports.0.max(other.ports.0);
        let shared = first <= self.ports.1.min(other.ports.1);
        let protocols = self.tcp && other.tcp || self.udp && other.udp;
        (self.address == other.address && shared && protocols)
            .then(|| (first, other.host_first + (first - other.ports.0)))
    }

    /// Adds the entry to others. Each port may lead to one place only.
    ///
    /// # Errors
    /// Another entry matches one of its ports, or there are too many entries.
    pub fn add_to(self, all: &mut Vec<Self>) -> Result<(), LoopbackError> {
        if let Some((port, host)) = all.iter().find_map(|other| self.clashes(other)) {
            return Err(LoopbackError::Twice(port, host));
        }
        if all.len() == MOST_LOOPBACK_ENTRIES {
            return Err(LoopbackError::TooMany);
        }
        all.push(self);
        Ok(())
    }
}

impl FromStr for LoopbackPorts {
    type Err = LoopbackError;

    fn from_str(text: &str) -> Result<Self, LoopbackError> {
        let (rest, tcp, udp) = match text.split_once('/') {
            None => (text, true, true),
            Some((rest, "tcp")) => (rest, true, false),
            Some((rest, "udp")) => (rest, false, true),
            Some((_, other)) => return Err(LoopbackError::Protocol(other.to_owned())),
        };
        // An address has dots, and a port has none.
        let (address, rest) = match rest.split_once(':') {
            Some((address, rest)) if address.contains('.') => {
                let parsed = address.parse();
                let parsed = parsed.map_err(|_| LoopbackError::Address(address.to_owned()))?;
                (Some(parsed), rest)
            }
            _ => (None, rest),
        };
        let (guest, host) = rest.split_once(':').unwrap_or((rest, rest));
        let range = |text: &str| {
            let range = scope::parse_ports(text);
            range.ok_or_else(|| LoopbackError::Ports(text.to_owned()))
        };
        let (guest, host) = (range(guest)?, range(host)?);
        let len = |(first, last): (u16, u16)| usize::from(last - first) + 1;
        if len(guest) != len(host) {
            return Err(LoopbackError::Lengths(len(guest), len(host)));
        }
        let has = |port| (guest.0..=guest.1).contains(&port);
        if has(DNS_PORT) {
            return Err(LoopbackError::Ours(DNS_PORT, "DNS"));
        }
        if has(DHCP_PORT) && udp {
            return Err(LoopbackError::Ours(DHCP_PORT, "DHCP"));
        }
        Ok(Self {
            address,
            ports: guest,
            host_first: host.0,
            tcp,
            udp,
            typed: false,
        })
    }
}

impl fmt::Display for LoopbackPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.typed {
            "--host-loopback"
        } else {
            "host_loopback"
        };
        write!(f, "{name} {}", self.spec())
    }
}
