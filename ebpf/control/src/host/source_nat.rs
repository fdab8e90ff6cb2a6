//! The host's own source NAT: rules that masquerade or change the source address of packets.
//!
//! It keeps a packet's own source port if no other connection of its has that toward the
//! destination, and picks any other otherwise. Neither it nor slipgate sees the other's flows. If
//! both have the same tuple, the server cannot tell the two connections apart, and the guest's flow
//! gets the answers to both. So only separate ports, or separate addresses, keep them apart.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::RangeInclusive,
};

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
    /// Their source address; `None`: any of the uplink's.
    pub address: Option<Ipv4Addr>,
    /// The address that masquerading gives packets there; `None`: unknown.
    pub masquerade: Option<Ipv4Addr>,
    /// Range of their translated ports.
    pub ports: RangeInclusive<u16>,
    /// The IPv6 addresses of the uplink, which flows of IPv6 have; `None`: no guest has IPv6.
    pub addresses6: Option<Vec<Ipv6Addr>>,
}

impl SourceNat {
    /// Whether the rule may give a connection a tuple that a guest's flow has, or may get.
    pub fn may_meet(&self, guests: &GuestsTuples) -> bool {
        let leaves_there = |device: &Device| device.is(&guests.uplink);
        let overlaps = |ports: &RangeInclusive<u16>| {
            ports.start().max(guests.ports.start()) <= ports.end().min(guests.ports.end())
        };
        self.device.as_ref().is_none_or(leaves_there)
            && self.ports.as_ref().is_none_or(overlaps)
            && (self.may_meet_ipv4(guests) || self.may_meet_ipv6(guests))
    }

    fn may_meet_ipv4(&self, guests: &GuestsTuples) -> bool {
        let is_theirs = |address: Ipv4Addr| match &self.addresses {
            Addresses::Among(range) => range.contains(&IpAddr::V4(address)),
            Addresses::OfDevice => guests.masquerade.is_none_or(|its| its == address),
            Addresses::Unknown => true,
        };
        self.sees[0] && guests.address.is_none_or(is_theirs)
    }

    /// Whether the same holds for IPv6, where guests' flows have one of the uplink's addresses.
    pub fn may_meet_ipv6(&self, guests: &GuestsTuples) -> bool {
        let Some(addresses) = guests.addresses6.as_ref().filter(|_| self.sees[1]) else {
            return false;
        };
        match &self.addresses {
            Addresses::Among(range) => {
                let mut all = addresses.iter().copied().map(IpAddr::V6);
                addresses.is_empty() || all.any(|address| range.contains(&address))
            }
            Addresses::OfDevice | Addresses::Unknown => true,
        }
    }
}

/// Files with the legacy tables of IPv4 and of IPv6, and with the targets that their rules may have.
const LEGACY: [[&str; 2]; 2] = [
    ["/proc/net/ip_tables_names", "/proc/net/ip_tables_targets"],
    ["/proc/net/ip6_tables_names", "/proc/net/ip6_tables_targets"],
];

/// Returns all such rules of nftables, different ones of a chain once each, and an entry for legacy
/// iptables if it may have some, taken for masquerading: the kernel does not list the rules of its
/// tables as text.
pub(super) fn find() -> io::Result<Vec<SourceNat>> {
    let mut found: Vec<SourceNat> = Vec::new();
    let lines = |path| fs::read_to_string(path).unwrap_or_default();
    let legacy = [[true, false], [false, true]].into_iter().zip(LEGACY);
    let legacy = legacy
        .filter_map(|(sees, [tables, targets])| of_legacy(&lines(tables), &lines(targets), sees));
    for nat in nfnetlink::dump(nfnetlink::GET_RULE, of_rule)?
        .into_iter()
        .chain(legacy)
    {
        if !found.contains(&nat) {
            found.push(nat);
        }
    }
    found.sort_by(|a, b| (&a.table, &a.chain).cmp(&(&b.table, &b.chain)));
    Ok(found)
}

fn of_legacy(tables: &str, targets: &str, sees: [bool; 2]) -> Option<SourceNat> {
    let has_table = tables.lines().any(|table| table == "nat");
    let has_target = targets.lines().any(|target| TARGETS.contains(&target));
    (has_table && has_target).then(|| SourceNat {
        table: "nat".into(),
        chain: match sees {
            [true, _] => "of legacy iptables".into(),
            _ => "of legacy ip6tables".into(),
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
