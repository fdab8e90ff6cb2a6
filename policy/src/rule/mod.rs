//! The vocabulary of a policy: actions, rules, patterns, destinations, and how rules are looked up.
pub(crate) mod address_pool;
pub(crate) mod deny_file;
pub(crate) mod embedded;
pub(crate) mod host_loopback;
pub(crate) mod idle;
pub(crate) mod matcher;
pub(crate) mod name;
pub(crate) mod name_pattern;
pub(crate) mod names;
pub(crate) mod nat;
pub(crate) mod pattern;
pub(crate) mod prefix_map;
mod prefix_tree;
pub(crate) mod scope;
pub(crate) mod settings;
pub(crate) mod sleep;
pub(crate) mod timers;

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use slipgate_abi::{Protocol, Refusal};

use self::{
    deny_file::DenyFile,
    embedded::embedded,
    name_pattern::{NameError, NamePattern},
    pattern::Pattern,
};
/// Action of a rule or of the default.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Admit the flow, without inspecting its payload.
    Allow,
    /// Admit the flow, and require that the name it gives (TLS SNI, HTTP host, QUIC) is allowed
    /// too.
    Inspect,
    /// Refuse the flow, so that the guest sees it.
    Deny,
}

impl Action {
    /// Returns the name of the action as flags and policy files write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Inspect => "inspect",
            Self::Deny => "deny",
        }
    }

    /// Whether the action admits flows.
    pub const fn admits(self) -> bool {
        !matches!(self, Self::Deny)
    }
}

/// One rule of a policy.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Rule {
    /// `--allow`, `--inspect` or `--deny` with a pattern.
    Match(Action, Pattern),
    /// `--allow`, `--inspect` or `--deny` with a name.
    Name(Action, NamePattern),
    /// `--deny-file` with the compiled file.
    DenyFile(Box<DenyFile>),
}

impl Rule {
    /// Parses the value of a rule flag: a pattern by address or by name.
    ///
    /// # Errors
    /// The text is neither a pattern by address nor one by name.
    pub fn parse(action: Action, text: &str) -> Result<Self, NameError> {
        Ok(if NamePattern::is_meant_by(text) {
            Self::Name(action, text.parse()?)
        } else {
            Self::Match(action, text.parse()?)
        })
    }
}

/// Number of a rule: its element of the map `RULES`.
///
/// Each policy of a process has a range of numbers, so a number also identifies the policy. The
/// constants are those of a policy that is numbered from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RuleId(pub u32);

impl RuleId {
    /// No rule matched, and the default action decided.
    pub const DEFAULT: Self = Self(0);
    /// No rule matched, and the destination is in protected space.
    pub const PROTECTED: Self = Self(1);
    /// No rule opens it specifically, and the destination is a resolver that would bypass the rules
    /// by name.
    pub const DNS_ELSEWHERE: Self = Self(2);
    /// The first rule typed; the others follow in order.
    pub const FIRST_TYPED: Self = Self(3);
}

/// Destination of a flow, to be judged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Destination {
    /// Address of the destination.
    pub addr: IpAddr,
    /// Port; 0 for ICMP.
    pub port: u16,
    /// Transport protocol, or ICMP.
    pub protocol: Protocol,
}

impl Destination {
    /// Returns the IPv4 destination that an IPv6 destination leads to ([`embedded`]), if it does.
    pub(crate) fn inside(self) -> Option<Self> {
        let addr = embedded(self.addr)?.into();
        Some(Self { addr, ..self })
    }

    /// Returns the destination as the beginning of a sentence: `TCP to 192.0.2.1:443`, `TCP to
    /// [2001:db8::1]:443`, `Ping to 192.0.2.1`.
    pub fn describe(self) -> String {
        match self.protocol {
            Protocol::Icmp | Protocol::Icmpv6 => format!("Ping to {}", self.addr),
            protocol => format!(
                "{} to {}",
                protocol.name().to_uppercase(),
                SocketAddr::new(self.addr, self.port)
            ),
        }
    }
}

/// Decision about a flow or a DNS question, and the rule that made it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decision {
    /// Number of the rule that decided.
    pub rule: RuleId,
    /// Line of the deny file that matched, from 1; `None` if another kind of rule decided.
    pub line: Option<u32>,
    /// Reason of a refusal: [`Refusal::Rule`], [`Refusal::Default`], [`Refusal::Protected`] or
    /// [`Refusal::DnsElsewhere`]; `None` if allowed.
    pub refusal: Option<Refusal>,
}

impl Decision {
    /// A decision by a rule as a whole, not by a line of a deny file.
    pub(crate) const fn by(rule: RuleId, refusal: Option<Refusal>) -> Self {
        Self {
            rule,
            line: None,
            refusal,
        }
    }

    /// Whether the flow is allowed.
    pub const fn is_allowed(self) -> bool {
        self.refusal.is_none()
    }
}

/// Addresses that are protected because they belong to this host or its guests. They change as the
/// host is reconfigured.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LocalAddresses {
    /// Addresses of the host, and broadcast addresses of its networks.
    pub host: Vec<IpAddr>,
    /// Networks of the guests.
    pub guests: Vec<IpNet>,
}

#[cfg(test)]
#[path = "rule_test.rs"]
pub(crate) mod tests;
