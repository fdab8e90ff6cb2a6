//! The vocabulary of a policy: actions, rules, patterns, destinations, and how rules are looked up.
pub(crate) mod deny_file;
pub(crate) mod host_loopback;
pub(crate) mod matcher;
pub(crate) mod name;
pub(crate) mod name_pattern;
pub(crate) mod names;
pub(crate) mod pattern;
pub(crate) mod prefix_map;
pub(crate) mod scope;
pub(crate) mod settings;

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use slipgate_abi::{Protocol, Refusal};

use self::{
    deny_file::DenyFile,
    name_pattern::{NameError, NamePattern},
    pattern::Pattern,
};

/// What a rule or the default does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Let the flow be admitted.
    Allow,
    /// Let it be admitted, and hold it to the name that it says it is for.
    Inspect,
    /// Refuse it.
    Deny,
}

impl Action {
    /// As typed.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Inspect => "inspect",
            Self::Deny => "deny",
        }
    }

    /// Whether it lets flows in.
    pub const fn admits(self) -> bool {
        !matches!(self, Self::Deny)
    }
}

/// One rule, at its place in the order.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Rule {
    /// `--allow`, `--inspect` or `--deny` with a pattern.
    Match(Action, Pattern),
    /// `--allow`, `--inspect` or `--deny` with a name.
    Name(Action, NamePattern),
    /// `--deny-file`.
    DenyFile(Box<DenyFile>),
}

impl Rule {
    /// What was typed behind the flag: an address or a name.
    pub fn parse(action: Action, text: &str) -> Result<Self, NameError> {
        Ok(if NamePattern::is_meant_by(text) {
            Self::Name(action, text.parse()?)
        } else {
            Self::Match(action, text.parse()?)
        })
    }
}

/// A rule's number: its row in the `RULES` map, counted from the first that is this process's.
///
/// The policies of a process stand one behind the other, so a number tells the policy too. The
/// constants are those of the first one, or of the only one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RuleId(pub u32);

impl RuleId {
    /// No rule matched: `--default` decided.
    pub const DEFAULT: Self = Self(0);
    /// No rule matched, and the destination is protected.
    pub const PROTECTED: Self = Self(1);
    /// No rule means it, and the destination is a resolver that the rules by name could be got
    /// around by.
    pub const DNS_ELSEWHERE: Self = Self(2);
    /// The first rule typed; the others follow in order.
    pub const FIRST_TYPED: Self = Self(3);
}

/// A destination to judge.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Destination {
    /// Its address.
    pub addr: Ipv4Addr,
    /// Its port; 0 for ICMP.
    pub port: u16,
    /// The flow's protocol.
    pub protocol: Protocol,
}

impl Destination {
    /// As a sentence begins with it: `TCP to 192.0.2.1:443`, `Ping to 192.0.2.1`.
    pub fn describe(self) -> String {
        match self.protocol {
            Protocol::Icmp => format!("Ping to {}", self.addr),
            protocol => format!(
                "{} to {}:{}",
                protocol.name().to_uppercase(),
                self.addr,
                self.port
            ),
        }
    }
}

/// What was decided, and by which rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decision {
    /// The rule that decided.
    pub rule: RuleId,
    /// The deny file's line (from 1), when it was one.
    pub line: Option<u32>,
    /// `Some` when refused: [`Refusal::Rule`], [`Refusal::Default`], [`Refusal::Protected`] or
    /// [`Refusal::DnsElsewhere`].
    pub refusal: Option<Refusal>,
}

impl Decision {
    /// Whether the flow may be admitted.
    pub const fn is_allowed(self) -> bool {
        self.refusal.is_none()
    }
}

/// Addresses that are protected because of where this host stands; they change as it is
/// reconfigured.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LocalAddresses {
    /// The host's own addresses, broadcast addresses of its networks included.
    pub host: Vec<Ipv4Addr>,
    /// Networks of guests.
    pub guests: Vec<Ipv4Net>,
}

#[cfg(test)]
#[path = "rule_test.rs"]
pub(crate) mod tests;
