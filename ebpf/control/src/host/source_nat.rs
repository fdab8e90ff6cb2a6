//! The host's own source NAT: rules that masquerade or change the source address of packets.
//!
//! It keeps a packet's own source port if no other connection of its has that toward the
//! destination, and picks any other otherwise. Neither it nor slipgate sees the other's flows. If
//! both have the same tuple, the server cannot tell the two connections apart, and the guest's flow
//! gets the answers to both. So only separate ports, or separate addresses, keep them apart.

use std::{fs, io, net::Ipv4Addr, ops::RangeInclusive};

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
    /// Device by which the packets leave; `None`: any, as far as is known.
    pub device: Option<Device>,
    /// The new addresses.
    pub addresses: Addresses,
    /// The new ports; `None`: any that is free.
    pub ports: Option<RangeInclusive<u16>>,
}

/// What guests' flows have at an uplink.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GuestsTuples {
    /// Name of the uplink.
    pub uplink: String,
    /// Their source address; `None`: any of the uplink's.
    pub address: Option<Ipv4Addr>,
    /// The address that masquerading gives packets there; `None`: unknown.
    pub masquerade: Option<Ipv4Addr>,
    /// Their ports.
    pub ports: RangeInclusive<u16>,
}

impl SourceNat {
    /// Whether the rule may give a connection a tuple that a guest's flow has, or may get.
    pub fn may_meet(&self, guests: &GuestsTuples) -> bool {
        let leaves_there = |device: &Device| device.is(&guests.uplink);
        let overlaps = |ports: &RangeInclusive<u16>| {
            ports.start().max(guests.ports.start()) <= ports.end().min(guests.ports.end())
        };
        let is_theirs = |address: Ipv4Addr| match &self.addresses {
            Addresses::Among(range) => range.contains(&address),
            Addresses::OfDevice => guests.masquerade.is_none_or(|its| its == address),
            Addresses::Unknown => true,
        };
        self.device.as_ref().is_none_or(leaves_there)
            && self.ports.as_ref().is_none_or(overlaps)
            && guests.address.is_none_or(is_theirs)
    }
}

/// Files with the legacy tables, and with the targets that their rules may have.
const LEGACY_TABLES: &str = "/proc/net/ip_tables_names";
const LEGACY_TARGETS: &str = "/proc/net/ip_tables_targets";

/// Returns all such rules of nftables, different ones of a chain once each, and an entry for legacy
/// iptables if it may have some, taken for masquerading: the kernel does not list the rules of its
/// tables as text.
pub(super) fn find() -> io::Result<Vec<SourceNat>> {
    let mut found: Vec<SourceNat> = Vec::new();
    let lines = |path| fs::read_to_string(path).unwrap_or_default();
    let legacy = of_legacy(&lines(LEGACY_TABLES), &lines(LEGACY_TARGETS));
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

fn of_legacy(tables: &str, targets: &str) -> Option<SourceNat> {
    let has_table = tables.lines().any(|table| table == "nat");
    let has_target = targets.lines().any(|target| TARGETS.contains(&target));
    (has_table && has_target).then(|| SourceNat {
        table: "nat".into(),
        chain: "of legacy iptables".into(),
        device: None,
        addresses: Addresses::OfDevice,
        ports: None,
    })
}

/// Returns the translation by a rule of IPv4 or both families.
fn of_rule(family: u8, attributes: &[u8]) -> Option<SourceNat> {
    const NFTA_RULE_TABLE: u16 = 1;
    const NFTA_RULE_CHAIN: u16 = 2;
    const NFTA_RULE_EXPRESSIONS: u16 = 4;
    if !nfnetlink::sees_ipv4(family) {
        return None;
    }
    let translation = translation(nfnetlink::find(attributes, NFTA_RULE_EXPRESSIONS)?)?;
    let named = |kind| nfnetlink::find(attributes, kind).map_or_else(String::new, text);
    Some(SourceNat {
        table: named(NFTA_RULE_TABLE),
        chain: named(NFTA_RULE_CHAIN),
        device: translation.device,
        addresses: translation.addresses,
        ports: translation.ports,
    })
}

#[cfg(test)]
#[path = "source_nat_test.rs"]
mod tests;
