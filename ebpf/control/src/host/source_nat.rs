//! The host's own source NAT: rules that masquerade or change the source address of packets.
//!
//! It keeps a packet's own source port if no other connection of its has that toward the
//! destination, and picks any other otherwise. Neither it nor slipgate sees the other's flows. If
//! both have the same tuple, the server cannot tell the two connections apart, and the guest's flow
//! gets the answers to both. So only separate ports, or separate addresses, keep them apart.

use std::{fs, io, net::IpAddr, ops::RangeInclusive};

pub use super::nat_rule::{Addresses, Device};
use super::{
    nat_rule::{TARGETS, translation},
    nfnetlink::{self, text},
};

/// A rule that translates source addresses, or all of legacy iptables.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceNat {
    /// Table of the chain.
    pub table: String,
    /// Name of the chain.
    pub chain: String,
    /// Whether it sees packets of IPv4, and of IPv6.
    pub sees: [bool; 2],
    /// Device by which the packets leave; `None`: any, as far as is known.
    pub device: Option<Device>,
    /// Addresses that replace the source.
    pub addresses: Addresses,
    /// The new ports; `None`: any that is free.
    pub ports: Option<RangeInclusive<u16>>,
}

/// Source addresses and ports of guests' flows at an uplink.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GuestsTuples {
    /// Name of the uplink.
    pub uplink: String,
    /// Whose routes lead to it, in words; `None`: it is named as an uplink.
    pub by_routes: Option<String>,
    /// Range of their translated ports.
    pub ports: RangeInclusive<u16>,
    /// Addresses of IPv4 flows; `None`: guests have none.
    pub ipv4: Option<Sources>,
    /// Addresses of IPv6 flows; `None`: guests have none.
    pub ipv6: Option<Sources>,
}

/// Source addresses of one family at an uplink.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sources {
    /// Those of guests' flows; empty: any, as far as is known.
    pub of_guests: Vec<IpAddr>,
    /// Those that masquerading may give packets there; empty: unknown.
    pub by_masquerade: Vec<IpAddr>,
}

impl Sources {
    /// Whether a translation to these addresses may give one of guests' flows.
    fn may_be(&self, addresses: &Addresses) -> bool {
        let guests = &self.of_guests;
        if guests.is_empty() {
            return true;
        }
        match addresses {
            Addresses::Among(range) => guests.iter().any(|address| range.contains(address)),
            Addresses::OfDevice => {
                let mut its = self.by_masquerade.iter();
                self.by_masquerade.is_empty() || its.any(|address| guests.contains(address))
            }
            Addresses::Unknown => true,
        }
    }
}

impl SourceNat {
    /// Whether this stands for the rules of legacy iptables.
    pub(super) fn is_legacy(&self) -> bool {
        LEGACY_CHAINS.contains(&self.chain.as_str())
    }

    /// Whether the rule may give a connection a tuple that a guest's flow has, or may get.
    pub fn may_meet(&self, guests: &GuestsTuples) -> bool {
        self.may_meet_of(guests, [true, true])
    }

    /// Whether it may do so with IPv6 alone.
    pub fn may_meet_ipv6_only(&self, guests: &GuestsTuples) -> bool {
        self.may_meet_of(guests, [false, true]) && !self.may_meet_of(guests, [true, false])
    }

    fn may_meet_of(&self, guests: &GuestsTuples, [ipv4, ipv6]: [bool; 2]) -> bool {
        let leaves_there = |device: &Device| device.is(&guests.uplink);
        let overlaps = |ports: &RangeInclusive<u16>| {
            ports.start().max(guests.ports.start()) <= ports.end().min(guests.ports.end())
        };
        let meets = |sources: &Option<Sources>| {
            let sources = sources.as_ref();
            sources.is_some_and(|sources| sources.may_be(&self.addresses))
        };
        self.device.as_ref().is_none_or(leaves_there)
            && self.ports.as_ref().is_none_or(overlaps)
            && (ipv4 && self.sees[0] && meets(&guests.ipv4)
                || ipv6 && self.sees[1] && meets(&guests.ipv6))
    }
}

/// Files with the legacy tables of IPv4 and of IPv6, and with the targets that their rules may have.
const LEGACY: [[&str; 2]; 2] = [
    ["/proc/net/ip_tables_names", "/proc/net/ip_tables_targets"],
    ["/proc/net/ip6_tables_names", "/proc/net/ip6_tables_targets"],
];

/// What is shown for the chains of legacy iptables; no name of a chain has spaces.
const LEGACY_CHAINS: [&str; 2] = ["of legacy iptables", "of legacy ip6tables"];

/// Returns all such rules of nftables, different ones of a chain once each, and an entry for legacy
/// iptables if it may have some, taken for masquerading: the kernel does not list the rules of its
/// tables as text.
pub(super) fn find() -> io::Result<Vec<SourceNat>> {
    let mut found: Vec<SourceNat> = Vec::new();
    let rules = nfnetlink::dump(nfnetlink::GET_RULE, of_rule)?;
    for nat in rules.into_iter().chain(legacy()) {
        if !found.contains(&nat) {
            found.push(nat);
        }
    }
    found.sort_by(|a, b| (&a.table, &a.chain).cmp(&(&b.table, &b.chain)));
    Ok(found)
}

/// Returns the entries for legacy iptables: one a family that may have some.
pub(super) fn legacy() -> impl Iterator<Item = SourceNat> {
    let lines = |path| fs::read_to_string(path).unwrap_or_default();
    let families = [[true, false], [false, true]].into_iter().zip(LEGACY);
    families.filter_map(move |(sees, [tables, targets])| {
        of_legacy(&lines(tables), &lines(targets), sees)
    })
}

fn of_legacy(tables: &str, targets: &str, sees: [bool; 2]) -> Option<SourceNat> {
    let has_table = tables.lines().any(|table| table == "nat");
    let has_target = targets.lines().any(|target| TARGETS.contains(&target));
    (has_table && has_target).then(|| SourceNat {
        table: "nat".into(),
        chain: match sees {
            [true, _] => LEGACY_CHAINS[0].into(),
            _ => LEGACY_CHAINS[1].into(),
        },
        sees,
        device: None,
        addresses: Addresses::OfDevice,
        ports: None,
    })
}

/// Returns the translation by a rule of IPv4, IPv6 or both.
fn of_rule(family: u8, attributes: &[u8]) -> Option<SourceNat> {
    const NFTA_RULE_TABLE: u16 = 1;
    const NFTA_RULE_CHAIN: u16 = 2;
    const NFTA_RULE_EXPRESSIONS: u16 = 4;
    let sees = [nfnetlink::sees_ipv4(family), nfnetlink::sees_ipv6(family)];
    if sees == [false; 2] {
        return None;
    }
    let expressions = nfnetlink::find(attributes, NFTA_RULE_EXPRESSIONS)?;
    let translation = translation(expressions, sees == [false, true])?;
    let named = |kind| nfnetlink::find(attributes, kind).map_or_else(String::new, text);
    Some(SourceNat {
        table: named(NFTA_RULE_TABLE),
        chain: named(NFTA_RULE_CHAIN),
        sees,
        device: translation.device,
        addresses: translation.addresses,
        ports: translation.ports,
    })
}

#[cfg(test)]
#[path = "source_nat_test.rs"]
mod tests;
