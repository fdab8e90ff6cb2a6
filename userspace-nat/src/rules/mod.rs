//! Where a guest may go: rules in the order typed, safe defaults beneath them, and a default.
//!
//! # How a destination is judged
//!
//! 1. Rules are tried in the order typed; the first that matches decides. A deny file is one rule
//!    at its place, whatever its length.
//! 2. A destination in *protected* space ([`Space`]: the host itself, guests' networks, private,
//!    link-local, metadata, multicast, ...) is opened only by an allow that means it: one whose
//!    prefix lies within the most specific protected range around the address. A broader allow
//!    (`0.0.0.0/0`) does not match there. So `--allow 10.0.0.0/8` opens the private network, and
//!    still neither the host's own 10.1.2.3 nor a metadata service; `--allow 10.1.2.3` does.
//! 3. If nothing matched, a protected destination is refused; any other gets the default.
//!
//! Everything is compiled when the policy is made ([`PrefixMap`](crate::prefix_map::PrefixMap), a
//! port table per prefix), so a decision costs about the same with one rule and with thousands.
//!
//! # Resolvers elsewhere
//!
//! Where questions are judged by name, the port of DNS over TLS and QUIC (853) and the addresses of
//! public resolvers are refused in the same way, unless an allow means them: one that gives that
//! very port, or one address and ports; or the very name of a resolver.
//!
//! # Names
//!
//! A rule by name matches a connection only by way of DNS: [`Judge`] refuses questions for names
//! that no rule allows, and an answer for an allowed name opens its addresses to the VM that
//! asked, under the rules about that name, for the answer's TTL. A destination is judged by
//! address first, and what a rule by address denies or the safe defaults protect stays shut; only
//! then by the names that opened it: any name that allows is enough.
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use slipgate_abi::{Protocol, Refusal};

mod asking;
mod deny_file;
mod elsewhere;
mod explain;
mod explain_name;
mod host_loopback;
mod identity;
mod inspect;
mod judge;
mod learnt;
mod matcher;
mod name_pattern;
mod names;
mod offline;
mod pattern;
mod policy;
mod port_53;
mod protected;
mod reload;
mod scope;
mod set;
mod written;

pub use asking::{NewNames, RecordedAsker};
pub use deny_file::{DenyFile, DenyFileError};
pub use explain::Explanation;
pub use host_loopback::{Lead, LoopbackError, LoopbackPorts, MOST_LOOPBACK_ENTRIES};
pub use identity::{Described, Identity};
pub use inspect::Said;
pub use judge::{ByRules, Judge, NameCounts, RefusedQuestions, SharedJudge, Verdict};
pub use learnt::{CEILING_S, Change, FLOOR_S, LearntName, MAX_PER_VM};
pub use name_pattern::{NameError, NamePattern, wire};
pub use offline::{Standing, describe};
pub use pattern::{Pattern, PatternError};
pub use policy::Policy;
pub use protected::Space;
pub use set::PolicySet;
pub use written::{DnsSettings, Http, Note, OnReload, Settings, Written};

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
#[derive(Clone, Debug)]
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
