//! Rules by which the kernel chooses the routing table (`ip rule`).
use std::net::IpAddr;

use super::network::RouteKind;

/// A rule, with what decides whether it concerns packets that the host itself makes.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Rule {
    /// Priority: the lowest is asked first.
    pub priority: u32,
    /// Whether it is of IPv6; of IPv4 otherwise.
    pub is_ipv6: bool,
    /// Whether it is for all packets but those that it describes (`not`).
    pub is_inverted: bool,
    /// Source network; `None`: any.
    pub from: Option<(IpAddr, u8)>,
    /// Destination network; `None`: any.
    pub to: Option<(IpAddr, u8)>,
    /// Mark that packets have in the bits of `mask`.
    pub mark: u32,
    /// Bits of a mark that are compared; 0: packets may have any.
    pub mask: u32,
    /// Device by which packets came; `lo` is for those that the host makes.
    pub iif: Option<String>,
    /// Device to which the socket of packets is bound.
    pub oif: Option<String>,
    /// Whether it is for packets of VRFs, and asks their tables.
    pub is_of_vrfs: bool,
    /// Its further conditions, attributes as the kernel has them: protocol, ports, user, type of
    /// service, tunnel, or what this version does not know. Empty: none.
    pub more: Vec<u8>,
    /// Longest prefix whose routes in the table are passed over.
    pub suppressed_len: Option<u8>,
    /// Table that it asks.
    pub table: u32,
    /// Action on packets that the rule matches.
    pub action: RuleKind,
}

impl Rule {
    /// Whether it has further conditions.
    pub fn is_by_more(&self) -> bool {
        !self.more.is_empty()
    }
}

/// Action of a rule.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum RuleKind {
    /// Looks the destination up in the table.
    #[default]
    ToTable,
    /// Goes on at the rule with this priority.
    Goto(u32),
    /// Has no effect on routing.
    Nothing,
    /// Refuses, as a route of this kind.
    Refuse(RouteKind),
    /// Something that this version does not know.
    Unknown,
}
